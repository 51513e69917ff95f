"""The index of runs: what did not change is not read again, and the index is never believed against the files."""

import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.runs import rewritten, written

from composer_stages.errors import BadInput
from composer_stages.runs import index, ledger, store
from composer_stages.runs.kinds import ROLLOUT
from composer_stages.runs.run import InputRef, Run, SealedFile

FIRST, SECOND, RUNNING = "collect/a-111111", "collect/b-222222", "train/c-333333"
_opened: list[list[str]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened:
        _opened[-1].append(str(arguments[0]))


sys.addaudithook(_note)


@contextmanager
def opening() -> Iterator[list[str]]:
    """The manifests and documents that this process opens, without the folder of the test."""
    paths: list[str] = []
    _opened.append(paths)
    yield paths
    _opened.pop()
    paths[:] = ["/".join(path.split("/")[-3:]) for path in paths if path.endswith((".json", ".txt"))]


def made(root: Path) -> Path:
    """Two complete runs, one of them with a document, and one in progress."""
    shutil.rmtree(root, ignore_errors=True)
    first = written(root, FIRST, [(ROLLOUT, [{"rollout_id": "r", "task_id": "t"}])])
    (first / "report.txt").write_text("good")
    sealed = SealedFile(bytes=4, sha256=store.file_sha256(first / "report.txt")).model_dump()
    rewritten(first / "manifest.json", lambda m: m | {"files": m["files"] | {"report.txt": sealed}})
    written(root, SECOND)
    written(root, RUNNING, status="running")
    return root


def old(root: Path) -> Path:
    """Wait until a change of these files would show."""
    time.sleep(store.CTIME_MARGIN_S + 0.1)
    return root


def labels(root: Path) -> list[str]:
    """What the index says of the runs, asked by a new process."""
    index._index.cache_clear()
    return [entry.facts.label for entry in index.entries(root).values()]


def test_only_what_changed_is_read_again_by_this_process_and_the_next(tmp_path: Path) -> None:
    root = made(tmp_path / "artifacts")
    for _ in range(2):
        with opening() as paths:
            assert len(index.read(root, check=True)) == 3
        assert {f"{FIRST}/manifest.json", f"{SECOND}/manifest.json"} < set(paths), "a change might not show yet"
    old(root)
    index.read(root, check=True)
    for process in ("this", "next"):
        with opening() as paths:
            index.read(root, check=True)
        assert [path for path in paths if FIRST in path or SECOND in path] == [], process
        assert f"{RUNNING}/manifest.json" in paths, "what a run in progress has cost is in its ledger"
        index._index.cache_clear()
    rewritten(root / SECOND / "manifest.json", lambda m: m | {"label": "changed"})
    shutil.rmtree(root / RUNNING)
    with opening() as paths:
        assert labels(root) == ["", "changed"]
    assert [path for path in paths if path.endswith("manifest.json")] == [f"{SECOND}/manifest.json"]


@pytest.mark.parametrize("change", ["same size", "truncated", "missing", "table"])
def test_damage_shows_although_the_files_were_found_whole_before(tmp_path: Path, change: str) -> None:
    root = old(made(tmp_path / "artifacts"))
    assert index.read(root, check=True)[FIRST].damage == ""
    report, table = root / FIRST / "report.txt", root / FIRST / "rollouts.parquet"
    kept = table.read_bytes()
    if change == "same size":
        report.write_text("evil")
    elif change == "truncated":
        report.write_text("goo")
    elif change == "missing":
        report.unlink()
    else:
        table.write_bytes(kept[:-1])
    for _ in range(2):
        assert index.read(root, check=True)[FIRST].damage.startswith(table.name if change == "table" else report.name)
        assert index.read(root)[FIRST].damage == "", "files were not compared"
        index._index.cache_clear()
    report.write_text("good")
    table.write_bytes(kept)
    assert index.read(root, check=True)[FIRST].damage == ""


def spoiled(data: bytes) -> list[bytes]:
    """Files that are no index of this version: each is taken for none."""
    body = data.partition(b"\n")[2]
    unknown = body.replace(b'"content"', b'"contents"')
    return [
        b"",
        data[:-1],
        data.replace(b'"label":""', b'"label":"x"'),
        data.replace(index.schema().encode(), b"0", 1),
        index._head(unknown) + b"\n" + unknown,
        index._head(b"[1]") + b"\n[1]",
    ]


def test_an_index_that_is_damaged_or_of_another_version_is_made_again(tmp_path: Path) -> None:
    root = old(made(tmp_path / "artifacts"))
    file = root / index.NAME
    assert labels(root) == ["", "", ""]
    whole = file.read_bytes()
    for data in spoiled(whole):
        assert data != whole
        file.write_bytes(data)
        assert labels(root) == ["", "", ""]
        assert file.read_bytes() == whole


def test_an_index_that_cannot_be_written_or_read_costs_only_time(tmp_path: Path) -> None:
    root = old(made(tmp_path / "artifacts"))
    (root / index.NAME / "a folder in its place").mkdir(parents=True)
    assert labels(root) == labels(root) == ["", "", ""]
    assert index.read(tmp_path / "absent") == {} and not (tmp_path / "absent").exists()


def test_an_unreadable_manifest_is_told_and_read_again(tmp_path: Path) -> None:
    root = old(made(tmp_path / "artifacts"))
    manifest = root / SECOND / "manifest.json"
    kept = manifest.read_bytes()
    manifest.write_bytes(kept[:-9])
    for _ in range(2):
        found = index.read(root)[SECOND]
        assert isinstance(found, BadInput) and str(manifest) in str(found)
    assert list(index.entries(root)) == [root / FIRST, root / RUNNING]
    manifest.write_bytes(kept)
    assert isinstance(index.read(root)[SECOND], index.Entry)


def test_money_of_a_run_in_progress_is_that_of_its_ledger(tmp_path: Path) -> None:
    root = old(made(tmp_path / "artifacts"))
    assert index.entries(root)[root / RUNNING].facts.cost_usd == 0
    budget = ledger.Budget(None, root / RUNNING / ledger.NAME)
    budget.write([{"call": 1, "reserved": 0.5}, {"call": 1, "settled": 0.25}])
    assert index.entries(root)[root / RUNNING].facts.cost_usd == 0.25


def _list(root: Path, seconds: float) -> None:
    """Read as a process of its own, whose index knows nothing of the other's."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert len(labels(root)) == 3


def test_two_processes_write_the_index_at_the_same_time(tmp_path: Path) -> None:
    root = old(made(tmp_path / "artifacts"))
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_list, args=(root, 1.0)) for _ in range(2)]
    for process in both:
        process.start()
    for number in range(100):
        rewritten(root / SECOND / "manifest.json", lambda m, number=number: m | {"label": str(number)})
        (root / index.NAME).unlink(missing_ok=True)
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert labels(root) == ["", "99", ""]
    assert [path.name for path in root.iterdir() if path.is_file()] == [index.NAME], "no temporary file stays"


def test_readers_of_a_run_are_found_by_what_they_read(tmp_path: Path) -> None:
    root = made(tmp_path / "artifacts")
    read = InputRef(stage="collect", path=str(root / FIRST), content="x", fingerprint="another")
    fingerprint = Run(root / FIRST).manifest.fingerprint
    reader = written(root, "evaluate/d-444444", inputs={"runs": [read.model_copy(update={"fingerprint": fingerprint})]})
    written(root, "evaluate/e-555555", inputs={"runs": [read]})
    assert [run.path for run in index.readers_of(root, Run(root / FIRST))] == [reader]
