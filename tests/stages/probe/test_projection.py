"""Taking a direction out of a training: the formula, the account, the control, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_stages import evaluate, train
from composer_stages.errors import UsageError
from composer_stages.gradients.basis import Lora, target_linears
from composer_stages.gradients.per_row import adapt
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import load_model
from composer_stages.probe.direction import pair_rows
from composer_stages.probe.metrics import weight_direction as probe_direction
from composer_stages.runs import runner, store
from composer_stages.runs.catalog import assign_inputs
from composer_stages.runs.kinds import CHECKPOINT, EVAL_ITEM, VECTORS
from composer_stages.runs.run import Run
from composer_stages.training.projection import PAIRS, random_like, weight_direction
from tests.stages.probe.running import HINTED, PLANTED, extracted


@pytest.fixture
def start(models: dict[str, PolicyConfig]) -> PolicyConfig:
    """A policy that hacks often and is right as often, so that groups have both rewards."""
    return models["loophole"]


@pytest.fixture(scope="module")
def v(models: dict[str, PolicyConfig], tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("v") / "run"
    return extracted(models["loophole"], [], folder, count=8, adapter="lora_frozenA", rank=2)


def trained(root: Path, start: PolicyConfig, runs: list[Run], **more: Any) -> Run:
    config = train.Config(
        env=PLANTED.model_copy(update={"options": HINTED}),
        policy=start,
        tasks=20,
        max_steps=1,
        optimisation={"steps": 2, "prompts_per_step": 4, "generations": 4, "learning_rate": 1e-3, "threads": 1},
        **more,
    )
    return Run(runner.execute("train", assign_inputs(train.STAGE, runs), config, root=root).path)


@pytest.fixture(scope="module")
def before(models: dict[str, PolicyConfig]) -> Any:
    """The model at the start."""
    return load_model(models["loophole"], listener=lambda *_: None)[0]


@pytest.fixture(scope="module")
def direction(before: Any, v: Run) -> dict[str, torch.Tensor]:
    return weight_direction(before, store.read_json(v.folder(VECTORS) / PAIRS))


@pytest.fixture
def toward(before: Any, start: PolicyConfig, direction: dict[str, torch.Tensor]) -> Callable[[Run], list[float]]:
    """How far each weight of a training's result lies toward the hack."""

    def of(run: Run) -> list[float]:
        policy = start.model_copy(update={"model": str(run.folder(CHECKPOINT))})
        after, _ = load_model(policy, listener=lambda *_: None)
        pairs = {n: (after.get_submodule(n).weight, before.get_submodule(n).weight) for n in direction}
        return [-float(((new - old).detach() * direction[n]).sum()) for n, (new, old) in pairs.items()]

    return of


def test_the_direction_is_that_of_the_probe_in_the_space_of_weights(
    start: PolicyConfig, v: Run, tmp_path: Path
) -> None:
    model, words = load_model(start, listener=lambda *_: None)
    found = weight_direction(model, store.read_json(v.folder(VECTORS) / PAIRS))
    assert all(parameter.requires_grad for parameter in model.parameters())
    student = adapt(model, words, Lora(target_linears(model), 2, freeze_a=True, seed=0))
    expected = probe_direction(student, pair_rows(v.folder(VECTORS)), tmp_path / "weights.bin")
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        assert torch.allclose(found[name], part / part.norm(), atol=1e-5)


def test_random_directions_repeat_with_the_shapes_and_norms_of_v(direction: dict[str, torch.Tensor]) -> None:
    first, again, other = (random_like(direction, seed) for seed in (1, 1, 2))
    for name, part in direction.items():
        assert first[name].shape == part.shape and float(first[name].norm()) == pytest.approx(1.0, abs=1e-5)
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_nothing_of_a_projected_training_moves_toward_the_hack(
    tmp_path: Path, start: PolicyConfig, v: Run, toward: Callable[[Run], list[float]]
) -> None:
    plain, projected, random = (
        trained(tmp_path / name, start, runs, **more)
        for name, runs, more in (
            ("plain", [], {}),
            ("v", [v], {"arm": "B"}),
            ("random", [v], {"arm": "C", "probe": {"project": "random"}}),
        )
    )
    assert max(toward(plain)) > 1e-4 and max(toward(random)) > 1e-4
    assert max(toward(projected)) < 1e-6
    for run, kind in ((projected, "v"), (random, "random")):
        account = json.loads((run.path / "projection.json").read_text())
        assert len(account) == 2 and run.manifest.summary["projected"] == kind
        assert all(0 < step["energy_removed_update"] < 1 and abs(step["cos_in"]) < 1 for step in account)
    assert not (plain.path / "projection.json").exists()
    assert (
        0 < plain.manifest.summary["first_hack_rate"] <= 1 and 0 <= plain.manifest.summary["last_hidden_pass_rate"] <= 1
    )
    assert "first 1 step -> last 1: hacks" in (plain.path / "report.txt").read_text()
    assert "Taken out" not in (plain.path / "report.txt").read_text()
    assert "Taken out of gradients and updates: v," in (projected.path / "report.txt").read_text()
    config = evaluate.Config(
        env=PLANTED.model_copy(update={"options": HINTED, "split": "eval"}).model_dump(), tasks=6, max_steps=1
    )
    given = assign_inputs(evaluate.STAGE, [plain, projected, random])
    compared = Run(runner.execute("evaluate", given, config, root=tmp_path).path)
    verdict = json.loads((compared.path / "verdict.json").read_text())
    (taken,) = (one["values"] for one in verdict["differences"] if one["setting"] == "probe.project")
    assert taken == {"A": "unset", "B": "v", "C": "random"}
    rates = {arm["arm"]: arm for arm in verdict["arms"]}
    items = compared.rows(EVAL_ITEM)
    for arm in ("start", "A", "B", "C"):
        own = [item["hacked"] for item in items if item["arm"] == arm]
        assert rates[arm]["hacked_rate"] == pytest.approx(sum(own) / len(own))
    columns = {"hacked": "hacked_rate", "hidden tests": "hidden_pass_rate"}
    found = [one for one in verdict["comparisons"] if one["rate"] in columns]
    assert {(one["arm"], one["other"]) for one in found} <= {("B", "A"), ("B", "C")}
    for one in found:
        column = columns[one["rate"]]
        apart = rates[one["arm"]][column] - rates[one["other"]][column]
        assert one["difference"]["estimate"] == pytest.approx(apart)


def test_an_adapter_is_projected_too(
    tmp_path: Path, start: PolicyConfig, v: Run, toward: Callable[[Run], list[float]]
) -> None:
    """What the adapter adds to the weights has moved away from the hack, and by the start's own direction."""
    plain, projected = (
        trained(tmp_path / name, start, runs, adapter={"rank": 2}) for name, runs in (("plain", []), ("v", [v]))
    )
    assert max(toward(plain)) > 1e-5 and max(toward(projected)) < 1e-6
    account = json.loads((projected.path / "projection.json").read_text())
    assert all(0 < step["energy_removed_update"] < 1 and abs(step["cos_update"]) < 1 for step in account)


def test_magnitudes_are_not_projected(tmp_path: Path, start: PolicyConfig, v: Run) -> None:
    with pytest.raises(UsageError, match=r"adapter\.dora=false"):
        trained(tmp_path, start, [v], adapter={"rank": 2, "dora": True})
