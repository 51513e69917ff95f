"""Records of each training step, and the outputs of a finished training: checkpoint, metrics, tables and report.txt.

`TrainingJournal` records the rollouts and hints of each step; `write_tables` turns the records into tables.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from composer_stages.envs.base import Task
from composer_stages.layout import counted
from composer_stages.policy.adapters import CheckpointInfo
from composer_stages.policy.base import Policy
from composer_stages.rollouts import recording
from composer_stages.rollouts.agent_loop import FinishedUnit, LiveRollout
from composer_stages.runs import store
from composer_stages.runs.kinds import HINT, PAIR, ROLLOUT, STEP, TRAINING_REWARD, Row
from composer_stages.runs.run import Run, RunWriter
from composer_stages.runs.store import GroupCommit
from composer_stages.training.channels import CHANNELS
from composer_stages.training.channels.hints import Hint
from composer_stages.training.checkpoints import KEPT, link_kept
from composer_stages.training.config import Config
from composer_stages.training.projection import accounts
from composer_stages.training.rollout_gradients import write_measured
from composer_stages.training.rollouts import played_by_teacher
from composer_stages.training.step import ComposedTrainer
from composer_stages.words import Sentence

# Tables of a training: rollouts, their steps, rewards, and hints. Each rollout is a unit of the run's journal, and each
# training step another one that names those which it was trained on; a killed run keeps both. Units that are written
# again after a resume replace their first record.


class TrainingJournal:
    """Records each rollout, and which ones each step is trained on.

    sandbox: in which the environment runs commands. teacher: plays half of each group of `generations` rollouts; None
    where the policy plays all of them.
    """

    def __init__(
        self, out: RunWriter, policy: Policy, sandbox: str, teacher: Policy | None = None, generations: int = 1
    ) -> None:
        self.out, self._policy, self._sandbox = out, policy, sandbox
        self._teacher, self._generations = teacher, generations
        self._written = set[str]()
        """Rollouts that are recorded already when a step is trained on them."""
        self._commit = GroupCommit[FinishedUnit](out.write_all)

    def _unit(self, rollout: LiveRollout, policy: Policy) -> FinishedUnit:
        self._written.add(rollout.rollout_id)
        return rollout.rollout_id, recording.payload(rollout, policy, sandbox=self._sandbox, source="train"), False

    async def ended(self, rollout: LiveRollout) -> None:
        """Record a rollout of the policy when it has ended; returns once it is durable."""
        await self._commit(self._unit(rollout, self._policy))

    def kept(self, planned: LiveRollout) -> LiveRollout | None:
        """Return a rollout that an earlier attempt recorded; None where it did not end, or failed."""
        record: Any = self.out.journal.get(planned.rollout_id)
        if record is None or record["rollout"]["error_type"] is not None:
            return None
        self._written.add(planned.rollout_id)
        return recording.restore_rollout(planned, record)

    def rollouts(self, step: int, rollouts: Sequence[LiveRollout]) -> None:
        """Record the rollouts of a training step."""
        units = [
            self._unit(rollout, teacher or self._policy)
            for index, rollout in enumerate(rollouts)
            if rollout.rollout_id not in self._written
            for teacher in [self._teacher if played_by_teacher(index, self._generations) else None]
        ]
        rewards = [None if rollout.error else rollout.grade.reward for rollout in rollouts]
        step_record = {"training_step": step, "taken": [rollout.rollout_id for rollout in rollouts], "rewards": rewards}
        self.out.write_all([*units, (f"rollouts-{step:06d}", step_record, False)])

    def hints(self, step: int, hints: Sequence[tuple[LiveRollout, Hint]]) -> None:
        """Record the hints that a step learns from, as `hint/1` rows."""
        rows = [
            {
                "training_step": step,
                "rollout_id": rollout.rollout_id,
                "task_id": rollout.task.task_id,
                "step": hint.turn,
                "hint": hint.text,
                **{name: getattr(hint, name) for name in ("kind", "error", "source")},
            }
            for rollout, hint in hints
        ]
        self.out.write(f"hints-{step:06d}", {"training_step": step, "hints": rows})


def write_tables(out: RunWriter, num_steps: int) -> None:
    """Write the tables of what the first `num_steps` steps recorded, in order."""
    # Other units of the journal, such as a projection's, have no training_step; and a killed attempt may have played
    # steps that are no part of the result.
    of_step = {unit["unit"]: unit.get("training_step", num_steps) for unit in out.journal.records()}
    names = sorted(name for name, step in of_step.items() if step < num_steps)
    records = partial(trained_on, out, num_steps)
    # The journal is read once for each table: the rollouts of a training may exceed memory.
    columns = ("rollout_id", "task_id", "sample_idx", "reward")
    out.table(ROLLOUT, (payload["rollout"] for _, payload in records()))
    out.table(STEP, (row for _, payload in records() for row in payload["steps"]))
    out.table(
        TRAINING_REWARD,
        ({"training_step": step, **{name: p["rollout"][name] for name in columns}} for step, p in records()),
    )
    out.table(HINT, (row for unit in out.journal.read(names) for row in unit.get("hints", ())))


def trained_on(out: RunWriter, num_steps: int) -> Iterator[tuple[int, Any]]:
    """Yield the number of the step and the record of each rollout that the first `num_steps` steps were trained on."""
    steps = sorted((u["training_step"], u["taken"]) for u in out.journal.records() if "taken" in u)
    rollout_ids = [(step, rollout_id) for step, ids in steps if step < num_steps for rollout_id in ids]
    records = out.journal.read([rollout_id for _, rollout_id in rollout_ids])
    return ((step, record) for (step, _), record in zip(rollout_ids, records, strict=True))


def course(out: RunWriter, num_steps: int) -> tuple[Row, str]:
    """Return the share of hacks and of right answers over the first and the last three steps, as numbers and as text.

    Leaves out what the environment cannot tell; no text without hacks, where the share of right answers misleads.
    """
    ends = min(3, num_steps // 2)  # so that the first and the last steps never overlap
    rollouts = [(step, record["rollout"]) for step, record in trained_on(out, num_steps)]
    rates: Row = {}
    for column, name in (("hacked", "hack_rate"), ("hidden_pass", "hidden_pass_rate")):
        for when, steps in (("first", range(ends)), ("last", range(num_steps - ends, num_steps))):
            values = [row[column] for step, row in rollouts if step in steps and row[column] is not None]
            if values:
                rates[f"{when}_{name}"] = sum(values) / len(values)
    if not rates.get("first_hack_rate") and not rates.get("last_hack_rate"):
        return rates, ""
    texts = [
        f"{text} {rates[f'first_{name}']:.2f} -> {rates[f'last_{name}']:.2f}"
        for name, text in (("hack_rate", "hacks"), ("hidden_pass_rate", "right answers"))
        if f"first_{name}" in rates and f"last_{name}" in rates
    ]
    return rates, f"\nfirst {counted(ends, 'step')} -> last {ends}: {', '.join(texts)}\n"


def save(
    trainer: ComposedTrainer,
    config: Config,
    tasks: Iterable[Task],
    out: RunWriter,
    collapsed: str | None = None,
    hints: str | None = None,
) -> None:
    """Write checkpoint.json for `evaluate`, the kept checkpoints, metrics, tables and the report.

    collapsed: the sentence on departures from the course. hints: the result of the hint check. tasks: tasks of the
    training in order, on which `evaluate` refuses to evaluate; a short training uses only a part of all drawn tasks.
    """
    projected = accounts(out)
    if config.optimisation.keep_every:
        out.checkpoint(partial(link_kept, out.scratch(KEPT)), KEPT)
    # As the model was when the run began: hashing the weights of a large model again takes minutes.
    start, start_runs = out.manifest.identity["policy"], out.manifest.inputs.get("start", ())
    earlier = [CheckpointInfo.of(Run(Path(ref.path))) for ref in out.manifest.inputs.get("student", ())]
    identity = store.digest([start, *(ref.content for ref in start_runs)] if start_runs else start)
    info = CheckpointInfo(
        arm=config.arm,
        train_seed=config.seed,
        # Of a training that goes on with an earlier one's model, the start is that of the first.
        start=earlier[0].start if earlier else config.policy,
        start_identity=earlier[0].start_identity if earlier else identity,
        env=config.env.name,
        split=config.env.split,
        task_ids=tuple(dict.fromkeys([*(i for info in earlier for i in info.task_ids), *(t.task_id for t in tasks)])),
        further_tasks=_further_tasks(earlier, out),
        collapsed=collapsed,
    )
    out.document("checkpoint", info.model_dump(mode="json"))
    write_tables(out, trainer.state.global_step)
    write_measured(out, trainer.state.global_step)
    logged = [row for row in trainer.state.log_history if "loss" in row]  # without transformers' totals at the end
    out.metrics(logged)
    rewards = [row["reward"] for row in logged if "reward" in row]
    out.count(planned=config.optimisation.steps, done=trainer.state.global_step, failed=0)
    # TRL's share of groups whose rewards have no spread: their advantages are 0, and so is their gradient.
    equal = bool(logged) and all(row.get("frac_reward_zero_std") == 1 for row in logged)
    summary, course_text = course(out, trainer.state.global_step)
    given_up = int(sum(row.get("sampling/groups_given_up", 0) for row in logged))
    if projected:
        out.document("projection", projected)
        summary["projected"] = config.probe.project
    summary |= {name: value for name, value in (("collapsed", collapsed), ("groups_given_up", given_up)) if value}
    out.set_summary(
        arm=config.arm,
        first_reward=rewards[0] if rewards else None,
        last_reward=rewards[-1] if rewards else None,
        all_rewards_equal=equal,
        **summary,
    )
    max_staleness = config.optimisation.max_staleness
    remarks: list[str] = [
        *([Sentence("training.left-course", collapsed=collapsed)] if collapsed else []),
        *([f"Before training: {hints}."] if hints else []),
        *([Sentence("training.nothing-learned")] if equal and config.weights.grpo > 0 else []),
        *([Sentence("training.grpo-off")] if not config.weights.grpo else []),
        *([Sentence("training.groups-too-old", groups=given_up, max_staleness=max_staleness)] if given_up else []),
        *config.diloco.warnings(config.optimisation.steps),
    ]
    if projected:
        taken_out = {
            "none": Sentence("training.direction-measured"),
            "v": Sentence("training.direction-taken-out"),
            "random": Sentence("training.random-taken-out"),
        }
        remarks.append(taken_out[config.probe.project])
    lines = "".join(f"\n{line}\n" for line in remarks)
    out.write_file("report.txt", training_table(config.arm, logged) + course_text + lines)


def _further_tasks(earlier: Iterable[CheckpointInfo], out: RunWriter) -> dict[str, tuple[str, ...]]:
    """Return the tasks of the pairs and of earlier trainings by environment."""
    by_env: dict[str, dict[str, None]] = {}
    for info in earlier:
        for env, task_ids in [(info.env, info.task_ids), *info.further_tasks.items()]:
            by_env.setdefault(env, {}).update(dict.fromkeys(task_ids))
    for run in (Run(Path(ref.path)) for ref in out.manifest.inputs.get("pairs", ())):
        of_pairs = (row["task_id"] for row in run.scan(PAIR).rows(["task_id"]))
        by_env.setdefault(run.manifest.summary.get("env") or "", {}).update(dict.fromkeys(of_pairs))
    return {env: tuple(names) for env, names in by_env.items()}


GRPO_COLUMNS = ("reward", "reward_std", "loss", "grad_norm", "entropy")
"""Metrics of TRL's log, which are columns of the same names."""


def training_table(arm: str, history: Sequence[Row], rows: int = 12) -> str:
    """Return a table of at most `rows` + 1 steps, evenly spaced, the last one included; only logged columns.

    history: what TRL logged, one object of metrics a step. The channels' columns come from the registry.
    """
    titles = {name: name for name in GRPO_COLUMNS}
    for name, channel in CHANNELS.items():
        titles[f"{name}/loss"] = name
        titles |= {f"{name}/{metric}": title for metric, title in channel.columns.items()}
    columns = [(metric, title) for metric, title in titles.items() if any(metric in row for row in history)]
    stride, last = max(len(history) / rows, 1.0), len(history) - 1
    picked = sorted({min(int(i * stride), last) for i in range(rows)} | {last}) if history else []
    widths = [max(10, len(title) + 1) for _, title in columns]
    header = "".join(f"{title:>{width}}" for (_, title), width in zip(columns, widths, strict=True))
    lines = [f"arm {arm}", f"{'step':>6}{header}"]
    for index in picked:
        line = f"{history[index].get('step', index + 1):>6}"
        for (metric, _), width in zip(columns, widths, strict=True):
            value = history[index].get(metric)
            line += f"{value:>{width}.4f}" if isinstance(value, (int, float)) else f"{'-':>{width}}"
        lines.append(line)
    if len(picked) < len(history):
        lines.append(Sentence("training.steps-left-out", shown=len(picked), steps=len(history)))
    return "\n".join(lines) + "\n"
