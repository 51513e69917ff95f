"""On-policy distillation: both forms by hand, routed and averaged teachers, and what no cut or order may change."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import trainings
from support.environments import GuessEnv
from support.models import save_tiny, tiny_model
from torch import Tensor
from torch.autograd import gradcheck

from composer_stages.envs.base import Task
from composer_stages.errors import UsageError
from composer_stages.losses.distillation import divergence
from composer_stages.policy.local import LocalPolicy
from composer_stages.runs.run import Run
from composer_stages.training.channels.base import SourceInputs
from composer_stages.training.channels.opd import FrozenTeacher, Opd, TaughtRollout, TaughtRows, TaughtSource
from composer_stages.training.channels.rollouts import RolloutSource
from composer_stages.training.config import Config, OpdTeacher
from composer_stages.training.distributed import Student
from composer_stages.training.scoring import Scored, Tree, logits, score

VOCABULARY = 40
STUDENT, FIRST, SECOND = (tiny_model(seed, VOCABULARY).double() for seed in (0, 1, 2))
TEACHERS = [FrozenTeacher(OpdTeacher(), model) for model in (FIRST, SECOND, None)]
SERVED = [-2.0, -0.5, 0.0, -3.0, -1.0]
ROWS = [
    TaughtRollout(Tree([5, 6], ([8, 9, 30, 31],)), [1, 1, 0, 1], [-1.5, -2.5, 0.0, -0.5], {0: None}),
    TaughtRollout(Tree([7], ([11, 12, 13],)), [1, 1, 1], [-1.0, -2.0, -3.0], {1: None}),
    TaughtRollout(Tree([5, 6, 7], ([9, 10],)), [1, 1], [-4.0, -3.5], {0: None, 1: None}),
]
ASKED = [
    *ROWS,
    TaughtRollout(Tree([4], ([14, 15, 33, 16, 17],)), [1, 1, 0, 1, 1], [-2, -1, 0, -3, -4.0], {1: None, 2: SERVED}),
]


def channel(**opd: Any) -> Opd:
    return Opd(Config(weights={"opd": 1.0}, teacher={"model": "m"}, opd=opd, policy={"temperature": 1.25}))


def taught(rows: Sequence[TaughtRollout], model: Any = STUDENT, scored: Scored | None = None) -> TaughtRows:
    return TaughtRows(rows, rows, model, scored or score(model, [row.tree for row in rows]), TaughtSource(TEACHERS))


def log_probs(model: Any, row: TaughtRollout) -> Tensor:
    return (logits(model, score(model, [row.tree])) / 1.25).log_softmax(-1)


def sampled(model: Any, row: TaughtRollout) -> Tensor:
    return log_probs(model, row)[torch.arange(len(row.mask)), torch.tensor(row.tree.branches[0])]


FORMS: list[dict[str, Any]] = [{}, {"beta": 0.0}, {"beta": 0.3}, {"top_k": 4}, {"beta": 0.5, "top_k": 4}]


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_the_divergence_is_to_each_rollouts_teachers_and_their_mean(options: dict[str, Any]) -> None:
    expected, worst = [], 0.0
    of = {"beta": options.get("beta", 1.0), "top_k": options.get("top_k")}
    for row in ROWS:
        own = log_probs(STUDENT, row)
        to_each = [
            divergence(own, log_probs(TEACHERS[n].model, row), top_k_of="teacher", outside="renormalised", **of)
            for n in row.teachers
        ]
        mask = torch.tensor(row.mask, dtype=torch.float64)
        worst = max(worst, *(float((found * mask).max()) for found in to_each))
        expected.append((torch.stack(to_each).mean(0) * mask).sum())
    found = channel(**options).loss(taught(ROWS))
    torch.testing.assert_close(found.loss, sum(expected) / 8, rtol=1e-9, atol=0)
    assert found.denominator == 8 and found.metrics["divergence_max"].value() == pytest.approx(worst)


@pytest.mark.parametrize("form", ["divergence", "sampled"])
def test_a_teacher_may_be_shown_another_opening_than_the_student(form: str) -> None:
    """Its distributions are those behind its own prompt; the student's stay those behind its own."""
    own, to_teacher = ROWS[0], Tree([7, 3, 5, 6], ROWS[0].tree.branches)
    row = replace(own, teacher_trees={0: to_teacher})
    mask, student, old = (
        torch.tensor(own.mask, dtype=torch.float64),
        log_probs(STUDENT, own),
        torch.tensor(own.logprobs),
    )
    taught_by = log_probs(FIRST, replace(own, tree=to_teacher))
    expected = divergence(student, taught_by, beta=1.0, top_k=None, top_k_of="teacher", outside="renormalised")
    if form == "sampled":
        tokens = torch.tensor(own.tree.branches[0])
        advantage = taught_by[torch.arange(4), tokens] - old
        ratio = (sampled(STUDENT, own) - old).exp()
        expected = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    found = channel(form=form).loss(taught([row]))
    torch.testing.assert_close(found.loss, (expected * mask).sum() / 3, rtol=1e-6, atol=0)
    assert not torch.isclose(found.loss, channel(form=form).loss(taught([own])).loss)


def test_the_sampled_form_is_a_policy_gradient_to_the_mean_log_prob_of_the_teachers() -> None:
    terms = []
    for row in ASKED:
        own, old = sampled(STUDENT, row), torch.tensor(row.logprobs, dtype=torch.float64)
        given = [
            torch.tensor(SERVED, dtype=torch.float64) if n == 2 else sampled(TEACHERS[n].model, row).detach()
            for n in row.teachers
        ]
        advantage, ratio = torch.stack(given).mean(0) - old, (own - old).exp()
        losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        terms.append((losses * torch.tensor(row.mask)).sum())
    found = channel(form="sampled").loss(taught(ASKED))
    torch.testing.assert_close(found.loss, sum(terms) / 12, rtol=1e-9, atol=0)


def test_both_forms_have_one_gradient_in_expectation() -> None:
    """Over all tokens that the student may sample, each with its probability: that of the reverse KL."""
    prompt, logps = [5, 6], log_probs(STUDENT, ROWS[0])[0].detach()  # of the token after the prompt
    gradients = []
    for form in ("divergence", "sampled"):
        model = copy.deepcopy(STUDENT)
        for token in range(VOCABULARY) if form == "sampled" else (0,):
            logp = float(logps[token])
            row = TaughtRollout(Tree(prompt, ([token],)), [1], [logp], {0: None})
            loss = channel(form=form).loss(taught([row], model)).loss
            (loss * (math.exp(logp) if form == "sampled" else 1.0)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    # Log-probs of sampling are float32.
    assert float((gradients[1] - gradients[0]).norm()) < 1e-5 * float(gradients[0].norm())


@pytest.mark.parametrize("form", ["divergence", "sampled"])
def test_the_gradient_is_that_of_finite_differences(form: str) -> None:
    rows = ASKED if form == "sampled" else ROWS
    # On policy: at the edges of the clip there is no derivative.
    near = [replace(row, logprobs=sampled(STUDENT, row).tolist()) for row in rows]
    scored = score(STUDENT, [row.tree for row in near])

    def loss(hidden: Tensor) -> Tensor:
        again = Scored(hidden, scored.targets, scored.branch, scored.sizes)
        return (
            channel(form=form, **({"beta": 0.7} if form == "divergence" else {})).loss(taught(near, scored=again)).loss
        )

    assert gradcheck(loss, scored.hidden.detach().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("form", ["divergence", "sampled"])
def test_neither_order_nor_padding_changes_the_loss(form: str) -> None:
    """A long rollout of which no token counts is what the others would be padded to."""
    rows, long = (ASKED if form == "sampled" else ROWS), list(range(3, 39))
    silent = TaughtRollout(Tree([3, 4], (long,)), [0] * len(long), [0.0] * len(long), {0: None})
    found = []
    for given in (rows, [*reversed(rows), silent]):
        model = copy.deepcopy(STUDENT)
        loss = channel(form=form).loss(taught(given, model)).loss
        loss.backward()
        found.append((loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_a_teacher_teaches_the_tasks_that_match() -> None:
    task = Task("sum-17", "guess", "train", "arithmetic", "1+1")
    assert [OpdTeacher(tasks=tasks).teaches(task) for tasks in ((), ("arith*",), ("x", "sum-*"), ("guess",))] == [
        *(True, True, True),
        False,
    ]


# A training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, two teachers, and a model with another alphabet."""
    made = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "one", "two")):
        save_tiny(made / name, seed=seed)
    save_tiny(made / "stranger", characters="abcdefghijklm\u0120")
    return made


def train(root: Path, folder: Path, *teachers: dict[str, Any], steps: int = 6) -> Run:
    more = {
        "opd": {"teachers": [{**teacher, "model": str(folder / teacher["model"])} for teacher in teachers]},
        "weights": {"grpo": 0.0, "opd": 1.0},
        "optimisation": {"learning_rate": 0.01, "threads": 1, "steps": steps},
    }
    return trainings.trained(root, folder / "student", policy={"max_tokens": 6}, **more)


def test_a_training_comes_nearer_to_the_teacher_of_each_task(tmp_path: Path, folder: Path) -> None:
    families = sorted({task.family for task in GuessEnv().tasks("train", 4, 0)})
    one, two = {"model": "one", "tasks": families[:1]}, {"model": "two", "tasks": families[1:]}
    rows = trainings.metrics_of(train(tmp_path, folder, one, two))
    assert rows[-1]["opd/loss"] < 0.8 * rows[0]["opd/loss"]
    assert {name for name in rows[0] if name.startswith("opd/divergence/")} == {"opd/divergence/1", "opd/divergence/2"}


def test_a_model_that_teaches_in_several_ways_is_loaded_once(tmp_path: Path, folder: Path) -> None:
    one, two = ({"model": str(folder / name)} for name in ("one", "two"))
    teachers = [
        one | {"tasks": ["train-*"]},
        one | {"opening": {"greeting": "hello "}},
        two,
        one | {"dtype": "float16"},
    ]
    settings = trainings.settings(
        folder / "student", weights={"opd": 1.0, "taid": 1.0}, teacher=one, opd={"teachers": teachers}
    )
    student = Student(LocalPolicy.open(settings.policy, cache=tmp_path, listener=lambda *told: None))
    out: Any = SimpleNamespace(cache=tmp_path, progress=lambda *told: None, model=lambda *named, **facts: None)
    none: Any = None
    given = SourceInputs(settings, none, student, GuessEnv(), GuessEnv().tasks("train", 4, 0), out, none)
    taught = [teacher.model is RolloutSource.open(given).teacher for teacher in TaughtSource.open(given).teachers]
    assert taught == [True, True, False, False] and len(student.frozen) == 3


def test_another_opening_asks_for_calls_where_the_student_calls_tools(tmp_path: Path, folder: Path) -> None:
    settings = trainings.settings(
        folder / "student",
        env={"name": "support.environments:CallingEnv"},
        policy={"tool_calls": "qwen3"},
        weights={"opd": 1.0},
        opd={"teachers": [{"model": str(folder / "student"), "opening": {"greeting": "de "}}]},
    )
    student = Student(LocalPolicy.open(settings.policy, cache=tmp_path, listener=lambda *told: None))
    out: Any = SimpleNamespace(cache=tmp_path, progress=lambda *told: None, model=lambda *named, **facts: None)
    none: Any = None
    tasks = GuessEnv().tasks("train", 1, 0)
    [teacher] = TaughtSource.open(SourceInputs(settings, none, student, GuessEnv(), tasks, out, none)).teachers
    assert teacher.opening is not None and "de call " in student.policy.tokenizer.decode(teacher.opening(tasks[0]))


def test_the_student_itself_teaches_where_it_is_shown_another_opening(tmp_path: Path, folder: Path) -> None:
    """Before the first update student and teacher are one model: they differ by what they are shown alone."""
    same, other = ({"model": "student", "opening": given} for given in ({}, {"greeting": "hello "}))
    runs = [train(tmp_path / str(n), folder, one, steps=1) for n, one in enumerate((same, other))]
    first = [trainings.metrics_of(run)[0]["opd/loss"] for run in runs]
    assert first[0] < 1e-6 < 1e-3 < first[1]


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"model": "stranger"}, "stranger' has another vocabulary"),
        ({"model": "one", "tasks": ["nothing*"]}, "one' teaches nothing\\*, and none of the"),
        ({"model": "one", "opening": {"shots": 2}}, "has no option 'shots'"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_by_name(
    tmp_path: Path, folder: Path, teacher: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        train(tmp_path, folder, teacher)
