"""Read files that describe or judge trajectories in other files: descriptions of runs, verdicts, reports, statements.

Verdicts come as an index with one line a file, as a report on one file, or as SWE-bench's reports of one instance or a
whole run. They are looked up in this order (`Sidecars.verdict`).

A report applies to the files in its scope: its folder and all below, or, where it is in a folder of the kind that
harnesses make (`results/`, `logs/INSTANCE/`), the folder above that. A nearer scope comes first. A report that the user
named on its own, and that has nothing in its scope, applies to everything. A run's report lists the resolved instances:
whatever its run predicted and it does not list was not resolved.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from composer_stages.formats.measurement import MeasuredLog, State
from composer_stages.runs.kinds import Row
from composer_stages.words import Sentence

SB_CLI = "sb-cli-reports"
"""The folder in which sb-cli writes reports of SWE-bench's hosted evaluation, below its working folder."""
HARNESS_FOLDERS = frozenset({"logs", "results", "reports", "evaluation", "run_evaluation", SB_CLI})
RESOLVED = ("resolved_ids", "success_ids", "resolved")
NOT_RUN = ("incomplete_ids", "pending_ids")
"""Lists of instances that a run did not predict or judge: they are no evidence of which run a report belongs to, and
what was predicted of them has no verdict."""
INFRASTRUCTURE, REASONS = "infra_failure_ids", "failure_reasons"
"""Instances that SWE-bench 5 lists as failures of its machines, beside their place among the unresolved; and why."""
ERRORS = "error_ids"
"""Instances whose run left no report: a patch that does not apply, a time limit, or a failure of the machine. SWE-bench
counts them as unresolved."""
BROKEN = State.SCORED_WITH_ERROR, "no report of the harness"
OF_PRO = re.compile(r"instance_[\w.-]+__[\w.-]+-[0-9a-f]{40}")
"""The name of an instance of SWE-bench Pro, which ends in its commit."""
STATS = "stats"
"""What numbers that a program reports of a folder are described under."""
TIME = "time of the file"
SUFFIXES = (".gz", ".jsonl", ".json", ".traj", ".eval", ".parquet", ".csv", ".tsv")
KINDS = (".results", ".metadata", ".report", ".rollouts", ".output", ".traces", ".traj")
TIMED = re.compile(r"20\d\d-\d\d-\d\dT\d\d")
TIME_OF_FILE = re.compile(r"20\d\d-\d\d-\d\dT.*$")
TASK_FILE = re.compile(r"^(?:samples_|details_)?(?P<task>.+?)(?:_20\d\d-\d\d-\d\dT.*)?$")
IdsBelow = Callable[[Path | None], Iterable[str]]
"""Yields the instances of the trajectories below a folder, of all with None."""


@dataclass(frozen=True)
class FileLocation:
    """A file, its name in rows and reports, and the folder or file of the user's path that it was found by."""

    path: Path
    label: str
    root: Path = field(default=Path("/"), kw_only=True, compare=False)


@dataclass
class Report:
    """The verdicts of one file. `whole_run`: it lists the resolved instances of a run and leaves out the others."""

    location: FileLocation
    verdicts: dict[str, bool]
    whole_run: bool
    unjudged: dict[str, tuple[State, str]] = field(default_factory=dict)
    """Why instances have no verdict."""
    errors: frozenset[str] = frozenset()
    """Instances whose verdict is that their run ended in an error."""
    total: tuple[int, int | None] | None = None
    """How many instances are resolved as the program counts, and of how many that it judged."""
    scope: Path | None = None
    used: bool = True
    judged: set[str] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        folder, root = self.location.path.parent, self.location.root
        # The folders between the root and the file; none for a file that the user named itself.
        within = folder.relative_to(root).parts if folder.is_relative_to(root) else ()
        depths = (depth for depth, name in enumerate(within) if name in HARNESS_FOLDERS or name in self.verdicts)
        depth = next(depths, None)
        self.scope = folder if depth is None else root.joinpath(*within[:depth])
        # What may name its run: folders, and parts of its own name (`MODEL.RUN.json`).
        name = self.location.path.name
        dots = [at for at, character in enumerate(name) if character == "."]
        named = {*within, *(name[:at] for at in dots)}
        # What is behind the model, and the parts of sb-cli's names, `SUBSET__SPLIT__RUN.json`.
        named |= {name[at + 1 : dots[-1]] for at in dots[:-1]} | {*name[: dots[-1]].split("__")}
        self.names = named - HARNESS_FOLDERS - self.verdicts.keys() - {"report", "results"}


def is_of_pro(record: Any) -> bool:
    """Return whether a record is the `eval_results.json` of SWE-bench Pro: a verdict by instance.

    Those that its machinery lost stand in `infra_errors.json` (scaleapi/SWE-bench_Pro-os, `swe_bench_pro_eval.py`).
    """
    if not isinstance(record, Mapping) or not record:
        return False
    return all(isinstance(each, bool) for each in record.values()) and all(map(OF_PRO.match, record))


def parse_report(location: FileLocation, record: Mapping[str, Any]) -> Report | None:
    """Return the report in a JSON object, None if it is not a report; `TypeError` if its ids are not text."""
    # `resolved_ids` is SWE-bench's report of a run since 2.0, `success_ids` that of SWE-bench-Live; leaderboard
    # submissions have a list under `resolved`.
    ids = next((record[name] for name in RESOLVED if name in record), None)
    if isinstance(ids, list):
        lists = {key: value for key, value in record.items() if isinstance(value, list)}
        if not all(isinstance(instance, str) for value in lists.values() for instance in value):
            raise TypeError(Sentence("formats.report-id-not-text"))
        listed = {instance for key, value in lists.items() if key not in NOT_RUN for instance in value}
        unrun = {instance for key in NOT_RUN for instance in lists.get(key, ())}
        reasons = record.get(REASONS) or {}
        unjudged = dict.fromkeys(unrun - {*ids}, (State.NOT_RUN, State.NOT_RUN.value))
        for instance in lists.get(INFRASTRUCTURE, ()):
            unjudged[instance] = State.INVALID, str(reasons.get(instance) or "infrastructure failure")
        number, size = (record.get(f"{name}_instances") for name in ("resolved", "submitted"))
        total = (number, size if isinstance(size, int) else None) if isinstance(number, int) else None
        verdicts = {instance: instance in ids for instance in listed}
        return Report(location, verdicts, True, unjudged, frozenset(lists.get(ERRORS, ())), total)
    # The verdict without the instance around it: then the folder names the instance.
    if isinstance(ids, bool) and {"patch_exists", "PASS_TO_PASS"} & record.keys() and location.path.stem == "report":
        return Report(location, {location.path.parent.name: ids}, whole_run=False)
    if is_of_pro(record):
        return Report(location, dict(record), whole_run=False)
    single = {
        str(name): value["resolved"]
        for name, value in record.items()
        if isinstance(value, Mapping) and isinstance(value.get("resolved"), bool)
    }
    return Report(location, single, whole_run=False) if single else None


@dataclass
class Reports:
    """All reports of an import; `runs` by scope and `single` by scope and instance are filled by `settle`."""

    all: list[Report] = field(default_factory=list)
    contradicted: set[str] = field(default_factory=set)
    runs: dict[Path | None, list[Report]] = field(default_factory=lambda: defaultdict(list))
    single: dict[tuple[Path | None, str], list[Report]] = field(default_factory=lambda: defaultdict(list))

    def settle(self, ids_below: IdsBelow) -> None:
        """Index the reports once all files were found; ignore runs' reports without an imported instance."""
        for report in self.all:
            if report.location.path == report.location.root and not any(True for _ in ids_below(report.scope)):
                report.scope = None
            if report.whole_run and report.verdicts:
                report.used = any(instance in report.verdicts for instance in ids_below(report.scope))
        for report in filter(lambda report: report.used, self.all):
            if report.whole_run:
                self.runs[report.scope].append(report)
            else:
                for instance in report.verdicts:
                    self.single[report.scope, instance].append(report)

    def num_resolved(self, path: Path) -> tuple[int, int | None] | None:
        """Return how many instances the nearest report of a run calls resolved, and of how many; None without one."""
        runs_of_log = next((runs for scope in (*path.parents, None) if (runs := self.runs.get(scope))), [])
        return runs_of_log[0].total if len(runs_of_log) == 1 else None

    def outcome(self, path: Path, instance: str, model: str | None = None) -> "ReportedOutcome | None":
        """Return the verdict of the nearest reports on a file's instance; None without one, or if two differ."""
        beginnings = (path.name[:end] for end, character in enumerate(path.name) if character == ".")
        names = {*path.parts[1:-1], *beginnings} - HARNESS_FOLDERS
        # Harnesses replace the slash of a model's name in names of files: `org__model.run.json`.
        names |= {model.replace("/", "__")} if model else set()
        for scope in (*path.parents, None):
            single = _named(self.single.get((scope, instance), []), names)
            runs = _named(self.runs.get(scope, []), names)
            # A run's report that lists the instance counts as much as a report of its own; one that leaves it out
            # counts only where there is no other, as "not resolved".
            applying = [*single, *(r for r in runs if not single or instance in r.verdicts)]
            if not applying:
                continue
            unjudged = [report.unjudged[instance] for report in applying if instance in report.unjudged]
            applying = [report for report in applying if instance not in report.unjudged]
            if not applying:
                return ReportedOutcome(None, None, None, *unjudged[0])
            verdicts = {report.verdicts.get(instance, False) for report in applying}
            # Reports of the same instances that differ are of several runs, of which either may be this one.
            of_runs = [report.verdicts for report in applying if report.whole_run]
            if len(verdicts) > 1 or any(a.keys() == b.keys() and a != b for a, b in combinations(of_runs, 2)):
                self.contradicted.add(instance)
                return ReportedOutcome(None, None, None, State.MISSING, "reports contradict")
            for report in applying:
                report.judged.add(instance)
                report.unlisted |= {instance} - report.verdicts.keys()
            is_error = any(instance in report.errors for report in applying)
            return ReportedOutcome(verdicts.pop(), None, None, *(BROKEN if is_error else ()))
        return None

    def usage(self) -> dict[str, Any]:
        """Return the instances that each report, in its order, has judged so far, and those that contradict."""
        return {
            "contradicted": sorted(self.contradicted),
            "by_report": [[sorted(report.judged), sorted(report.unlisted)] for report in self.all],
        }

    def add_usage(self, elsewhere: Mapping[str, Any]) -> None:
        """Add the `usage` of the same reports in another process."""
        self.contradicted.update(elsewhere["contradicted"])
        for report, (judged, unlisted) in zip(self.all, elsewhere["by_report"], strict=True):
            report.judged.update(judged)
            report.unlisted.update(unlisted)

    @property
    def num_judged(self) -> int:
        """Return the number of instances that reports of single instances judged."""
        single = (report for report in self.all if not report.whole_run)
        return len({(report.scope, instance) for report in single for instance in report.judged})

    def summary(self) -> dict[str, Any]:
        """Return the numbers of reports and judged instances, and the names of unused reports."""
        return {
            "read": len(self.all),
            "judged": len({(report.scope, instance) for report in self.all for instance in report.judged}),
            "not_listed": len({(report.scope, instance) for report in self.all for instance in report.unlisted}),
            "contradicted": len(self.contradicted),
            "unused": [report.location.label for report in self.all if not report.judged],
        }


def _named(reports: list[Report], names: set[str]) -> list[Report]:
    """Return those of several reports that share most names with the file or its model, all if none does."""
    shared = [len(report.names & names) for report in reports]
    return [report for report, number in zip(reports, shared, strict=True) if number == max(shared)]


@dataclass(frozen=True)
class ReportedOutcome:
    """The verdict on a trajectory; None for fields that are not recorded."""

    resolved: bool | None
    model: str | None = None
    agent: str | None = None
    state: State | None = None
    reason: str = ""


@dataclass
class Sidecars:
    """Descriptions by folder and stem, verdicts by file, reports, statements by instance."""

    model: str | None = None
    """The model of files that record none."""
    redact: bool = True
    """Whether likely secrets are replaced."""
    score: str = ""
    """The score that is the reward, where a log holds several."""
    descriptions: dict[tuple[Path, str], Row] = field(default_factory=dict)
    verdicts: dict[tuple[Path, str], ReportedOutcome] = field(default_factory=dict)
    reports: Reports = field(default_factory=Reports)
    statements: dict[str, str] = field(default_factory=dict)
    trials: dict[Path, Row] = field(default_factory=dict)
    """Harbor's results of single trials, by folder."""
    regraded: set[str] = field(default_factory=set)
    """Ids of trials whose rollout another trial has graded again, whose verdict counts in their place."""
    recorded: dict[Path, tuple[Any, Any]] = field(default_factory=dict)
    """The file and the reader of a trial's record, by the one transcript of another format that the trial has."""
    logs: dict[tuple[Path, Hashable], MeasuredLog] = field(default_factory=dict)
    """What the logs of the files are of (`Origin.log`)."""

    def log(self, key: tuple[Path, Hashable], make: Callable[[], MeasuredLog]) -> MeasuredLog:
        """Return what a log is of, which is made once; key: a file or folder, and which of its logs."""
        log = self.logs.get(key)
        if log is None:
            log = self.logs[key] = make()
        return log

    def trial_folder(self, path: Path) -> Path | None:
        """Return the folder of the trial of Harbor that a file lies in, the nearest above it."""
        return next((folder for folder in path.parents if folder in self.trials), None)

    def description(self, path: Path) -> Row:
        """Return the run description with a file's stem or time, else the folder's last one, else an empty one."""
        names = (stem(path), time_of(path), "")
        return next(filter(None, (self.descriptions.get((path.parent, name)) for name in names)), {})

    def verdict(self, path: Path, instance: str | None, model: str | None = None) -> ReportedOutcome | None:
        """Return the verdict on a file, or on its instance; the model distinguishes several reports in one place."""
        places = [(path, instance or ""), (path, ""), (path.parent, stem(path))]
        of_file = next((self.verdicts[key] for key in places if key in self.verdicts), None)
        if of_file is not None or instance is None:
            return of_file
        return self.reports.outcome(path, instance, model)

    def add(self, location: FileLocation, record: Any) -> bool:
        """Add a record that is not a trajectory; return False if it is of no known kind."""
        path = location.path
        if not isinstance(record, Mapping):
            return False
        if "model" in record and ("env" in record or "env_id" in record) and "prompt" not in record:
            # The metadata of a verifiers or OpenEnv run; `env` was renamed to `env_id`. Rollouts have a prompt too.
            name = stem(path)
            self.descriptions[path.parent, "" if name == "metadata" else name] = dict(record)
        elif {"results", "configs", "config"} <= record.keys():
            # The results of lm-evaluation-harness, which describe the samples of their folder, first those of their
            # time: several runs of a model lie in one folder.
            config = record["config"]
            model = record.get("model_name") or config.get("model_args") or config.get("model")
            sampling = {name: config.get(name) for name in ("gen_kwargs", "limit") if config.get(name) is not None}
            about = {**record, "model": model, "sampling": sampling, "directions": _directions(record)}
            about[TIME] = time_of(path)
            self.descriptions[path.parent, time_of(path)] = self.descriptions[path.parent, ""] = about
        elif isinstance(record.get("adapter_spec"), Mapping) and "scenario_spec" in record:
            # The specification of a run of HELM.
            self.descriptions[path.parent, ""] = {**record["adapter_spec"], "env": record.get("name")}
        elif {"results", "config_general"} <= record.keys():
            # The results of LightEval, which has them in another folder than the details.
            self.descriptions[path.parent, time_of(path)] = dict(record)
        elif {"name", "count", "sum"} <= record.keys() and isinstance(record["name"], Mapping):
            # One of HELM's statistics of a run.
            self.descriptions.setdefault((path.parent, STATS), {}).setdefault(STATS, []).append(dict(record))
        elif isinstance(record.get("stats"), Mapping) and "evals" in record["stats"]:
            # Harbor's result of a job.
            self.descriptions[path.parent, STATS] = dict(record["stats"])
        elif {"domain", "num_simulations", "metrics"} <= record.keys():
            # What NVIDIA's tau2 reports of the file beside it.
            self.descriptions[path.parent, stem(path).removesuffix("_results")] = dict(record)
        elif {"info", "tasks", "simulation_index"} <= record.keys():
            # tau2's description of a run whose simulations have a file each.
            self.descriptions[path.parent / "simulations", ""] = dict(record)
        elif {"run_id", "agent_name", "model_name"} <= record.keys():
            # The metadata of a run of Terminal-Bench.
            self.descriptions[path.parent, ""] = {"model": record["model_name"]}
        elif {"task_name", "verifier_result"} <= record.keys() and not isinstance(record["verifier_result"], str):
            # Harbor's result of one trial.
            self.trials[path.parent] = dict(record)
            graded = (record.get("config") or {}).get("source_trial") or {}
            self.regraded |= {str(graded["trial_id"])} if graded.get("trial_id") else set()
        elif {"instance_id", "problem_statement", "base_commit"} <= record.keys() and "history" not in record:
            # A row of a SWE-bench dataset; a trajectory (with a history) may repeat these columns.
            self.statements[record["instance_id"]] = record["problem_statement"]
        elif {"resolved", "file", "instance_id"} <= record.keys():
            # A line of an index of trajectories, whose paths are relative to the index.
            target = (path.parent / record["file"]).resolve()
            outcome = ReportedOutcome(record["resolved"], record.get("model"), record.get("agent"))
            self.verdicts[target, record["instance_id"]] = outcome
        elif report := parse_report(location, record):
            self.reports.all.append(report)
        elif isinstance(record.get("resolved"), bool) and "patch_exists" in record:
            self.verdicts[path.parent, stem(path)] = ReportedOutcome(record["resolved"])
        else:
            return False
        return True


def _directions(results: Mapping[str, Any]) -> dict[str, dict[str, bool]]:
    """Return whether higher values are better, by task and metric, from results of lm-evaluation-harness.

    Those of before 2024-07 say it in the tasks' configurations alone.
    """
    directions = dict[str, dict[str, bool]]()
    for task, config in results["configs"].items():
        for metric in config.get("metric_list") or [] if isinstance(config, Mapping) else []:
            if isinstance(metric.get("higher_is_better"), bool):
                directions.setdefault(task, {})[str(metric.get("metric"))] = metric["higher_is_better"]
    for task, flags in (results.get("higher_is_better") or {}).items():
        # None where the tasks of a group differ.
        directions.setdefault(task, {}).update({name: flag for name, flag in flags.items() if isinstance(flag, bool)})
    return directions


def time_of(path: Path) -> str:
    """Return the time at the end of a file's name, empty without one."""
    match = TIME_OF_FILE.search(stem(path))
    return match[0] if match else ""


def task_of(path: Path) -> str:
    """Return the task that a file of samples or details is named after, without the time at its end."""
    return TASK_FILE.sub(r"\g<task>", stem(path))


def differing_folders(paths: Iterable[str]) -> list[str]:
    """Return the names of the files' folders if all file names begin with a time and all folders differ, else none.

    Two logs of one task differ in their time stamps alone, by which nobody knows them.
    """
    places = [Path(path).expanduser().resolve() for path in paths]
    names = [path.parent.name for path in places]
    return names if all(TIMED.match(path.name) for path in places) and len(set(names)) == len(names) else []


def stem(path: Path) -> str:
    """Return a file's name without the endings of its storage and its kind (`x.results.jsonl.gz` is `x`)."""
    name = path.name
    while name.endswith(SUFFIXES):
        name = name[: -len(Path(name).suffix)]
    while name.endswith(KINDS):
        name = name[: -len(Path(name).suffix)]
    return name
