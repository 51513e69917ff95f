"""Hints are checked before a training on them: both rates, a stop where they do harm, and never twice."""

from math import comb
from pathlib import Path
from typing import Any

import pytest
from support.environments import GuessEnv, HintedEnv, NeverGradedEnv
from support.trainings import metrics_of, settings

from composer_stages import train
from composer_stages.arms.hint_check import LEVEL, HintCheck, measure
from composer_stages.envs.answered import AnsweredEnv, Question
from composer_stages.envs.base import Split
from composer_stages.errors import Incomplete
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.runs import runner
from composer_stages.runs.activity import Notice
from composer_stages.runs.kinds import CHECKPOINT
from composer_stages.runs.run import Inputs, Run

HINTED = "support.environments:HintedEnv"
ANSWERING = "answering 8 tasks without and with hints"


class Sums(AnsweredEnv):
    name, source = "sums", "a schoolbook"

    def questions(self, split: Split, count: int, seed: int) -> list[Question]:
        return [Question(str(n), f"{n} + {n} =", str(2 * n)) for n in range(count)]


class Reader:
    """Answers with what stands in brackets after its last question, else 4; remembers what it was asked."""

    config, capture_level, batch_size = PolicyConfig(model="reader"), "text", 100

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def sample(self, turns: list[Turn]) -> list[Sample]:
        self.turns += turns
        questions = [turn.messages[-1]["content"].partition("(Answer: ")[2].rstrip(")") for turn in turns]
        return [Sample(text=answer or "4", completion_tokens=3) for answer in questions]

    def facts(self) -> dict[str, Any]:
        return {}


def test_the_same_tasks_are_answered_with_equal_seeds_without_and_with_the_hint() -> None:
    reader, tasks = Reader(), Sums().tasks("train", 5, 0)
    result = measure(Sums, reader, [*tasks, *tasks[:1]], seed=3, max_steps=8)
    assert result == HintCheck(both=1, plain_only=0, hinted_only=5, neither=0, ungraded=0, tokens=36)
    plain, hinted = reader.turns[:6], reader.turns[6:]
    assert [turn.seed for turn in plain] == [turn.seed for turn in hinted] and len({t.seed for t in plain}) == 6
    assert plain[1].messages[-1]["content"] == "1 + 1 =" and hinted[1].messages[-1]["content"] == "1 + 1 =\n(Answer: 2)"


class Ungraded(HintedEnv, NeverGradedEnv):
    def grade(self) -> Any:
        return NeverGradedEnv.grade(self) if self._hinted else super().grade()


def test_what_could_not_be_graded_is_no_failure() -> None:
    result = measure(Ungraded, Reader(), GuessEnv().tasks("train", 3, 0), seed=0, max_steps=1)
    assert (result.ungraded, result.graded, result.harmful) == (3, 0, False)


def stops(number: int, plain: float, hinted: float) -> float:
    """The probability that a check of so many independent answers each way stops a training."""
    lost, gained = plain * (1 - hinted), hinted * (1 - plain)
    return sum(
        comb(number, i) * comb(number - i, j) * lost**i * gained**j * (1 - lost - gained) ** (number - i - j)
        for i in range(number + 1)
        for j in range(number + 1 - i)
        if HintCheck(0, i, j, number - i - j, 0, 0).harmful
    )


def test_equal_rates_are_seldom_stopped_and_harm_mostly_is() -> None:
    """As the module says."""
    equal = {(n, rate): stops(n, rate, rate) for n in (8, 32, 64) for rate in (0.0, 0.02, 0.1, 0.3, 0.5, 0.9, 1.0)}
    assert max(equal.values()) <= LEVEL and equal[32, 0.3] == pytest.approx(0.06, abs=0.005)
    assert stops(32, 0.20, 0.02) == pytest.approx(0.76, abs=0.005)
    assert stops(64, 0.20, 0.02) == pytest.approx(0.98, abs=0.005)
    assert stops(64, 0.25, 0.23) < 0.12


class Training:
    """Trainings on hints with what they said, and the answers that were sampled before."""

    def __init__(self, root: Path, tiny: Path, helps: bool | None = True, **more: Any) -> None:
        env = {"name": HINTED, "options": {"helps": helps}}
        self.root, self.tiny, self.more = root, tiny, {"env": env, "weights": {"sdpo": 1.0}} | more
        self.said: list[str] = []

    def run(self, check_answers: int = 8, **options: Any) -> Run:
        self.said.clear()
        hints = {"check_answers": check_answers} | self.more.get("hints", {})
        config = settings(self.tiny, **{**self.more, "hints": hints})
        heard = lambda event, done, total: self.said.append(event)  # noqa: E731
        return Run(runner.execute("train", {}, config, root=self.root, listener=heard, **options).path)

    @property
    def notices(self) -> list[str]:
        return [notice for notice in self.said if isinstance(notice, Notice)]


def test_a_training_whose_hints_help_shows_both_rates(tmp_path: Path, tiny: Path) -> None:
    training = Training(tmp_path / "checked", tiny)
    run = training.run()
    (notice,) = training.notices
    words = "behind hints 100.0 % [67.6, 100.0] of the student's answers pass, without hints 0.0 % [0."
    assert notice.startswith(words)
    assert run.manifest.summary["hint_check"] == {"hinted": 1.0, "plain": 0.0, "answers": 8}
    assert f"Before training: {notice}." in (run.path / "report.txt").read_text()
    unchecked = Training(tmp_path / "unchecked", tiny)
    second = unchecked.run(check_answers=0)
    assert ANSWERING in training.said and not unchecked.notices and ANSWERING not in unchecked.said
    assert run.manifest.fingerprint == second.manifest.fingerprint
    weights = [(each_run.folder(CHECKPOINT) / "model.safetensors").read_bytes() for each_run in (run, second)]
    assert weights[0] == weights[1], "the check changed what was trained"


def test_a_training_whose_hints_do_harm_stops_before_it_begins_and_is_not_checked_again(
    tmp_path: Path, tiny: Path
) -> None:
    training = Training(tmp_path, tiny, helps=False)
    with pytest.raises(Incomplete, match=r"hints 0\.0 % .* hints 100\.0 % .*hints\.check_answers=0") as stopped:
        training.run()
    assert stopped.value.exit_code == 3 and ANSWERING in training.said
    (folder,) = tmp_path.glob("train/2*")
    run = Run(folder)
    assert run.manifest.status == "incomplete" and str(stopped.value) == run.manifest.reason
    assert run.manifest.summary["hint_check"]["plain"] == 1.0 and not (folder / "metrics.jsonl").exists()
    with pytest.raises(Incomplete):
        training.run(resume=True)
    assert ANSWERING not in training.said
    assert len(metrics_of(training.run(check_answers=0, resume=True))) == 2


def test_hints_that_change_nothing_are_a_warning(tmp_path: Path, tiny: Path) -> None:
    training = Training(tmp_path, tiny, helps=None, optimisation={"steps": 1, "prompts_per_step": 1}, tasks=8)
    run = training.run()
    (task_ids,) = [unit["task_ids"] for unit in run.units() if "hint_check" in unit]
    assert len(set(task_ids)) == 8, "all tasks, though one is trained on"
    (notice,) = training.notices
    assert notice.startswith("warning: hints do not help: behind hints 0.0 %") and "8 answers each way" in notice
    assert run.manifest.status == "complete"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"env": {"name": "support.environments:GuessEnv"}}, "a hint of guess stands after what went wrong"),
        ({"hints": {"source": "rollout"}}, "hints.source=rollout"),
    ],
)
def test_hints_that_cannot_be_checked_are_named_and_trained_on(
    tmp_path: Path, tiny: Path, more: dict[str, Any], words: str
) -> None:
    training = Training(tmp_path, tiny, **more, optimisation={"steps": 1})
    run = training.run()
    (notice,) = training.notices
    assert notice.startswith("hints were not checked: ") and words in notice
    assert run.manifest.status == "complete" and "hint_check" not in run.manifest.summary


def test_the_answers_are_a_part_of_the_planned_tokens(tiny: Path) -> None:
    def tokens(**more: Any) -> int | None:
        return train.plan(Inputs({}), settings(tiny, env={"name": HINTED}, max_steps=1, **more)).max_completion_tokens

    plain = tokens()
    assert plain == 2 * 2 * 4 * 20 == tokens(weights={"sdpo": 1}, hints={"check_answers": 0})
    assert tokens(weights={"sdpo": 1}) == plain + 2 * 32 * 20
