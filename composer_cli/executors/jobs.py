"""The jobs that were submitted from here. The record of each is one JSON file, ARTIFACTS/submitted/NAME/job.json."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from composer_cli.executors.base import CANCELLED, EXECUTORS, Executor, State, found, redact
from stages.errors import BadInput, ComposerError, UsageError
from stages.redaction import redacted
from stages.runs import store

FOLDER = "submitted"
SHOWN = 20
"""Lines of a log that `composer show` prints."""


@dataclass(frozen=True)
class Job:
    """A submitted chain, as its record keeps it: names of keys, never their values."""

    name: str
    executor: str
    words: list[str]
    keys: list[str]
    where: dict[str, Any]
    """The settings `on`."""
    submitted_at: str
    spec: dict[str, Any]
    state: State
    """As it was when somebody last asked; asked for no more once it is over."""
    found: Mapping[str, Any] | None = None
    """What finds it again at its executor; None while it is being submitted."""
    folder: str = ""

    @property
    def at(self) -> Executor:
        """Its executor."""
        if self.executor not in EXECUTORS:
            raise BadInput(f"{self.name} was submitted to {self.executor}, which this version does not know.")
        return found(self.executor)


def keep(folder: Path, job: Job) -> None:
    """Write a job's record."""
    value = {name: held for name, held in asdict(job).items() if name != "folder"}
    store.write_json(folder / "job.json", value)


def kept(folder: Path, job: Job, **changed: Any) -> Job:
    """The job with other values, in its record too."""
    changed_job = replace(job, **changed, folder=str(folder))
    keep(folder, changed_job)
    return changed_job


def every(root: Path) -> list[Job]:
    """All jobs that were submitted from here, oldest first."""
    return [_read(path.parent) for path in sorted(root.glob(f"{FOLDER}/*/job.json"))]


def _read(folder: Path) -> Job:
    value = store.read_json(folder / "job.json")
    try:
        job = Job(**{**value, "state": State(**value["state"])}, folder=str(folder))
    except (TypeError, KeyError) as error:
        raise BadInput(f"{folder}/job.json is no record of a submitted job ({error}). Delete its folder.") from None
    redact(job.keys)
    return job


def find(root: Path, text: str, *, part: bool = True) -> Job | None:
    """The job of this name or folder, or with `part` the only one whose name holds the text; None where none does."""
    jobs = every(root)
    fitting = [job for job in jobs if text in (job.name, f"{FOLDER}/{job.name}", job.folder)]
    if part and not fitting:
        fitting = [job for job in jobs if text in job.name]
    if len(fitting) > 1:
        some = ", ".join(job.name for job in fitting[-3:])
        raise UsageError(f"{len(fitting)} jobs fit {text!r}, for example {some}. Give more of the name.")
    return fitting[0] if fitting else None


def named(root: Path, text: str) -> Job:
    """The same, and `BadInput` where there is none."""
    job = find(root, text)
    if job is None:
        raise BadInput(f"No job {text!r} was submitted from {root}. `composer status` lists those that were.")
    return job


def asked(job: Job) -> Job:
    """The job as its executor says that it stands; what is over is not asked for again."""
    if job.state.over or job.found is None:
        return job
    return kept(Path(job.folder), job, state=job.at.state(job.found))


def cancel(job: Job) -> Job:
    """Stop a job; `UsageError` where it is over."""
    job = asked(job)
    if job.state.over or job.found is None:
        raise UsageError(f"{job.name} is over: {job.state.status}. There is nothing to cancel.")
    job.at.cancel(job.found)
    return kept(Path(job.folder), job, state=State(CANCELLED, "from here"))


def log(job: Job, follow: bool) -> Iterator[str]:
    """What a job printed, line by line, without keys."""
    if job.found is not None:
        for line in job.at.log(job.found, follow and not job.state.over):
            yield redacted(line)


def lines(root: Path) -> list[dict[str, Any]]:
    """Every job with its state now, for `composer status`; an executor that cannot be asked is said in words."""
    told = []
    for job in every(root):
        try:
            state = asked(job).state
        except ComposerError as error:
            state = State(job.state.status, f"when last asked; now: {error}")
        age_s = (datetime.now(UTC) - datetime.fromisoformat(job.submitted_at)).total_seconds()
        told.append(
            {"job": job.name, "on": job.executor, "status": state.status, "age_s": age_s, "reason": state.detail}
        )
    return told


def page(job: Job) -> str:
    """A job as text: how it stands, what was submitted, the end of its log."""
    head = [
        f"{job.name}, submitted to {job.executor} on {job.submitted_at}",
        f"status: {job.state.status}" + (f" ({job.state.detail})" if job.state.detail else ""),
        f"command: composer {' '.join(job.words)}",
        *(f"{name}: {value}" for name, value in (job.found or {}).items()),
    ]
    last = list(log(job, follow=False))[-SHOWN:]
    return "\n".join([*head, "", *last, "", f"The record: {job.folder}/job.json"])
