"""What lies beside trajectories and says something about them: run descriptions, verdicts, problem statements.

Verdicts come as an index with one line a file, as a report beside one file, or as SWE-bench's reports of one instance
or a whole run (`reports.py`). They are looked up in this order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.importers.reports import Place, Reports, parsed

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
    """Descriptions by folder and stem, verdicts by file, reports, statements by instance."""

    model: str | None = None
    """The model that the user names for files that name none."""
    redact: bool = True
    """Whether what is likely a secret is replaced."""
    descriptions: dict[tuple[Path, str], Record] = field(default_factory=dict)
    verdicts: dict[tuple[Path, str], ReportedOutcome] = field(default_factory=dict)
    reports: Reports = field(default_factory=Reports)
    statements: dict[str, str] = field(default_factory=dict)
    trials: dict[Path, Record] = field(default_factory=dict)
    """Harbor's results of single trials, by folder."""

    def description(self, path: Path) -> Record:
        """The run description beside a file: of the same stem, else the folder's only one."""
        return self.descriptions.get((path.parent, stem(path))) or self.descriptions.get((path.parent, "")) or {}

    def trial(self, path: Path) -> Record:
        """Harbor's result of the trial that a file belongs to: in its folder or the one above; empty without one."""
        return self.trials.get(path.parent) or self.trials.get(path.parent.parent) or {}

    def verdict(self, path: Path, instance: str | None, model: str | None = None) -> ReportedOutcome | None:
        """The verdict on a file, or on its instance; the model tells reports of several models in one place apart."""
        places = [(path, instance or ""), (path, ""), (path.parent, stem(path))]
        of_file = next((self.verdicts[place] for place in places if place in self.verdicts), None)
        if of_file is not None or instance is None:
            return of_file
        resolved = self.reports.resolved(path, instance, model)
        return None if resolved is None else ReportedOutcome(resolved)

    def add(self, place: Place, record: Any) -> bool:
        """Take in a record that is no trajectory; False when it is of no known use."""
        path = place.path
        if not isinstance(record, Mapping):
            return False
        if is_description(record):
            name = stem(path)
            self.descriptions[path.parent, "" if name == "metadata" else name] = dict(record)
        elif is_trial(record):
            self.trials[path.parent] = dict(record)
        elif is_instance(record):
            self.statements[record["instance_id"]] = record["problem_statement"]
        elif {"resolved", "file", "instance_id"} <= record.keys():
            target = (path.parent / record["file"]).resolve()
            named = ReportedOutcome(record["resolved"], record.get("model"), record.get("agent"))
            self.verdicts[target, record["instance_id"]] = named
        elif report := parsed(place, record):
            self.reports.all.append(report)
        elif isinstance(record.get("resolved"), bool) and "patch_exists" in record:
            self.verdicts[path.parent, stem(path)] = ReportedOutcome(record["resolved"])
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


def is_trial(record: Mapping[str, Any]) -> bool:
    """Whether this is Harbor's result of one trial."""
    return {"task_name", "verifier_result"} <= record.keys() and not isinstance(record["verifier_result"], str)
