"""What lies beside trajectories and says something about them: run descriptions, verdicts, problem statements.

Verdicts come as SWE-bench reports of one instance or a whole run, or as an index with one line a file. They are looked
up by file first, then by instance within the folder of the report.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
SUFFIXES = (".gz", ".jsonl", ".json", ".traj", ".eval", ".parquet")
KINDS = (".results", ".metadata", ".report", ".rollouts", ".output", ".traces", ".traj")


@dataclass(frozen=True)
class ReportedOutcome:
    """What a report says of a trajectory. None where it does not say."""

    resolved: bool | None
    model: str | None = None
    agent: str | None = None


@dataclass
class Sidecars:
    """Descriptions by folder and stem, verdicts by file and by folder and instance, statements by instance."""

    model: str | None = None
    """The model that the user names for files that name none."""
    descriptions: dict[tuple[Path, str], Record] = field(default_factory=dict)
    verdicts: dict[tuple[Path, str], ReportedOutcome] = field(default_factory=dict)
    statements: dict[str, str] = field(default_factory=dict)

    def description(self, path: Path) -> Record:
        """The run description beside a file: of the same stem, else the folder's only one."""
        return self.descriptions.get((path.parent, stem(path))) or self.descriptions.get((path.parent, "")) or {}

    def verdict(self, path: Path, instance: str | None) -> ReportedOutcome | None:
        """The verdict on a file, or on an instance by a report in the file's folder or one above it."""
        places = [(path, instance or ""), (path, ""), (path.parent, stem(path))]
        places += [(folder, instance) for folder in path.parents] if instance else []
        return next((self.verdicts[place] for place in places if place in self.verdicts), None)

    def add(self, path: Path, record: Any) -> bool:
        """Take in a record that is no trajectory; False when it is of no known use."""
        if isinstance(record, Mapping) and is_description(record):
            name = stem(path)
            self.descriptions[path.parent, "" if name == "metadata" else name] = dict(record)
        elif isinstance(record, Mapping) and is_instance(record):
            self.statements[record["instance_id"]] = record["problem_statement"]
        elif verdicts := list(_verdicts(path, record)):
            self.verdicts |= dict(verdicts)
        else:
            return False
        return True


def stem(path: Path) -> str:
    """A file's name without what says how it is stored and what kind of file it is."""
    name = path.name
    while name.endswith(SUFFIXES):
        name = name[: -len(Path(name).suffix)]
    while name.endswith(KINDS):
        name = name[: -len(Path(name).suffix)]
    return name


def is_description(record: Mapping[str, Any]) -> bool:
    """Whether this is the metadata of a verifiers or OpenEnv run."""
    return "model" in record and ("env" in record or "env_id" in record) and "prompt" not in record


def is_instance(record: Mapping[str, Any]) -> bool:
    """Whether this is a row of a SWE-bench dataset."""
    return {"instance_id", "problem_statement", "base_commit"} <= record.keys() and "history" not in record


def _verdicts(path: Path, record: Any) -> Iterable[tuple[tuple[Path, str], ReportedOutcome]]:
    if not isinstance(record, Mapping):
        return
    if "resolved" in record and "file" in record and "instance_id" in record:
        target = (path.parent / record["file"]).resolve()
        yield (
            (target, record["instance_id"]),
            ReportedOutcome(record["resolved"], record.get("model"), record.get("agent")),
        )
    elif isinstance(record.get("resolved"), bool) and "patch_exists" in record:
        yield (path.parent, stem(path)), ReportedOutcome(record["resolved"])
    elif isinstance(ids := record.get("resolved_ids", record.get("resolved")), list):
        yield from _of_a_run(path, record, set(ids))
    else:
        for name, value in record.items():
            if isinstance(value, Mapping) and isinstance(value.get("resolved"), bool):
                yield (path.parent, str(name)), ReportedOutcome(value["resolved"])


def _of_a_run(
    path: Path, record: Mapping[str, Any], resolved: set[str]
) -> Iterable[tuple[tuple[Path, str], ReportedOutcome]]:
    """A run's report: who was resolved, and who was judged at all."""
    judged = {
        i
        for key in ("submitted_ids", "completed_ids", "unresolved_ids", "generated", "applied", "no_generation")
        for i in record.get(key) or []
    }
    for instance in sorted(resolved | judged):
        yield (path.parent, instance), ReportedOutcome(instance in resolved)
