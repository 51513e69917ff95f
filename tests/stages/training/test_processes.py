"""Several processes take the step of one, as copies or in shares: every channel, form and adapter, killed or not."""

import subprocess
import time
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import save_tiny
from support.torchrun import BROKEN, direction_run, pairs_run, start, train_all
from support.trainings import metrics_of
from transformers import Qwen3ForCausalLM

from composer_stages.errors import UsageError
from composer_stages.runs import store
from composer_stages.runs.kinds import CHECKPOINT, HINT, ROLLOUT, ROLLOUT_GRADIENT
from composer_stages.runs.run import Run
from composer_stages.train import Config
from composer_stages.training.channels import CHANNELS
from composer_stages.training.memory import Room, check_memory, describe_plan, estimate_memory
from composer_stages.training.model_shape import ModelShape
from composer_stages.training.plan import TrainPlan

TOLERANCE = 1e-5
STEP = {"steps": 2, "prompts_per_step": 4, "generations": 2, "learning_rate": 0.05, "threads": 1}
APART = ("step_time", "memory_gib", "entropy", "cispo_clip_ratio")
"""Metrics that measure the machine, or that TRL takes the mean of over passes, of which processes have other ones."""
AT_FIRST = ("dpo/accuracy",)
"""In step 1 the student is the reference, so that this counts the signs of margins that are 0 up to rounding."""
SHARDED = {"distribution": {"sharding": "fsdp2"}}
EVERY = tuple(CHANNELS)
CUT = {"micro_batch": 2, "max_tokens_per_micro_batch": 60}
RECOMPUTED = {"gradient_checkpointing": True}
FORMS = ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
Case = tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]
"""Channels, settings of the optimisation, other settings."""
SMALL: dict[str, Case] = {
    "all": (EVERY, {}, {}),
    "all-cut": (EVERY, {**CUT, "gradient_cosine_every": 1}, {}),
    "adapter": (EVERY, {}, {"adapter": {"rank": 4}}),
    "plain": ((), {"keep_every": 1}, {}),
}
"""Everything once."""
OTHERS: dict[str, Case] = {
    "cut": (EVERY, CUT, {}),
    "kl": (("sdpo",), {"beta": 0.1}, {}),
    "kl-adapter": (("sdpo",), {"beta": 0.1}, {"adapter": {"rank": 4}}),
    "recomputed": (("sdpo", "dpo"), RECOMPUTED, {}),
    "adapter-cut": (EVERY, {**CUT, **RECOMPUTED}, {"adapter": {"rank": 4}, "hints": {"teacher": "ema"}}),
    "demonstrations": (("sdpo",), {}, {"hints": {"source": "rollout", "success_reward": 0.01}}),
    "average": (("sdpo",), {}, {"hints": {"teacher": "ema", "importance_clip": 2.0}}),
    "projected": (("dpo",), {}, {"from_direction": True}),
    "measured": (("dpo",), {}, {"from_direction": True, "probe": {"project": "none", "measure": True}}),
    "hints-checked": (("sdpo",), {}, {"env": {"name": "support.environments:HintedEnv"}}),
    "mixed": (("dpo",), {}, {"probe": {"mixed": "ratio"}}),
    "singular-values": (("dpo",), {}, {"adapter": {"kind": "singular-values"}}),
}
"""What channels and optimiser can be told to do otherwise."""
CASES: dict[str, Case] = {
    **SMALL,
    **{name: ((name,), {}, {}) for name in CHANNELS},
    **{"-".join(two): (two, {"steps": 1}, {}) for two in combinations(CHANNELS, 2)},
    **{form: (("dpo",), {"loss_type": form, "micro_batch": 2}, {}) for form in FORMS},
    **OTHERS,
}
"""Every channel alone and with each other one, and each form of GRPO's loss, besides."""
IN_SHARES = (
    *("all", "cut", "plain", "kl", "recomputed", "projected", "hints-checked", "mixed"),
    *("adapter", "adapter-cut", "kl-adapter"),
)


def settings(folder: Path, names: tuple[str, ...] = (), size: dict[str, Any] | None = None, **more: Any) -> Any:
    """A case on the tiny model: gradient descent, so that weights differ by as much as gradients do."""
    needs = {need for name in names for need in CHANNELS[name].needs}
    needs |= {"teacher"} if more.get("probe", {}).get("mixed") else set()
    inputs = {"from_pairs": str(folder / "pairs")} if "pairs" in needs else {}
    if more.pop("from_direction", False):
        inputs["from_direction"] = str(folder / "direction")
    return {
        "env": {"name": "support.environments:GuessEnv"},
        "policy": {"model": str(folder / "student"), "max_tokens": 10},
        "tasks": 3,
        "optimisation": {**STEP, **(size or {})},
        "weights": {name: 0.7 + 0.2 * i for i, name in enumerate(names)},
        "pairs": {"per_step": 5},
        "hints": {"per_step": 5},
        "teacher": {"model": str(folder / "teacher")} if "teacher" in needs else None,
        "trl": {"optim": "sgd"},
        **inputs,
        **more,
    }


def cases(folder: Path, names: Iterable[str], **more: Any) -> dict[str, Any]:
    return {name: settings(folder, CASES[name][0], CASES[name][1], **CASES[name][2], **more) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a teacher, pairs, and the pairs of a direction."""
    made = tmp_path_factory.mktemp("processes")
    save_tiny(made / "student")
    save_tiny(made / "teacher", seed=5)
    pairs_run(made / "pairs", 12)
    direction_run(made / "direction", 4)
    return made


def weights_apart(one: Run, other: Run) -> float:
    """The largest difference of a weight."""
    (a,), (b,) = ([load_file(p) for p in run.folder(CHECKPOINT).glob("*.safetensors")] for run in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def difference(one: Run, other: Run) -> float:
    """The largest difference of a weight, a loss or another metric of a step, relative to numbers above 1."""
    found = [weights_apart(one, other)]
    for number, (ours, theirs) in enumerate(zip(metrics_of(one), metrics_of(other), strict=True)):
        assert ours.keys() == theirs.keys()
        left_out = APART if number else (*APART, *AT_FIRST)
        found += [abs(ours[k] - theirs[k]) / max(1, abs(ours[k])) for k in ours if k not in left_out]
    return max(found)


def gradients(run: Run) -> list[dict[str, Any]]:
    """What was measured of each rollout, in order; nothing where the training measures none."""
    rows = run.rows(ROLLOUT_GRADIENT) if run.holds(ROLLOUT_GRADIENT) else []
    return sorted(rows, key=lambda row: (row["training_step"], row["rollout_id"]))


def compare(ours: dict[str, Run], theirs: dict[str, Run]) -> dict[str, float]:
    """Differences above the tolerance by case; the rollouts and hints of both are the same rows."""
    for name, run in ours.items():
        assert run.rows(HINT) == theirs[name].rows(HINT), name
        played, others = ([r["rollout_id"] for r in x.rows(ROLLOUT)] for x in (run, theirs[name]))
        assert played == others and len(set(played)) == len(played) > 0, name
        for ours_row, their_row in zip(gradients(run), gradients(theirs[name]), strict=True):
            assert ours_row == pytest.approx(their_row, abs=TOLERANCE), name
    found = {name: difference(run, theirs[name]) for name, run in ours.items()}
    print(max(found.values()))
    return {name: much for name, much in found.items() if not much < TOLERANCE}


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(folder: Path) -> None:
    asked = cases(folder, SMALL)
    broken = {kind: {**asked["all"], "broken": kind} for kind in BROKEN}
    alone, both = train_all(folder / "one", asked, 1), train_all(folder / "two", asked | broken, 2)
    assert compare({name: both[name] for name in asked}, alone) == {}
    assert set(CHANNELS) <= {key.partition("/")[0] for key in metrics_of(alone["all"])[0]}
    red = {kind: weights_apart(both[kind], alone["all"]) for kind in BROKEN}
    assert all(much > 10 * TOLERANCE for much in red.values()), red


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "names"), [(2, CASES), (4, SMALL)], ids=["2", "4"])
def test_every_combination_in_any_number_of_processes(folder: Path, count: int, names: Iterable[str]) -> None:
    asked = cases(folder, names)
    alone = train_all(folder / f"alone-{count}", asked, 1)
    assert compare(train_all(folder / f"together-{count}", asked, count), alone) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_shares_take_the_step_of_one_process(folder: Path, count: int) -> None:
    """Masters, gradients and moments are spread over the processes; the checkpoint is that of one."""
    asked = cases(folder, IN_SHARES, **SHARDED)
    alone = train_all(folder / f"one-{count}", asked, 1)
    together = train_all(folder / f"shares-{count}", asked, count)
    assert compare(together, alone) == {}
    for name, run in together.items():
        ours, theirs = (each.folder(CHECKPOINT) for each in (run, alone[name]))
        kind = "adapter_" if CASES[name][2].get("adapter") else ""
        config, other = (store.read_json(folder / f"{kind}config.json") for folder in (ours, theirs))
        for listed in (config, other):  # peft writes a set
            listed["target_modules"] = sorted(listed.get("target_modules", []))
        assert config == other
        model = f"{kind}model.safetensors"
        assert load_file(ours / model).keys() == load_file(theirs / model).keys()
    step = Path("checkpoints") / "step_000001" / "model.safetensors"
    ours, theirs = (load_file(run["plain"].path / step) for run in (together, alone))
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5
    accounts = [store.read_json(run["projected"].path / "projection.json") for run in (together, alone)]
    for ours, theirs in zip(*accounts, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5) and ours["energy_removed_update"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_without_rows_and_bfloat16_take_the_same_step(folder: Path) -> None:
    """What breaks the shares' denominators is seen; bfloat16 weights are trained as float32 masters, here as there."""
    tiny = save_tiny(folder / "half")
    Qwen3ForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tiny)
    half = {"policy": {"model": str(tiny), "max_tokens": 10}}
    asked = {
        "broken": settings(folder, EVERY, **SHARDED) | {"broken": "OwnDenominators"},
        "half": settings(folder, ("dpo",), **half, **SHARDED),
        "whole": settings(folder, ("dpo",), **half),
    }
    together = train_all(folder / "odd", asked, 2)
    alone = train_all(folder / "even", {"broken": settings(folder, EVERY)}, 1)
    assert weights_apart(together["broken"], alone["broken"]) > 1e-4
    trained = load_file(together["half"].folder(CHECKPOINT) / "model.safetensors")
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert 0 < weights_apart(together["half"], together["whole"]) < 0.02


KILLED = {"steps": 6, "save_every": 2}
SLOWLY = {"env": {"name": "support.environments:SlowEnv"}}
CARRIED: dict[str, Case] = {
    "copies": (("sdpo", "taid"), KILLED, {"hints": {"teacher": "ema"}}),
    "shares": (("taid",), {**KILLED, "learning_rate": 0.01}, {"trl": {"adam_epsilon": 1e-2}}),
}
"""Taid's schedule, a moving average and AdamW's moments go along. Its epsilon is large, so that moments of nearly 0 do
not decide a step's sign."""


def at_a_checkpoint(folder: Path, case: dict[str, Any], count: int) -> list["subprocess.Popen[str]"]:
    """Processes that have just written the first checkpoint, with steps to go."""
    running = start(folder, {"run": case}, count)
    deadline = time.monotonic() + 280
    while not (folder / "run" / "scratch" / "trainer" / "checkpoint-2" / "composer.json").exists():
        assert all(process.poll() is None for process in running) and time.monotonic() < deadline
        time.sleep(0.01)
    return running


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", CARRIED)
def test_a_killed_training_goes_on_in_another_number_of_processes(tmp_path: Path, folder: Path, kind: str) -> None:
    names, size, more = CARRIED[kind]
    case = settings(folder, names, size, **more, **SLOWLY)
    whole = train_all(tmp_path / "whole", {"run": case}, 1)
    killed = case if kind == "copies" else {**case, **SHARDED}
    for first, then in ((2, 1), (1, 2)):
        place = tmp_path / f"{first}-{then}"
        running = at_a_checkpoint(place, killed, first)
        running[-1].kill()
        if kind == "copies" and first == 2:
            said = running[0].communicate(timeout=120)[1]
            assert running[0].returncode == 1 and "One of the other 1 processes of this training is gone" in said
        for process in running:
            process.kill()
            process.communicate(timeout=60)
        resumed = train_all(place, {"run": killed}, then)
        assert resumed["run"].manifest.attempts == 2
        assert compare(resumed, whole) == {}


def test_distribution_is_not_part_of_the_fingerprint() -> None:
    assert Config(**SHARDED).identity() == Config().identity()


def test_shares_take_less_memory() -> None:
    """Seven billion parameters in bfloat16 on eight: 16 bytes an eighth of them, and a few layers."""
    linears = ((10_000, 20_000),) * 28
    shape = ModelShape(
        parameters=7_000_000_000, bytes=2, layers=28, hidden=3584, kv=512, vocabulary=152_064, linears=linears
    )
    size = {"micro_batch": 1, "gradient_checkpointing": True, "learning_rate": 1e-6}
    training = TrainPlan(
        Config(policy={"model": "vllm:m"}, optimisation=size, adapter={"rank": 0}),
        shape,
        small=False,
        rollout_tokens=1024,
        processes=8,
    )
    sharded = training.changed(distribution={"sharding": "fsdp2"})
    whole, shared = estimate_memory(training), estimate_memory(sharded)
    assert (whole.weights, whole.gradients, whole.optimiser) == (42e9, 28e9, 56e9)
    assert (shared.weights, shared.gradients, shared.optimiser) == (3.5e9, 3.5e9, 7e9)
    assert "52.2 GiB of the first process' main memory" in describe_plan(sharded)[-1]
    assert "main memory" not in "".join(describe_plan(training))
    layer, rest, head = 2e8, 7e9 - 28 * 2e8, 3584 * 152_064
    passing = 2 * (rest + 2 * layer)
    assert shared.gathered + shared.activations == 6 * rest > passing + 2 * (head + layer) + 4 * layer
    often = estimate_memory(sharded.changed(optimisation={"shared_prompts": True}))
    assert often.gathered == passing + 2 * 7e9 + 4 * layer, "gradients that are not cut at once"
    here = estimate_memory(sharded.changed(policy={"model": "m"}))
    assert here.gathered + here.activations > 14e9, "a process that samples has the weights whole"
    frozen = estimate_memory(sharded.changed(adapter={"rank": 16}))
    assert frozen.weights < 2e9 and frozen.gathered == passing
    with pytest.raises(UsageError, match=r"distribution.sharding=fsdp2 \(\d+"):
        check_memory(training, Room(round(shared.total)))
