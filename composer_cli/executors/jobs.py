"""The jobs that were submitted from here. The record of each is one JSON file, ARTIFACTS/submitted/NAME/job.json."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from composer_cli.executors.base import CANCELLED, EXECUTORS, Executor, JobState, load, redact
from stages.errors import BadInput, ComposerError, UsageError
from stages.redaction import redacted
from stages.runs import store

FOLDER = "submitted"
SHOWN = 20
"""Lines of a log that `composer show` prints."""


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted chain, as its record keeps it: names of keys, never their values."""

    name: str
    executor: str
    words: list[str]
    keys: list[str]
    where: dict[str, Any]
    """The settings `on`."""
    submitted_at: str
    spec: dict[str, Any]
    state: JobState
    """The state at the last query of the executor; final once the job is over."""
    found: Mapping[str, Any] | None = None
    """What finds the job again at its executor; None while it is being submitted."""
    folder: str = ""

    def at_executor(self) -> Executor:
        """Return the executor that the job was submitted to."""
        if self.executor not in EXECUTORS:
            raise BadInput(f"{self.name} was submitted to {self.executor}, which this version does not know.")
        return load(self.executor)


def keep(folder: Path, job: SubmittedJob, **changed: Any) -> SubmittedJob:
    """Write a job's record with other values for some of its fields; returns the changed job."""
    job = replace(job, **changed, folder=str(folder))
    record = {name: value for name, value in asdict(job).items() if name != "folder"}
    store.write_json(folder / "job.json", record)
    return job


def every(root: Path) -> list[SubmittedJob]:
    """Return all jobs that were submitted from here, oldest first; their keys are redacted from now on."""
    jobs = []
    for path in sorted(root.glob(f"{FOLDER}/*/job.json")):
        record = store.read_json(path)
        try:
            job = SubmittedJob(**{**record, "state": JobState(**record["state"])}, folder=str(path.parent))
        except (TypeError, KeyError) as error:
            raise BadInput(f"{path} is no record of a submitted job ({error}). Delete its folder.") from None
        redact(job.keys)
        jobs.append(job)
    return jobs


def find(root: Path, text: str, *, part: bool = True) -> SubmittedJob | None:
    """Return the job of this name or folder, or with `part` the only one whose name holds the text; else None."""
    jobs = every(root)
    fitting = [job for job in jobs if text in (job.name, f"{FOLDER}/{job.name}", job.folder)]
    if part and not fitting:
        fitting = [job for job in jobs if text in job.name]
    if len(fitting) > 1:
        some = ", ".join(job.name for job in fitting[-3:])
        raise UsageError(f"{len(fitting)} jobs fit {text!r}, for example {some}. Give more of the name.")
    return fitting[0] if fitting else None


def refreshed(job: SubmittedJob) -> SubmittedJob:
    """Return the job with the state that its executor reports now, kept in its record; ended jobs are not queried."""
    if job.state.over or job.found is None:
        return job
    return keep(Path(job.folder), job, state=job.at_executor().state(job.found))


def cancel(root: Path, text: str) -> SubmittedJob:
    """Stop the job of this name; raises `BadInput` where there is none, `UsageError` where it is over."""
    job = find(root, text)
    if job is None:
        raise BadInput(f"No job {text!r} was submitted from {root}. `composer status` lists those that were.")
    job = refreshed(job)
    if job.state.over or job.found is None:
        raise UsageError(f"{job.name} is over: {job.state.status}. There is nothing to cancel.")
    job.at_executor().cancel(job.found)
    return keep(Path(job.folder), job, state=JobState(CANCELLED, "from here"))


def log(job: SubmittedJob, follow: bool) -> Iterator[str]:
    """Yield what a job printed, line by line, without keys."""
    if job.found is not None:
        for line in job.at_executor().log(job.found, follow and not job.state.over):
            yield redacted(line)


def lines(root: Path) -> list[dict[str, Any]]:
    """Return every job with its present state, for `composer status`; a failed query is part of the reason."""
    found = []
    for job in every(root):
        try:
            state = refreshed(job).state
        except ComposerError as error:
            state = JobState(job.state.status, f"when last asked; now: {error}")
        age_s = (datetime.now(UTC) - datetime.fromisoformat(job.submitted_at)).total_seconds()
        found.append(
            {"job": job.name, "on": job.executor, "status": state.status, "age_s": age_s, "reason": state.detail}
        )
    return found


def page(job: SubmittedJob) -> str:
    """Return a job as text: its state, what was submitted, the end of its log."""
    head = [
        f"{job.name}, submitted to {job.executor} on {job.submitted_at}",
        f"status: {job.state.status}" + (f" ({job.state.detail})" if job.state.detail else ""),
        f"command: composer {' '.join(job.words)}",
        *(f"{name}: {value}" for name, value in (job.found or {}).items()),
    ]
    last = list(log(job, follow=False))[-SHOWN:]
    return "\n".join([*head, "", *last, "", f"The record: {job.folder}/job.json"])
