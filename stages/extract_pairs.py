"""extract-pairs: turn disagreement between teachers and student into preference pairs.

Answers: is there signal? Reads rollouts and teacher actions, writes `pairs` and a reason for everything dropped. Two
actions are equal when their canonical form is, or, where the environment can tell, when running them from a copy of the
recorded state gives the same outcome. The unit is a state.

Imported rollouts need no teachers: several models, or several rollouts of one, on the same task vote and are judged by
their rewards in every state that they share. The unit is a task then.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Literal

import orjson

from stages.envs.base import ComparesOutcomes, Environment, Task
from stages.envs.config import EnvStageConfig
from stages.errors import UsageError
from stages.pairs.canonical import canonical
from stages.pairs.evidence import evidence, spent
from stages.pairs.evidence import outcomes as outcomes_of
from stages.pairs.labels import class_names
from stages.pairs.outcomes import NotReproducible, State, outcomes
from stages.pairs.report import report
from stages.pairs.rows import by_task, of_group, pair_row
from stages.pairs.states import AnsweredState, answered_states, blindly_asked, judged, names
from stages.pairs.voting import Ballot, Preference, backers, decide, distinct, merged
from stages.rollouts.trace import by_rollout, prompt_ids
from stages.runs.artifact import Out, Run, Slot
from stages.runs.config import StageConfig
from stages.runs.inputs import Inputs
from stages.runs.plan import Plan
from stages.runs.records import ORIGIN, PAIR, ROLLOUT, STEP, TASK, TEACHER_ACTION, Row

VERSION = 3
INPUTS = {"rollouts": Slot(STEP), "teacher_actions": Slot(TEACHER_ACTION, unless=(ORIGIN,))}
OUTPUTS = {"pairs": PAIR}
BATCH = 16
"""States that are made durable in one step."""
Prompts = dict[tuple[str, int], list[int] | None]
"""Token ids before a step, by rollout and step; None where they are not recorded."""


class Config(StageConfig):
    """How actions are compared."""

    compare: Literal["outcome", "canonical"] = "outcome"
    """`outcome` runs actions whose canonical forms differ and compares what they lead to; `canonical` compares text."""
    sandbox: str = "bubblewrap"
    """Where actions are run."""
    student: str | None = None
    """The model whose actions are judged in imported groups of several models; without it, each in turn."""

    def label(self) -> str:
        """How actions are compared."""
        return f"by-{self.compare}"


def plan(inputs: Inputs, config: Config) -> Plan:
    """The states to compare in, or the tasks whose rollouts to compare."""
    del config
    if "teacher_actions" not in inputs:
        return Plan(units=len(inputs.one("rollouts").rows(TASK)), what="tasks")
    return Plan(units=len(answered_states(inputs.one("rollouts"), inputs.one("teacher_actions"))), what="states")


def run(inputs: Inputs, config: Config, out: Out) -> None:
    """Vote in every state, then tabulate pairs and drops."""
    if "teacher_actions" not in inputs:
        _compare_groups(inputs.one("rollouts"), config, out)
        return
    states = answered_states(inputs.one("rollouts"), inputs.one("teacher_actions"))
    make = _environment(inputs.one("rollouts"), config)
    tasks = {row["task_id"]: _task(row) for row in inputs.one("rollouts").rows(TASK)}
    with ThreadPoolExecutor(4) as pool:
        for start in range(0, len(states), BATCH):
            out.stop_here()
            out.progress("states", start, len(states))
            missing = [state for state in states[start : start + BATCH] if not out.finished(state.digest)]
            results = pool.map(lambda state: _vote(state, tasks[state.task_id], make), missing)
            out.write_all((state.digest, result, False) for state, result in zip(missing, results, strict=True))
    out.progress("states", len(states), len(states))
    _finish(states, tasks, inputs.one("rollouts"), inputs.one("teacher_actions"), out)


def _prompts(rollouts: Run) -> Prompts:
    return {
        (row["rollout_id"], row["step"]): prompt
        for rows in by_rollout(rollouts.rows(STEP)).values()
        for row, prompt in zip(rows, prompt_ids(rows), strict=True)
    }


def _environment(rollouts: Run, config: Config) -> Callable[[], Environment] | None:
    """A maker of the environment the rollouts come from, or None when actions are compared as text."""
    if config.compare == "canonical":
        return None
    env = rollouts.manifest.config.get("env")
    if env is None:
        return None
    make = EnvStageConfig(env=env, sandbox=config.sandbox).opener()
    return make if isinstance(make(), ComparesOutcomes) else None


def _task(row: Row) -> Task:
    names = ("task_id", "env", "split", "family", "prompt")
    return Task(**{name: row[name] for name in names}, data=orjson.loads(row["data_json"]))


def _vote(state: AnsweredState, task: Task, make: Callable[[], Environment] | None) -> Row:
    """Every recorded step's preferences or reason for none, and how actions were compared."""
    steps, path = state.recorded.steps, state.recorded.path
    texts = dict.fromkeys(
        text for text in [*(step["action"] for step in steps), *chain(*state.teachers.values())] if text is not None
    )
    forms = {text: canonical(text) for text in texts}
    compared_by, known, reproducible = "canonical", dict[str, str](), True
    candidates = {form: text for text, form in reversed(forms.items()) if form is not None}
    if make is not None and len(candidates) > 1:
        try:
            order = distinct(list(forms.values()))
            reached = State(task, tuple(s["action"] for s in path), tuple(s["observation"] for s in path))
            known = dict(zip(order, outcomes(make, reached, [candidates[form] for form in order]), strict=True))
            compared_by = "outcome"
        except NotReproducible:
            reproducible = False
    classes = merged(forms, known)
    votes = [_ballot(state, step, classes) for step in steps]
    if not reproducible:
        votes = [{"pairs": [], "reason": "state_not_reproducible"} for _ in steps]
    return {"votes": votes, "compared_by": compared_by, **names(state, class_names(classes, forms))}


def _ballot(state: AnsweredState, step: Row, classes: dict[str, str | None]) -> Row:
    if step["truncated"]:
        return {"pairs": [], "reason": "student_truncated"}
    if not any(state.teachers.values()):
        return {"pairs": [], "reason": "not_asked"}
    ballot = Ballot(step["action"], state.teachers, classes)
    preferences, reason = decide(ballot)
    return {"pairs": [{**vars(p), "chosen_by": backers(ballot, p)} for p in preferences], "reason": reason}


def _finish(states: list[AnsweredState], tasks: dict[str, Task], rollouts: Run, answers: Run, out: Out) -> None:
    """Pairs in the order of the states, each once, and the count of every reason for dropping."""
    dropped: Counter[str] = Counter()
    pairs: dict[str, Row] = {}
    records, prompts = {record["unit"]: record for record in out.records()}, _prompts(rollouts)
    shared = {
        digest: len({(fields["chosen"], fields["rejected"]) for vote in record["votes"] for fields in vote["pairs"]})
        for digest, record in records.items()
    }
    for state in states:
        record = records[state.digest]
        for step, vote in zip(state.recorded.steps, record["votes"], strict=True):
            dropped[vote["reason"]] += vote["reason"] is not None
            for fields in vote["pairs"]:
                backing = fields["chosen_by"]
                row = pair_row(
                    Preference(**{name: value for name, value in fields.items() if name != "chosen_by"}),
                    tasks[state.task_id],
                    step,
                    state.recorded.messages,
                    prompt=prompts[step["rollout_id"], step["step"]],
                    num_teachers=len(state.teachers),
                    compared_by=record["compared_by"],
                    chosen_by=backing,
                    served_models=sorted({state.models[name] for name in backing if name in state.models}),
                    cost_usd=None if state.cost_usd is None else state.cost_usd / shared[state.digest],
                )
                dropped["duplicate"] += row["pair_id"] in pairs
                pairs.setdefault(row["pair_id"], row)
    rows = list(pairs.values())
    out.table(PAIR, rows)
    cost = spent(answers.rows(TEACHER_ACTION))
    seen = {state.digest: judged(state, records[state.digest]) for state in states}
    tested = [seen[state.digest] for state in blindly_asked(states, answers)]
    report(
        rows,
        +dropped,
        num_traces=len({step["rollout_id"] for state in states for step in state.recorded.steps}),
        num_steps=sum(len(state.recorded.steps) for state in states),
        out=out,
        spent=cost,
        evidence=evidence(list(seen.values()), outcomes_of(rollouts.rows(ROLLOUT)), cost, tested),
    )


def _compare_groups(imported: Run, config: Config, out: Out) -> None:
    """Compare the rollouts of every task with each other, then tabulate pairs and drops."""
    rollouts, steps = imported.rows(ROLLOUT), imported.rows(STEP)
    if config.student is not None and config.student not in {row["model"] for row in rollouts}:
        known = ", ".join(sorted({row["model"] or "unknown" for row in rollouts}))
        raise UsageError(f"No rollout is of the model {config.student!r}. The models are: {known}.")
    submitted = {row["rollout_id"]: row["submission"] for row in imported.rows(ORIGIN)}
    tasks = [_task(row) for row in imported.rows(TASK)]
    grouped, stepped = by_task(rollouts), by_task(steps)
    for done, task in enumerate(tasks):
        out.stop_here()
        out.progress("tasks", done, len(tasks))
        if not out.finished(task.task_id):
            members = grouped[task.task_id]
            out.write(task.task_id, of_group(task, members, stepped[task.task_id], submitted, config.student))
    out.progress("tasks", len(tasks), len(tasks))
    written = {record["unit"]: record for record in out.records()}
    records = [written[task.task_id] for task in tasks]
    rows = [row for record in records for row in record["pairs"]]
    out.table(PAIR, rows)
    dropped = sum((Counter(record["dropped"]) for record in records), Counter[str]())
    shared = (
        f"{sum(r['shared'] for r in records)} of {sum(r['states'] for r in records)} states shared by several rollouts"
    )
    models = len({row["model"] for row in rollouts})
    about = f"{len(tasks)} tasks, {models} models, {shared}"
    report(rows, dropped, num_traces=len(rollouts), num_steps=len(steps), out=out, about=about)
