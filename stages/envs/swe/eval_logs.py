"""Saved logs of SWE-bench's harnesses, with what lies beside them: patch, verdict of the harness, instance row.

Two layouts. Containers: `<instance>/test_output.txt` with `report.json` and `patch.diff` beside it (also SWE-smith's).
Early 2024: `<instance>.<model>.eval.log[.gz]`, with a `report.json` that lists the resolved instances of the whole run.
"""

import gzip
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from stages.envs.repo.grading import TestsStatus
from stages.envs.swe.instance_index import InstanceIndex
from stages.envs.swe.instances import LISTS
from stages.envs.swe.report import VOID
from stages.errors import BadInput
from stages.runs import store
from stages.runs.records import Row

OUTPUT = "test_output.txt"
BEFORE_GOLD = "test_output_pre_gold.txt"
RUN_LOG = "run_instance.log"
UNFINISHED = (RUN_LOG, "eval.sh")
PLAIN = re.compile(r"(?P<instance>.+?__.+?-\d+)\.(?P<model>.+)\.eval\.log(\.gz)?$")


@dataclass(frozen=True)
class EvalLog:
    """One log; None is what is not there. `file` is its path below the folder that was asked for.

    `harness_resolved` and `harness_tests` are the harness's verdict on it, and on every single test. `early`: of the
    harness of early 2024.
    """

    instance: str
    file: str
    early: bool
    log: str | None
    row: Row | None
    model: str | None = None
    patch: str | None = None
    harness_resolved: bool | None = None
    harness_tests: TestsStatus | None = None
    before_gold: str | None = None
    flaw: str | None = None
    """Why there is no log, or only a part of it."""

    @property
    def digest(self) -> str:
        """What the verdict depends on."""
        return store.digest(vars(self))


def find(folder: Path, given: Sequence[Path] = ()) -> list[EvalLog]:
    """Every log below a folder, in order of their paths. `given` are further files of instance rows.

    `BadInput` where it is no folder or holds no logs.
    """
    if not folder.is_dir():
        raise BadInput(f"{str(folder)!r} is not a folder. Give the folder that holds the logs.")
    index = InstanceIndex(folder, given)
    logs = [_container(path, folder, index) for path in _containers(folder)]
    plain = ((path, PLAIN.match(path.name)) for path in sorted(folder.rglob("*.eval.log*")))
    logs += [_plain(path, match, folder, index) for path, match in plain if match]
    if not logs:
        raise BadInput(f"{folder} holds no logs: neither <instance>/{OUTPUT} nor <instance>.<model>.eval.log.")
    return logs


def _containers(folder: Path) -> list[Path]:
    """Folders of instances: those with a test output, and those whose run did not get so far."""
    marks = (OUTPUT, f"{OUTPUT}.gz", *UNFINISHED)
    return sorted({path.parent for mark in marks for path in folder.rglob(mark)})


def _container(place: Path, folder: Path, index: InstanceIndex) -> EvalLog:
    """One instance's folder."""
    whole = _json(place / "report.json")
    by_instance = len(whole) == 1 and isinstance(next(iter(whole.values())), dict)
    instance, report = next(iter(whole.items())) if by_instance else (place.resolve().name, whole)
    log, flaw = _text(place / OUTPUT)
    row = index.near(instance, place.resolve()) or _reported_row(report) or index.elsewhere(instance)
    return EvalLog(
        instance=instance,
        file=str(place.relative_to(folder) / OUTPUT),
        early=False,
        log=log,
        row=row and {**row, "instance_id": instance},
        model=report.get("model_name_or_path") or _model(place.resolve()),
        patch=_text(place / "patch.diff")[0],
        harness_resolved=report["resolved"] if isinstance(report.get("resolved"), bool) else None,
        harness_tests=report.get("tests_status") or None,
        before_gold=_text(place / BEFORE_GOLD)[0],
        flaw=flaw or (None if log is not None else _why_none(place)),
    )


def _model(place: Path) -> str | None:
    """The model by the folders: `run_evaluation/RUN/MODEL/INSTANCE`, or `MODEL/logs/INSTANCE`."""
    above = [folder.name for folder in place.parents]
    if above[2:3] == ["run_evaluation"]:
        return above[0].replace("__", "/")
    return above[1] if above[0] == "logs" and above[1] else None


def _why_none(place: Path) -> str:
    """Why there is no test output."""
    run = _text(place / RUN_LOG)[0] or ""
    ends = [mark for mark in (*VOID, "Error building image", "Timeout error") if mark in run]
    return f"no test output is stored{f', and {RUN_LOG} says {ends[0]!r}' if ends else ''}"


def _reported_row(report: Mapping[str, Any]) -> Row | None:
    """The lists that a report holds: what succeeded and what failed, or, after a validation, the names alone."""
    status = report.get("tests_status") or report
    return {name: _all_names(status[name]) for name in LISTS} if status.keys() >= set(LISTS) else None


def _all_names(value: Any) -> list[str]:
    return [*value.get("success", ()), *value.get("failure", ())] if isinstance(value, dict) else list(value)


def _plain(path: Path, match: re.Match[str], folder: Path, index: InstanceIndex) -> EvalLog:
    """One log of the early harness; `match` is that of its name."""
    instance = match["instance"]
    resolved = _json(path.parent / "report.json").get("resolved")
    log, flaw = _text(path)
    return EvalLog(
        instance=instance,
        file=str(path.relative_to(folder)),
        early=True,
        log=log,
        row=index.near(instance, path.parent.resolve()) or index.elsewhere(instance),
        model=match["model"],
        harness_resolved=instance in resolved if isinstance(resolved, list) else None,
        flaw=flaw,
    )


def _text(path: Path) -> tuple[str | None, str | None]:
    """A file as text, plain or gzip, and what is wrong with it; every kind of line end becomes one newline."""
    for candidate in (path, path.with_name(f"{path.name}.gz")):
        if candidate.is_file():
            data, flaw = _unpacked(candidate.read_bytes())
            text = data.decode(errors="replace")
            return text.replace("\r\n", "\n").replace("\r", "\n"), flaw
    return None, None


def _unpacked(data: bytes) -> tuple[bytes, str | None]:
    """The content, as far as a damaged archive gives it."""
    if data[:2] != b"\x1f\x8b":
        return data, None
    try:
        return gzip.decompress(data), None
    except (OSError, EOFError, zlib.error) as error:
        return b"".join(_pieces(data)), f"the archive is damaged ({error})"


def _pieces(data: bytes) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits=31)
    try:
        yield stream.decompress(data)
    except zlib.error:
        return


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none, or where it is torn."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
