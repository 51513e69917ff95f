"""Slurm, through sbatch. All files of a job are on the file system that this machine shares with the cluster.

A job that is preempted, or whose node dies, is queued again by Slurm (--requeue); one that nears its time limit queues
itself again. Either way the next attempt continues where the one before stopped, since the chain runs with --resume.
Slurm warns of the limit by SIGUSR1, so that the script can tell this from scancel and preemption, which send SIGTERM.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from composer_cli.executors.base import (
    FAILED,
    LOST,
    JobSettings,
    JobState,
    SubmittedChain,
    follow_log,
    key_values,
    script,
    state_of_exit,
)
from composer_stages.data_files import load_text, load_toml
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.runs import store
from composer_stages.words import Sentence

RESERVED = ("job-name", "output", "error", "open-mode", "requeue", "no-requeue", "signal", "export", "chdir", "array")
"""Options of sbatch that Composer sets itself."""
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "PYTHONPATH", "HF_HOME", "HF_ENDPOINT", "COMPOSER_VLLM", "OMP_NUM_THREADS")
"""Variables that a job inherits from this environment. Nothing else is passed on but the keys, by name."""
STATUSES: dict[str, str] = load_toml(__package__, "statuses.toml")["slurm"]
SIGNAL_FORWARDING = load_text(__package__, "slurm_signals.sh").rstrip("\n")
"""Shell that runs the chain in "$@", forwards signals to it, and queues the job again near its time limit."""


class SlurmSettings(JobSettings):
    """A Slurm job."""

    options: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], bool | int | str] = Field(default_factory=dict)
    """Long options of sbatch: {partition = "gpu", gpus = 1, time = "4:00:00"}."""
    python: str = ""
    """The interpreter of the environment that holds Composer, as the cluster sees it; empty for the one used here."""
    warn_s: int = Field(default=120, gt=0)
    """Seconds before its time limit at which a job stops and queues itself again; more than the longest step takes."""
    restarts: int = Field(default=20, ge=0)
    """How often it queues itself again at most."""


class Slurm:
    """Submits through sbatch, asks through scontrol, cancels through scancel."""

    settings, shares_files = SlurmSettings, True

    def spec(self, chain: SubmittedChain, where: SlurmSettings) -> dict[str, Any]:
        """Return the batch script, and the command that submits it."""
        clash = [name for name in where.options if name in RESERVED]
        if clash:
            raise UsageError("cli.sbatch-option-reserved", name=clash[0])
        folder = chain.folder.resolve()
        passed = [name for name in (*PASSED_ON, *chain.keys) if name in chain.keys or name in os.environ]
        options: dict[str, bool | int | str] = {
            "job-name": chain.name,
            # `%` begins a pattern in names of output files: %j is the job's id.
            "output": str(folder / "log.txt").replace("%", "%%"),
            "open-mode": "append",
            "requeue": True,
            # B: to the batch script alone, which passes the signal on; without it, to its children and not to itself.
            "signal": f"B:USR1@{where.warn_s}",
            # By name, so that sbatch takes the values from this environment and no key is in the script. NIL passes
            # no variable but Slurm's own.
            "export": ",".join(dict.fromkeys(passed)) or "NIL",
            **where.options,
        }
        lines = []
        for name, value in options.items():
            quoted = f'"{value}"' if re.search(r"\s", str(value)) else value  # a space ends a value unless quoted
            lines += [] if value is False else [f"#SBATCH --{name}" + ("" if value is True else f"={quoted}")]
        text = script(
            chain,
            where,
            python=where.python or sys.executable,
            artifacts=str(folder.parents[1]),
            head="\n".join(lines),
            supervise=SIGNAL_FORWARDING.format(folder=shlex.quote(str(folder)), restarts=where.restarts),
        )
        return {"command": ["sbatch", "--parsable", "job.sh"], "keys": list(chain.keys), "script": text}

    def submit(self, chain: SubmittedChain, where: SlurmSettings) -> dict[str, Any]:
        """Submit the script with sbatch, which reads the keys from this environment by their names."""
        key_values(chain.keys)
        store.write_sealed(chain.folder / "job.sh", self.spec(chain, where)["script"].encode())
        try:
            answer = _run("sbatch", "--parsable", str(chain.folder / "job.sh"))
        except InfrastructureError as error:
            raise UsageError("cli.nothing-submitted", error=error) from None
        return {"id": answer.partition(";")[0].strip(), "folder": str(chain.folder.resolve())}

    def state(self, job: Mapping[str, Any]) -> JobState:
        """Return the state that scontrol reports; for a job that Slurm has forgotten, that of its script's exit code.

        scontrol comes first: on a shared file system the script's file may be seen a minute late.
        """
        try:
            fields = dict(re.findall(r"(\w+)=(\S*)", _run("scontrol", "show", "job", "-o", job["id"])))
        except InfrastructureError as error:
            if "Invalid job id" not in str(error):
                raise
            fields = {}
        word = fields.get("JobState", "")
        attempt = f"attempt {int(fields.get('Restarts', '0')) + 1}" if fields.get("Restarts", "0") != "0" else ""
        if word in STATUSES:
            waits = fields.get("Reason", "None") if word == "PENDING" else "None"
            return JobState(STATUSES[word], ", ".join(part for part in (attempt, waits) if part not in ("", "None")))
        if word == "COMPLETED":
            return state_of_exit(0)
        # "CODE:SIGNAL".
        if code := int(fields.get("ExitCode", "0").partition(":")[0]):
            return state_of_exit(code)
        exit_code = store.read_bytes(Path(job["folder"]) / "exit-code")
        if exit_code is not None:
            return state_of_exit(int(exit_code))
        if word:
            return JobState(FAILED, f"Slurm calls it {word}")
        return JobState(LOST, Sentence("cli.slurm-forgot-job"))

    def log(self, job: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """Yield the lines of the file that Slurm writes all attempts' output to."""
        path = Path(job["folder"]) / "log.txt"
        return follow_log(
            lambda: (store.read_bytes(path) or b"").decode(errors="replace"), lambda: not follow or self.state(job).over
        )

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Send SIGTERM to all processes of the job; Slurm sends SIGKILL after its KillWait."""
        _run("scancel", job["id"])


def _run(*words: str) -> str:
    """Return the output of a command of Slurm's."""
    if shutil.which(words[0]) is None:
        raise UsageError("cli.slurm-command-missing", program=words[0])
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        raise InfrastructureError("cli.slurm-command-failed", program=words[0], reason=reason)
    return done.stdout
