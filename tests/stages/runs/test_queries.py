"""Queries of the pages: kinds of actions, states of pairs of every age, tasks of two arms, rollouts by id."""

import json
from pathlib import Path

import pytest
from support.runs import row, written

from composer_stages.runs import queries
from composer_stages.runs.kinds import EVAL_ITEM, PAIR, ROLLOUT, STATE, STEP, TASK
from composer_stages.runs.queries import PairFilter, RolloutFilter, RolloutPlace, TaskFilter
from composer_stages.runs.run import Run


def said(*texts: str) -> str:
    return json.dumps([{"role": "user", "content": text} for text in texts])


def pair(number: int, chosen: str = "a", rejected: str = "b", **given: object) -> dict[str, object]:
    known = {"pair_id": f"p{number}", "rule": "majority_over_student", "state_id": f"s{number}", "rollout_id": "r"}
    return known | {"chosen": chosen, "rejected": rejected, "chosen_by": ["one"], "rejected_by": "student"} | given


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        ("```bash\nsed -i 's|a|b|' x.py\n```", "sed"),
        ("I look first.\n```\ncd /testbed && python3 -m pytest\n```", "python3"),
        ("<function=str_replace_editor>\n<parameter=path>x</parameter>", "str_replace_editor"),
        ('{"name": "bash", "arguments": {"command": "ls"}}', "bash"),
        ("Done.", "text"),
        ("", "text"),
    ],
)
def test_the_kind_of_an_action_is_its_first_word(tmp_path: Path, action: str, kind: str) -> None:
    run = Run(written(tmp_path, "extract-pairs/x", [(PAIR, [pair(0, action, "```bash\nls\n```")])]))
    page = queries.pairs(run, PairFilter(action=kind))
    assert page is not None and page.total == 1 and page.rows[0]["chosen_action"] == kind
    assert dict(page.values["action"]) == {kind: 1, "ls": 1}


def test_states_are_put_together_and_a_broken_chain_ends(tmp_path: Path) -> None:
    states = [
        {"state_id": "s0", "kept_messages": 0, "new_messages_json": said("task")},
        {"state_id": "s1", "before_id": "s0", "kept_messages": 1, "new_messages_json": said("more")},
        {"state_id": "s3", "before_id": "s4", "kept_messages": 0, "new_messages_json": said("x")},
        {"state_id": "s4", "before_id": "s3", "kept_messages": 0, "new_messages_json": said("y")},
    ]
    pairs = [pair(number) for number in (1, 2, 3)]
    run = Run(written(tmp_path, "extract-pairs/x", [(PAIR, pairs), (STATE, states)]))
    found = queries.state_messages(run, pairs)
    assert [message["content"] for message in found["p1"]] == ["task", "more"]
    assert "p2" not in found and "p3" in found


PASSES = {"lost": ([None], [True]), "some": ([True, False], [True, None]), "all": ([True], [False])}
"""Of the arms A and B, by task."""


def test_tasks_without_an_outcome_have_no_difference_and_come_last(tmp_path: Path) -> None:
    items = [
        {"item_id": f"{arm}{task}{n}", "arm": arm, "task_id": task, "passed": passed, "transcript_json": said(task)}
        for task, outcomes in PASSES.items()
        for arm, passes in zip("AB", outcomes, strict=True)
        for n, passed in enumerate(passes)
    ]
    run = Run(written(tmp_path, "evaluate/x", [(EVAL_ITEM, items)]))
    page = queries.tasks(run, "A", "B")
    assert [(one["task_id"], one["difference"]) for one in page.rows] == [("all", -1.0), ("some", 0.5), ("lost", None)]
    assert (page.first_more, page.second_more, page.equal, page.total) == (1, 1, 0, 3)
    assert [one["prompt"] for one in page.rows] == ["all", "some", "lost"]
    assert [one["task_id"] for one in queries.tasks(run, "A", "B", TaskFilter(side="second")).rows] == ["some"]
    assert [one["task_id"] for one in queries.tasks(run, "B", "A", TaskFilter(side="first")).rows] == ["some"]


def test_rollouts_are_chosen_by_id_and_carry_their_prompt(tmp_path: Path) -> None:
    rollouts = [row(ROLLOUT, {"rollout_id": f"r{n}", "task_id": "t", "reward": 1.0}) for n in range(3)]
    steps = [
        {"rollout_id": f"r{n}", "step": step, "new_messages_json": said(f"prompt {n}, step {step}")}
        for n in range(3)
        for step in range(2)
    ]
    run = Run(written(tmp_path, "train/x", [(ROLLOUT, rollouts), (STEP, steps)]))
    page = queries.page(run, RolloutFilter(ids=("r2", "nobody")))
    assert page is not None and [(one["id"], one["prompt"]) for one in page.rows] == [("r2", "prompt 2, step 0")]
    empty = queries.page(run, RolloutFilter(ids=()))
    assert empty is not None and empty.total == 0
    assert queries.place(run, RolloutFilter(), "r1") == RolloutPlace(2, 3, "r0", "r2")
    assert queries.place(run, RolloutFilter(ids=("r0", "r2")), "r2") == RolloutPlace(2, 2, "r0", None)
    assert queries.place(run, RolloutFilter(ids=("r0",)), "r2") is None


@pytest.mark.parametrize("after", [0, 2])
def test_the_prompt_is_the_last_message_of_a_user_before_the_first_action(tmp_path: Path, after: int) -> None:
    roles = ("system", "user", "assistant", "user")  # a worked example precedes the question
    asked = [{"role": role, "content": f"{role} {place}"} for place, role in enumerate(roles)]
    said_then = [{"role": role, "content": "after"} for role in ("assistant", "user")[:after]]
    item = {"item_id": "i", "arm": "A", "task_id": "t", "passed": True}
    item |= {"transcript_json": json.dumps([*asked, *said_then]), "steps_json": '[{"message": 4}]' if after else "[]"}
    step = {"rollout_id": "i", "step": 0, "new_messages_json": json.dumps(asked)}
    task = {"task_id": "t", "prompt": "user 3"}
    tables = ([(EVAL_ITEM, [item])], [(ROLLOUT, [{"rollout_id": "i", "task_id": "t"}]), (STEP, [step]), (TASK, [task])])
    for number, each in enumerate(tables):
        run = Run(written(tmp_path, f"stage/{number}", each))
        page = queries.page(run, RolloutFilter())
        assert page is not None and [one["prompt"] for one in page.rows] == ["user 3"]
    listed = queries.tasks(Run(tmp_path / "stage/0"), "A", "B").rows
    assert [one["prompt"] for one in listed] == ["user 3"]


@pytest.mark.parametrize(
    ("ids", "short"),
    [
        (["kata-train-0-00001#0@0", "kata-train-0-00001#1@0"], ["00001#0", "00001#1"]),
        (["kata-0-00001#0@0", "kata-0-00002#1@0"], ["00001#0", "00002#1"]),
        (["A/0/t-1#0", "B/0/t-1#0"], ["A", "B"]),
        (["sample-1001", "sample-10011"], ["1001", "10011"]),
        (["alone"], ["alone"]),
        (["x-1", "x-11"], ["x-1", "x-11"]),
        (["x-1#0@941614287553", "x-1#0@941755", "x-1#1@12"], ["0@9416", "0@9417", "1@12"]),
        (["x-1#0@94161428", "x-1#0@94161999"], ["941614", "941619"]),
        (["x-1@1234", "x-1@12345678"], ["1234", "12345"]),
        (["a@١٢٣٤٥٦٧٨", "a@١٢٣٤٥٦٧٩"], ["١٢٣٤٥٦٧٨", "١٢٣٤٥٦٧٩"]),
        (["a@12345678\n", "b@12345679\n"], ["a@12345678", "b@12345679"]),
        (["a@12345678\n", "a@12345679\n", "a@12345"], ["12345678\n", "12345679\n", "1234"]),
        ([f"a@{1:01501}", f"a@{2:01501}"], [f"{1:01501}", f"{2:01501}"]),
        (["12345678", "12355678"], ["12345678", "12355678"]),
    ],
)
def test_an_id_is_found_by_what_tells_it_from_the_others(tmp_path: Path, ids: list[str], short: list[str]) -> None:
    run = Run(written(tmp_path, "train/x", [(ROLLOUT, [row(ROLLOUT, {"rollout_id": one}) for one in ids])]))
    assert queries.short_ids(run, ids) == short
    assert [queries.rollout_ids(run, part) for part in [*short, *ids]] == [[one] for one in [*ids, *ids]]


def test_a_rollout_is_found_by_its_task_where_its_id_does_not_name_it(tmp_path: Path) -> None:
    rows = [{"rollout_id": one, "task_id": task} for one, task in (("x1", "four/vowels"), ("x2", "four/sum"))]
    run = Run(written(tmp_path, "import/x", [(ROLLOUT, [row(ROLLOUT, each) for each in rows])]))
    assert queries.rollout_ids(run, "vowels") == queries.rollout_ids(run, "four/vowels") == ["x1"]
    assert queries.rollout_ids(run, "owels") == []


def test_a_text_is_looked_for_in_rollouts_whose_steps_are_not_there(tmp_path: Path) -> None:
    rollouts = [row(ROLLOUT, {"rollout_id": f"r{n}", "task_id": "t", "reward": 1.0}) for n in range(3)]
    alone = Run(written(tmp_path, "train/alone", [(ROLLOUT, rollouts)]))
    steps = [{"rollout_id": "r1", "step": 0, "action": "ls R2"}]
    beside = Run(written(tmp_path, "train/beside", [(ROLLOUT, rollouts), (STEP, steps)]))
    found = [[one["id"] for one in queries.page(run, RolloutFilter(text="r2")).rows] for run in (alone, beside)]
    assert found == [["r2"], ["r1", "r2"]]
