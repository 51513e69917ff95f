"""Batches at a local server that behaves like OpenAI's: half the price, nothing bought twice, whatever is killed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.batch_server import BatchServer, serving_batches
from support.server import Reply, answer

from stages import replay_teachers
from stages.errors import Incomplete, UsageError
from stages.runs import runner, store
from stages.runs.kinds import TEACHER_ACTION
from stages.runs.ledger import NAME, Budget, totals
from stages.runs.run import Run

PROBE = (10 + 1) / 1e6
"""USD of the call by which a server is probed."""


def said(body: dict[str, Any], number: int) -> Reply:
    return Reply(body=answer(f"{body['model']} {number}", 1000, 1000))


def replay(root: Path, rollouts: Run, server: BatchServer, names: tuple[str, ...] = ("one",), **options: Any) -> Run:
    prices = {"usd_per_mtok_in": 1.0, "usd_per_mtok_out": 1.0}
    table = [
        {"name": n, "model": n, "base_url": server.url, "max_tokens": 2000, "batch_poll_s": 0.05, **prices}
        for n in names
    ]
    config = replay_teachers.Config(teachers=table, batch=True)
    return Run(runner.execute("replay-teachers", {"rollouts": rollouts}, config, root=root, **options).path)


def test_a_batch_a_teacher_at_half_the_price(tmp_path: Path, collected: Callable[..., Run]) -> None:
    rollouts = collected()
    with serving_batches(BatchServer(said, looks=3)) as server:
        run = replay(tmp_path, rollouts, server, ("one", "two"))
    rows = run.rows(TEACHER_ACTION)
    assert len(server.batches) == 2 and not server.singles
    assert len(rows) == sum(len(server.requests(name)) for name in server.batches) > 4
    assert all(row["cost_usd"] == pytest.approx(0.5 * 2000 / 1e6) for row in rows)
    assert (
        run.manifest.cost_usd == pytest.approx(sum(row["cost_usd"] for row in rows) + 2 * PROBE)
        and run.manifest.possibly_usd == 0
    )
    by_id = {line["custom_id"]: n for name in server.batches for n, line in enumerate(server.requests(name))}
    assert all(row["action"] == f"{row['teacher']} {by_id[row['unit_id']]}" for row in rows), "by id, not by order"
    assert run.manifest.summary["verdict"] == "AFFORDABLE"


def test_answers_in_the_cache_are_not_bought_in_a_batch(tmp_path: Path, collected: Callable[..., Run]) -> None:
    rollouts = collected()
    with serving_batches(BatchServer(said)) as server:
        first = replay(tmp_path, rollouts, server)
        bought = first.rows(TEACHER_ACTION)
        shutil.rmtree(first.path)
        again = replay(tmp_path, rollouts, server)
        assert len(server.batches) == 1
    assert again.rows(TEACHER_ACTION) == bought and again.manifest.cost_usd == 0


def test_what_a_batch_could_not_answer_is_told_and_asked_again(tmp_path: Path, collected: Callable[..., Run]) -> None:
    def partly(body: dict[str, Any], number: int) -> Reply | None:
        return (said(body, number), Reply(400, {"error": {"message": "too long"}}), None)[min(number, 2)]

    rollouts = collected()
    server = BatchServer(partly, status="expired")
    with serving_batches(server):
        with pytest.raises(Incomplete, match="the batch has no answer: not executed in time"):
            replay(tmp_path, rollouts, server)
        asked = len(server.requests("batch-0"))
        server.reply, server.status = said, "completed"
        run = replay(tmp_path, rollouts, server, resume=True)
    assert len(server.requests("batch-1")) == asked - 2, "the answered and the rejected are final"
    (rejected,) = [row for row in run.rows(TEACHER_ACTION) if row["error_type"] == "rejected"]
    assert rejected["cost_usd"] > 0.5 * 2000 / 1e6, "a 400 may have been billed, so it costs its upper bound"
    expected = (asked - 1) * 0.5 * 2000 / 1e6 + rejected["cost_usd"] + PROBE
    assert run.manifest.cost_usd == pytest.approx(expected)


def test_a_refused_batch_stops_the_run_and_costs_nothing(tmp_path: Path, collected: Callable[..., Run]) -> None:
    server = BatchServer(said, status="failed")
    with serving_batches(server), pytest.raises(UsageError, match=r"line 1 is no request\. Ask without --batch"):
        replay(tmp_path, collected(), server)
    (folder,) = tmp_path.glob("replay-teachers/2*")
    assert totals(folder) == (PROBE, 0.0)


def test_a_creation_whose_answer_is_lost_is_found_and_not_repeated(
    tmp_path: Path, collected: Callable[..., Run]
) -> None:
    server = BatchServer(said, lose_next_creation=True)
    with serving_batches(server):
        run = replay(tmp_path, collected(), server)
    assert len(server.batches) == 1 and len(server.files) == 2
    assert all(row["error_type"] is None for row in run.rows(TEACHER_ACTION))


def test_a_batch_is_taken_up_wherever_the_run_was_cut_off(tmp_path: Path, collected: Callable[..., Run]) -> None:
    """The journal and the ledger are cut to every earlier state that a kill could have left."""
    rollouts = collected()
    with serving_batches(BatchServer(said)) as server:
        whole = replay(tmp_path / "whole", rollouts, server)
        steps, ledger = whole.path / "steps", (whole.path / NAME).read_bytes().splitlines(keepends=True)
        journal = [
            store.encode(row) + b"\n" for path in sorted(steps.glob("*.jsonl.gz")) for row in store.read_lines(path)
        ]
        expected, cost = whole.rows(TEACHER_ACTION), whole.manifest.cost_usd
        answers = [index for index, line in enumerate(journal) if b'"answer"' in line]
        first, last = answers[0], answers[-1]
        probe = len(ledger) - 2  # the lines of the probing call
        cuts = {
            "written down": (1, probe),
            "reserved": (1, probe + 1),
            "made": (first, probe + 1),
            "half answered": ((first + last) // 2, probe + 1),
            "answered": (last + 1, probe + 1),
            "settled": (last + 1, probe + 2),
        }
        for name, (lines, paid) in cuts.items():
            copy = tmp_path / name / "replay-teachers" / whole.path.name
            shutil.copytree(whole.path, copy)
            (copy / "teacher_actions.parquet").unlink()
            shutil.rmtree(copy / "steps")
            (copy / "steps").mkdir()
            (copy / "steps" / "000000.jsonl.open").write_bytes(b"".join(journal[:lines]))
            (copy / NAME).write_bytes(b"".join(ledger[:paid]))
            told = store.read_json(copy / "manifest.json")
            store.write_json(copy / "manifest.json", {**told, "status": "running", "outputs": {}})
            run = replay(tmp_path / name, rollouts, server, resume=True)
            assert run.rows(TEACHER_ACTION) == expected, name
            assert run.manifest.cost_usd == pytest.approx(cost + (PROBE if lines <= last else 0)), name  # asks again
            assert run.manifest.possibly_usd == pytest.approx(0.0), name
            assert len(server.batches) == 1, name


def test_what_an_attempt_left_open_is_held_again(tmp_path: Path) -> None:
    budget = Budget(10.0, tmp_path / NAME)
    for batch, usd in (("a", 4.0), ("b", 5.0)):
        held = budget.hold(usd, batch=batch)
        assert held is not None
        budget.write([held.line])
    again = Budget(10.0, tmp_path / NAME)
    assert (again.possibly, again.reserved) == (9.0, 0.0) and again.take_up(batch="c") is None
    taken = again.take_up(batch="a")
    assert taken is not None and (again.possibly, again.reserved) == (5.0, 4.0) and again.take_up(batch="a") is None
    again.write([{"call": taken.call, "settled": 1.0}])
    assert totals(tmp_path) == (1.0, 5.0)
