"""What an executor is: it takes a script, gives back the id of a job, and says how that job stands."""

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Protocol

from pydantic import Field

from stages.backends.engine import ENGINES, WORDS
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


# ---- names
# The word behind --on, looked up in one place.

EXECUTORS = {
    "slurm": "composer_cli.executors.slurm:Slurm",
    "hf-jobs": "composer_cli.executors.hf_jobs:HfJobs",
    "modal": "composer_cli.executors.modal_sandbox:ModalSandbox",
}
"""Where a whole chain can be submitted. Each is imported when it is wanted."""
LOCAL = "local"


def executor(word: str) -> Executor | None:
    """The executor of this name; None for `local` and engines of workers, where a chain runs in this process."""
    if word == LOCAL or word.partition(":")[0] in ENGINES:
        return None
    if word not in EXECUTORS:
        near = get_close_matches(word, [LOCAL, *EXECUTORS, *ENGINES], n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(f"There is no executor {word!r}. {hint}There are: {', '.join([LOCAL, *EXECUTORS])}, {WORDS}.")
    return found(word)


def found(word: str) -> Executor:
    """One of those that there are."""
    made: Callable[[], Executor] = resolve_name(EXECUTORS[word])
    return made()


# ---- script
# A chain as a shell script. Files that lie here go along by their text, so that what was submitted is what runs.


def script(chain: Chain, where: Where, *, python: str, artifacts: str, head: str = "", supervise: str = "") -> str:
    """The whole text.

    head: lines for a scheduler behind the first one. supervise: shell that runs the chain, whose command is in "$@";
    without it the chain takes the shell's place, and so gets its signals.
    """
    lines = ["#!/bin/sh", head, "set -eu", "files=$(mktemp -d); export files", *map(_file, chain.files.items())]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in where.env.items()]
    lines += [where.setup, f"set -- {_command(chain, python, artifacts)}", supervise or 'exec "$@"']
    return "\n".join(line for line in lines if line) + "\n"


def _command(chain: Chain, python: str, artifacts: str) -> str:
    words = [shlex.quote(python), "-m", "composer_cli", *(_word(word, chain.files) for word in chain.words)]
    return " ".join([*words, "--resume", "--artifacts", shlex.quote(artifacts)])


def _word(word: str, files: Mapping[str, str]) -> str:
    return f'"$files"/{word}' if word in files else shlex.quote(word)


def _file(item: tuple[str, str]) -> str:
    name, text = item
    end = f"END_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    newline = "" if text.endswith("\n") else "\n"
    return f"cat > \"$files\"/{name} <<'{end}'\n{text}{newline}{end}"
