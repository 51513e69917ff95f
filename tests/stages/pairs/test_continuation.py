"""Recorded states are restored or given up with a reason, and pairs are judged by what their actions led to."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from composer_stages.envs.base import Grade, Message, Observation, Split, Task
from composer_stages.envs.bash import same_observation
from composer_stages.errors import InfrastructureError
from composer_stages.pairs.continuation import (
    CONTINUATIONS_FAIL,
    MIN_UNITS,
    REJECTED_BETTER,
    REJECTED_PASSED,
    Branch,
    ContinuationOutcomes,
    PairOutcome,
    branches,
    can_differ,
    continuation_row,
    restore,
    signal_test,
)
from composer_stages.pairs.evidence import failure_text
from composer_stages.pairs.report import PairVerdict
from composer_stages.policy.base import PolicyConfig, Sample, Turn
from composer_stages.rollouts.agent_loop import NOT_RESTORED, LiveRollout, Rules, act, begin
from composer_stages.rollouts.recording import step_rows
from composer_stages.rollouts.trace import state_digests
from composer_stages.runs.kinds import CONTINUATION, PAIR, Row

RULES = Rules(max_steps=8)


class Scripted:
    """A policy whose answers the tests write themselves."""

    config, capture_level, batch_size = PolicyConfig(), "text", 8

    def sample(self, turns: list[Turn]) -> list[Sample]:
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        return {}


class Counter:
    """Say a number and see the sum so far; `end` ends, and a sum of 6 or more passes."""

    name, sandbox = "counter", "not-needed"
    say: Callable[[int], str] = staticmethod(lambda total: f"the sum is {total}")
    opening, broken = "count", False

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return [Task(f"count-{n}", self.name, split, "f", "count") for n in range(count)]

    def reset(self, task: Task) -> list[Message]:
        self.total = 0
        return [{"role": "user", "content": self.opening}]

    def step(self, text: str) -> Observation:
        if self.broken:
            raise InfrastructureError("the machine is gone")
        if text == "end":
            return Observation("", stop="submitted")
        self.total += int(text)
        return Observation(self.say(self.total))

    def grade(self) -> Grade:
        return Grade(reward=float(self.total), hidden_pass=self.total >= 6)

    def close(self) -> None:
        """Nothing to free."""


def played(*actions: str) -> tuple[LiveRollout, list[Row]]:
    """A rollout of these actions, and its rows."""
    rollout, environment = LiveRollout(Counter().tasks("train", 1, 0)[0], 0, 0), Counter()
    begin(RULES, rollout, environment)
    for number, action in enumerate(actions):
        act(rollout, environment, Turn(list(rollout.messages), number), Sample(action), RULES)
    return rollout, step_rows(rollout, Scripted())


def restored(rows: list[Row], action: str, **changed: Any) -> tuple[LiveRollout, Counter]:
    environment = Counter()
    for name, value in changed.items():
        setattr(environment, name, value)
    task = Counter().tasks("train", 1, 0)[0]
    rollout = LiveRollout(task, 0, 1, prelude=lambda *given: restore(rows, action, *given))
    begin(RULES, rollout, environment)
    return rollout, environment


def test_the_recorded_state_is_restored_and_another_action_taken_there() -> None:
    recorded, rows = played("1", "2", "9", "end")
    rollout, environment = restored(rows[:3], "3")
    assert environment.total == 1 + 2 + 3 and len(rollout.steps) == 3 and rollout.terminated_by is None
    assert rollout.messages[:-2] == recorded.messages[: rows[2]["num_messages"]], "the state, as the policy saw it"
    assert [message["content"] for message in rollout.messages[-2:]] == ["3", "the sum is 6"]
    # The digests of the state are those of the recorded one, so that the policy is asked the same.
    restored_rows = step_rows(rollout, Scripted())
    assert state_digests(restored_rows) == state_digests(rows)[:3]
    assert [row["state_sha256"] for row in restored_rows] == [row["state_sha256"] for row in rows[:3]]
    again, _ = restored(rows[:1], "end")
    assert again.terminated_by == "submitted" and len(again.steps) == 1


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"opening": "count!"}, "the opening differs"),
        ({"say": lambda total: f"the sum is {total + (total == 3)}"}, "the observation differs at action 1"),
    ],
)
def test_a_state_that_differs_is_given_up_with_the_reason(changed: dict[str, Any], reason: str) -> None:
    _, rows = played("1", "2", "9", "end")
    rollout, environment = restored(rows[:3], "3", **changed)
    assert (rollout.terminated_by, rollout.grade.error, rollout.error) == (NOT_RESTORED, reason, None)
    assert environment.total <= 3, "the action itself is not played"
    row = continuation_row(rollout, Branch("s", "r", 2, "f", "3"), 3)
    assert (row["passed"], row["reward"], row["num_steps"], row["error"]) == (None, None, 0, reason)
    assert not can_differ(row), "it would differ every time"
    CONTINUATION.check(row)


def test_a_rollout_that_ends_before_the_state_is_given_up() -> None:
    _, rows = played("1", "2", "9")
    rows[1]["action"], rows[1]["observation"] = "end", ""
    rollout, _ = restored(rows, "3")
    assert (rollout.terminated_by, rollout.grade.error) == (NOT_RESTORED, "the rollout ends at action 1")


def test_a_broken_environment_is_an_error_and_tried_again() -> None:
    _, rows = played("1", "2")
    rollout, _ = restored(rows, "3", broken=True)
    row = continuation_row(rollout, Branch("s", "r", 1, "f", "3"), 2)
    assert row["error_type"] == "InfrastructureError" and row["passed"] is None and can_differ(row)


def test_durations_and_addresses_may_differ_and_nothing_else() -> None:
    assert same_observation("2 passed in 0.12s", "2 passed in 3.04s")
    assert same_observation("<f at 0x7f32ab10> took 5 ms", "<f at 0x7f99cd20> took 812 ms")
    assert not same_observation("2 passed in 0.12s", "3 passed in 0.12s")
    assert not same_observation("0x12", "0x13") and not same_observation("12 files", "13 files")


def test_a_continuation_row_begins_with_the_action() -> None:
    _, rows = played("1", "2", "9")
    rollout, environment = restored(rows, "4")
    act(rollout, environment, Turn(list(rollout.messages), 0), Sample("end", prompt_tokens=7, cost_usd=0.5), RULES)
    rollout.grade = environment.grade()
    row = continuation_row(rollout, Branch("s", "r", 2, "f", "4"), 3)
    said = [message["content"] for message in json.loads(row["transcript_json"])]
    assert said == ["4", "the sum is 7", "end"] and row["num_steps"] == 2
    assert (row["passed"], row["reward"], row["prompt_tokens"], row["cost_usd"]) == (True, 7.0, 7, 0.5)


# --- from continuations to pairs


def pair(state: str, chosen: str, rejected: str, family: str = "f", step: int = 0) -> Row:
    known = {"state_sha256": state, "chosen": chosen, "rejected": rejected, "family": family, "task_id": state}
    return dict.fromkeys(PAIR.columns) | known | {"rollout_id": f"r-{state}", "step": step}


def batch(*rows: Row) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=PAIR.schema)


def rows_of(state: str, action: str, *passed: bool | None, steps: int = 2, lost: str | None = None) -> list[Row]:
    shown = {"num_steps": 0 if lost else steps, "terminated_by": NOT_RESTORED if lost else "submitted", "error": lost}
    return [
        dict.fromkeys(CONTINUATION.columns)
        | {"state_sha256": state, "action": action, "sample_idx": sample, "passed": one, **shown}
        for sample, one in enumerate(passed)
    ]


def both(**states: tuple[Sequence[bool | None], Sequence[bool | None]]) -> list[Row]:
    """The rows of states in which `a` was chosen and `b` rejected: whether their continuations passed."""
    return [one for name, (a, b) in states.items() for one in (*rows_of(name, "a", *a), *rows_of(name, "b", *b))]


def continued(pairs: Sequence[pa.RecordBatch], rows: list[Row], samples: int = 2) -> ContinuationOutcomes:
    return ContinuationOutcomes(pairs, rows, samples, unit_of=lambda task, family: family, noun="families")


def test_branches_of_a_state_replace_one_step_and_are_played_once() -> None:
    found = branches([batch(pair("s", "a", "b"), pair("s", "a", "c", step=4)), batch(pair("t", "a", "b"))])
    told = [(one.state_sha256, one.action, one.step) for one in found]
    assert told == [(state, action, 0) for state, actions in (("s", "abc"), ("t", "ab")) for action in actions]
    assert len({one.key(0) for one in found}) == 5


def test_pairs_are_dropped_where_no_continuation_of_the_chosen_action_passes() -> None:
    pairs = [batch(pair("s", "fails", "b"), pair("s", "once", "b"), pair("t", "unknown", "b"), pair("u", "ends", "b"))]
    rows = [
        *rows_of("s", "fails", False, False),
        *rows_of("s", "once", False, True),
        *rows_of("s", "b", False, False),
        *rows_of("t", "unknown", None, None),
        *rows_of("u", "ends", False, steps=1),
    ]
    held = continued(pairs, rows)
    for respect in (True, False):
        found = held.reasons(pairs[0], [False] * 4, respect=respect)
        assert found == [CONTINUATIONS_FAIL, None, None, CONTINUATIONS_FAIL]


def test_pass_rates_overrule_votes_and_rollouts() -> None:
    pairs = [batch(*(pair(name, "a", "b") for name in ("better", "equal", "worse", "unknown")))]
    measured = {"better": ((True, True), (False, True)), "equal": ((True, False), (False, True))}
    measured |= {"worse": ((True, False), (True, True)), "unknown": ((True, None), (None, True))}
    held = continued(pairs, both(**measured))
    assert held.reasons(pairs[0], [False] * 4, respect=True) == [None, None, REJECTED_BETTER, None]
    against = held.reasons(pairs[0], [True] * 4, respect=True)
    assert against == [None, REJECTED_PASSED, REJECTED_BETTER, REJECTED_PASSED]
    assert held.reasons(pairs[0], [True] * 4, respect=False) == [None] * 4


def test_both_sides_are_compared_on_the_samples_that_both_have() -> None:
    families = [str(number) for number in range(MIN_UNITS)]
    pairs = [batch(*(pair(name, "a", "b", name) for name in families), pair("x", "a", "b", "x"))]
    rows = rows_of("x", "a", None, lost="the observation differs at action 7")
    rows += rows_of("x", "b", None, lost="the observation differs at action 7")
    for name in families:
        # An action that ended the rollout stands for both samples; the second of the other side is not known.
        rows += [*rows_of(name, "a", True, steps=1), *rows_of(name, "b", False, None)]
    found = continued(pairs, rows).test
    assert (found.pairs, found.tested, found.units) == (MIN_UNITS + 1, MIN_UNITS, MIN_UNITS)
    assert found.not_tested == {"the observation differs": 1}
    assert (found.chosen, found.rejected, found.verdict) == (1.0, 0.0, "SIGNAL")


def test_the_verdict_includes_dropped_pairs() -> None:
    """In half of the pairs the rejected action passes instead: without these, twelve of twelve would be a signal."""
    families = [str(number) for number in range(24)]
    pairs = [batch(*(pair(name, "a", "b", name) for name in families))]
    rows = both(**{name: ([number % 2 == 0], [number % 2 == 1]) for number, name in enumerate(families)})
    found = continued(pairs, rows, samples=1)
    assert found.reasons(pairs[0], [False] * 24, respect=False).count(None) == 12
    assert (found.test.tested, found.test.difference, found.test.verdict) == (24, 0.0, "UNDECIDED")


def outcomes(differences: Sequence[float], units: int) -> list[PairOutcome]:
    """Pairs of these differences; those without one pass or fail on both sides, in turn."""
    return [
        PairOutcome(str(n % units), *((max(d, 0.0), max(-d, 0.0)) if d else (float(n // units % 2),) * 2))
        for n, d in enumerate(differences)
    ]


def test_verdicts_by_the_interval() -> None:
    random = np.random.default_rng(0)
    assert signal_test(outcomes(random.choice([0.0, 1.0], size=60), 12)).verdict == "SIGNAL"
    assert signal_test(outcomes(np.zeros(600).tolist(), 12)).verdict == "NO SIGNAL"
    worse = random.choice([-1.0, 0.0], size=60)
    assert signal_test(outcomes(worse.tolist(), 12)).verdict == "NO SIGNAL", "the chosen action is the worse one"
    assert signal_test(outcomes(random.choice([-1.0, 1.0], size=40).tolist(), 12)).verdict == "UNDECIDED"


def test_pairs_of_one_unit_count_together() -> None:
    """400 pairs of eight units say no more than eight units do; as units of their own they would be a signal."""
    shared = np.repeat([1.0] * 6 + [-1.0] * 2, 50)
    one_by_one = [PairOutcome(str(n), 0.5 + d / 2, 0.5 - d / 2) for n, d in enumerate(shared)]
    together = [PairOutcome(str(n // 50), one.chosen, one.rejected) for n, one in enumerate(one_by_one)]
    assert signal_test(one_by_one).verdict == "SIGNAL" and signal_test(together).verdict == "UNDECIDED"


def test_too_little_is_not_judged() -> None:
    few = outcomes([1.0] * 50, MIN_UNITS - 1)
    assert signal_test(few).verdict == "TOO LITTLE DATA" and signal_test(few).difference is None
    enough = outcomes([1.0] * 50, MIN_UNITS)
    assert signal_test(enough).verdict == "SIGNAL"
    mostly_other = signal_test(enough, {"the opening differs": 51})
    assert mostly_other.verdict == "TOO LITTLE DATA", "most pairs are of another kind"


def test_the_evidence_leads_with_the_verdict_on_the_pairs() -> None:
    heuristic = PairVerdict("DISAGREEMENT TRACKS FAILURE", {"alignment": None}, (failure_text(None),))
    found = continued([batch()], []).evidence(heuristic)
    assert found.verdict == "TOO LITTLE DATA" and found.numbers["disagreement"] == "DISAGREEMENT TRACKS FAILURE"
    first, second, *_ = found.lines()
    assert first.startswith("TOO LITTLE DATA: 0 of 0 pairs") and second.startswith("DISAGREEMENT TRACKS FAILURE: ")
