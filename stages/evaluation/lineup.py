"""Which models an evaluation compares: checkpoints, models of the settings, and rollouts that were played earlier."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stages import envs
from stages.errors import BadInput
from stages.evaluation.arms import START
from stages.policy.checkpoint import CheckpointInfo
from stages.policy.config import VLLM, PolicyConfig
from stages.runs.artifact import Run
from stages.runs.outcome_records import CHECKPOINT, EVAL_ITEM
from stages.runs.records import ROLLOUT, Row

SWE_BENCH = "swe-bench"
"""What importers write for a benchmark of SWE-bench's family."""


@dataclass(frozen=True)
class Arm:
    """One model to play: the arm's name, its training seed, and where the model is."""

    name: str
    seed: int
    policy: PolicyConfig


def to_play(
    trained: Sequence[Run], policies: Mapping[str, PolicyConfig], *, temperature: float, with_start: bool
) -> list[Arm]:
    """The trained models after the one they all started from, then those of the settings, in the order given.

    `BadInput` when an arm is named twice or the checkpoints did not start from one model.
    """
    infos = [CheckpointInfo.of(run) for run in trained]
    arms = [Arm(info.arm, info.train_seed, _at(info.start, run)) for info, run in zip(infos, trained, strict=True)]
    arms += [Arm(name, 0, policy) for name, policy in policies.items()]
    names = [(arm.name, arm.seed) for arm in arms]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"Arm {repeated[0]!r} with seed {repeated[1]} was given twice. Give every arm and seed once.")
    starts = {info.start_identity: run for info, run in zip(infos, trained, strict=True)}
    if len(starts) > 1:
        raise BadInput(
            "The arms did not start from the same model, so they cannot be compared: "
            + ", ".join(str(run.path) for run in starts.values())
        )
    if infos and with_start:
        arms.insert(0, Arm(START, 0, infos[0].start))
    return [Arm(a.name, a.seed, a.policy.model_copy(update={"temperature": temperature})) for a in arms]


def _at(start: PolicyConfig, run: Run) -> PolicyConfig:
    folder = str(run.folder(CHECKPOINT))
    return start.model_copy(update={"model": f"{VLLM}{folder}" if start.served else folder})


def recorded(runs: Iterable[Run]) -> tuple[list[Row], bool]:
    """Rollouts that were collected or imported, as items; the arm is the model that a rollout names.

    Also whether their families are fixed strata: SWE-bench's repositories, or as the environment says. Rollouts that a
    training played are no arm: they were sampled from a model that still changed. `BadInput` where two runs hold
    rollouts of one model, or a rollout does not name its model.
    """
    items: list[Row] = []
    first: dict[str, Run] = {}
    names = set()
    for run in (run for run in runs if not run.holds(CHECKPOINT)):
        rows = _rows(run)
        for row in rows:
            if not row["model"]:
                raise BadInput(
                    f"{run.path} holds rollouts that name no model, so they are no arm. "
                    "Import them again with --set model=NAME."
                )
            if (other := first.setdefault(row["model"], run)) is not run:
                raise BadInput(
                    f"{run.path} and {other.path} both hold rollouts of {row['model']}, so which is which cannot be "
                    "told. Give one of them, or import one again under another name."
                )
            names.add(row["env"])
        items += [_item(row, row["model"], run, len(rows)) for row in rows]
    fixed = all(name == SWE_BENCH or (name in envs.ENVIRONMENTS and envs.fixed_families(name)) for name in names)
    return items, fixed


def of_start(run: Run) -> list[Row]:
    """The rollouts of a run as items of the start model, for a pilot."""
    rows = _rows(run)
    return [_item(row, START, run, len(rows)) for row in rows]


def _rows(run: Run) -> list[Row]:
    """The rollouts of a run, as far as items need them: without patches and logs."""
    table = run.scan(ROLLOUT)
    needed = {*EVAL_ITEM.columns, "rollout_id", "model", "env", "reward", "completion_tokens"}
    return list(table.rows([name for name in table.columns if name in needed]))


def _item(row: Row, arm: str, run: Run, num: int) -> Row:
    """One `eval_item` row; what the rollout does not know is null. A cost that is not its own is its share of `num`."""
    return {name: row.get(name) for name in EVAL_ITEM.columns} | {
        "item_id": f"{arm}/{row['rollout_id']}",
        "arm": arm,
        "train_seed": 0,
        "passed": None if row["reward"] is None else row["reward"] >= 1.0,
        "cost_usd": run.manifest.cost_usd / num if row["cost_usd"] is None else row["cost_usd"],
        "sampled_tokens": row["completion_tokens"],
    }


def shared(items: Sequence[Row], arms: Sequence[str]) -> tuple[list[Row], int]:
    """The items of tasks and samples that every one of these arms has, and how many tasks that leaves out.

    Arms that are not named keep what they share with those.
    """
    have = {arm: {(item["task_id"], item["sample_idx"]) for item in items if item["arm"] == arm} for arm in arms}
    common = set.intersection(*have.values()) if have else set()
    every = {task for keys in have.values() for task, _ in keys}
    kept = [item for item in items if (item["task_id"], item["sample_idx"]) in common]
    return kept, len(every - {task for task, _ in common})
