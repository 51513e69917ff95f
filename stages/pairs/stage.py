"""What `extract-pairs` does: its plan, its run, and the share of a worker."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from stages import envs
from stages.envs import task_table
from stages.envs.base import ComparesOutcomes, Environment, Task
from stages.envs.config import EnvStageConfig
from stages.errors import BadInput, Incomplete, UsageError
from stages.layout import counted, plural
from stages.pairs.actions import Form, form, text_form
from stages.pairs.blocks import ActionClasses, StateBlock
from stages.pairs.config import Config
from stages.pairs.continuation import Branch, Continued, PairBatches, branches, goes_on, play_branches, read_rows
from stages.pairs.evidence import (
    PASSED_COLUMNS,
    FailureAlignment,
    failure_text,
    failure_verdict,
    passed_by_rollout,
)
from stages.pairs.extraction import Extraction
from stages.pairs.groups import group_pairs, steps_by_task
from stages.pairs.report import PairAccount, PairVerdict, report
from stages.pairs.states import AnsweredStates, recorded_classes, vote
from stages.policy import PolicyConfig, available
from stages.policy.serving import Serving
from stages.rollouts.agent_loop import PlayingConfig
from stages.runs.kinds import CONTINUATION, ORIGIN, PAIR, ROLLOUT, STATE, STEP, TASK, TEACHER_ACTION, Row
from stages.runs.run import Inputs, Run, RunWriter
from stages.runs.stage import Plan

ROLLOUT_COLUMNS = ["rollout_id", "task_id", "group_id", "model", "reward", "hidden_pass"]
"""The columns that rollouts of one task are compared by."""
SUBMISSION_COLUMNS = ["rollout_id", "submission"]
BY_REWARD = (
    "imported rollouts cannot be continued, so their pairs are not tested by their own actions; pairs by reward "
    "(better_outcome, better_submission) were chosen by the outcomes, which cannot judge them again"
)
BATCH = 16
"""States that are made durable in one step."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of states to vote in, or of tasks whose rollouts to compare; with the most continuations."""
    rollouts = inputs.one("rollouts")
    if "teacher_actions" not in inputs:
        _refuse_continuing(rollouts, config)
        return Plan(units=len(rollouts.scan(TASK)), what="tasks")
    answers = inputs.one("teacher_actions")
    with TemporaryDirectory() as folder, AnsweredStates(rollouts, answers, Path(folder)) as states:
        number = len(states)
    if not config.signal.rollouts:
        return Plan(units=number, what="states")
    policy, playing = _collected_with(rollouts, config)
    # Every action of a pair is that of a step or of an answer; most of them are in no pair.
    most = (len(rollouts.scan(STEP)) + len(answers.scan(TEACHER_ACTION))) * _samples(policy, config)
    tokens = most * playing.max_steps * available.longest_answer(policy)
    notes = (f"at most {most} continuations", *playing.limits.notes(playing.max_steps))
    return Plan(number, "states", max_completion_tokens=tokens, max_cost_usd=policy.cost(0, tokens), notes=notes)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Vote in every state, play the pairs' actions if asked to, then write the pairs, their states and the report."""
    rollouts = inputs.one("rollouts")
    if "teacher_actions" not in inputs:
        _refuse_continuing(rollouts, config)
        _compare_groups(rollouts, config, out)
        return
    answers = inputs.one("teacher_actions")
    if config.signal.rollouts:
        _collected_with(rollouts, config)  # refuses before the first vote
    tasks = {row["task_id"]: task_table.task(row) for row in rollouts.scan(TASK).rows()}
    with AnsweredStates(rollouts, answers, out.scratch("states")) as states:
        make = _environment(rollouts, config)
        if make is not None:
            _vote_by_outcome(states, tasks, make, _form(rollouts), out)
        passed = passed_by_rollout(rollouts.scan(ROLLOUT).rows(PASSED_COLUMNS))
        extraction = Extraction(states, answers, passed, respect=config.outcome == "respect")
        pairs = extraction.pairs(_votes(states, _form(rollouts), by_text=make is None, out=out), tasks)
        continued = None
        if config.signal.rollouts:
            held = list(pairs)  # all of them: they are few beside the rollouts that are played for them
            pairs, continued = iter(held), _continue(held, rollouts, tasks, config, out)
        out.table(PAIR, extraction.kept(pairs, continued))
        out.table(STATE, extraction.account.states.rows(rollouts))
        extraction.report(config, out, continued)
    failed = out.manifest.counts.get("continuations_failed", 0)
    if failed:
        raise Incomplete(
            f"{failed} of {out.manifest.counts['continuations']} continuations failed. The others are saved, and the "
            "pairs are written without these; retry them with --resume."
        )


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Vote where actions have to be run for it, or play continuations; everything else is left to `run`."""
    rollouts = inputs.one("rollouts")
    tasks = {row["task_id"]: task_table.task(row) for row in rollouts.scan(TASK).rows()}
    if out.shared_value is not None:
        wanted, samples = out.shared_value
        _play(wanted, samples, rollouts, tasks, config, out)
        return
    make = _environment(rollouts, config)
    with AnsweredStates(rollouts, inputs.one("teacher_actions"), out.scratch("states")) as states:
        if make is not None:
            _vote_by_outcome(states, tasks, make, _form(rollouts), out)


def _refuse_continuing(rollouts: Run, config: Config) -> None:
    """Raise `UsageError` where continuations are asked for, and the rollouts were not played by `collect`."""
    if config.signal.rollouts and rollouts.manifest.stage != "collect":
        raise UsageError(
            f"signal.rollouts continues from states that `composer collect` recorded, and {rollouts.path} is a run of "
            f"{rollouts.manifest.stage}. Leave it out: the verdict is then about votes and failed rollouts."
        )


def _collected_with(rollouts: Run, config: Config) -> tuple[PolicyConfig, PlayingConfig]:
    """Return the policy of a collection, and how its rollouts are continued under this stage's seed and sandbox.

    `BadInput` where the policy's weights are no longer those of the collection.
    """
    _refuse_continuing(rollouts, config)
    recorded = rollouts.manifest.config
    policy = PolicyConfig.model_validate(recorded["policy"])
    then, now = rollouts.manifest.identity.get("policy", {}).get("weights"), policy.identity()["weights"]
    if then != now:
        raise BadInput(
            f"The model {policy.model} has changed since {rollouts.path} was collected with it, so its rollouts cannot "
            "be continued. Collect again, or leave out signal.rollouts."
        )
    given = {name: value for name, value in recorded.items() if name in PlayingConfig.model_fields}
    return policy, PlayingConfig.model_validate({**given, "seed": config.seed, "sandbox": config.sandbox})


def _samples(policy: PolicyConfig, config: Config) -> int:
    """Return the continuations of each action: the most likely answers are the same every time."""
    return config.signal.rollouts if policy.temperature > 0 else 1


def _continue(pairs: PairBatches, rollouts: Run, tasks: dict[str, Task], config: Config, out: RunWriter) -> Continued:
    """Play the actions of all pairs and write the table of continuations."""
    policy, playing = _collected_with(rollouts, config)
    number, wanted = _samples(policy, config), branches(pairs)
    _play(wanted, range(1), rollouts, tasks, config, out)
    # An action that ended the rollout does so every time, and the environment grades equal work equally.
    first = list(read_rows(out, wanted, range(1)))
    again = [branch for branch, row in zip(wanted, first, strict=True) if goes_on(row)]
    _play(again, range(1, number), rollouts, tasks, config, out)
    rows = [*first, *read_rows(out, again, range(1, number))]
    out.table(CONTINUATION, rows)
    out.count(continuations=len(rows), continuations_failed=sum(row["error_type"] is not None for row in rows))
    out.manifest.tokens.update(
        prompt=sum(row["prompt_tokens"] for row in rows), completion=sum(row["completion_tokens"] for row in rows)
    )
    unit = envs.sampling_unit(playing.env.name)
    return Continued(
        pairs,
        rows,
        number,
        # Tasks, where the units are all there are: the result then holds for other tasks of these units.
        unit_of=lambda task, family: task if unit.fixed else unit.of_family(family),
        noun="tasks" if unit.fixed else plural(unit.noun),
    )


def _play(
    wanted: Sequence[Branch], samples: range, rollouts: Run, tasks: dict[str, Task], config: Config, out: RunWriter
) -> None:
    """Play the samples of branches that are not finished, in the environment and with the policy of the collection."""
    if not wanted or not samples or all(out.finished(one.key(sample)) for one in wanted for sample in samples):
        return
    policy, playing = _collected_with(rollouts, config)
    with Serving(out, [policy]) as serving:
        opened = serving.open(policy)
        out.model("policy", **opened.facts())
        play_branches(
            wanted,
            samples,
            rollouts=rollouts,
            tasks=tasks,
            make=playing.opener(),
            policy=opened,
            config=playing,
            out=out,
        )


def _environment(rollouts: Run, config: Config) -> Callable[[], Environment] | None:
    """Return a maker of the environment of the rollouts, or None when actions are compared as text."""
    env = rollouts.manifest.config.get("env")
    if config.compare == "canonical" or env is None:
        return None
    make = EnvStageConfig(env=env, sandbox=config.sandbox).opener()
    return make if isinstance(make(), ComparesOutcomes) else None


def _form(rollouts: Run) -> Form:
    """Return what the actions of rollouts are compared by before any is run."""
    env = rollouts.manifest.config.get("env")
    return text_form if env is not None and envs.text_actions(env["name"]) else form


def _vote_by_outcome(
    states: AnsweredStates, tasks: dict[str, Task], make: Callable[[], Environment], form: Form, out: RunWriter
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
            results = pool.map(lambda one: vote(one[0], tasks[one[0].task_id], make, one[1], form), missing)
            out.write_all((state.digest, result, False) for (state, _), result in zip(missing, results, strict=True))


def _votes(
    states: AnsweredStates, form: Form, *, by_text: bool, out: RunWriter
) -> Iterator[tuple[StateBlock, ActionClasses]]:
    """Yield the states with the classes of equal actions: by text alone, or as written by `_vote_by_outcome`."""
    done, number = 0, len(states)
    records = iter(()) if by_text else out.journal.read(states.digests())
    for block in states.blocks(form=form):
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
    judgement = FailureAlignment(passed_by_rollout(rollouts))

    def pairs() -> Iterator[Row]:
        for record in out.journal.read(tasks):
            dropped.update(record["dropped"])
            shared.update(shared=record["shared"], states=record["states"])
            # Rollouts that no vote judges belong to the null: how often is one of theirs in line by chance?
            own = [row["rollout_id"] for row in grouped[record["unit"]] if config.student in (None, row["model"])]
            judgement.rollout_numbers(own, [record["unit"]] * len(own))
            for wants, voted in enumerate(record["voted"]):  # in line with a failure, with a pass
                numbers, _ = judgement.rollout_numbers(voted, [record["unit"]] * len(voted))
                judgement.add(numbers, bool(wants))
            for row in record["pairs"]:
                account.add(row)
                yield row

    out.table(PAIR, pairs())
    out.table(STATE, account.states.rows(imported, tasks.values()))
    models = len({row["model"] for row in rollouts})
    about = f"{counted(len(tasks), 'task')}, {counted(models, 'model')}, "
    about += f"{shared['shared']} of {shared['states']} states shared by several rollouts"
    aligned = judgement.alignment()
    numbers = {"alignment": aligned and vars(aligned)}
    evidence = PairVerdict(failure_verdict(aligned), numbers, (failure_text(aligned), BY_REWARD))
    num_steps = len(imported.scan(STEP))
    report(
        account,
        dropped,
        num_rollouts=len(rollouts),
        num_steps=num_steps,
        config=config,
        out=out,
        about=about,
        evidence=evidence,
    )
