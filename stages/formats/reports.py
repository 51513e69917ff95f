"""Reports of SWE-bench's harnesses: who was resolved, for which files each speaks, and what it was used for.

A report speaks for the files in its scope: the folder that it lies in and all below, or, where it lies in a folder of
the kind that harnesses make (`results/`, `logs/INSTANCE/`), the folder above that. A nearer scope comes first. A report
that was named on its own, and has nothing in its scope, speaks for everything.

A run's report lists who was resolved: whatever its run predicted and it does not list was not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

HARNESS_FOLDERS = frozenset({"logs", "results", "reports", "evaluation", "run_evaluation"})
NOT_PREDICTED = "incomplete_ids"
"""The instances of the dataset that a run did not predict, which say nothing of whose report it is."""
SHOWN = 10
"""Reports, and contradicting instances, that the lines name."""
IdsBelow = Callable[[Path | None], Iterable[str]]
"""The instances of the trajectories below a folder; of all with None."""


@dataclass(frozen=True)
class Place:
    """A file, its name in reports, and the folder that the user gave, from which it was found."""

    path: Path
    label: str
    root: Path


@dataclass
class Report:
    """What one file says. `whole_run`: it lists the resolved instances of a run, and is silent on the others."""

    place: Place
    verdicts: dict[str, bool]
    whole_run: bool
    scope: Path | None = None
    used: bool = True
    judged: set[str] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scope = self._scope()

    def _scope(self) -> Path:
        within = self._below_root
        for depth, name in enumerate(within):
            if name in HARNESS_FOLDERS or name in self.verdicts:
                return self.place.root.joinpath(*within[:depth])
        return self.place.path.parent

    @property
    def _below_root(self) -> tuple[str, ...]:
        """The folders between the root and the file; none for a file that was named itself."""
        folder, root = self.place.path.parent, self.place.root
        return folder.relative_to(root).parts if folder.is_relative_to(root) else ()

    @cached_property
    def names(self) -> set[str]:
        """What may name its run: folders, and the beginnings of its own name (`MODEL.RUN.json`)."""
        return (
            {*self._below_root, *_beginnings(self.place.path.name)}
            - HARNESS_FOLDERS
            - self.verdicts.keys()
            - {"report", "results"}
        )

    def says(self, instance: str) -> bool:
        """Whether it was resolved; by a run's report also of one that it does not list."""
        return self.verdicts.get(instance, False)


def parsed(place: Place, record: Mapping[str, Any]) -> Report | None:
    """The report that a JSON object is; None where it is none. `TypeError` where its ids are not text."""
    ids = record.get("resolved_ids", record.get("resolved"))
    if isinstance(ids, list):
        listed = {i for key, value in record.items() if isinstance(value, list) and key != NOT_PREDICTED for i in value}
        if not all(isinstance(instance, str) for instance in listed):
            raise TypeError("a list of ids holds something else")
        return Report(place, {instance: instance in ids for instance in listed}, whole_run=True)
    if isinstance(ids, bool) and "patch_exists" in record and place.path.stem == "report":
        return Report(place, {place.path.parent.name: ids}, whole_run=False)
    single = {
        str(name): value["resolved"]
        for name, value in record.items()
        if isinstance(value, Mapping) and isinstance(value.get("resolved"), bool)
    }
    return Report(place, single, whole_run=False) if single else None


class Reports:
    """All reports of an import."""

    def __init__(self) -> None:
        self.all: list[Report] = []
        self.contradicted: set[str] = set()
        self._by_scope: dict[Path | None, list[Report]] = defaultdict(list)
        self._single: dict[tuple[Path | None, str], list[Report]] = defaultdict(list)

    def settle(self, ids_below: IdsBelow) -> None:
        """Once everything was found: set aside runs' reports that list instances, none of which is here."""
        for report in self.all:
            if report.place.path == report.place.root and not any(True for _ in ids_below(report.scope)):
                report.scope = None
            if report.whole_run and report.verdicts:
                report.used = any(instance in report.verdicts for instance in ids_below(report.scope))
        for report in filter(lambda report: report.used, self.all):
            if report.whole_run:
                self._by_scope[report.scope].append(report)
            else:
                for instance in report.verdicts:
                    self._single[report.scope, instance].append(report)

    def resolved(self, path: Path, instance: str, model: str | None = None) -> bool | None:
        """Whether the instance of a file was resolved, by the nearest reports; None where none says, or two differ."""
        names = {part for part in (*path.parts[1:-1], *_beginnings(path.name)) if part not in HARNESS_FOLDERS}
        names |= {model.replace("/", "__")} if model else set()
        for scope in (*path.parents, None):
            single = _named(self._single.get((scope, instance), []), names)
            runs = _named(self._by_scope.get(scope, []), names)
            speaking = [*single, *(r for r in runs if not single or instance in r.verdicts)]
            if speaking:
                return self._verdict(instance, speaking)
        return None

    def _verdict(self, instance: str, speaking: Sequence[Report]) -> bool | None:
        said = {report.says(instance) for report in speaking}
        if len(said) > 1:
            self.contradicted.add(instance)
            return None
        for report in speaking:
            report.judged.add(instance)
            report.unlisted |= {instance} - report.verdicts.keys()
        return said.pop()

    def used_for(self) -> dict[str, Any]:
        """On which instances each report, in its order, has spoken so far, and where they contradict each other."""
        return {
            "contradicted": sorted(self.contradicted),
            "spoke": [[sorted(report.judged), sorted(report.unlisted)] for report in self.all],
        }

    def were_used_for(self, elsewhere: Mapping[str, Any]) -> None:
        """Count what the same reports were used for by another process."""
        self.contradicted.update(elsewhere["contradicted"])
        for report, (judged, unlisted) in zip(self.all, elsewhere["spoke"], strict=True):
            report.judged.update(judged)
            report.unlisted.update(unlisted)

    def lines(self) -> list[str]:
        """What was read and what it was used for, in lines for a report."""
        if not self.all:
            return []
        runs, single = [r for r in self.all if r.whole_run], [r for r in self.all if not r.whole_run]
        lines = ["", "verdicts were read from", *map(_line, runs[:SHOWN])]
        lines += [f"  ... and {len(runs) - SHOWN} more runs' reports"] if len(runs) > SHOWN else []
        if single:
            judged = len({(report.scope, instance) for report in single for instance in report.judged})
            first = f"{len(single)} reports of single instances, the first {single[0].place.label}"
            lines.append(f"  {first}: {judged} instances judged")
        if self.contradicted:
            named = ", ".join(sorted(self.contradicted)[:SHOWN])
            lines.append(
                f"  reports contradict each other on {len(self.contradicted)} instances, which have no verdict: {named}"
            )
        return lines

    def summary(self) -> dict[str, Any]:
        """The same in numbers, and the names of those that were of no use."""
        return {
            "read": len(self.all),
            "judged": len({(report.scope, instance) for report in self.all for instance in report.judged}),
            "not_listed": len({(report.scope, instance) for report in self.all for instance in report.unlisted}),
            "contradicted": len(self.contradicted),
            "unused": [report.place.label for report in self.all if not report.judged],
        }


def _line(report: Report) -> str:
    named, resolved = f"  {report.place.label}: a run's report", sum(report.verdicts.values())
    if not report.used:
        return f"{named} of {len(report.verdicts)} instances, none of which is here: not used"
    return (
        f"{named}, {resolved} resolved; {len(report.judged)} instances judged, {len(report.unlisted)} of them not "
        "listed and so not resolved"
    )


def _beginnings(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))


def _named(reports: list[Report], names: set[str]) -> list[Report]:
    """Of several reports those that are named like the file or its model, where there are any."""
    named = [report for report in reports if report.names & names] if len(reports) > 1 else []
    return named or reports


# ---- sidecars
# What lies beside trajectories and says something about them: run descriptions, verdicts, problem statements.
#
# Verdicts come as an index with one line a file, as a report beside one file, or as SWE-bench's reports of one
# instance
# or a whole run (`reports.py`). They are looked up in this order.

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
