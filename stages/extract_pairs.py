"""extract-pairs: turn disagreement between teachers and student into preference pairs.

Answers: is there signal? Reads rollouts and teacher actions; writes `pairs`, their `states`, and a reason for every
step without a pair. Two actions are equal when their canonical forms are or, where the environment can tell, when
running them from a copy of the recorded state gives the same outcome. The unit is a state.

Imported rollouts need no teachers: several models, or several rollouts of one, on the same task vote and are judged by
their rewards in every state that they share. The unit is a task then.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from stages.envs import task_table
from stages.envs.base import ComparesOutcomes, Environment, Task
from stages.envs.config import EnvStageConfig
from stages.errors import UsageError
from stages.pairs.audit import PASSED_COLUMNS, passed_by_rollout
from stages.pairs.blocks import ActionClasses, StateBlock
from stages.pairs.extraction import Extraction
from stages.pairs.groups import group_pairs, steps_by_task
from stages.pairs.report import PairAccount, report
from stages.pairs.states import AnsweredStates, recorded_classes, vote
from stages.runs.artifact import Inputs, Run, RunWriter, Slot
from stages.runs.config import StageConfig
from stages.runs.records import ORIGIN, PAIR, ROLLOUT, STATE, STEP, TASK, TEACHER_ACTION, Row
from stages.runs.stage import Plan, Stage

ROLLOUT_COLUMNS = ["rollout_id", "task_id", "group_id", "model", "reward", "gt_pass"]
"""The columns that rollouts of one task are compared by."""
SUBMISSION_COLUMNS = ["rollout_id", "submission"]
BATCH = 16
"""States that are made durable in one step."""


class Config(StageConfig):
    """Settings of how actions are compared."""

    compare: Literal["outcome", "canonical"] = "outcome"
    """`outcome` runs actions whose canonical forms differ and compares their outcomes; `canonical` compares text."""
    sandbox: str = "bubblewrap"
    """Where actions are executed."""
    student: str | None = None
    """The model whose actions are judged in imported groups of several models; without it, each in turn."""

    def label(self) -> str:
        """Return how actions are compared."""
        return f"by-{self.compare}"


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of states to vote in, or of tasks whose rollouts to compare."""
    del config
    if "teacher_actions" not in inputs:
        return Plan(units=len(inputs.one("rollouts").scan(TASK)), what="tasks")
    with (
        TemporaryDirectory() as folder,
        AnsweredStates(inputs.one("rollouts"), inputs.one("teacher_actions"), Path(folder)) as states,
    ):
        return Plan(units=len(states), what="states")


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Vote in every state, then write the pairs, their states and the report."""
    rollouts = inputs.one("rollouts")
    if "teacher_actions" not in inputs:
        _compare_groups(rollouts, config, out)
        return
    answers = inputs.one("teacher_actions")
    tasks = {row["task_id"]: task_table.task(row) for row in rollouts.scan(TASK).rows()}
    with AnsweredStates(rollouts, answers, out.scratch("states")) as states:
        make = _environment(rollouts, config)
        if make is not None:
            _vote_by_outcome(states, tasks, make, out)
        extraction = Extraction(states, answers, passed_by_rollout(rollouts.scan(ROLLOUT).rows(PASSED_COLUMNS)))
        out.table(PAIR, extraction.pairs(_votes(states, by_text=make is None, out=out), tasks))
        out.table(STATE, extraction.account.states.rows(rollouts))
        extraction.report(out)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Vote where actions have to be run for it; everything else takes no time, and is left to `run`."""
    rollouts = inputs.one("rollouts")
    make = _environment(rollouts, config)
    tasks = {row["task_id"]: task_table.task(row) for row in rollouts.scan(TASK).rows()}
    with AnsweredStates(rollouts, inputs.one("teacher_actions"), out.scratch("states")) as states:
        if make is not None:
            _vote_by_outcome(states, tasks, make, out)


def _environment(rollouts: Run, config: Config) -> Callable[[], Environment] | None:
    """Return a maker of the environment of the rollouts, or None when actions are compared as text."""
    env = rollouts.manifest.config.get("env")
    if config.compare == "canonical" or env is None:
        return None
    make = EnvStageConfig(env=env, sandbox=config.sandbox).opener()
    return make if isinstance(make(), ComparesOutcomes) else None


def _vote_by_outcome(
    states: AnsweredStates, tasks: dict[str, Task], make: Callable[[], Environment], out: RunWriter
) -> None:
    """Run the actions that have to be run, which takes long, and write the vote in every state."""
    out.spread([[digest] for digest in states.digests()], "states")
    with ThreadPoolExecutor(4) as pool:
        units, done, number = iter(states), 0, len(states)
        while batch := list(islice(units, BATCH)):
            out.raise_if_stopped()
            out.progress("states", done, number)
            done += len(batch)
            missing = [(state, states.path(state)) for state in batch if not out.finished(state.digest)]
            results = pool.map(lambda one: vote(one[0], tasks[one[0].task_id], make, one[1]), missing)
            out.write_all((state.digest, result, False) for (state, _), result in zip(missing, results, strict=True))


def _votes(states: AnsweredStates, *, by_text: bool, out: RunWriter) -> Iterator[tuple[StateBlock, ActionClasses]]:
    """Yield the states with the classes of equal actions: by text alone, or as written by `_vote_by_outcome`."""
    done, number = 0, len(states)
    records = iter(()) if by_text else out.journal.read(states.digests())
    for block in states.blocks():
        out.raise_if_stopped()
        out.progress("states", done, number)
        done += block.size
        yield block, block.classes_by_text() if by_text else recorded_classes(block, islice(records, block.size))
    out.progress("states", number, number)


def _compare_groups(imported: Run, config: Config, out: RunWriter) -> None:
    """Compare the rollouts of every task with each other, then write the pairs, their states and the report."""
    rollouts = list(imported.scan(ROLLOUT).rows(ROLLOUT_COLUMNS))
    if config.student is not None and config.student not in {row["model"] for row in rollouts}:
        known = ", ".join(sorted({row["model"] or "unknown" for row in rollouts}))
        raise UsageError(f"No rollout is of the model {config.student!r}. The models are: {known}.")
    submitted = {row["rollout_id"]: row["submission"] for row in imported.scan(ORIGIN).rows(SUBMISSION_COLUMNS)}
    tasks = {row["task_id"]: task_table.task(row) for row in imported.scan(TASK).rows()}
    grouped: dict[str, list[Row]] = {task_id: [] for task_id in tasks}
    for row in rollouts:
        grouped[row["task_id"]].append(row)

    # Tasks whose rollouts have no steps come last. The generator looks at `with_steps` when the others are done.
    with_steps = set[str]()
    without_steps = ((task_id, list[Row]()) for task_id in tasks if task_id not in with_steps)
    for done, (task_id, steps) in enumerate(chain(steps_by_task(imported, out.scratch("steps")), without_steps)):
        with_steps.add(task_id)
        out.raise_if_stopped()
        out.progress("tasks", done, len(tasks))
        if not out.finished(task_id):
            out.write(task_id, group_pairs(tasks[task_id], grouped[task_id], steps, submitted, config.student))
    out.progress("tasks", len(tasks), len(tasks))
    account, dropped, shared = PairAccount(), Counter[str](), Counter[str]()

    def pairs() -> Iterator[Row]:
        for record in out.journal.read(tasks):
            dropped.update(record["dropped"])
            shared.update(shared=record["shared"], states=record["states"])
            for row in record["pairs"]:
                account.add(row)
                yield row

    out.table(PAIR, pairs())
    out.table(STATE, account.states.rows(imported, tasks.values()))
    models = len({row["model"] for row in rollouts})
    about = f"{len(tasks)} tasks, {models} models, "
    about += f"{shared['shared']} of {shared['states']} states shared by several rollouts"
    report(account, dropped, num_traces=len(rollouts), num_steps=len(imported.scan(STEP)), out=out, about=about)


STAGE = Stage(
    name="extract-pairs",
    version=4,
    config=Config,
    inputs={"rollouts": Slot(STEP), "teacher_actions": Slot(TEACHER_ACTION, unless=(ORIGIN,))},
    outputs={"pairs": PAIR, "states": STATE},
    plan=plan,
    run=run,
    work=work,
)
