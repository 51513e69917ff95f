"""The protocol of executors, which take a chain as a shell script and return the id and the state of a job."""

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Protocol

from pydantic import Field

from composer_stages.backends.engine import ENGINES, WORDS
from composer_stages.errors import UsageError
from composer_stages.redaction import secret_in
from composer_stages.registry import Registry
from composer_stages.runs.settings import Settings
from composer_stages.words import Sentence

Name = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
QUEUED, RUNNING, COMPLETE, FAILED = "queued", "running", "complete", "failed"
INTERRUPTED, CANCELLED, LOST = "interrupted", "cancelled", "lost"
ACTIVE = (QUEUED, RUNNING)
EVERY_S = 2.0
"""Between two reads of a log."""
EXECUTORS = Registry[str](
    "composer.executors",
    {
        "slurm": "composer_cli.executors.slurm:Slurm",
        "hf-jobs": "composer_cli.executors.hf_jobs:HfJobs",
        "modal": "composer_cli.executors.modal_sandbox:ModalSandbox",
    },
    lambda point: point.value,
)
"""The classes of the executors by the word after --on; each is imported when it is used."""
LOCAL = "local"


class JobSettings(Settings):
    """The settings of any executor, given as `--set on.KEY=VALUE` or in a table `[on]` of a file."""

    setup: str = ""
    """Lines of shell before the chain, such as `module load cuda` or what installs Composer."""
    env: dict[Name, str] = Field(default_factory=dict)
    """Variables of the job's environment, with their values. No keys: these values are shown and kept."""
    keys: list[Name] = Field(default_factory=list)
    """Names of further variables that hold keys; those that the chain's `api_key_env` name need not be repeated."""
    workers: str | None = Field(default=None, pattern=r"^(processes:[1-9]\d*|ray(://.+)?)$")
    """The workers that do the chain's units: processes:N on its machine, or the Ray cluster that it is part of."""


@dataclass(frozen=True)
class JobState:
    """The state of a job: one of the statuses above, and details."""

    status: str
    detail: str = ""

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.status not in ACTIVE


@dataclass(frozen=True)
class SubmittedChain:
    """A chain as it is submitted to an executor."""

    name: str
    """The name of the job and of its folder: the time, the preset, six digits of a digest."""
    folder: Path
    """The folder of its record on this machine."""
    words: Sequence[str]
    """The words after `composer`, without --artifacts; those that are keys of `files` mean files of the job."""
    files: Mapping[str, str]
    """Texts of presets and settings of this machine, by their names in the job."""
    keys: Sequence[str]
    """Names of the variables that hold keys."""


class Executor(Protocol):
    """A service that runs chains. Raises `UsageError` where something is missing here, before anything is submitted."""

    settings: type[Any]
    """The model of its settings, a `JobSettings`."""
    shares_files: bool
    """Whether a path that means a file here means the same file there."""

    def spec(self, chain: SubmittedChain, where: Any) -> dict[str, Any]:
        """Return what would be submitted, as JSON, without the value of any key: `script` is the text."""
        ...

    def submit(self, chain: SubmittedChain, where: Any) -> dict[str, Any]:
        """Submit the chain once; return the handle of the job, as JSON."""
        ...

    def state(self, job: Mapping[str, Any]) -> JobState:
        """Return the state of a job; raises `InfrastructureError` where the service does not answer."""
        ...

    def log(self, job: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """Yield what a job printed, line by line, with `follow` until it ends."""
        ...

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Stop a job; what it finished stays."""
        ...


def state_of_exit(code: int) -> JobState:
    """Return the state of a job whose command ended with this exit code."""
    if code == 0:
        return JobState(COMPLETE)
    # 128 + SIGINT, SIGKILL (out of memory, or a scheduler's last word) and SIGTERM.
    if code in (130, 137, 143):
        return JobState(INTERRUPTED, Sentence("cli.exit-code-resumable", exit_code=code))
    return JobState(FAILED, Sentence("cli.exit-code-of-job", exit_code=code))


def follow_log(text: Callable[[], str], over: Callable[[], bool], every_s: float = EVERY_S) -> Iterator[str]:
    """Yield the lines of a log that can only be read as a whole, each once, until the job is over.

    An unfinished last line is yielded when it is complete, or the job is over.
    """
    seen = 0
    while True:
        last = over()  # before the text is read, so that no line is missed
        content = text()
        content = content if last else content[: content.rfind("\n") + 1]
        yield from content[seen:].splitlines()
        seen = max(seen, len(content))
        if last:
            return
        time.sleep(every_s)


def key_values(keys: Sequence[str]) -> dict[str, str]:
    """Return the keys by the names of their variables, redacted from now on; raises `UsageError` for those not set."""
    missing = [name for name in keys if not secret_in(name)]
    if missing:
        raise UsageError("cli.keys-not-set", keys=missing)
    return {name: os.environ[name] for name in keys}


def redact(keys: Sequence[str]) -> None:
    """Redact from now on the values of these variables, as far as they are set here."""
    for name in keys:
        secret_in(name)


def executor(word: str) -> Executor | None:
    """Return the executor of this name; None for `local` and engines of workers: the chain runs in this process."""
    if word == LOCAL or word.partition(":")[0] in ENGINES:
        return None
    if word not in EXECUTORS:
        raise UsageError("cli.no-executor", word=word, executors=[LOCAL, *EXECUTORS], engines=[*ENGINES], words=WORDS)
    return load(word)


def load(word: str) -> Executor:
    """Return the executor of one of the names in EXECUTORS."""
    factory: Callable[[], Executor] = resolve_name(EXECUTORS[word])
    return factory()


def script(
    chain: SubmittedChain, where: JobSettings, *, python: str, artifacts: str, head: str = "", supervise: str = ""
) -> str:
    """Return a chain as a shell script. Files of this machine go along as text: what was submitted is what runs.

    head: lines for a scheduler, after the first one. supervise: shell that runs the chain, whose command is in "$@";
    without it the chain takes the shell's place, and so gets its signals.
    """
    lines = ["#!/bin/sh", head, "set -eu", "files=$(mktemp -d); export files"]
    for name, text in chain.files.items():
        # The digest of the text ends its here-document, so that no line of the text can.
        end = f"END_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        newline = "" if text.endswith("\n") else "\n"
        lines.append(f"cat > \"$files\"/{name} <<'{end}'\n{text}{newline}{end}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in where.env.items()]
    words = [f'"$files"/{word}' if word in chain.files else shlex.quote(word) for word in chain.words]
    command = [shlex.quote(python), "-m", "composer_cli", *words, "--resume", "--artifacts", shlex.quote(artifacts)]
    lines += [where.setup, f"set -- {' '.join(command)}", supervise or 'exec "$@"']
    return "\n".join(line for line in lines if line) + "\n"
