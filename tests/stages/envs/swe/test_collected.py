"""Rollouts on a repository from collection to predictions: what an agent did by its last step is not lost."""

import json
from pathlib import Path

import pytest
from support.server import Reply, answer, serving

from composer_stages import collect, export
from composer_stages.envs.bash import fenced
from composer_stages.runs import runner
from composer_stages.runs.kinds import ROLLOUT
from composer_stages.runs.run import Run

FIX = "sed -i 's/a - b/a + b/' abacus/sums.py"
FIXED = "+    return a + b\n"


@pytest.fixture
def settings(path: Path, repos: Path, venvs: Path) -> dict[str, str]:
    """Of the environment, for the instance."""
    return {"name": "swe-lite", "split": "eval", "path": str(path), "repos": str(repos), "venvs": str(venvs)}


def test_work_that_a_limit_ended_is_graded_kept_and_exported(tmp_path: Path, settings: dict[str, str]) -> None:
    submitted: list[int] = []

    def reply(body: dict, n: int) -> Reply:
        """One sample submits at its second step, the other does something else until a limit ends it."""
        if len(body["messages"]) == 2:
            return Reply(body=answer(fenced(FIX)))
        submitted.append(n)
        return Reply(body=answer(fenced("submit" if len(submitted) == 1 else "git log --all")))

    with serving(reply) as server:
        config = collect.Config(
            env=settings, policy={"model": "fixer", "base_url": server.url}, tasks=1, samples=2, max_steps=2
        )
        run = Run(runner.execute("collect", {}, config, root=tmp_path).path)
    rows = {row["terminated_by"]: row for row in run.rows(ROLLOUT)}
    assert set(rows) == {"submitted", "max_steps"}
    for row in rows.values():
        assert FIXED in row["patch"] and row["reward"] == 1.0
        assert (row["hidden_pass"], row["visible_pass"], row["image"]) == (True, True, None)
        assert (row["f2p_passed"], row["f2p_total"]) == (1, 1) and row["p2p_passed"] == row["p2p_total"] >= 1
        assert "test_add" in row["test_log"] or "passed" in row["test_log"]
    assert rows["submitted"]["submission"] == rows["submitted"]["patch"] and rows["submitted"]["canary"] == []
    assert rows["max_steps"]["submission"] is None
    assert rows["max_steps"]["canary"] == ["found the canary", "searches history"]
    assert run.manifest.summary["hidden_pass_rate"] == 1.0
    assert "hidden tests pass 100.0 %" in (run.path / "report.txt").read_text()

    written = Run(
        runner.execute("export", {"rollouts": run}, export.Config(format="swebench-preds"), root=tmp_path).path
    )
    predictions = [json.loads(line) for file in written.path.glob("*/all_preds.jsonl") for line in file.open()]
    assert [p["model_patch"] for p in predictions] == [rows["submitted"]["patch"]] * 2


def test_the_same_by_tool_calls(tmp_path: Path, settings: dict[str, str]) -> None:
    def reply(body: dict, n: int) -> Reply:
        made = [("bash", {"command": FIX}), ("bash", {"command": "cat abacus/sums.py"})] if n == 0 else [("submit", {})]
        calls = [
            {"id": str(i), "type": "function", "function": {"name": a, "arguments": json.dumps(b)}}
            for i, (a, b) in enumerate(made)
        ]
        body = answer("")
        body["choices"][0]["message"] |= {"tool_calls": calls}
        return Reply(body=body)

    with serving(reply) as server:
        config = collect.Config(
            env=settings, policy={"model": "fixer", "base_url": server.url, "tool_calls": "native"}, tasks=1, samples=1
        )
        run = Run(runner.execute("collect", {}, config, root=tmp_path).path)
        assert "```" not in server.requests[0]["messages"][0]["content"]
        assert "return a + b" in server.requests[1]["messages"][-1]["content"]
    (row,) = run.rows(ROLLOUT)
    assert (row["hidden_pass"], row["terminated_by"]) == (True, "submitted") and FIXED in row["submission"]
