"""The runs there are: what became of each, and why one that is not complete, or no longer up to date, is so."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from composer_cli.console import duration
from composer_cli.printing import visible_line
from composer_cli.show import runs
from stages import STAGES
from stages.errors import BadInput, UsageError
from stages.runs import manifest, runner
from stages.runs.manifest import InputRef, Manifest
from stages.runs.stage import load_stage

RED, GREEN, YELLOW, BLUE = 31, 32, 33, 34
COLOURS = {
    "complete": GREEN,
    "running": BLUE,
    "queued": BLUE,
    "cancelled": YELLOW,
    "lost": RED,
    "incomplete": YELLOW,
    "interrupted": YELLOW,
    "failed": RED,
    "unreadable": RED,
}


@dataclass(frozen=True)
class Line:
    """One run. `reason` is empty when the run is complete and up to date."""

    run: str
    status: str
    began: str = ""
    age_s: float = 0.0
    done: int = 0
    planned: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    reason: str = ""


def lines(root: Path, *, versions: bool = True) -> list[Line]:
    """Every run below the artifacts folder, stage by stage, oldest first.

    versions: whether a run counts as out of date for its stage's newer version, which imports every stage there is.
    """
    return [_line(folder, versions) for folder in runs.folders(root)]


def _line(folder: Path, versions: bool) -> Line:
    try:
        found = manifest.read(folder)
    except BadInput as error:
        return Line(runs.name(folder), "unreadable", reason=str(error))
    began, planned = datetime.fromisoformat(found.started_at), found.counts.get("planned", 0)
    return Line(
        run=runs.name(folder),
        status=found.status,
        began=found.started_at,
        age_s=(datetime.now(UTC) - began).total_seconds(),
        done=found.counts.get("done", planned if found.status == "complete" else 0),
        planned=planned,
        cost_usd=found.cost_usd,
        seconds=found.seconds,
        reason=_reason(folder, found, versions),
    )


def _reason(folder: Path, found: Manifest, versions: bool) -> str:
    if found.status == "running":
        return "in progress" if _held(folder) else "its process ended without finishing; --resume goes on"
    if found.status != "complete":
        return found.reason
    changes = [_changed(ref) for refs in found.inputs.values() for ref in refs]
    missing = [f"its {out['file']} is missing" for out in found.outputs.values() if not (folder / out["file"]).exists()]
    return "; ".join(reason for reason in [*changes, versions and _outdated(found), *missing] if reason)


def _held(folder: Path) -> bool:
    """Whether a process is at work in the folder."""
    try:
        with runner.locked(folder):
            return False
    except UsageError:
        return True


def _changed(ref: InputRef) -> str | None:
    path = Path(ref.path)
    if not (path / "manifest.json").is_file():
        return f"its input {runs.name(path)} was deleted"
    try:
        same = manifest.read(path).content == ref.content
    except BadInput:
        return f"its input {runs.name(path)} is unreadable"
    return None if same else f"its input {runs.name(path)} has changed since"


def _outdated(found: Manifest) -> str | None:
    now = load_stage(found.stage).version if found.stage in STAGES else found.stage_version
    older = found.stage_version < now
    return f"{found.stage} was version {found.stage_version} and is now {now}" if older else None


def table(found: list[Line]) -> str:
    """The runs as aligned text: words to the left, numbers to the right."""
    from tabulate import tabulate

    head = ("run", "status", "age", "units", "USD", "took", "reason")
    sides = ("left", "left", "right", "right", "right", "right", "left")
    shown = tabulate(map(_cells, found), head, tablefmt="plain", colalign=sides, disable_numparse=True)
    return "\n".join(line.rstrip() for line in shown.splitlines())


def _cells(line: Line) -> tuple[str, ...]:
    units = f"{line.done}/{line.planned}" if line.planned else ""
    age, took = age_of(line.age_s) if line.began else "", duration(line.seconds) if line.seconds else ""
    cost = f"{line.cost_usd:.2f}" if line.began else ""
    return visible_line(line.run), line.status, age, units, cost, took, visible_line(line.reason)


def jobs_table(found: list[dict[str, Any]]) -> str:
    """Submitted jobs as aligned text."""
    from tabulate import tabulate

    cells = [(job["job"], job["on"], job["status"], age_of(job["age_s"]), visible_line(job["reason"])) for job in found]
    shown = tabulate(cells, ("job", "on", "status", "age", "reason"), tablefmt="plain", disable_numparse=True)
    return "\n".join(line.rstrip() for line in shown.splitlines())


def age_of(seconds: float) -> str:
    """Roughly how long ago: 40 s, 12 min, 5 h, 3 d; 0 s where a clock was set back and it lies ahead."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"
