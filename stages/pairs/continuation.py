"""Test pairs by their own actions: play both from the recorded state, let the policy continue, compare the outcomes.

A recorded state is restored by playing the recorded actions in a new rollout. Every observation has to be the recorded
one, but for durations and memory addresses, and the policy gets the recorded conversation. Then one side's action is
played, and the policy that collected the rollouts continues with the same sampling seeds on both sides. The environment
only has to be reproducible: a state with another observation is not restored, and its pairs are counted with the reason
and stay untested.

In reading order: a branch, which is one action in one state, and its rollouts (`restore`); playing the branches of all
pairs, one unit a rollout (`play_branches`); the outcomes and the verdict on the pairs (`ContinuationOutcomes`).

The verdict is on all played pairs, also those that their outcomes drop: a verdict on the remaining pairs would be
biased, since the same outcomes would select the pairs and judge them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
import pyarrow as pa

from composer_stages.envs.base import Environment, Grade, Task
from composer_stages.envs.bash import same_observation
from composer_stages.evaluation.difference import Decision
from composer_stages.evaluation.inference import fewest_units
from composer_stages.evaluation.measurement import measure_difference, paired_test
from composer_stages.evaluation.outcomes import PairedOutcomes
from composer_stages.layout import p_value
from composer_stages.messages import Message
from composer_stages.pairs.report import PairVerdict
from composer_stages.policy.base import Policy, Sample, Turn
from composer_stages.rollouts.agent_loop import NOT_RESTORED, LiveRollout, Rules, act, play_missing
from composer_stages.rollouts.config import PlayingConfig
from composer_stages.rollouts.history import SUMMARY_REQUEST
from composer_stages.rollouts.trace import step_groups, transcripts
from composer_stages.runs import store
from composer_stages.runs.kinds import STEP, Row
from composer_stages.runs.run import Run, RunWriter
from composer_stages.words import Sentence

COLUMNS = ["rollout_id", "task_id", "step", "new_messages_json", "action", "observation", "prompt_tokens", "seed"]
"""The columns of steps that a state is restored from."""
SIDES = ["state_sha256", "chosen", "rejected"]
RELEVANT = 0.05
"""Smallest difference between the pass rates of chosen and rejected actions that makes pairs worth training on."""
MIN_UNITS = fewest_units()
"""Six: sign flips over five have no p-value below 2 * 2**-5 = .0625."""
MIN_TESTED = 0.5
"""Least share of tested pairs for a verdict: many pairs that could not be restored may differ from the tested ones."""
CONTINUATIONS_FAIL = "chosen_continuations_fail"
REJECTED_BETTER = "rejected_continues_better"
REJECTED_PASSED = "rejected_action_passed"
"""Reasons to drop a pair by outcomes: of its own actions, and of a rollout that took the rejected one."""
PairBatches = Sequence[pa.RecordBatch]
"""The `pair/1` rows of an extraction, block by block."""
SignalVerdict = Literal["SIGNAL", "NO SIGNAL", "UNDECIDED", "TOO LITTLE DATA"]


@dataclass(frozen=True)
class Branch:
    """One action in one state, and the recorded step that it replaces."""

    state_sha256: str
    rollout_id: str
    step: int
    family: str
    action: str

    def key(self, sample: int) -> str:
        """Return the key of one continuation's unit."""
        return f"{self.state_sha256}/{store.digest(self.action)[:16]}/{sample}"


def branches(pairs: Iterable[pa.RecordBatch]) -> list[Branch]:
    """Return the branches of all pairs, each once. All branches of a state replace one recorded step."""
    by_action: dict[tuple[str, str], Branch] = {}
    step_of: dict[str, tuple[str, int]] = {}
    columns = ["state_sha256", "rollout_id", "step", "family", "chosen", "rejected"]
    for rows in pairs:
        for row in rows.select(columns).to_pylist():
            state = row["state_sha256"]
            replaced = step_of.setdefault(state, (row["rollout_id"], row["step"]))
            for action in (row["chosen"], row["rejected"]):
                by_action.setdefault((state, action), Branch(state, *replaced, row["family"], action))
    return list(by_action.values())


def restore(steps: Sequence[Row], action: str, rollout: LiveRollout, environment: Environment, rules: Rules) -> None:
    """Play the recorded actions before the last of `steps`, then `action` in place of the last.

    The rollout ends as `NOT_RESTORED`, with the reason, where it differs from the recording.
    """
    conversations = transcripts(list(steps))
    if rollout.messages != conversations[0]:
        _mark_not_restored(rollout, "the opening differs")
        return
    for number, (row, messages) in enumerate(zip(steps[:-1], conversations, strict=False)):
        _play_recorded(rollout, environment, rules, messages, row, row["action"])
        if rollout.error is not None:
            return  # a failure of the environment, which another attempt may avoid
        if not same_observation(rollout.steps[-1].observation.content, row["observation"]):
            _mark_not_restored(rollout, f"the observation differs at action {number}")
            return
        if rollout.terminated_by is not None:
            _mark_not_restored(rollout, f"the rollout ends at action {number}")
            return
    _play_recorded(rollout, environment, rules, conversations[-1], steps[-1], action)


def _play_recorded(
    rollout: LiveRollout, environment: Environment, rules: Rules, messages: list[Message], row: Row, action: str
) -> None:
    """Play an action after the recorded conversation, which replaces the rollout's own."""
    rollout.messages, rollout.summarising = messages, messages[-1] == SUMMARY_REQUEST
    # Recorded prompt tokens, and the action's bytes as a bound for its tokens: limits of the context keep counting.
    sample = Sample(action, prompt_tokens=row["prompt_tokens"] or 0, completion_tokens=len(action.encode()))
    act(rollout, environment, Turn(messages, row["seed"] or 0), sample, rules)


def _mark_not_restored(rollout: LiveRollout, reason: str) -> None:
    rollout.terminated_by, rollout.grade = NOT_RESTORED, Grade(reward=None, error=reason)


def play_branches(
    branches: Sequence[Branch],
    samples: range,
    *,
    rollouts: Run,
    tasks: Mapping[str, Task],
    make: Callable[[], Environment],
    policy: Policy,
    config: PlayingConfig,
    out: RunWriter,
) -> None:
    """Play the unfinished samples of every branch; each is a unit of the run with its `continuation/1` row.

    The steps of all rollouts that have a branch are held in memory.
    """
    needed = {branch.rollout_id for branch in branches}
    groups = step_groups(rollouts.scan(STEP).rows(COLUMNS))
    steps = {rows[0]["rollout_id"]: rows for rows in groups if rows[0]["rollout_id"] in needed}
    planned: dict[int, tuple[Branch, int]] = {}
    continued = []
    for branch in branches:
        recorded = steps[branch.rollout_id][: branch.step + 1]
        for sample in samples:
            # By the state and not by the action: both sides of a pair are continued with the same seeds.
            seed = int(store.digest([config.seed, branch.state_sha256])[:15], 16)
            prelude = partial(restore, recorded, branch.action)
            rollout = LiveRollout(tasks[recorded[-1]["task_id"]], sample, seed, prelude=prelude)
            continued.append(rollout)
            planned[id(prelude)] = branch, len(recorded)

    def planned_branch(rollout: LiveRollout) -> tuple[Branch, int]:
        # A server plays copies of the rollouts; the copies share the prelude.
        return planned[id(rollout.prelude)]

    play_missing(
        make,
        policy,
        continued,
        key=lambda rollout: planned_branch(rollout)[0].key(rollout.sample_idx),
        payload=lambda rollout: {"continuation": continuation_row(rollout, *planned_branch(rollout))},
        config=config,
        out=out,
        noun="continuations",
        shared_value=(list(branches), samples),
    )


def continuation_row(rollout: LiveRollout, branch: Branch, num_recorded: int) -> Row:
    """Return the `continuation/1` row of a rollout; its steps and messages begin with the branch's action."""
    lost = rollout.error is not None or rollout.terminated_by == NOT_RESTORED
    steps = [] if lost else rollout.steps[num_recorded - 1 :]
    sampled = [step.sample for step in rollout.steps[num_recorded:]]
    error_type, error = rollout.error or (None, rollout.grade.error)
    return {
        "state_sha256": branch.state_sha256,
        "rollout_id": branch.rollout_id,
        "step": branch.step,
        "family": branch.family,
        "action": branch.action,
        "sample_idx": rollout.sample_idx,
        "seed": rollout.seed,
        "terminated_by": rollout.terminated_by,
        "wall_s": rollout.wall_s,
        "continuation_id": branch.key(rollout.sample_idx),
        "task_id": rollout.task.task_id,
        "num_steps": len(steps),
        "passed": None if lost else rollout.grade.passed,
        "reward": None if lost else rollout.grade.reward,
        "transcript_json": store.encode(rollout.messages[steps[0].num_messages :]).decode() if steps else None,
        "error_type": error_type,
        "error": error,
        "prompt_tokens": sum(sample.prompt_tokens for sample in sampled),
        "completion_tokens": sum(sample.completion_tokens for sample in sampled),
        "cost_usd": sum(sample.cost_usd for sample in sampled),
    }


def can_differ(row: Row) -> bool:
    """Return whether other samples of a branch can differ from this one: the policy acted, or an error occurred.

    An action that ends the rollout, and a state that is not restored, are the same in every sample.
    """
    return row["error_type"] is not None or row["num_steps"] > 1


@dataclass(frozen=True)
class SignalTest:
    """Pass rates of the chosen and the rejected actions of the tested pairs, their difference, interval and p-value.

    units: the number of independent units, such as families. not_tested: the number of pairs by reason.
    """

    verdict: SignalVerdict
    pairs: int
    tested: int
    units: int
    not_tested: dict[str, int]
    chosen: float | None = None
    rejected: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True)
class PairOutcome:
    """The pass rates of both sides of a pair, and the independent unit of the pair."""

    unit: str
    chosen: float
    rejected: float


SIGNALS: Mapping[str, SignalVerdict] = {
    Decision.BETTER: "SIGNAL",
    Decision.BETTER_BY_LESS: "SIGNAL",
    Decision.WORSE: "NO SIGNAL",
    Decision.NO_GAIN: "NO SIGNAL",
}
"""The verdict on pairs by the result of the paired test of chosen against rejected actions."""


def signal_test(outcomes: Sequence[PairOutcome], not_tested: Mapping[str, int] | None = None) -> SignalTest:
    """Return the verdict on pairs: SIGNAL where their chosen actions pass more often than the rejected ones.

    NO SIGNAL where a difference of `RELEVANT` is excluded, otherwise UNDECIDED. A unit has the sum of its pairs, which
    may depend on each other in any way.
    """
    missing = dict(not_tested or {})
    pairs, units = len(outcomes) + sum(missing.values()), len({outcome.unit for outcome in outcomes})
    if units < MIN_UNITS or len(outcomes) < MIN_TESTED * pairs:
        return SignalTest("TOO LITTLE DATA", pairs, len(outcomes), units, missing)
    chosen, rejected = (np.array([[getattr(outcome, side) for outcome in outcomes]]) for side in ("chosen", "rejected"))
    paired = PairedOutcomes.of_one_seed(chosen, rejected, [outcome.unit for outcome in outcomes])
    difference = measure_difference(
        paired, [paired_test(paired)], min_gain=RELEVANT, rate="pass rate", treatment="chosen", baseline="rejected"
    )
    return SignalTest(
        SIGNALS.get(difference.decision, "UNDECIDED"),
        pairs,
        len(outcomes),
        units,
        missing,
        chosen=float(chosen.mean()),
        rejected=float(rejected.mean()),
        difference=difference.estimate,
        low=difference.low,
        high=difference.high,
        p_value=difference.p_value,
    )


class ContinuationOutcomes:
    """Outcomes of the continuations of all pairs.

    rows: the `continuation/1` rows. samples: the planned continuations of each branch. unit_of: maps a pair's task and
    family to its independent unit; noun: the plural noun of units in sentences.
    """

    def __init__(
        self, pairs: PairBatches, rows: Iterable[Row], samples: int, unit_of: Callable[[str, str], str], noun: str
    ) -> None:
        self._pairs, self._samples, self._unit_of, self._noun = pairs, samples, unit_of, noun
        self._passed: dict[tuple[str, str], dict[int, bool | None]] = {}
        self._reasons: dict[str, str] = {}
        self._repeats = set[tuple[str, str]]()
        self.num_continuations = 0
        for row in rows:
            branch = row["state_sha256"], row["action"]
            self._passed.setdefault(branch, {})[row["sample_idx"]] = row["passed"]
            self.num_continuations += row["num_steps"] > 0
            if not can_differ(row):
                self._repeats.add(branch)
            if row["terminated_by"] == NOT_RESTORED:
                # "the observation differs at action 3": pairs are counted without the number.
                self._reasons[row["state_sha256"]] = row["error"].partition(" at action ")[0]

    def _outcomes(self, state: str, action: str) -> list[bool | None]:
        """Return the outcome of each sample of a branch; None if it is unknown."""
        passed = self._passed.get((state, action), {})
        if (state, action) in self._repeats:
            return [passed.get(0)] * self._samples
        return [passed.get(sample) for sample in range(self._samples)]

    def reasons(self, rows: pa.RecordBatch, against: Sequence[bool], *, respect: bool) -> list[str | None]:
        """Return the reason to drop each pair; None to keep it.

        Drops pairs whose chosen action never passed and, with `respect`, those whose rejected action passed more often.
        against: a flag for each pair whose rejected action was taken by a rollout that passed; such a pair is kept only
        where the chosen action passed more often than the rejected one.
        """
        reasons = list[str | None]()
        for row, passed_before in zip(rows.select(SIDES).to_pylist(), against, strict=True):
            outcomes = self._outcomes(row["state_sha256"], row["chosen"])
            chosen, rejected = self._rates(row) or (0.0, 0.0)
            if False in outcomes and True not in outcomes:
                reasons.append(CONTINUATIONS_FAIL)
            elif respect and rejected > chosen:
                reasons.append(REJECTED_BETTER)
            else:
                reasons.append(REJECTED_PASSED if respect and passed_before and chosen <= rejected else None)
        return reasons

    def _rates(self, row: Row) -> tuple[float, float] | None:
        """Return the pass rates of both sides of a pair over the samples that both have; None without any."""
        sides = zip(*(self._outcomes(row["state_sha256"], row[side]) for side in ("chosen", "rejected")), strict=True)
        pass_rates = [(chosen, rejected) for chosen, rejected in sides if chosen is not None and rejected is not None]
        return tuple(np.mean(pass_rates, axis=0).tolist()) if pass_rates else None

    @cached_property
    def test(self) -> SignalTest:
        """Test all pairs, each by the samples whose outcomes are known on both sides."""
        outcomes, missing = list[PairOutcome](), Counter[str]()
        for row in self._rows():
            if (rates := self._rates(row)) is not None:
                outcomes.append(PairOutcome(self._unit_of(row["task_id"], row["family"]), *rates))
            else:
                missing[self._reasons.get(row["state_sha256"], "no outcome is known")] += 1
        return signal_test(outcomes, missing)

    def _rows(self) -> Iterator[Row]:
        for rows in self._pairs:
            yield from rows.select([*SIDES, "task_id", "family"]).to_pylist()

    def evidence(self, heuristic: PairVerdict) -> PairVerdict:
        """Return the verdict on the pairs, followed by the heuristic verdict on disagreement."""
        test = self.test
        units = {"units": test.units, "noun": self._noun}
        tally = Sentence(
            "pairs.played",
            tested=test.tested,
            pairs=test.pairs,
            samples=self._samples,
            continuations=self.num_continuations,
            not_tested=sorted(test.not_tested.items()),
        )
        if test.p_value is None:
            least = {"units_needed": MIN_UNITS, "share_needed": MIN_TESTED}
            reason: str = Sentence("pairs.too-few-played", played=tally, **units, **least)
        else:
            reason = Sentence("pairs.continued", played=tally, test=test, p=p_value(test.p_value), **units)
        return heuristic.below(test.verdict, {"continued": asdict(test)}, reason)


def read_rows(out: RunWriter, branches: Sequence[Branch], samples: range) -> Iterator[Row]:
    """Yield the `continuation/1` rows of the played samples, in the order of the branches."""
    keys = [branch.key(sample) for branch in branches for sample in samples]
    return (record["continuation"] for record in out.journal.read(keys))
