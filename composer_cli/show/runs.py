"""The list of all runs with their status and damage, for `composer status` and the first page of `composer view`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from composer_stages import STAGES, stage_order
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import index, runner
from composer_stages.runs.catalog import find_input, name, references
from composer_stages.runs.run import Check, Run, RunFacts, read_manifest
from composer_stages.runs.stage import load_stage
from composer_stages.words import Sentence


@dataclass(frozen=True)
class RunLine:
    """One run in a list. `reason` is empty when the run is complete, up to date, and passed its own checks."""

    run: str
    status: str
    environment: str = ""
    models: str = ""
    """Of its settings: the policy's, or those of all policies."""
    began: str = ""
    age_s: float = 0.0
    done: int = 0
    planned: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0
    device: str = ""
    """Where it runs or ran."""
    reason: str = ""


FAILED_CHECKS = "it did not pass its own checks"
REPAIR = "Rerun that stage, or restore the file."
DAMAGED = "damaged"
"""The status of a complete run whose files are not those that were written."""


def lines(root: Path, *, check: Check = "sizes") -> list[RunLine]:
    """List every run below the artifacts folder, in the order of the stages, oldest first.

    check: how thoroughly the files are compared with the manifest, as `Run.damage` takes it.
    """
    return [line for line, _ in lines_and_summaries(root, check=check)]


def lines_and_summaries(
    root: Path, *, versions: bool = True, check: Check = "sizes"
) -> list[tuple[RunLine, dict[str, Any]]]:
    """Return `lines`, each with the summary of its run.

    versions: whether a run counts as out of date for its stage's newer version, which imports every stage there is.
    """
    root, now = root.resolve(), datetime.now(UTC)
    entries = index.read(root, check=check == "sizes")
    contents = {f"{root}/{run}": entry.content for run, entry in entries.items() if isinstance(entry, index.Entry)}
    listed = list[tuple[RunLine, dict[str, Any]]]()
    for run_name, entry in entries.items():
        if isinstance(entry, BadInput):
            listed.append((RunLine(run_name, "unreadable", reason=str(entry)), {}))
            continue
        facts, planned = entry.facts, entry.facts.counts.get("planned", 0)
        found_damage = entry.damage if check == "sizes" else damage(Run(root / run_name), check)
        line = RunLine(
            run=run_name,
            status=DAMAGED if found_damage else facts.status,
            environment=str(_table(facts.config, "env").get("name", "")),
            models=", ".join(_models(facts.config) or facts.summary.get("models", ())),
            began=facts.started_at,
            age_s=(now - datetime.fromisoformat(facts.started_at)).total_seconds(),
            done=facts.counts.get("done", planned if facts.status == "complete" else 0),
            planned=planned,
            cost_usd=facts.cost_usd,
            seconds=facts.seconds,
            device=facts.device,
            reason="; ".join(filter(None, [found_damage, reason(root / run_name, facts, versions, contents)])),
        )
        listed.append((line, facts.summary))
    return listed


def _models(config: Mapping[str, Any]) -> list[str]:
    """Return the models that settings name, each once."""
    named = [_table(config, "policy"), *_table(config, "policies").values()]
    return list(dict.fromkeys(str(each["model"]) for each in named if isinstance(each, dict) and each.get("model")))


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}


def reason(folder: Path, record: RunFacts, versions: bool = False, contents: Mapping[str, str] = {}) -> str:
    """Return why a run is not complete, or no longer up to date; empty when it is both.

    contents: `Manifest.content` of runs that were read already, by their absolute folder.
    """
    if record.status == "running":
        try:
            # Only the process that works in a folder holds its lock: no process, no lock, whatever the manifest says.
            with runner.locked(folder):
                return Sentence("cli.process-ended")
        except UsageError:  # another process holds the folder
            return "in progress"
    if record.status != "complete":
        return record.reason
    reasons = [FAILED_CHECKS] if record.outcome.ok is False else []
    for ref in references(record):
        if contents.get(ref.path) == ref.content:
            continue
        path = find_input(folder.resolve().parents[1], Path(ref.path))
        if not (path / "manifest.json").is_file():
            reasons.append(Sentence("cli.input-deleted", name=name(path)))
            continue
        try:
            if (contents.get(str(path)) or read_manifest(path).content) != ref.content:
                reasons.append(Sentence("cli.input-changed", name=name(path)))
        except BadInput:
            reasons.append(Sentence("cli.input-unreadable", name=name(path)))
    if versions and record.stage in STAGES and record.stage_version < (now := load_stage(record.stage).version):
        reasons.append(Sentence("cli.stage-version-raised", stage=record.stage, before=record.stage_version, now=now))
    return "; ".join(reasons)


def damage(run: Run, check: Check = "sizes") -> str:
    """Return the first damaged file of a run in words; empty without one."""
    if run.manifest.status == "complete":
        return run.damage(check) or ""
    if check == "bytes":  # an unfinished run has no digests yet; its units have checksums in their gzip files
        try:
            for _ in run.units():
                pass
        except BadInput as error:
            return str(error)
    return ""


def with_ancestors(ends: Sequence[Run]) -> list[Run]:
    """Return these runs and all that they were made from, in the order of the stages.

    Inputs that were deleted are left out: the manifest that names them says so. Raises `BadInput` for a complete run
    whose files are damaged.
    """
    chain: dict[Path, Run] = {}
    pending = list(ends)
    while pending:
        run = pending.pop(0)
        if run.path in chain:
            continue
        if found_damage := damage(run, "tables"):
            raise BadInput("cli.run-damaged", run=run.path, damage=found_damage)
        chain[run.path] = run
        root = run.path.resolve().parents[1]
        paths = [find_input(root, Path(ref.path)) for ref in references(run.manifest)]
        pending[:0] = [Run(path) for path in paths if (path / "manifest.json").is_file()]
    return sorted(chain.values(), key=lambda run: (stage_order(run.manifest.stage), run.path.name))
