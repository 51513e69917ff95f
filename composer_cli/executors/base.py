"""What an executor is: it takes a script, gives back the id of a job, and says how that job stands."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import Field

from stages.errors import UsageError
from stages.redaction import secret_in
from stages.runs.config import Settings

Name = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
QUEUED, RUNNING, COMPLETE, FAILED, INTERRUPTED, CANCELLED, LOST = (
    "queued",
    "running",
    "complete",
    "failed",
    "interrupted",
    "cancelled",
    "lost",
)
GOING_ON = (QUEUED, RUNNING)
EVERY_S = 2.0
"""Between two looks at a log that is read whole."""
EXIT_CODES = {
    1: "it failed, or a check of its own is not passed",
    2: "it was refused",
    3: "incomplete but saved, or a verdict without enough data",
    4: "an input is missing",
}


class Where(Settings):
    """The settings of any executor, given as `--set on.KEY=VALUE` or in a table `[on]` of a file."""

    setup: str = ""
    """Lines of shell that come before the chain, such as `module load cuda` or what installs Composer."""
    env: dict[Name, str] = Field(default_factory=dict)
    """Variables of the job's environment, with their values. No keys: what stands here is shown and kept."""
    keys: list[Name] = Field(default_factory=list)
    """Names of further variables that hold keys; those that the chain's `api_key_env` name need not be repeated."""
    workers: str | None = Field(None, pattern=r"^(processes:[1-9]\d*|ray(://.+)?)$")
    """Whom the job deals the chain's units to: processes:N on its machine, or the Ray cluster that it stands in."""


@dataclass(frozen=True)
class State:
    """How a job stands: one of the words above, and what else is known in a few words."""

    status: str
    detail: str = ""

    @property
    def over(self) -> bool:
        """Whether it will not change any more."""
        return self.status not in GOING_ON


@dataclass(frozen=True)
class Chain:
    """What is submitted, whoever executes it."""

    name: str
    """Of the job and of its folder: the time, the preset, six digits of the script."""
    folder: Path
    """Where its record lies here."""
    words: Sequence[str]
    """The words behind `composer`, without --artifacts; in `files` they are names of files that go along."""
    files: Mapping[str, str]
    """Texts of presets and settings that lie here, by their names in the job."""
    keys: Sequence[str]
    """Names of the variables that hold keys."""


class Executor(Protocol):
    """Somewhere a chain can run. Raises `UsageError` where something is missing here, before anything is submitted."""

    settings: type[Any]
    """The model of its settings, a `Where`."""
    shares_files: bool
    """Whether a path that means a file here means the same file there."""

    def spec(self, chain: Chain, where: Any) -> dict[str, Any]:
        """What would be submitted, as JSON, without any key: `script` is its text."""
        ...

    def submit(self, chain: Chain, where: Any) -> dict[str, Any]:
        """Submit it once; returns what finds the job again, as JSON."""
        ...

    def state(self, job: Mapping[str, Any]) -> State:
        """How it stands; `InfrastructureError` where nobody could be asked."""
        ...

    def log(self, job: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """What it printed, line by line, with `follow` until it ends."""
        ...

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Stop it; what it finished stays."""
        ...


def ended(code: int) -> State:
    """The state of a job whose command ended with this exit code."""
    if code == 0:
        return State(COMPLETE)
    if code in (130, 137, 143):
        return State(INTERRUPTED, f"exit code {code}; the same command with --on goes on")
    said = EXIT_CODES.get(code)
    return State(FAILED, f"exit code {code}: {said}" if said else f"exit code {code}")


def grown(text: Callable[[], str], over: Callable[[], bool], every_s: float = EVERY_S) -> Iterator[str]:
    """The lines of a log that is read whole each time, each once, until it is over; a line that grows is waited for."""
    seen = 0
    while True:
        last = over()  # asked before the text is read, so that nothing is missed
        whole = text()
        whole = whole if last else whole[: whole.rfind("\n") + 1]
        yield from whole[seen:].splitlines()
        seen = max(seen, len(whole))
        if last:
            return
        time.sleep(every_s)


def values(keys: Sequence[str]) -> dict[str, str]:
    """The keys by the names of their variables, redacted from now on; `UsageError` names those that are not set."""
    missing = [name for name in keys if not secret_in(name)]
    if missing:
        raise UsageError(f"The chain needs {', '.join(missing)}, which is not set here. Export it before submitting.")
    return {name: os.environ[name] for name in keys}


def redact(keys: Sequence[str]) -> None:
    """Redact from now on the keys of these names that are set here."""
    for name in keys:
        secret_in(name)
