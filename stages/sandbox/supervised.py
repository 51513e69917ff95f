"""A sandbox that keeps one supervisor alive for many commands and replaces it when it is lost."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stages.errors import InfrastructureError, UsageError
from stages.sandbox import memory_group
from stages.sandbox.bubblewrap import GUEST, LINKS, TESTBED, base_python, bwrap_command, guest_folder
from stages.sandbox.contract import CommandResult, Limits, existing_folder
from stages.sandbox.session import KILLED, Reply, SupervisorLost, SupervisorSession

KINDS = ("bubblewrap", "none")
FIXED_ENV = {
    "PATH": f"{LINKS}:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/agent",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
}


class SupervisedSandbox:
    """Implements `Sandbox` for both kinds, for one thread at a time; `open_sandbox` explains the arguments."""

    def __init__(
        self,
        kind: str,
        work: Path,
        limits: Limits,
        readonly: Sequence[Path] = (),
        env: Mapping[str, str] | None = None,
        *,
        writable: bool = True,
        hidden: Sequence[Path] = (),
    ) -> None:
        self.kind, self.work, self.limits, self.writable = kind, existing_folder(work), limits, writable
        self.readonly = [path.absolute() for path in readonly]
        self.hidden = list(hidden)
        self.env = dict(env or {})
        if missing := [str(path) for path in self.readonly if not path.exists()]:
            raise UsageError(f"The sandbox should show {', '.join(missing)}, which does not exist.")
        self.session: SupervisorSession | None = self._start()

    def run(self, command: str, *, wall_s: float | None = None) -> CommandResult:
        """Run `command` by a fresh bash in the work folder and wait for it at most `wall_s` seconds."""
        started = time.monotonic()
        try:
            reply = self.ask({"kind": "command", "command": command.encode(errors="replace")}, wall_s)
        except SupervisorLost as error:
            message = f"The sandbox was lost during this command: {error}. Files are kept; everything else was ended.\n"
            return CommandResult(message, KILLED, time.monotonic() - started, False, len(message), "sandbox")
        return _result(reply, time.monotonic() - started)

    def ask(self, request: dict[str, Any], wall_s: float | None = None, content: Any = None) -> Reply:
        """Run one job. After SupervisorLost, which is raised again, the next job gets a fresh supervisor."""
        self.session = self.session or self._start()
        try:
            return self.session.ask(request, self.limits.wall_s if wall_s is None else wall_s, content)
        except SupervisorLost as error:
            stderr = self._end()
            raise SupervisorLost(f"{error}; {stderr.splitlines()[-1]}" if stderr else str(error)) from None

    def close(self) -> None:
        """End every process inside. The work folder stays."""
        self._end()

    def _end(self) -> str:
        session, self.session = self.session, None
        return session.close() if session is not None else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> SupervisorSession:
        fixed = _fixed_env(self.kind, self.work)
        inside = TESTBED if self.kind == "bubblewrap" else str(self.work)
        # The supervisor itself gets no variable of the caller's, such as a PYTHONPATH that leads into the work folder.
        group = memory_group.opened(self.limits) if self.kind == "bubblewrap" else None
        return SupervisorSession(
            self._command(), fixed, self.limits, {"work": inside, "env": {**fixed, **self.env}}, group
        )

    @contextmanager
    def _command(self) -> Iterator[tuple[list[str], list[int]]]:
        if self.kind == "none":
            yield [str(base_python()), "-sS", str(guest_folder())], []
            return
        visible = bwrap_command(self.work, self.limits, self.readonly, writable=self.writable, hidden=self.hidden)
        with visible as (argv, descriptors):
            yield [*argv, "--", str(LINKS / "python3"), "-sS", GUEST], descriptors


def _fixed_env(kind: str, work: Path) -> dict[str, str]:
    if kind == "bubblewrap":
        return FIXED_ENV
    return {**FIXED_ENV, "HOME": str(work), "PATH": f"{base_python().parent}:{os.defpath}:/usr/local/bin"}


def _result(reply: Reply, duration_s: float) -> CommandResult:
    output = reply.output.decode(errors="replace")
    return CommandResult(output, reply.returncode, duration_s, reply.timed_out, reply.output_bytes, reply.killed_for)


def known_kind(kind: str) -> str:
    """The kind itself; `UsageError` names what exists."""
    if kind not in KINDS:
        raise UsageError(f"There is no sandbox {kind!r}; choose one of: {', '.join(KINDS)}.")
    return kind


def open_sandbox(
    kind: str,
    work: Path,
    *,
    limits: Limits | None = None,
    readonly: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
    hidden: Sequence[Path] = (),
) -> SupervisedSandbox:
    """A sandbox on the folder `work` (there /testbed under bubblewrap), with `readonly` visible at their own paths.

    `kind` is one of KINDS, `env` adds variables for commands. `hidden` are files and folders of this machine that would
    be visible inside and are empty there; without isolation they can be read. No folder among them lies in another.
    `UsageError` where no such sandbox works here, or a path does not exist.
    """
    probe(known_kind(kind))
    return SupervisedSandbox(kind, work, limits or Limits(), readonly, env, hidden=hidden)


@cache
def probe(kind: str) -> None:
    """Run one real command, once in this process; `UsageError` holds the reason and the way out where it fails."""
    known_kind(kind)
    with tempfile.TemporaryDirectory(prefix="composer-probe-") as folder:
        try:
            with SupervisedSandbox(kind, Path(folder), Limits()) as sandbox:
                result = sandbox.run("python3 -c 'print(6 * 7)'")
        except InfrastructureError as error:
            raise UsageError(f"{error} {_advice()}") from None
    if result.output != "42\n":
        raise UsageError(f"The sandbox {kind!r} cannot run a command: {result.output.strip()!r}. {_advice()}")


def _advice() -> str:
    switch = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if switch.exists() and switch.read_text().strip() == "1":
        return "Try sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0, or --set sandbox=none (no isolation)."
    return "Allow unprivileged user namespaces on this machine, or choose --set sandbox=none (no isolation)."
