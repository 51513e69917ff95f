"""Groups of rollouts: shared states, votes with each model in turn, rewards, contradictions, submissions."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from support.runs import row as of_kind
from support.transcripts import action as written, assistant, tool, user

from composer_stages.pairs.groups import choose, compare_submissions, visits_by_state
from composer_stages.rollouts.trace import state_sha256
from composer_stages.runs import store
from composer_stages.runs.kinds import STEP, Row


def search(query: str, thought: str = "") -> str:
    return written(thought, ("search", f'{{"query": "{query}"}}'))


def rollout(
    name: str, *moves: tuple[str, str], reward: float | None = None, asked: str = "q", sample: int = 0
) -> tuple[Row, list[Row]]:
    """A rollout of the model `name` that did (action, observation) one after the other."""
    identity = {"rollout_id": f"{name}/{sample}", "task_id": "t", "group_id": "t", "sample_idx": sample}
    gained = [user(asked)]
    state: list[dict[str, str]] = []
    steps = []
    for index, (action, seen) in enumerate(moves):
        state = [*state, *gained]
        told = {"new_messages_json": store.encode(gained).decode(), "state_sha256": state_sha256(state)}
        steps.append(of_kind(STEP, {**identity, "step": index, "action": action, **told}))
        gained = [assistant(action), tool(seen)]
    return {**identity, "model": name, "reward": reward, "hidden_pass": None}, steps


def meet(*rollouts: tuple[Row, list[Row]]) -> list[Any]:
    return visits_by_state([step for _, steps in rollouts for step in steps], [row for row, _ in rollouts])


def searching(**models: str) -> Sequence[Any]:
    """The one state of models that search for this."""
    (visits,) = meet(*(rollout(name, (search(query), "")) for name, query in models.items()))
    return visits


def chosen(visits: Sequence[Any], student: str | None = None) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    choices, _, dropped = choose(visits, student)
    return [(c.preference.rule, c.preference.chosen, c.preference.rejected) for c in choices], dict(dropped)


def test_rollouts_share_states_until_actions_or_observations_differ() -> None:
    same = [rollout(name, (search("boat", f"{name} thinks"), "ships"), (search(name), "x")) for name in ("a", "b")]
    other = rollout("c", (search("boat"), "nothing"), (search("c"), "x"))
    assert [[visit.model for visit in visits] for visits in meet(*same, other)] == [["a", "b", "c"], ["a", "b"], ["c"]]
    openings = meet(rollout("a", ("x", "")), rollout("b", ("x", ""), asked="other"))
    assert [len(visits) for visits in openings] == [1, 1]


def test_each_model_in_turn_is_outvoted_by_the_others() -> None:
    visits = searching(a="boat", b="boat", c="boat", d="ship")
    found, dropped = chosen(visits)
    assert ("majority_over_student", search("boat"), search("ship")) in found
    assert {rule for rule, _, _ in found} == {"majority_over_student", "student_over_minority"}
    assert {(c, r) for _, c, r in found} == {(search("boat"), search("ship"))} and dropped == {"rewards_unknown": 1}
    assert [rule for rule, _, _ in chosen(visits, "d")[0]] == ["majority_over_student"], "the named one alone is judged"
    assert [rule for rule, _, _ in chosen(visits, "a")[0]] == ["student_over_minority"]


def test_one_other_model_is_no_majority() -> None:
    assert chosen(searching(a="boat", b="ship")) == ([], {"too_few_teachers": 2, "rewards_unknown": 1})


def test_votes_that_contradict_each_other_are_both_dropped() -> None:
    found, dropped = chosen(searching(a="boat", b="boat", c="ship", d="ship"))
    assert found == [] and dropped == {"contradicted_by_votes": 4, "rewards_unknown": 1}


def several(*moves: tuple[str, str, list[float]]) -> list[Any]:
    """The one state of rollouts: (model, what it searches, the rewards of its rollouts that do so)."""
    counts: Counter[str] = Counter()
    made = []
    for name, query, rewards in moves:
        for reward in rewards:
            made.append(rollout(name, (search(query), ""), reward=reward, sample=counts[name]))
            counts[name] += 1
    (visits,) = meet(*made)
    return visits


def better(visits: Sequence[Any]) -> set[tuple[str, str]]:
    return {(c, r) for rule, c, r in chosen(visits)[0] if rule == "better_outcome"}


def test_rewards_decide_between_actions_and_overrule_votes() -> None:
    visits = several(("a", "boat", [0.0] * 3), ("b", "boat", [0.0] * 3), ("c", "boat", [0.0]), ("d", "ship", [1.0] * 4))
    found, dropped = chosen(visits)
    assert found == [("better_outcome", search("ship"), search("boat"))] and dropped["contradicted_by_reward"] > 0
    _, votes, _ = choose(visits, None)
    assert votes and all(choice.compared_by == "canonical" for choice in votes), "rewards have not selected among them"
    (choice,) = choose(visits, None)[0]
    assert (choice.preference.votes_chosen, choice.preference.votes_rejected, choice.visit.model) == (4, 7, "a")


def test_pairs_need_two_rollouts_on_each_side() -> None:
    found, dropped = chosen(several(("a", "boat", [1.0]), ("b", "ship", [0.0])))
    assert found == [] and dropped == {"too_few_teachers": 2, "too_few_rollouts": 1}


@pytest.mark.parametrize(
    ("one", "other", "supported"),
    [
        ([1.0] * 4, [0.0] * 4, True),
        ([1.0] * 3, [0.0] * 4, True),  # LEAST_VISITS
        ([1.0] * 2, [0.0] * 5, True),
        ([1.0] * 3, [0.0] * 3, False),
        ([1.0] * 2, [0.0] * 4, False),
        ([1.0] * 5 + [0.0], [0.0] * 5 + [1.0], False),
        ([1.0] * 8 + [0.0], [0.0] * 8 + [1.0], True),
        ([0.9, 0.8, 0.7, 0.6], [0.5, 0.4, 0.3, 0.2], True),
        ([0.9, 0.8, 0.3, 0.6], [0.5, 0.4, 0.7, 0.2], False),
    ],
)
def test_a_difference_counts_where_its_interval_supports_it(
    one: list[float], other: list[float], supported: bool
) -> None:
    visits = several(("a", "boat", one), ("a", "ship", other))
    assert better(visits) == ({(search("boat"), search("ship"))} if supported else set())
    assert chosen(visits)[1].get("difference_not_supported", 0) == (not supported)


def test_no_action_is_on_both_sides_of_a_state() -> None:
    visits = several(("a", "boat", [1.0] * 9), ("a", "ship", [0.5] * 9), ("a", "raft", [0.0] * 9))
    assert better(visits) == {(search("boat"), search("raft"))}
    assert chosen(visits)[1]["both_sides_of_a_state"] == 2


def test_a_vote_for_what_the_rewards_reject_is_dropped_also_against_a_third_action() -> None:
    names = (("a", "boat", [0.0] * 3), ("b", "boat", [0.0] * 3), ("c", "raft", [0.0]), ("d", "ship", [1.0] * 5))
    sides = {side: {move[1 + side] for move in chosen(several(*names))[0]} for side in (0, 1)}
    assert sides == {0: {search("ship")}, 1: {search("boat")}}


def test_one_models_samples_are_enough_for_rewards_and_the_context_is_the_rejected_ones() -> None:
    good = [rollout("a", (search("boat", "I know."), ""), reward=1.0, sample=i) for i in range(4)]
    bad = [rollout("a", (search("ship", "Hm."), ""), reward=0.0, sample=4 + i) for i in range(4)]
    (choice,), _, _ = choose(meet(*good, *bad)[0], None)
    assert choice.preference.rule == "better_outcome" and choice.visit.step["rollout_id"] == "a/4"


def test_the_context_is_the_students_where_one_is_named() -> None:
    visits = several(("a", "boat", [1.0] * 4), ("b", "ship", [0.0] * 4))
    for student in ("a", "b"):
        by_reward = [choice for choice in choose(visits, student)[0] if choice.preference.rule == "better_outcome"]
        assert {choice.visit.model for choice in by_reward} == {student}
    assert choose(visits, "c")[0] == []


@pytest.mark.parametrize(
    ("moves", "reasons"),
    [
        ([("a", search("boat"), 1.0), ("b", search("boat"), 0.0)], {"actions_equal": 1, "too_few_teachers": 2}),
        ([("a", search("boat"), 1.0), ("b", search("ship"), 1.0)], {"rewards_equal": 1, "too_few_teachers": 2}),
        ([("a", search("boat"), 1.0)], {"state_not_shared": 1}),
        ([("a", search("boat"), 1.0), ("b", "", 0.0)], {"too_few_teachers": 2, "too_few_rollouts": 1}),
    ],
)
def test_every_reason_for_no_pair_is_counted(moves: list[tuple[str, str, float]], reasons: dict[str, int]) -> None:
    (visits,) = meet(*(rollout(name, (action, ""), reward=reward) for name, action, reward in moves))
    assert chosen(visits) == ([], reasons)


def test_truncated_actions_take_no_part() -> None:
    cut = rollout("a", (search("boat"), ""), reward=1.0)
    cut[1][0]["truncated"] = True
    (visits,) = meet(cut, rollout("b", (search("ship"), ""), reward=0.0))
    assert chosen(visits) == ([], {"truncated": 1, "state_not_shared": 1})


def test_actions_without_calls_are_compared_by_what_was_run_or_said() -> None:
    ran = [rollout(name, (f"{name} says\n```\nls  -a\n```", "")) for name in ("a", "b")]
    for _, steps in ran:
        steps[0]["commands"] = ["ls  -a"]
    (visits,) = meet(*ran)
    assert visits[0].form == visits[1].form
    (visits,) = meet(rollout("a", ("It is  42.", "")), rollout("b", ("It is 42.", "")))
    assert visits[0].form == visits[1].form


def row(name: str, reward: float | None, model: str = "m") -> dict[str, Any]:
    return {"rollout_id": name, "model": model, "reward": reward, "hidden_pass": None if reward is None else reward > 0}


def test_accepted_submissions_are_preferred_over_refused_ones() -> None:
    rows = [row("a", 1.0, "x"), row("b", 1.0, "y"), row("c", 0.0, "z"), row("d", 0.0, "x")]
    handed_in = {"a": "P", "b": "P", "c": "Q", "d": "R"}
    found, dropped = compare_submissions(rows, handed_in, None)
    told = [(v.preference.chosen, v.preference.rejected, v.preference.votes_chosen) for v in found]
    assert told == [("P", "Q", 2), ("P", "R", 2)]
    assert [v.preference.rejected_by for v in found] == ["z", "x"] and not dropped
    assert [v.preference.rejected for v in compare_submissions(rows, handed_in, "z")[0]] == ["Q"]


def test_reasons() -> None:
    rows = [row("a", 1.0), row("b", 0.0), row("c", None), row("d", 0.0), row("e", None)]
    found, dropped = compare_submissions(rows, {"a": "P\n", "b": "P", "c": "Q", "d": " ", "e": None}, None)
    assert found == [] and dropped == {"submission_judged_both_ways": 1, "submission_not_judged": 1, "no_submission": 1}
    _, dropped = compare_submissions([row("a", 1.0), row("b", 1.0)], {"a": "P", "b": "Q"}, None)
    assert dropped == {"submissions_equal": 1}
