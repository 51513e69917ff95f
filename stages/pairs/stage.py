"""The work of `extract-pairs`: its plan, its run, the share of a worker, and the pairs of a block of votes.

`states.patterns` decides each pattern of equal actions once; `pair_rows` writes the pairs of all states with it.
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

from composer_stages import envs
from composer_stages.envs import task_table
from composer_stages.envs.base import ComparesOutcomes, Environment, Task
from composer_stages.envs.config import EnvStageConfig
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.layout import plural
from composer_stages.pairs.actions import Form, action_form
from composer_stages.pairs.blocks import NOTHING, ActionClasses, Array, StateBlock, StateGroup, equal_rows, to_numpy
from composer_stages.pairs.config import Config
from composer_stages.pairs.continuation import (
    REJECTED_PASSED,
    Branch,
    ContinuationOutcomes,
    PairBatches,
    branches,
    can_differ,
    play_branches,
    read_rows,
)
from composer_stages.pairs.evidence import (
    PASSED_COLUMNS,
    FailureAlignment,
    PairEvidence,
    failure_text,
    failure_verdict,
    passed_by_rollout,
    sample_tasks,
    teacher_costs,
)
from composer_stages.pairs.groups import LEAST_VISITS, group_pairs, pair_id, steps_by_task
from composer_stages.pairs.report import PairTally, PairVerdict, report
from composer_stages.pairs.states import (
    AnsweredStates,
    Pattern,
    PatternPair,
    patterns,
    recorded_classes,
    unselected_states,
    vote,
)
from composer_stages.policy import available
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.serving import Serving
from composer_stages.rollouts.config import PlayingConfig
from composer_stages.rollouts.trace import collected_with
from composer_stages.runs.kinds import (
    CHECKPOINT,
    CONTINUATION,
    ORIGIN,
    PAIR,
    ROLLOUT,
    STATE,
    STEP,
    TASK,
    TEACHER_ACTION,
    Row,
)
from composer_stages.runs.run import Inputs, Run, RunWriter
from composer_stages.runs.stage import Plan
from composer_stages.words import Sentence

CHOSEN_FAILS = "chosen_ends_in_failure"
COST_COLUMNS = ["teacher", "cost_usd", "error_type"]


class Extraction:
    """One extraction from teachers' answers.

    passed: by rollout, None if unknown. respect: drop the pairs that teach against these outcomes.
    """

    def __init__(
        self, states: AnsweredStates, answers: Run, passed: Mapping[str, bool | None], *, respect: bool = True
    ) -> None:
        self._answers, self._passed, self._respect = answers, passed, respect
        self._evidence = PairEvidence(states.teachers, passed)
        self._num_rollouts, self._num_steps, states_per_task = states.counts()
        self._tested = pa.array(sample_tasks(states_per_task), pa.string())
        self.account, self.dropped = PairTally(), Counter[str]()

    def pairs(
        self, votes: Iterable[tuple[StateBlock, ActionClasses]], tasks: Mapping[str, Task]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the distinct pairs in the order of the states, and count the drops and the evidence.

        An extra column, `REJECTED_PASSED`, flags pairs that teach against the outcome of a rollout.
        """
        for block, classes in votes:
            decided = list(patterns(block, classes))
            number = 0
            for group, pattern in decided:
                number += len(pattern.pairs) * len(group.states)
                for reason in pattern.reasons:
                    self.dropped[reason] += len(group.states)
                self.dropped["duplicate"] += pattern.duplicates * len(group.states)
            tested = to_numpy(pc.is_in(block.first_step_column("task_id"), self._tested)) & unselected_states(
                self._answers, block
            )
            self._evidence.add(block, classes, decided, tested)
            rows, rejected = pair_rows(block, classes, decided, tasks)
            self.dropped[CHOSEN_FAILS] += number - len(rows)
            against = np.isin(rejected, self._passed_actions(block, classes)) & self._respect
            against &= to_numpy(pc.equal(rows["rule"], "majority_over_student"))
            yield rows.append_column(REJECTED_PASSED, pa.array(against))

    def _passed_actions(self, block: StateBlock, classes: ActionClasses) -> Array:
        """Return the `action_keys` of the steps of a block whose rollout passed."""
        coded = block.steps["rollout_id"].combine_chunks().dictionary_encode()
        passed = np.array([self._passed.get(name) is True for name in coded.dictionary.to_pylist()], dtype=bool)
        return action_keys(block, classes, np.flatnonzero(passed[to_numpy(coded.indices)]))

    def drop(self, pairs: Iterable[pa.RecordBatch], continued: ContinuationOutcomes | None) -> Iterator[pa.RecordBatch]:
        """Yield the pairs that neither a rollout's outcome nor their own continuations contradict."""
        for rows in pairs:
            against = to_numpy(rows[REJECTED_PASSED])
            rows = rows.select(PAIR.columns)
            if continued is None:
                self.dropped[REJECTED_PASSED] += int(against.sum())
                remaining = rows.filter(pa.array(~against))
            else:
                reasons = continued.reasons(rows, against.tolist(), respect=self._respect)
                self.dropped.update(reason for reason in reasons if reason is not None)
                remaining = rows.filter(pa.array([reason is None for reason in reasons], pa.bool_()))
            self.account.add_all(remaining)
            yield remaining

    def report(self, config: Config, out: RunWriter, continued: ContinuationOutcomes | None) -> None:
        """Write the report, the counts and the verdict."""
        costs = teacher_costs(self._answers.scan(TEACHER_ACTION).batches(COST_COLUMNS))
        evidence = self._evidence.evidence(costs)
        unplayed = replace(evidence, sentences=(*evidence.sentences, Sentence("pairs.not-played")))
        evidence = unplayed if continued is None else continued.evidence(evidence)
        report(
            self.account,
            +self.dropped,
            num_rollouts=self._num_rollouts,
            num_steps=self._num_steps,
            config=config,
            out=out,
            costs=costs,
            evidence=evidence,
        )


def action_keys(block: StateBlock, classes: ActionClasses, rows: Array) -> Array:
    """Return a key for each of these actions [N] of a block: equal exactly for equal actions in the same state.

    Malformed actions are equal where their texts are.
    """
    state = np.append(block.step_state, block.answer_state)[rows]
    kind = np.where(classes.class_of == NOTHING, len(classes.names) + block.text_of, classes.class_of)[rows]
    keys: Array = state * (len(classes.names) + len(block.texts) + 1) + kind
    return keys


def pair_rows(
    block: StateBlock, classes: ActionClasses, decided: Sequence[tuple[StateGroup, Pattern]], tasks: Mapping[str, Task]
) -> tuple[pa.RecordBatch, Array]:
    """Return the `pair/1` rows of a block, in the order of states, and the `action_keys` of their rejected actions [N].

    Pairs that choose an action which ends the rollout and fails are left out.
    """
    coded = block.answers["served"].combine_chunks().dictionary_encode()
    served_code, served_names = to_numpy(coded.indices, null=NOTHING), coded.dictionary.to_pylist()
    parts, kinds, backers = list[Array](), list[PatternPair](), [np.zeros((0, len(block.teachers)), dtype=np.int64)]
    for group, pattern in decided:
        ends = (group.students + np.cumsum(group.samples, dtype=int)).tolist()
        for index, pair in enumerate(pattern.pairs):
            rows, ones = group.rows, np.ones(len(group.states), dtype=np.int64)
            sides = [rows[:, pair.step], rows[:, pair.chosen], rows[:, pair.rejected]]
            # A server may change its model between answers: the model of each backer's last answer is recorded.
            models = np.full((len(ones), len(block.teachers)), NOTHING)
            for teacher, (name, number, end) in enumerate(zip(block.teachers, group.samples, ends, strict=True)):
                if name in pair.chosen_by and number:
                    models[:, teacher] = served_code[rows[:, end - 1] - len(block.steps)]
            backers.append(models)
            parts.append(
                np.column_stack([group.states, index * ones, *sides, len(kinds) * ones, pattern.shared * ones])
            )
            kinds.append(pair)
    models, served = np.concatenate(backers), list[list[str]]()
    models_of = np.zeros(len(models), dtype=np.int64)  # the index in `served` of each pair's models
    for equal in equal_rows(models):
        models_of[equal] = len(served)
        served.append(sorted({served_names[code] for code in models[equal[0]] if code != NOTHING}))
    order = np.column_stack([np.concatenate([np.zeros((0, 7), dtype=np.int64), *parts]), models_of])
    order = order[~classes.failing[order[:, 3]]]
    state, _, step, chosen, rejected, kind, shared, models_of = order[np.lexsort((order[:, 1], order[:, 0]))].T
    kind_of_row = pa.array(kind)

    def step_column(column: str, rows: Array = step) -> pa.Array:
        return block.steps[column].take(pa.array(rows)).combine_chunks()

    def text_column(values: Sequence[str]) -> pa.Array:
        return pa.array(values, pa.string()).take(kind_of_row)

    def number_column(values: Sequence[float]) -> pa.Array:
        return pa.array(np.array(values, dtype=np.float64)[kind])

    # A pair's context is the student's step where its token ids are known, else the first step in the state: both have
    # the same messages.
    first = block.first_step[state]
    named = np.where(to_numpy(step_column("has_ids")), step, first)
    state_id = step_column("rollout_id", named), step_column("step", named).cast(pa.string()), pa.scalar("/")
    task, digest = step_column("task_id", first).dictionary_encode(), step_column("state_sha256")
    texts = [block.actions.take(pa.array(side)) for side in (chosen, rejected)]
    preferences, usd = [pair.preference for pair in kinds], block.usd[state]
    families = [tasks[task_id].family for task_id in task.dictionary.to_pylist()]
    columns = {
        "pair_id": pa.array(list(map(pair_id, *(side.to_pylist() for side in (digest, *texts)))), pa.string()),
        "rule": text_column([preference.rule for preference in preferences]),
        "rollout_id": step_column("rollout_id"),
        "task_id": task.dictionary_decode(),
        "family": pa.array(families, pa.string()).take(task.indices),
        "step": step_column("step"),
        "state_sha256": digest,
        "state_id": pc.binary_join_element_wise(*state_id),
        "chosen": texts[0],
        "rejected": texts[1],
        "rejected_by": text_column([preference.rejected_by for preference in preferences]),
        "votes_chosen": number_column([preference.votes_chosen for preference in preferences]),
        "votes_rejected": number_column([preference.votes_rejected for preference in preferences]),
        "num_teachers": pa.array(np.full(len(state), len(block.teachers), dtype=np.int64)),
        "compared_by": classes.compared_by.take(pa.array(state)),
        "chosen_by": pa.array([pair.chosen_by for pair in kinds], pa.list_(pa.string())).take(kind_of_row),
        "served_models": pa.array(served, pa.list_(pa.string())).take(pa.array(models_of)),
        "cost_usd": pa.array(usd / shared, mask=np.isnan(usd)),
    }
    batch = pa.RecordBatch.from_arrays([columns[column] for column in PAIR.columns], schema=PAIR.schema)
    return batch, action_keys(block, classes, rejected)


ROLLOUT_COLUMNS = ["rollout_id", "task_id", "group_id", "model", "reward", "hidden_pass"]
"""The columns by which rollouts of one task are compared."""
SUBMISSION_COLUMNS = ["rollout_id", "submission"]
BATCH = 16
"""States that are written to disk together."""


def plan(inputs: Inputs, config: Config) -> Plan:
    """Plan the votes in states, or the comparisons in tasks; with a bound of the continuations."""
    rollouts = inputs.one("rollouts")
    if "teacher_actions" not in inputs:
        _refuse_continuing(rollouts, config)
        return Plan(units=len(rollouts.scan(TASK)), what="tasks")
    answers = inputs.one("teacher_actions")
    with TemporaryDirectory() as folder, AnsweredStates(rollouts, answers, Path(folder)) as states:
        number = len(states)
    if not config.signal.rollouts:
        return Plan(units=number, what="states")
    policy, playing = _collection_settings(rollouts, config)
    # Every action of a pair comes from a step or an answer; most steps and answers are in no pair.
    max_continuations = (len(rollouts.scan(STEP)) + len(answers.scan(TEACHER_ACTION))) * _samples(policy, config)
    tokens = max_continuations * playing.most_steps() * available.longest_answer(policy)
    notes = (f"at most {max_continuations} continuations", *playing.limits.notes(playing.most_steps()))
    return Plan(number, "states", max_completion_tokens=tokens, max_cost_usd=policy.cost(0, tokens), notes=notes)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Vote in every state, play the pairs' actions if configured, then write the pairs, their states and the report."""
    rollouts = inputs.one("rollouts")
    if env := collected_with(rollouts).get("env"):  # by which a training knows the tasks that it learns from
        out.set_summary(env=env["name"])
    if "teacher_actions" not in inputs:
        _refuse_continuing(rollouts, config)
        _compare_groups(rollouts, config, out)
        return
    answers = inputs.one("teacher_actions")
    if config.signal.rollouts:
        _collection_settings(rollouts, config)  # raises before the first vote
    tasks = {row["task_id"]: task_table.read_task(row) for row in rollouts.scan(TASK).rows()}
    with AnsweredStates(rollouts, answers, out.scratch("states")) as states:
        make = _environment_factory(rollouts, config)
        if make is not None:
            _vote_by_outcome(states, tasks, make, action_form(rollouts), out)
        passed = passed_by_rollout(rollouts.scan(ROLLOUT).rows(PASSED_COLUMNS))
        extraction = Extraction(states, answers, passed, respect=config.outcome == "respect")
        pairs = extraction.pairs(_votes(states, action_form(rollouts), by_text=make is None, out=out), tasks)
        continued = None
        if config.signal.rollouts:
            batches = list(pairs)  # in memory: pairs are few compared with their rollouts
            pairs, continued = iter(batches), _continue(batches, rollouts, tasks, config, out)
        out.table(PAIR, extraction.drop(pairs, continued))
        out.table(STATE, extraction.account.states.rows(rollouts))
        extraction.report(config, out, continued)
    failed = out.manifest.counts.get("continuations_failed", 0)
    if failed:
        raise Incomplete("pairs.continuations-failed", failed=failed, planned=out.manifest.counts["continuations"])


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Run actions to vote, or play continuations; `run` does the rest."""
    rollouts = inputs.one("rollouts")
    tasks = {row["task_id"]: task_table.read_task(row) for row in rollouts.scan(TASK).rows()}
    if out.shared_value is not None:
        branches, samples = out.shared_value
        _play(branches, samples, rollouts, tasks, config, out)
        return
    make = _environment_factory(rollouts, config)
    with AnsweredStates(rollouts, inputs.one("teacher_actions"), out.scratch("states")) as states:
        if make is not None:
            _vote_by_outcome(states, tasks, make, action_form(rollouts), out)


def _refuse_continuing(rollouts: Run, config: Config) -> None:
    """Raise `UsageError` for continuations of rollouts that `collect` did not play."""
    if config.signal.rollouts and rollouts.manifest.stage != "collect":
        raise UsageError("pairs.not-collected", path=rollouts.path, stage=rollouts.manifest.stage)


def _collection_settings(rollouts: Run, config: Config) -> tuple[PolicyConfig, PlayingConfig]:
    """Return the policy of a collection, and its playing settings with this stage's seed and sandbox.

    Raises `BadInput` if the policy's weights have changed since the collection.
    """
    _refuse_continuing(rollouts, config)
    recorded = rollouts.manifest.config
    policy = PolicyConfig.model_validate(recorded["policy"])
    if rollouts.manifest.identity.get("policy", {}).get("weights") != policy.identity()["weights"]:
        raise BadInput("pairs.model-changed", model=policy.model, path=rollouts.path)
    for ref in rollouts.manifest.inputs.get("student", ()):  # a training, whose model the settings do not name
        student = Run(Path(ref.path))
        if student.manifest.content != ref.content:
            raise BadInput("pairs.model-changed", model=student.path, path=rollouts.path)
        policy = policy.with_model(student.folder(CHECKPOINT))
    options = {name: value for name, value in recorded.items() if name in PlayingConfig.model_fields}
    return policy, PlayingConfig.model_validate({**options, "seed": config.seed, "sandbox": config.sandbox})


def _samples(policy: PolicyConfig, config: Config) -> int:
    """Return the number of continuations of each action: 1 at temperature 0, where all are equal."""
    return config.signal.rollouts if policy.temperature > 0 else 1


def _continue(
    pairs: PairBatches, rollouts: Run, tasks: dict[str, Task], config: Config, out: RunWriter
) -> ContinuationOutcomes:
    """Play the actions of all pairs and write the table of continuations."""
    policy, playing = _collection_settings(rollouts, config)
    number, pair_branches = _samples(policy, config), branches(pairs)
    _play(pair_branches, range(1), rollouts, tasks, config, out)
    # An action that ended the rollout does so every time, and the environment grades equal work equally.
    first = list(read_rows(out, pair_branches, range(1)))
    repeated = [branch for branch, row in zip(pair_branches, first, strict=True) if can_differ(row)]
    _play(repeated, range(1, number), rollouts, tasks, config, out)
    rows = [*first, *read_rows(out, repeated, range(1, number))]
    out.table(CONTINUATION, rows)
    out.count(continuations=len(rows), continuations_failed=sum(row["error_type"] is not None for row in rows))
    out.manifest.tokens.update(
        prompt=sum(row["prompt_tokens"] for row in rows), completion=sum(row["completion_tokens"] for row in rows)
    )
    unit = envs.sampling_unit(playing.env.name)
    return ContinuationOutcomes(
        pairs,
        rows,
        number,
        # Tasks where the environment has a fixed set of units: the result then holds for more tasks of these units.
        unit_of=lambda task, family: task if unit.fixed else unit.of_family(family),
        noun="tasks" if unit.fixed else plural(unit.noun),
    )


def _play(
    branches: Sequence[Branch], samples: range, rollouts: Run, tasks: dict[str, Task], config: Config, out: RunWriter
) -> None:
    """Play the unfinished samples of branches, in the environment and with the policy of the collection."""
    if all(out.finished(branch.key(sample)) for branch in branches for sample in samples):
        return
    policy, playing = _collection_settings(rollouts, config)
    with Serving(out, [policy]) as serving:
        opened = serving.open(policy)
        out.model("policy", **opened.facts())
        play_branches(
            branches,
            samples,
            rollouts=rollouts,
            tasks=tasks,
            make=playing.opener(),
            policy=opened,
            config=playing,
            out=out,
        )


def _environment_factory(rollouts: Run, config: Config) -> Callable[[], Environment] | None:
    """Return a factory of the rollouts' environment; None if actions are compared as text."""
    env = collected_with(rollouts).get("env")
    if config.compare == "canonical" or env is None:
        return None
    make = EnvStageConfig(env=env, sandbox=config.sandbox).opener()
    return make if isinstance(make(), ComparesOutcomes) else None


def _vote_by_outcome(
    states: AnsweredStates, tasks: dict[str, Task], make: Callable[[], Environment], form: Form, out: RunWriter
) -> None:
    """Run the actions whose forms differ, and write the vote in every state."""
    out.spread([[digest] for digest in states.digests()], "states")
    with ThreadPoolExecutor(4) as pool:
        units, done, number = iter(states), 0, len(states)
        while batch := list(islice(units, BATCH)):
            out.raise_if_stopped()
            out.progress("states", done, number)
            done += len(batch)
            missing = [state for state in batch if not out.finished(state.digest)]
            paths = [states.path(state) for state in missing]
            results = pool.map(lambda state, path: vote(state, tasks[state.task_id], make, path, form), missing, paths)
            out.write_all((state.digest, result, False) for state, result in zip(missing, results, strict=True))


def _votes(
    states: AnsweredStates, form: Form, *, by_text: bool, out: RunWriter
) -> Iterator[tuple[StateBlock, ActionClasses]]:
    """Yield the states with the classes of equal actions: by text, or as `_vote_by_outcome` recorded them."""
    done, number = 0, len(states)
    records = iter(()) if by_text else out.journal.read(states.digests())
    for block in states.blocks(form=form):
        out.raise_if_stopped()
        out.progress("states", done, number)
        done += block.size
        yield block, block.classes_by_text() if by_text else recorded_classes(block, islice(records, block.size))
    out.progress("states", number, number)


def _compare_groups(imported: Run, config: Config, out: RunWriter) -> None:
    """Compare the rollouts of each task, then write the pairs, their states and the report."""
    rollouts = list(imported.scan(ROLLOUT).rows(ROLLOUT_COLUMNS))
    if config.student is not None and config.student not in {row["model"] for row in rollouts}:
        names = ", ".join(sorted({row["model"] or "unknown" for row in rollouts}))
        raise UsageError("pairs.no-such-student", student=config.student, models=names)
    submitted = {row["rollout_id"]: row["submission"] for row in imported.scan(ORIGIN).rows(SUBMISSION_COLUMNS)}
    tasks = {row["task_id"]: task_table.read_task(row) for row in imported.scan(TASK).rows()}
    grouped: dict[str, list[Row]] = {task_id: [] for task_id in tasks}
    for row in rollouts:
        grouped[row["task_id"]].append(row)

    # Tasks without steps come last: the generator reads `with_steps` after the tasks with steps.
    with_steps = set[str]()
    without_steps = ((task_id, list[Row]()) for task_id in tasks if task_id not in with_steps)
    for done, (task_id, steps) in enumerate(chain(steps_by_task(imported, out.scratch("steps")), without_steps)):
        with_steps.add(task_id)
        out.raise_if_stopped()
        out.progress("tasks", done, len(tasks))
        if not out.finished(task_id):
            out.write(task_id, group_pairs(tasks[task_id], grouped[task_id], steps, submitted, config.student))
    out.progress("tasks", len(tasks), len(tasks))
    account, dropped, shared = PairTally(), Counter[str](), Counter[str]()
    judgement = FailureAlignment(passed_by_rollout(rollouts))

    def pairs() -> Iterator[Row]:
        for record in out.journal.read(tasks):
            dropped.update(record["dropped"])
            shared.update(shared=record["shared"], states=record["states"])
            # Rollouts without a vote are numbered too: they belong to the null distribution.
            judged = [row["rollout_id"] for row in grouped[record["unit"]] if config.student in (None, row["model"])]
            judgement.rollout_numbers(judged, [record["unit"]] * len(judged))
            for outcome, voted in enumerate(record["voted"]):  # in line with a failure, with a pass
                numbers, _ = judgement.rollout_numbers(voted, [record["unit"]] * len(voted))
                judgement.add(numbers, bool(outcome))
            for row in record["pairs"]:
                account.add(row)
                yield row

    out.table(PAIR, pairs())
    out.table(STATE, account.states.rows(imported, tasks.values()))
    models = len({row["model"] for row in rollouts})
    note = str(Sentence("pairs.shared-states", tasks=len(tasks), models=models, **shared))
    if "better_outcome" not in account.rules and dropped["difference_not_supported"] + dropped["too_few_rollouts"]:
        note += f"\n{Sentence('pairs.no-better-outcome', rollouts=LEAST_VISITS)}"
    aligned = judgement.alignment()
    numbers = {"alignment": aligned and vars(aligned)}
    evidence = PairVerdict(failure_verdict(aligned), numbers, (failure_text(aligned), Sentence("pairs.by-reward")))
    num_steps = len(imported.scan(STEP))
    report(
        account,
        dropped,
        num_rollouts=len(rollouts),
        num_steps=num_steps,
        config=config,
        out=out,
        note=note,
        evidence=evidence,
    )
