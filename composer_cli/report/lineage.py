"""Which runs belong together: a run, and everything it was made from."""

from collections.abc import Sequence
from pathlib import Path

from composer_cli.show import runs
from stages import names, order
from stages.errors import BadInput
from stages.runs.artifact import Run

PROBE_ENDS = ("probe-uat", "probe-compare", "probe-plot")
"""Stages of the probe that nothing else reads."""


def chain(root: Path, wanted: Sequence[str]) -> list[Run]:
    """The runs that are named, or the newest of the last stage that has one, and of the probe, with all before them."""
    ends = [Run(runs.find(root, text)) for text in wanted] or _newest(root)
    found: dict[Path, Run] = {}
    for end in ends:
        _add_ancestors(end, found)
    return sorted(found.values(), key=lambda run: (order(run.manifest.stage), run.path.name))


def _newest(root: Path) -> list[Run]:
    """The last stage of the pipeline that has a run, and what the probe found and drew."""
    latest = {stage: runs.latest(root, stage) for stage in (*names("pipeline"), *PROBE_ENDS)}
    there = {stage: path for stage, path in latest.items() if path is not None}
    if not there:
        raise BadInput(f"There is no finished run in {root} to report on. `composer run --preset demo` makes some.")
    last = [stage for stage in names("pipeline") if stage in there][-1:]
    return [Run(there[stage]) for stage in [*last, *(stage for stage in PROBE_ENDS if stage in there)]]


def _add_ancestors(run: Run, found: dict[Path, Run]) -> None:
    """Inputs that were deleted are left out: the manifest that names them says so."""
    if run.path in found:
        return
    if run.manifest.status == "complete" and (damage := run.damage()):
        raise BadInput(f"{run.path}: {damage}. Rerun that stage, or restore the file.")
    found[run.path] = run
    for ref in (ref for refs in run.manifest.inputs.values() for ref in refs):
        if (Path(ref.path) / "manifest.json").is_file():
            _add_ancestors(Run(Path(ref.path)), found)
