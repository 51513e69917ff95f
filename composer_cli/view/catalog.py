"""The runs there are, which were made from which, and what a list says of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_cli.show import runs
from composer_cli.show.status import Line, lines
from stages.errors import BadInput
from stages.runs.artifact import Run
from stages.runs.kinds import Kind
from stages.runs.manifest import InputRef

HEADLINES = ("verdict", "decision", "mean_reward", "pairs", "pairs_per_trace", "arm", "cleaner")
"""Of what a run concluded, what its line in the list shows."""


@dataclass(frozen=True)
class Listed:
    """One line of the list."""

    line: Line
    stage: str
    headline: dict[str, Any]


class Catalog:
    """Runs below a folder, read anew for every page: what happens meanwhile is seen."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def listed(self, text: str = "", stage: str = "", status: str = "") -> list[Listed]:
        """All runs that fit, newest first; `text` is looked for in name, status and reason."""
        found = [
            Listed(line, line.run.partition("/")[0], self._headline(line)) for line in lines(self.root, versions=False)
        ]
        fitting = [
            one
            for one in found
            if text.lower() in f"{one.line.run} {one.line.status} {one.line.reason} {one.headline}".lower()
            and stage in ("", one.stage)
            and status in ("", one.line.status)
        ]
        return sorted(fitting, key=lambda one: one.line.began, reverse=True)

    def _headline(self, line: Line) -> dict[str, Any]:
        if line.status == "unreadable":
            return {}
        summary = Run(self.root / line.run).manifest.summary
        return {name: summary[name] for name in HEADLINES if summary.get(name) is not None}

    def run(self, stage: str, folder: str) -> Run | None:
        """The run of this name; None where there is none, whatever else the name may point to."""
        known = {runs.name(path): path for path in runs.folders(self.root)}
        return Run(known[f"{stage}/{folder}"]) if f"{stage}/{folder}" in known else None

    def made_from(self, run: Run) -> list[Run]:
        """The runs that read this one, oldest first."""
        wanted = (run.manifest.fingerprint, run.path.name)
        return [
            one for one in self._readable() if wanted in {(ref.fingerprint, Path(ref.path).name) for ref in _read(one)}
        ]

    def inputs(self, run: Run) -> list[tuple[str, bool]]:
        """The names of the runs that this one read, and whether they are still there."""
        names = [runs.name(Path(ref.path)) for ref in _read(run)]
        return [(name, (self.root / name / "manifest.json").is_file()) for name in names]

    def with_kind(self, run: Run, kind: Kind) -> list[Run]:
        """Those made from this run, at first or second hand, that hold records of a kind."""
        children = self.made_from(run)
        found = {one.path: one for one in [*children, *(g for child in children for g in self.made_from(child))]}
        return [one for one in found.values() if one.holds(kind) and one.manifest.status == "complete"]

    def _readable(self) -> Sequence[Run]:
        found = []
        for path in runs.folders(self.root):
            try:
                found.append(Run(path))
            except BadInput:
                continue
        return found


def _read(run: Run) -> list[InputRef]:
    return [ref for refs in run.manifest.inputs.values() for ref in refs]
