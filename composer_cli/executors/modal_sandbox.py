"""Modal, through its SDK: a chain in a sandbox, artifacts in a volume, keys in one of Modal's secrets.

Modal does not restart a sandbox: after a preemption, or after its timeout, the same command continues the chain.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from composer_cli.executors.base import (
    FAILED,
    RUNNING,
    JobSettings,
    JobState,
    SubmittedChain,
    follow_log,
    redact,
    script,
    state_of_exit,
)
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.redaction import redacted
from composer_stages.words import Sentence

MOUNTED = "/artifacts"
TIMED_OUT = 124
"""The exit code that the SDK reports for a sandbox after its timeout."""
LONGEST_S = 86_400


class ModalSettings(JobSettings):
    """A Modal sandbox."""

    image: str = Field(min_length=1)
    """Image of a registry that holds Composer, or Python where `setup` installs Composer."""
    volume: str = Field(min_length=1)
    """Name of the volume in which artifacts are kept; made where there is none."""
    secret: str = ""
    """Name of Modal's secret that holds the chain's keys."""
    app: str = "composer"
    """The Modal app that its sandboxes belong to; made where there is none."""
    gpu: str = ""
    """As Modal writes it: A10G, H100, H100:2."""
    cpu: float = Field(default=2.0, gt=0)
    """Cores."""
    memory: int = Field(default=8192, gt=0)
    """MiB."""
    timeout_s: int = Field(default=LONGEST_S, gt=0, le=LONGEST_S)
    """Longest time of the sandbox, at most a day."""
    python: str = "python"
    """The interpreter in the image."""


class ModalSandbox:
    """Submits, queries and cancels jobs through Modal's SDK."""

    settings, shares_files = ModalSettings, False

    def spec(self, chain: SubmittedChain, where: ModalSettings) -> dict[str, Any]:
        """Return what the sandbox is created from, with names for Modal's objects."""
        if chain.keys and not where.secret:
            raise UsageError("cli.modal-secret-missing", keys=chain.keys)
        return {
            "app": where.app,
            "name": chain.name,
            "image": where.image,
            "keys": list(chain.keys),
            "secret": where.secret,
            "volumes": {MOUNTED: where.volume},
            "gpu": where.gpu or None,
            "cpu": where.cpu,
            "memory": where.memory,
            "timeout": where.timeout_s,
            "script": script(chain, where, python=where.python, artifacts=MOUNTED, head="exec 2>&1"),
        }

    def submit(self, chain: SubmittedChain, where: ModalSettings) -> dict[str, Any]:
        """Create the sandbox under the chain's name: Modal refuses a second one of that name."""
        spec = self.spec(chain, where)
        redact(chain.keys)
        # Taken before the sandbox exists: `logs.fetch` needs a beginning, and none of its lines may be older.
        began = datetime.now(UTC).isoformat()
        with _sdk() as modal:
            app = modal.App.lookup(spec["app"], create_if_missing=True)
            secrets = [modal.Secret.from_name(where.secret, required_keys=spec["keys"])] if where.secret else []
            volumes = {
                path: modal.Volume.from_name(name, create_if_missing=True) for path, name in spec["volumes"].items()
            }
            sandbox = modal.Sandbox.create(
                *("sh", "-c", spec["script"]),
                app=app,
                image=modal.Image.from_registry(spec["image"]),
                secrets=secrets,
                volumes=volumes,
                **{name: spec[name] for name in ("name", "gpu", "cpu", "memory", "timeout")},
            )
            return {"id": sandbox.object_id, "since": began}

    def state(self, job: Mapping[str, Any]) -> JobState:
        """Return the state by the exit code; running where there is none."""
        with _sdk() as modal:
            code = modal.Sandbox.from_id(job["id"]).poll()
        if code is None:
            return JobState(RUNNING)
        if code == TIMED_OUT:
            return JobState(FAILED, Sentence("cli.modal-timed-out"))
        return state_of_exit(code)

    def log(self, job: Mapping[str, Any], follow: bool) -> Iterator[str]:
        """Yield the lines of output that Modal has kept, also after the end of the sandbox."""

        def read() -> str:
            with _sdk() as modal:
                entries = modal.Sandbox.from_id(job["id"]).logs.fetch(since=datetime.fromisoformat(job["since"]))
                return "".join(entry.message for entry in entries)

        return follow_log(read, lambda: not follow or self.state(job).over)

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Terminate the sandbox."""
        with _sdk() as modal:
            modal.Sandbox.from_id(job["id"]).terminate()


@contextmanager
def _sdk() -> Iterator[Any]:
    """Yield the SDK and turn its failures into sentences: `UsageError` where it is not installed, or Modal refuses."""
    try:
        import modal
        from modal import exception as failure
    except ImportError:
        raise UsageError("cli.modal-missing") from None
    try:
        yield modal
    except failure.Error as error:
        reason = redacted((str(error).strip().splitlines() or [""])[0].rstrip("."))
        if isinstance(error, failure.AuthError):
            raise UsageError("cli.modal-refuses-token", reason=reason) from None
        if isinstance(error, (failure.NotFoundError, failure.InvalidError, failure.AlreadyExistsError)):
            raise UsageError("cli.modal-refuses-job", reason=reason) from None
        raise InfrastructureError("cli.modal-failed", error=type(error).__name__, reason=reason) from None
