"""A sandbox that keeps one supervisor alive for many commands and replaces it when it is lost."""

import os
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.sandbox import memory_group
from composer_stages.sandbox.bubblewrap import GUEST, LINKS, MACHINE, TESTBED, base_python, bwrap_command, guest_folder
from composer_stages.sandbox.contract import CommandResult, Limits, View
from composer_stages.sandbox.session import KILLED, Reply, SupervisorLost, SupervisorSession
from composer_stages.words import Sentence

KINDS = ("bubblewrap", "none")
# The whole environment of a job, but for what the caller adds: nothing of the host's, which may hold keys.
FIXED_ENV = {
    "PATH": f"{LINKS}:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/agent",
    "LANG": "C.UTF-8",
    # A .pyc stays valid through an edit of equal size within a second: right fixes then scored .2 on average, not 1.
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    # There is no terminal: a pager or a question would wait until the time is over.
    "PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
}


class SupervisedSandbox(AbstractContextManager["SupervisedSandbox"]):
    """Implements `Sandbox` for both kinds, for one thread at a time; `open_sandbox` gives the arguments.

    Kept alive a command costs about 3 ms, in a bwrap of its own 9 to 13 ms.
    """

    def __init__(self, kind: str, work: Path, limits: Limits, view: View) -> None:
        if not work.is_dir():
            raise UsageError("sandbox.work-folder-missing", path=str(work))
        self.kind, self.work, self.limits = kind, work.resolve(), limits
        self.view = replace(view, readonly=[path.absolute() for path in view.readonly])
        if missing_paths := [str(path) for path in self.view.readonly if not path.exists()]:
            raise UsageError("sandbox.shown-path-missing", paths=missing_paths)
        self.session: SupervisorSession | None = self._start()

    def run(self, command: str, *, wall_s: float | None = None) -> CommandResult:
        """Run `command` by a fresh bash in the work folder and wait for it at most `wall_s` seconds."""
        started = time.monotonic()
        try:
            reply = self.ask({"kind": "command", "command": command.encode(errors="replace")}, wall_s)
        except SupervisorLost as error:
            message = f"{Sentence('sandbox.lost-during-command', error=str(error))}\n"
            return CommandResult(message, KILLED, time.monotonic() - started, False, len(message), "sandbox")
        output, duration_s = reply.output.decode(errors="replace"), time.monotonic() - started
        return CommandResult(
            output, reply.returncode, duration_s, reply.timed_out, reply.output_bytes, reply.killed_for
        )

    def ask(self, request: dict[str, Any], wall_s: float | None = None, content: Any = None) -> Reply:
        """Run one job. After SupervisorLost, which is raised again, the next job gets a fresh supervisor."""
        self.session = self.session or self._start()
        try:
            return self.session.ask(request, self.limits.wall_s if wall_s is None else wall_s, content)
        except SupervisorLost as error:
            session, self.session = self.session, None
            stderr = session.close()
            raise SupervisorLost(f"{error}; {stderr.splitlines()[-1]}" if stderr else str(error)) from None

    def close(self) -> None:
        """End every process inside. The work folder stays."""
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> SupervisorSession:
        command: AbstractContextManager[tuple[list[str], list[int]]]
        if self.kind == "bubblewrap":
            environment, inside = FIXED_ENV, MACHINE if self.view.places else TESTBED
            group = memory_group.open_group(self.limits)
            command = bwrap_command(self.work, self.limits, self.view, [str(LINKS / "python3"), "-sS", GUEST])
        else:
            path = f"{base_python().parent}:{os.defpath}:/usr/local/bin"
            environment, inside, group = {**FIXED_ENV, "HOME": str(self.work), "PATH": path}, str(self.work), None
            command = nullcontext(([str(base_python()), "-sS", str(guest_folder())], []))
        # The supervisor itself gets no variable of the caller's, such as a PYTHONPATH that leads into the work folder.
        settings = {"work": inside, "env": {**environment, **self.view.env}, "counts_sockets": group is None}
        return SupervisorSession(command, environment, self.limits, settings, group)


def open_sandbox(kind: str, work: Path, *, limits: Limits | None = None, view: View | None = None) -> SupervisedSandbox:
    """Open a sandbox on the folder `work`: /testbed under bubblewrap, MACHINE where the view has places.

    `UsageError` where no such sandbox works here, or a path does not exist.
    """
    probe(kind)
    return SupervisedSandbox(kind, work, limits or Limits(), view or View())


@cache
def probe(kind: str) -> None:
    """Run one real command, once in this process; `UsageError` holds the reason and the way out where it fails."""
    if kind not in KINDS:
        raise UsageError("sandbox.unknown-kind", kind=kind, kinds=list(KINDS))
    with tempfile.TemporaryDirectory(prefix="composer-probe-") as folder:
        try:
            with SupervisedSandbox(kind, Path(folder), Limits(), View()) as sandbox:
                result = sandbox.run("python3 -c 'print(6 * 7)'")
        except InfrastructureError as error:
            raise UsageError("sandbox.probe-not-started", error=str(error), advice=_namespace_advice()) from None
    if result.output != "42\n":
        raise UsageError("sandbox.probe-fails", kind=kind, output=result.output.strip(), advice=_namespace_advice())


def _namespace_advice() -> Sentence:
    # Ubuntu 24.04 and later forbid them by AppArmor, unless this switch is 0.
    switch = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    is_restricted = switch.exists() and switch.read_text().strip() == "1"
    return Sentence("sandbox.allow-namespaces", by_apparmor=is_restricted)
