"""Run pytest as a child and write the report of its plugin: no process that runs code under test holds the secret.

    python -I -S composer_supervisor.py COMMAND...

Reads the secret from stdin. The child gets a descriptor in the variable COMPOSER_CHANNEL; its first line is a key, with
which the plugin seals every outcome as it happens, in order. A line without the right seal is tampering, and so is the
pass of a test that raised. The child gets PYTHONPATH as COMPOSER_PATH, which composer_pytest.py restores. Writes a line
`<secret> <JSON>` to stdout once the plugin sent the end of the session, and exits with the child's exit status. Runs
under Python 3.6 and later. `_ctypes` and `_socket` are the C cores of `ctypes` and `socket`, whose Python parts would
cost a third of the start-up.
"""

import _ctypes
import _socket
import hashlib
import hmac
import json
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_DUMPABLE = 4
INTERVAL_S = 0.05
CHUNK_BYTES = 1 << 16


class SealedReport:
    """The sealed lines of one child. `raised` is the test whose last phase raised."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.received = 0
        self.tampered = False
        self.raised: str | None = None
        self.outcomes: dict[str, str] = {}
        self.broken: list[list[str]] = []
        self.end: dict[str, Any] | None = None

    def take(self, line: bytes) -> None:
        """Accept a line whose seal is right for its sequence number; any line after the end is tampering too."""
        # The number is sealed too, so that no line can be replayed, omitted or moved.
        seal, _, body = line.partition(b" ")
        expected = hmac.new(self.key.encode(), b"%d " % self.received + body, hashlib.sha256).hexdigest().encode()
        if self.end is not None or not hmac.compare_digest(seal, expected):
            self.tampered = True
            return
        self.received += 1
        try:
            kind, content = json.loads(body.decode("utf-8", "surrogatepass"))
            self.record(kind, content)
        except Exception:  # code under test may find the sender and seal anything
            self.tampered = True

    def record(self, kind: str, content: "Any") -> None:
        """Record the content of one line."""
        if kind == "end":
            self.end = dict(content)
        elif kind == "broken":
            self.broken.append(content)
        elif kind == "phase":
            self.raised = content[0] if content[1] else None
        # The report of a phase that raised was changed on its way, for instance by a thread.
        elif content[1] in ("passed", "xpassed") and content[0] == self.raised:
            self.tampered = True
        elif self.outcomes.get(content[0]) not in ("failed", "error"):
            self.outcomes[content[0]] = content[1]

    def result(self, control: str) -> "dict[str, Any]":
        """Return the report, JSON-able."""
        failed = [self.outcomes.pop(name) for name in list(self.outcomes) if name.endswith(control)]
        report = {"outcomes": self.outcomes, "broken": self.broken, "control": failed, "tampered": self.tampered}
        # The collected outcomes count, whatever the end claims.
        return dict(self.end or {}, **report)


def start(command: "list[str]") -> "tuple[int, _socket.socket]":
    """Start the command with one end of a channel; return its pid and the other end."""
    parent_end, child_end = _socket.socketpair()
    pid = os.fork()
    if pid == 0:
        # The secret comes on stdin, which the child must not read first.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.set_inheritable(child_end.fileno(), True)
        environment = dict(os.environ, COMPOSER_CHANNEL=str(child_end.fileno()))
        # Python would search these folders before its own when it starts, the work folder among them.
        if "PYTHONPATH" in environment:
            environment["COMPOSER_PATH"] = environment.pop("PYTHONPATH")
        os.execvpe(command[0], command, environment)  # noqa: S606
    child_end.close()
    return pid, parent_end


def listen(pid: int, channel: _socket.socket, report: SealedReport) -> int:
    """Take lines until the child has ended and the channel is empty; return its wait status."""
    data, status = b"", None
    channel.setblocking(False)
    while True:
        # First whether the child has ended, then what it sent: in the other order its last lines could be missed.
        if status is None:
            ended, wait_status = os.waitpid(pid, os.WNOHANG)
            status = wait_status if ended else None
        ready, _, _ = select.select([channel], [], [], 0 if status is not None else INTERVAL_S)
        chunk = channel.recv(CHUNK_BYTES) if ready else b""
        # It closed its end and will send nothing more; without waiting this loop would spin until it ends.
        if ready and not chunk and status is None:
            status = os.waitpid(pid, 0)[1]
        data += chunk
        lines = data.split(b"\n")
        data = lines.pop()
        for line in lines:
            report.take(line)
        if status is not None and not chunk:
            return status


def main(command: "list[str]") -> None:
    """Run the command and report."""
    # Before the secret is read: the child, of the same user, must not read this process's memory.
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # None is the running program
    _ctypes.call_function(prctl, (PR_SET_DUMPABLE, 0, 0, 0, 0))
    pid, channel = start(command)
    secret, report = sys.stdin.readline().strip(), SealedReport(os.urandom(16).hex())
    channel.sendall(report.key.encode() + b"\n")
    status = listen(pid, channel, report)
    if report.end is not None:
        line = f"\n{secret} {json.dumps(report.result('composer-control'))}\n".encode("utf-8", "surrogatepass")
        # A pipe may take only a part of a long report.
        while line:
            line = line[os.write(1, line) :]
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1:])
