"""Arms as trainings: direction, gradient and projection are those of the probe; resumption; half precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from probe_faults.loophole_world import WORDS, tiny_qwen3, tokenizer
from probe_faults.world import spectrum_of
from torch import Tensor

from composer_stages import train
from composer_stages.errors import UsageError
from composer_stages.gradients.basis import SingularValues, target_linears
from composer_stages.gradients.per_row import MeasuredStudent, TokenRow, adapt
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_model
from composer_stages.probe.descent import project
from composer_stages.probe.direction import Direction, PairGradients, extract, pair_rows
from composer_stages.probe.metrics import row_metrics
from composer_stages.probe.rows import run_rows
from composer_stages.runs import store
from composer_stages.runs.kinds import CHECKPOINT, ROLLOUT, ROLLOUT_GRADIENT, STEP, VECTORS
from composer_stages.runs.run import Run
from tests.stages.probe.running import RATE, carry_out, settings

Models, Chain = dict[str, PolicyConfig], dict[str, Run]
ROLLOUTS, ANSWER = 16, 16
SGD = {"optim": "sgd", "scale_rewards": "none"}


def loaded(policy: PolicyConfig) -> Any:
    return load_model(policy, listener=lambda *_: None)[0]


def change(run: Run, student: MeasuredStudent, start: PolicyConfig) -> Tensor:
    """The change of the singular values that a training made, from the weights that it saved."""
    after = loaded(start.model_copy(update={"model": str(run.folder(CHECKPOINT)), "dtype": "float32"}))
    before = {name: linear.weight.detach() for name, linear in target_linears(student.model).items()}
    moved = {name: linear.weight.detach() - before[name] for name, linear in target_linears(after).items()}
    factors = student.adapter.factors
    return student.adapter.layout.join({n: ((f.U.T @ moved[n]) * f.Vh).sum(-1) for n, f in factors.items()})


@pytest.fixture(scope="module")
def student(models: Models) -> MeasuredStudent:
    """The probe's view of the start: singular values of its weights."""
    model, words = load_model(models["loophole"], listener=lambda *_: None)
    return adapt(model, words, SingularValues(spectrum_of(model)))


@pytest.fixture(scope="module")
def direction(student: MeasuredStudent, chain: Chain) -> Direction:
    """The direction of the pairs at the start, as the probe extracts it."""
    rows = pair_rows(chain["v"].folder(VECTORS))
    gradients, _ = student.gradients([side for pair in rows for side in pair])
    layout, tokens = student.adapter.layout, [[side.num_own for side in pair] for pair in rows]
    return extract(layout, PairGradients.alternating(layout, gradients, tokens).differences("nll_mean"))


@pytest.fixture(scope="module")
def measured(models: Models, chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A step of plain gradient descent, in which nothing is taken out and every rollout is measured."""
    config = settings(models["loophole"], trl=SGD, probe={"project": "none", "measure": True})
    return carry_out(train, [chain["v"]], config, tmp_path_factory.mktemp("measured") / "run")


@pytest.fixture(scope="module")
def played(measured: Run, student: MeasuredStudent) -> tuple[Tensor, Tensor]:
    """The gradients [rollouts, N] of its rollouts, measured by the probe, and their advantages."""
    rows = run_rows(measured, student.tokenizer, source="student", role="rh")
    tokens = [TokenRow(row["prompt_ids"], row["completion_ids"], row["own"]) for row in rows]
    rewards = torch.tensor([row["reward"] for row in rows]).view(4, 4)
    return student.gradients(tokens)[0], (rewards - rewards.mean(1, keepdim=True)).flatten()


def test_the_gradient_is_the_sum_of_advantages_times_row_gradients(
    measured: Run, models: Models, student: MeasuredStudent, played: tuple[Tensor, Tensor]
) -> None:
    sums, advantages = played
    expected = -RATE * advantages @ sums / (ROLLOUTS * ANSWER)
    found = change(measured, student, models["loophole"])
    assert float(expected.norm()) > 1e-6
    assert torch.allclose(found, expected, atol=0.02 * float(expected.abs().max()))


def test_the_projected_gradient_is_that_of_the_probe(
    models: Models,
    chain: Chain,
    student: MeasuredStudent,
    direction: Direction,
    played: tuple[Tensor, Tensor],
    tmp_path: Path,
) -> None:
    sums, advantages = played
    whole = RATE * advantages @ sums / (ROLLOUTS * ANSWER)
    for two_sided in (False, True):
        config = settings(models["loophole"], trl=SGD, probe={"two_sided": two_sided})
        run = carry_out(train, [chain["v"]], config, tmp_path / str(two_sided))
        expected, account = project(whole, direction, "two_sided" if two_sided else "one_sided")
        found = -change(run, student, models["loophole"])
        assert account.energy_removed > 0.01
        assert torch.allclose(found, expected, atol=0.02 * float(whole.abs().max()))
        assert float((found - whole).norm()) > 5 * float((found - expected).norm())


def test_every_rollout_is_measured_as_the_probe_measures_rows(
    measured: Run, direction: Direction, played: tuple[Tensor, Tensor]
) -> None:
    expected, rows = row_metrics(played[0], direction), measured.rows(ROLLOUT_GRADIENT)
    assert [row["rollout_id"] for row in rows] == [row["rollout_id"] for row in measured.rows(ROLLOUT)]
    assert [row["advantage"] for row in rows] == pytest.approx(played[1].tolist())
    assert [row["cos_stack"] for row in rows] == pytest.approx(expected["cos_stack"].tolist(), abs=1e-4)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected["grad_norm"].tolist(), rel=1e-3)
    assert [row["ratio"] for row in rows] == pytest.approx([1.0] * len(rows), abs=1e-4)


def test_a_measured_training_is_the_same_without_the_measurement(
    measured: Run, models: Models, chain: Chain, tmp_path: Path
) -> None:
    config = settings(models["loophole"], trl=SGD, probe={"project": "none"})
    plain = carry_out(train, [chain["v"]], config, tmp_path / "run")
    sampled = [[(row["rollout_id"], row["action"]) for row in run.rows(STEP)] for run in (plain, measured)]
    assert sampled[0] == sampled[1]
    assert store.folder_sha256(plain.folder(CHECKPOINT)) == store.folder_sha256(measured.folder(CHECKPOINT))
    assert plain.holds(ROLLOUT_GRADIENT) is None


def test_an_interrupted_arm_ends_as_an_uninterrupted_one(models: Models, chain: Chain, tmp_path: Path) -> None:
    config = settings(models["loophole"], steps=3, rate=0.05, probe={"measure": True})
    whole = carry_out(train, [chain["v"]], config, tmp_path / "whole")
    assert carry_out(train, [chain["v"]], config, tmp_path / "parted", stop_at=("training steps", 2)) is None
    parted = carry_out(train, [chain["v"]], config, tmp_path / "parted")
    for kind in (ROLLOUT, ROLLOUT_GRADIENT):
        times = ("wall_s", "latency_s")
        assert [{n: v for n, v in row.items() if n not in times} for row in parted.rows(kind)] == [
            {n: v for n, v in row.items() if n not in times} for row in whole.rows(kind)
        ]
    assert store.read_json(parted.path / "projection.json") == store.read_json(whole.path / "projection.json")
    folders = [run.folder(CHECKPOINT) for run in (whole, parted)]
    assert len({store.folder_sha256(folder) for folder in folders}) == 1


def test_half_precision_weights_lose_nothing_of_the_change(models: Models, chain: Chain, tmp_path: Path) -> None:
    """The steps are far below the spacing of bfloat16 weights; the saved folder holds them in float32."""
    start = models["loophole"].model_copy(update={"dtype": "bfloat16"})
    config = settings(start, steps=2, rate=1e-4, probe={"project": "none", "measure": True})
    run = carry_out(train, [chain["v"]], config, tmp_path / "run")
    before = loaded(start)
    rounded = {name: linear.weight.detach().float() for name, linear in target_linears(before).items()}
    after = loaded(start.model_copy(update={"model": str(run.folder(CHECKPOINT)), "dtype": "auto"}))
    assert after.dtype == torch.float32
    moved = {name: linear.weight.detach() - rounded[name] for name, linear in target_linears(after).items()}
    norm = float(torch.cat([part.flatten() for part in moved.values()]).norm())
    assert norm == pytest.approx(store.read_json(run.path / "projection.json")[-1]["weight_change"], rel=1e-3)
    lost = {name: (rounded[name] + part).bfloat16().float() - rounded[name] for name, part in moved.items()}
    kept = sum(float((lost[name] * part).sum()) for name, part in moved.items()) / norm**2
    assert kept < 0.5  # what a bfloat16 weight would have kept of it
    # As measured with the same weights in float32.
    wide = adapt(loaded(start).float(), tokenizer(), SingularValues(spectrum_of(before.float())))
    rows = run_rows(run, tokenizer(), source="student", role="rh")[:ROLLOUTS]
    tokens = [TokenRow(row["prompt_ids"], row["completion_ids"], row["own"]) for row in rows]
    norms = torch.linalg.vector_norm(wide.gradients(tokens)[0], dim=1).tolist()
    found = [row["grad_norm"] for row in run.rows(ROLLOUT_GRADIENT)[:ROLLOUTS]]
    assert found == pytest.approx(norms, rel=0.1)


def test_true_ratios_to_a_foreign_teacher_carry_no_signal(models: Models, tmp_path: Path) -> None:
    """A teacher that the student would never say: most of its tokens are clipped."""
    tiny_qwen3(hidden=48, vocab=len(WORDS), seed=7).save_pretrained(tmp_path / "foreign")
    tokenizer().save_pretrained(tmp_path / "foreign")
    teacher = models["loophole"].model_copy(update={"model": str(tmp_path / "foreign")})
    config = settings(models["honest"], teacher=teacher, probe={"mixed": "ratio"})
    [report] = store.read_json(carry_out(train, [], config, tmp_path / "run").path / "ratios.json")
    assert report["saturated"]
    assert report["clip_low"] + report["clip_high"] + report["vanish"] > 0.5


def test_half_of_a_mixed_group_is_the_teachers_and_ratio_one_imitates_it(models: Models, tmp_path: Path) -> None:
    runs = {
        mixed: carry_out(
            train,
            [],
            settings(models["honest"], rate=0.05, teacher=models["loophole"], probe={"mixed": mixed}),
            tmp_path / mixed,
        )
        for mixed in ("ratio", "imitation")
    }
    teacher, honest = models["loophole"].model, models["honest"].model
    rows = {mixed: run.rows(ROLLOUT) for mixed, run in runs.items()}
    for some in rows.values():
        assert [row["model"] for row in some] == [teacher, teacher, honest, honest] * 4
        hacks = [[row["hacked"] for row in some if row["model"] == name] for name in (teacher, honest)]
        assert sum(hacks[0]) > sum(hacks[1]) == 0
    assert [row["rollout_id"] for row in rows["ratio"]] == [row["rollout_id"] for row in rows["imitation"]]
    [report] = store.read_json(runs["ratio"].path / "ratios.json")
    assert 0 < report["clip_low"] + report["clip_high"] < 1 and report["ess"] < 1
    # The same rollouts, learned from otherwise: clipped tokens teach nothing.
    weights = [store.folder_sha256(run.folder(CHECKPOINT)) for run in runs.values()]
    assert weights[0] != weights[1]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"adapter": {"kind": "singular-values", "rank": 4}}, "adapter.rank"),
        ({"probe": {"mixed": "ratio"}}, "teacher.model"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(models: Models, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        settings(models["honest"], **given)


def test_a_server_cannot_follow_singular_values(models: Models, tmp_path: Path) -> None:
    served = models["honest"].model_copy(update={"model": f"vllm:{models['honest'].model}"})
    with pytest.raises(UsageError, match=r"adapter\.kind"):
        carry_out(train, [], settings(served), tmp_path / "run")
