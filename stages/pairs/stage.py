"""What `extract-pairs` does: its plan, its run, the share of a worker, and the pairs of a block of votes.

`states.patterns` decides each pattern of equal actions once; `pair_rows` writes the pairs of all states that have
it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages import envs
from stages.envs import task_table
from stages.envs.base import ComparesOutcomes, Environment, Task
from stages.envs.config import EnvStageConfig
from stages.errors import BadInput, Incomplete, UsageError
from stages.layout import counted, plural
from stages.pairs.actions import Form, form, text_form
from stages.pairs.blocks import (
    NOTHING,
    ActionClasses,
    AlikeStates,
    Array,
    StateBlock,
    equal_rows,
    lists_to_arrow,
    texts_to_arrow,
    to_arrow,
    to_numpy,
)
from stages.pairs.config import Config
from stages.pairs.continuation import (
    REJECTED_PASSED,
    Branch,
    Continued,
    PairBatches,
    branches,
    goes_on,
    play_branches,
    read_rows,
)
from stages.pairs.evidence import (
    PASSED_COLUMNS,
    FailureAlignment,
    PairEvidence,
    failure_text,
    failure_verdict,
    passed_by_rollout,
    spent,
    tasks_to_test,
)
from stages.pairs.groups import LEAST_VISITS, group_pairs, pair_id, steps_by_task
from stages.pairs.report import PairAccount, PairVerdict, report
from stages.pairs.states import AnsweredStates, Pattern, PatternPair, asked_blindly, patterns, recorded_classes, vote
from stages.policy import PolicyConfig, available
from stages.policy.serving import Serving
from stages.rollouts.agent_loop import PlayingConfig
from stages.runs.kinds import CONTINUATION, ORIGIN, PAIR, ROLLOUT, STATE, STEP, TASK, TEACHER_ACTION, Row
from stages.runs.run import Inputs, Run, RunWriter
from stages.runs.stage import Plan

NOT_PLAYED = "signal.rollouts = N plays both actions of every pair N times, and tests the pairs by that"
CHOSEN_FAILS = "chosen_ends_in_failure"
COST_COLUMNS = ["teacher", "cost_usd", "error_type"]


class Extraction:
    """One extraction from teachers' answers. passed: whether each rollout passed.

    respect: whether pairs that teach against these outcomes are dropped.
    """

    def __init__(
        self, states: AnsweredStates, answers: Run, passed: Mapping[str, bool | None], *, respect: bool = True
    ) -> None:
        self._answers, self._passed, self._respect = answers, passed, respect
        self._evidence = PairEvidence(states.teachers, passed)
        self._num_rollouts, self._num_steps, states_per_task = states.counts()
        self._tested = pa.array(tasks_to_test(states_per_task), pa.string())
        self.account, self.dropped = PairAccount(), Counter[str]()

    def pairs(
        self, votes: Iterable[tuple[StateBlock, ActionClasses]], tasks: Mapping[str, Task]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the pairs in the order of the states, each once; count everything else on the way.

        With one column more, `REJECTED_PASSED`: whether the pair teaches against the outcome of a rollout.
        """
        for block, classes in votes:
            found = list(patterns(block, classes))
            number = 0
            for alike, pattern in found:
                number += len(pattern.pairs) * len(alike.states)
                for reason in pattern.reasons:
                    self.dropped[reason] += len(alike.states)
                self.dropped["duplicate"] += pattern.duplicates * len(alike.states)
            tested = to_numpy(pc.is_in(block.first_step_column("task_id"), self._tested)) & asked_blindly(
                self._answers, block
            )
            self._evidence.add(block, classes, found, tested)
            rows, rejected = pair_rows(block, classes, found, tasks)
            self.dropped[CHOSEN_FAILS] += number - len(rows)
            against = np.isin(rejected, self._passed_actions(block, classes)) & self._respect
            against &= to_numpy(pc.equal(rows["rule"], "majority_over_student"))
            yield rows.append_column(REJECTED_PASSED, to_arrow(against))

    def _passed_actions(self, block: StateBlock, classes: ActionClasses) -> Array:
        """Return the actions of a block, by `action_keys`, that some rollout took which passed."""
        coded = block.steps["rollout_id"].combine_chunks().dictionary_encode()
        passed = np.array([self._passed.get(name) is True for name in coded.dictionary.to_pylist()], dtype=bool)
        return action_keys(block, classes, np.flatnonzero(passed[to_numpy(coded.indices)]))

    def kept(self, pairs: Iterable[pa.RecordBatch], continued: Continued | None) -> Iterator[pa.RecordBatch]:
        """Yield the pairs that are written: those that neither a rollout's outcome nor their own contradicts."""
        for rows in pairs:
            against = to_numpy(rows[REJECTED_PASSED])
            rows = rows.select(PAIR.columns)
            if continued is None:
                self.dropped[REJECTED_PASSED] += int(against.sum())
                kept = rows.filter(to_arrow(~against))
            else:
                reasons = continued.reasons(rows, against.tolist(), respect=self._respect)
                self.dropped.update(reason for reason in reasons if reason is not None)
                kept = rows.filter(to_arrow(np.array([reason is None for reason in reasons], dtype=bool)))
            self.account.add_all(kept)
            yield kept

    def report(self, config: Config, out: RunWriter, continued: Continued | None) -> None:
        """Write the report, the counts and the verdict."""
        cost = spent(self._answers.scan(TEACHER_ACTION).batches(COST_COLUMNS))
        evidence = self._evidence.evidence(cost)
        evidence = (
            replace(evidence, sentences=(*evidence.sentences, NOT_PLAYED))
            if continued is None
            else continued.evidence(evidence)
        )
        report(
            self.account,
            +self.dropped,
            num_rollouts=self._num_rollouts,
            num_steps=self._num_steps,
            config=config,
            out=out,
            spent=cost,
            evidence=evidence,
        )


def action_keys(block: StateBlock, classes: ActionClasses, rows: Array) -> Array:
    """Return a number for each of these actions [N] of a block: equal in one state for equal actions, and only there.

    Malformed actions are equal where their texts are.
    """
    state = np.append(block.at, block.answered)[rows]
    kind = np.where(classes.class_of == NOTHING, len(classes.names) + block.text_of, classes.class_of)[rows]
    keys: Array = state * (len(classes.names) + len(block.texts) + 1) + kind
    return keys


def pair_rows(
    block: StateBlock,
    classes: ActionClasses,
    found: Sequence[tuple[AlikeStates, Pattern]],
    tasks: Mapping[str, Task],
) -> tuple[pa.RecordBatch, Array]:
    """Return the `pair/1` rows of a block, in the order of states and of the pairs in each, and their rejected actions.

    Without those that choose an action which ends the rollout and fails. The rejected actions [N] are `action_keys`.
    """
    coded = block.answers["served"].combine_chunks().dictionary_encode()
    served_code, served_names = to_numpy(coded.indices, null=NOTHING), coded.dictionary.to_pylist()
    parts, kinds, backers = list[Array](), list[PatternPair](), [np.zeros((0, len(block.teachers)), dtype=np.int64)]
    for alike, pattern in found:
        ends = (alike.students + np.cumsum(alike.samples, dtype=int)).tolist()
        for place, pair in enumerate(pattern.pairs):
            rows, same = alike.rows, np.ones(len(alike.states), dtype=np.int64)
            sides = [rows[:, pair.step], rows[:, pair.chosen], rows[:, pair.rejected]]
            # A server may change its model between answers: that of each backer's last answer is recorded.
            models = np.full((len(same), len(block.teachers)), NOTHING)
            for teacher, (name, number, end) in enumerate(zip(block.teachers, alike.samples, ends, strict=True)):
                if name in pair.chosen_by and number:
                    models[:, teacher] = served_code[rows[:, end - 1] - len(block.steps)]
            backers.append(models)
            parts.append(
                np.column_stack([alike.states, place * same, *sides, len(kinds) * same, pattern.shared * same])
            )
            kinds.append(pair)
    models, served = np.concatenate(backers), list[list[str]]()
    models_of = np.zeros(len(models), dtype=np.int64)  # of each pair: the number of its list of models
    for equal in equal_rows(models):
        models_of[equal] = len(served)
        served.append(sorted({served_names[code] for code in models[equal[0]] if code != NOTHING}))
    order = np.column_stack([np.concatenate([np.zeros((0, 7), dtype=np.int64), *parts]), models_of])
    order = order[~classes.failing[order[:, 3]]]
    state, _, step, chosen, rejected, kind, shared, models_of = order[np.lexsort((order[:, 1], order[:, 0]))].T
    kind_of_row = to_arrow(kind)

    def of_step(column: str, at: Array = step) -> pa.Array:
        return block.steps[column].take(to_arrow(at)).combine_chunks()

    def text_of(values: Sequence[str]) -> pa.Array:
        return texts_to_arrow(values).take(kind_of_row)

    def number_of(values: Sequence[float]) -> pa.Array:
        return to_arrow(np.array(values, dtype=np.float64)[kind])

    # A pair's context is the student's own step where its token ids are known, else that of the rollout which reached
    # the state first: both have the same messages.
    first = block.first_step[state]
    named = np.where(to_numpy(of_step("has_ids")), step, first)
    state_id = of_step("rollout_id", named), of_step("step", named).cast(pa.string()), texts_to_arrow(["/"])[0]
    task, digest = of_step("task_id", first).dictionary_encode(), of_step("state_sha256")
    texts = [block.actions.take(to_arrow(side)) for side in (chosen, rejected)]
    preferences, usd = [pair.preference for pair in kinds], block.usd[state]
    families = [tasks[one].family for one in task.dictionary.to_pylist()]
    columns = {
        "pair_id": texts_to_arrow(list(map(pair_id, *(side.to_pylist() for side in (digest, *texts))))),
        "rule": text_of([one.rule for one in preferences]),
        "rollout_id": of_step("rollout_id"),
        "task_id": task.dictionary_decode(),
        "family": texts_to_arrow(families).take(task.indices),
        "step": of_step("step"),
        "state_sha256": digest,
        "state_id": pc.binary_join_element_wise(*state_id),
        "chosen": texts[0],
        "rejected": texts[1],
        "rejected_by": text_of([one.rejected_by for one in preferences]),
        "votes_chosen": number_of([one.votes_chosen for one in preferences]),
        "votes_rejected": number_of([one.votes_rejected for one in preferences]),
        "num_teachers": to_arrow(np.full(len(state), len(block.teachers), dtype=np.int64)),
        "compared_by": classes.compared_by.take(to_arrow(state)),
        "chosen_by": lists_to_arrow([pair.chosen_by for pair in kinds]).take(kind_of_row),
        "served_models": lists_to_arrow(served).take(to_arrow(models_of)),
        "cost_usd": to_arrow(usd / shared, valid=~np.isnan(usd)),
    }
    batch = pa.RecordBatch.from_arrays([columns[column] for column in PAIR.columns], schema=PAIR.schema)
    return batch, action_keys(block, classes, rejected)


ROLLOUT_COLUMNS = ["rollout_id", "task_id", "group_id", "model", "reward", "hidden_pass"]
"""The columns that rollouts of one task are compared by."""
SUBMISSION_COLUMNS = ["rollout_id", "submission"]
NO_BETTER_OUTCOME = (
    f"Rewards decide between no two actions: fewer than {LEAST_VISITS} rollouts of a task that come to the same state "
    "cannot show it, and mixed rewards need more. Play each task more often (collect: samples; inspect: epochs)."
)
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
    """Return the continuations of each action: at temperature 0 they are the same every time."""
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
    if "better_outcome" not in account.rules and dropped["difference_not_supported"] + dropped["too_few_rollouts"]:
        about += f"\n{NO_BETTER_OUTCOME}"
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
