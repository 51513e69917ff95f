"""Groups of rollouts: shared states, votes with each model in turn, rewards, contradictions."""

from collections.abc import Sequence
from typing import Any

import pytest

from stages.messages import Spoken, ToolCall, write
from stages.pairs.groups import choose, crossings
from stages.rollouts.episode import state_sha256
from stages.runs import store
from stages.runs.records import Row


def search(query: str, thought: str = "") -> str:
    return write(Spoken(thought, (ToolCall("search", f'{{"query": "{query}"}}'),)))


def rollout(
    name: str, *moves: tuple[str, str], reward: float | None = None, asked: str = "q", sample: int = 0
) -> tuple[Row, list[Row]]:
    """A rollout of the model `name` that did (action, observation) one after the other."""
    identity = {"rollout_id": f"{name}/{sample}", "task_id": "t", "group_id": "t", "sample_idx": sample}
    gained = [{"role": "user", "content": asked}]
    state: list[dict[str, str]] = []
    steps = []
    for index, (action, seen) in enumerate(moves):
        state = [*state, *gained]
        told = {"new_messages_json": store.encode(gained).decode(), "state_sha256": state_sha256(state)}
        unknown = {
            "commands": None,
            "truncated": None,
            "prompt_delta_token_ids": None,
            "completion_token_ids": None,
            "prefix_ok": None,
        }
        steps.append({**identity, "step": index, "action": action, **told, **unknown})
        gained = [{"role": "assistant", "content": action}, {"role": "tool", "content": seen}]
    return {**identity, "model": name, "reward": reward, "gt_pass": None}, steps


def meet(*rollouts: tuple[Row, list[Row]]) -> list[Any]:
    return crossings([step for _, steps in rollouts for step in steps], [row for row, _ in rollouts])


def chosen(visits: Sequence[Any], student: str | None = None) -> tuple[list[tuple[str, str, str]], dict[str, int]]:
    choices, dropped = choose(visits, student)
    return [(c.preference.rule, c.preference.chosen, c.preference.rejected) for c in choices], dict(dropped)


def test_states_are_shared_as_long_as_actions_and_observations_agree() -> None:
    same = [rollout(name, (search("boat", f"{name} thinks"), "ships"), (search(name), "x")) for name in ("a", "b")]
    other = rollout("c", (search("boat"), "nothing"), (search("c"), "x"))
    assert [[visit.model for visit in visits] for visits in meet(*same, other)] == [["a", "b", "c"], ["a", "b"], ["c"]]


def test_another_opening_is_another_state() -> None:
    assert [len(visits) for visits in meet(rollout("a", ("x", "")), rollout("b", ("x", ""), asked="other"))] == [1, 1]


def test_each_model_in_turn_is_outvoted_by_the_others() -> None:
    (visits,) = meet(
        *(rollout(name, (search(q), "")) for name, q in (("a", "boat"), ("b", "boat"), ("c", "boat"), ("d", "ship")))
    )
    found, dropped = chosen(visits)
    assert ("majority_over_student", search("boat"), search("ship")) in found
    assert {rule for rule, _, _ in found} == {"majority_over_student", "student_over_minority"}
    assert {(c, r) for _, c, r in found} == {(search("boat"), search("ship"))} and dropped == {"rewards_unknown": 1}


def test_a_named_student_is_the_only_one_that_is_judged() -> None:
    rollouts = [
        rollout(name, (search(q), "")) for name, q in (("a", "boat"), ("b", "boat"), ("c", "boat"), ("d", "ship"))
    ]
    (visits,) = meet(*rollouts)
    assert [rule for rule, _, _ in chosen(visits, "d")[0]] == ["majority_over_student"]
    assert [rule for rule, _, _ in chosen(visits, "a")[0]] == ["student_over_minority"]


def test_one_other_model_is_no_majority() -> None:
    (visits,) = meet(rollout("a", (search("boat"), "")), rollout("b", (search("ship"), "")))
    assert chosen(visits) == ([], {"too_few_teachers": 2, "rewards_unknown": 1})


def test_votes_that_contradict_each_other_are_both_dropped() -> None:
    names = (("a", "boat"), ("b", "boat"), ("c", "ship"), ("d", "ship"))
    (visits,) = meet(*(rollout(name, (search(q), "")) for name, q in names))
    found, dropped = chosen(visits)
    assert found == [] and dropped == {"contradicted_by_votes": 4, "rewards_unknown": 1}


def test_rewards_decide_between_actions_and_overrule_votes() -> None:
    names = (("a", "boat", 0.0), ("b", "boat", 0.0), ("c", "boat", 0.0), ("d", "ship", 1.0))
    (visits,) = meet(*(rollout(name, (search(q), ""), reward=r) for name, q, r in names))
    found, dropped = chosen(visits)
    assert found == [("better_outcome", search("ship"), search("boat"))] and dropped["contradicted_by_reward"] == 4
    (choice,) = choose(visits, None)[0]
    assert (choice.preference.votes_chosen, choice.preference.votes_rejected, choice.at.model) == (1, 3, "a")


def test_rewards_compare_the_mean_of_all_who_did_the_same() -> None:
    moves = [("a", "boat", 1.0, 0), ("a", "boat", 0.0, 1), ("b", "ship", 0.5, 0), ("c", "raft", 0.0, 0)]
    (visits,) = meet(*(rollout(name, (search(q), ""), reward=r, sample=i) for name, q, r, i in moves))
    found = {(c, r) for rule, c, r in chosen(visits)[0] if rule == "better_outcome"}
    assert found == {(search("boat"), search("raft")), (search("ship"), search("raft"))}


def test_one_models_samples_are_enough_for_rewards_and_the_context_is_the_rejected_ones() -> None:
    good = rollout("a", (search("boat", "I know."), ""), reward=1.0)
    bad = rollout("a", (search("ship", "Hm."), ""), reward=0.0, sample=1)
    (choice,), _ = choose(meet(good, bad)[0], None)
    assert choice.preference.rule == "better_outcome" and choice.at.step["rollout_id"] == "a/1"


def test_the_context_is_the_students_where_one_is_named() -> None:
    (visits,) = meet(rollout("a", (search("boat"), ""), reward=1.0), rollout("b", (search("ship"), ""), reward=0.0))
    assert choose(visits, "a")[0][0].at.model == "a" and choose(visits, "b")[0][0].at.model == "b"
    assert choose(visits, "c")[0] == []


@pytest.mark.parametrize(
    ("moves", "reasons"),
    [
        ([("a", search("boat"), 1.0), ("b", search("boat"), 0.0)], {"actions_equal": 1, "too_few_teachers": 2}),
        ([("a", search("boat"), 1.0), ("b", search("ship"), 1.0)], {"rewards_equal": 1, "too_few_teachers": 2}),
        ([("a", search("boat"), 1.0)], {"state_not_shared": 1}),
        ([("a", search("boat"), 1.0), ("b", "", 0.0)], {"too_few_teachers": 2, "empty_action": 1}),
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
