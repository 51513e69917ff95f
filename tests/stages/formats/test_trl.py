"""TRL's logged completions, as text and as messages, with one or several rewards."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from support.transcripts import action, assistant, call, payloads, read, tool, user

from composer_stages.rollouts import missing


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def row(**more: Any) -> dict[str, Any]:
    record = {"step": 1, "prompt": "user\n1+1?\nassistant\n", "completion": "2"}
    return {**record, "right_reward": 1.0, "advantage": 0.5, **more}


def test_text_rows(tmp_path: Path) -> None:
    rows = [row(), row(completion="3", right_reward=0.0)]
    first, second = payloads(table(tmp_path / "completions_00001.parquet", rows))
    assert first["rollout"]["group_id"] == second["rollout"]["group_id"]
    assert [p["rollout"]["reward"] for p in (first, second)] == [1.0, 0.0] and first["steps"][0]["action"] == "2"
    assert {missing.MODEL, missing.OPENING, missing.TOKENS, missing.FINISH} <= set(first["origin"]["missing"])


def test_several_rewards_without_weights_are_no_reward(tmp_path: Path) -> None:
    (payload,) = payloads(table(tmp_path / "c.parquet", [row(format_reward=0.5)]))
    assert payload["rollout"]["reward"] is None and missing.REWARD in payload["origin"]["missing"]
    assert '"format_reward":0.5' in payload["origin"]["extra_json"]


def test_message_rows_with_nulls_where_other_rows_have_calls(tmp_path: Path) -> None:
    messages = [assistant("", tool_calls=[call("f", '{"a": 1}')]), tool("2"), assistant("It is 2.")]
    rows = [row(prompt=[user("1+1?")], completion=completion) for completion in (messages, [assistant("3")])]
    rollouts, drops, _ = read(table(tmp_path / "c.parquet", rows))
    assert [len(rollout.turns) for rollout in rollouts] == [2, 1] and not drops
    assert rollouts[0].turns[0].action == action("", ("f", '{"a": 1}'))


def test_a_function_called_reward_is_no_total(tmp_path: Path) -> None:
    """TRL writes a column for each function; where that one is alone, it is the reward."""
    named = {"step": 1, "prompt": "1+1?", "completion": "2", "reward": 1.0, "advantage": 0.5}
    (alone,) = payloads(table(tmp_path / "alone.parquet", [named]))
    (beside,) = payloads(table(tmp_path / "beside.parquet", [{**named, "format_reward": 0.0}]))
    assert (alone["rollout"]["reward"], beside["rollout"]["reward"]) == (1.0, None)
    assert '"rewards":{"format_reward":0.0,"reward_function":1.0}' in beside["origin"]["extra_json"]


def test_a_generation_in_the_files_of_several_steps_counts_once(tmp_path: Path) -> None:
    """As TRL writes it with `num_iterations`; another that differs in one answer counts whole."""
    for step in (1, 2):
        table(tmp_path / f"completions_0000{step}.parquet", [row(step=step), row(step=step, completion="3")])
    table(tmp_path / "completions_00003.parquet", [row(step=3), row(step=3, completion="4")])
    rollouts, drops, _ = read(tmp_path)
    kept = {unit.trajectory.own_id if hasattr(unit, "trajectory") else unit.own_id for unit in rollouts}
    assert len(kept) == 4 and not drops


def test_the_verdict_of_hidden_tests_is_written_and_read_apart_from_the_reward(tmp_path: Path) -> None:
    row = {"step": 0, "prompt": "1+1?", "completion": "2", "reward": 1.0, "advantage": None, "hidden_pass": False}
    marks = {"rollout_id": "r", "task_id": "t", "env": "e", "family": None, "split": None}
    (read_again,) = payloads(table(tmp_path / "c.parquet", [row | marks]))
    assert (read_again["rollout"]["reward"], read_again["rollout"]["hidden_pass"]) == (1.0, False)
