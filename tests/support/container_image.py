"""Images made from nothing but what this machine has, without a registry; and podman, where it can run them."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from composer_stages.envs.repo import runner
from composer_stages.sandbox import containers
from support.harbor import BASE

PROGRAMS = (
    *("bash", "cat", "chmod", "cp", "env", "git", "id", "ls"),
    *("mkdir", "mv", "rm", "sed", "sleep", "timeout", "touch"),
)
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "turtledemo", "config-*", "*.a"
)
FILE = "FROM scratch\nCOPY root /\nENV PATH=/usr/local/bin:/bin LANG=C.UTF-8\n"


def libraries(program: Path) -> set[str]:
    """The shared libraries that a program or a module needs, the loader included."""
    shown = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    return {word for word in shown.split() if word.startswith("/")}


def fill(root: Path, packages: Iterable[Path] = (), modules: Iterable[Path] = (), programs: Iterable[str] = ()) -> None:
    """A small system in a folder: a shell, the usual programs and further ones, this Python, and packages of it.

    modules: compiled ones that are mounted later; the libraries that they need are put in.
    """
    needed = {library for module in modules for library in libraries(module) if library.startswith("/lib")}
    for name in (*PROGRAMS, *programs):
        program = Path(shutil.which(name) or "").resolve(strict=True)
        (root / "bin").mkdir(parents=True, exist_ok=True)
        shutil.copy(program, root / "bin" / name)
        needed |= libraries(program)
    (root / "bin" / "sh").symlink_to("bash")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    home, stdlib = root / "usr" / "local", Path(sysconfig.get_path("stdlib"))
    (home / "bin").mkdir(parents=True)
    interpreter = Path(sys.executable).resolve()
    shutil.copy(interpreter, home / "bin" / version)
    for name in ("python", "python3"):
        (home / "bin" / name).symlink_to(version)
    shutil.copytree(stdlib, home / "lib" / version, ignore=LEFT_OUT, symlinks=True)
    needed |= libraries(interpreter).union(*map(libraries, (stdlib / "lib-dynload").glob("*.so")))
    for path in packages:
        target = home / "lib" / version / "site-packages" / path.name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(path, target, ignore=LEFT_OUT) if path.is_dir() else shutil.copy(path, target)
    system = Path(next(library for library in needed if "/libc.so" in library)).parent
    for library in needed:  # those of a Python that was built elsewhere too lie where any loader looks
        place = library if library.startswith("/lib") else str(system / Path(library).name)
        target = root / place.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(library).resolve(), target)
    for name in ("dev", "etc", "proc", "tmp"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")


def build(context: Path, tag: str, *further: str) -> None:
    """`podman build` of a folder with a `Containerfile`."""
    subprocess.run(
        ["podman", "build", "--quiet", "--tag", tag, *further, str(context)], check=True, capture_output=True
    )


@cache
def missing() -> str | None:
    """Why containers cannot be run here by podman without being root, in its own words; None where they can."""
    if not shutil.which("podman"):
        return "podman is not installed"
    if os.getuid() == 0:
        return "these tests run as root, and rootless podman is what they try"
    tag = f"localhost/composer-probe:{os.getpid()}"
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        (root / "bin").mkdir(parents=True)
        sleep = Path(shutil.which("true") or "").resolve()
        shutil.copy(sleep, root / "bin" / "true")
        for library in libraries(sleep):
            (root / library.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(library).resolve(), root / library.lstrip("/"))
        (Path(folder) / "Containerfile").write_text(FILE)
        try:
            build(Path(folder), tag)
            words = ["podman", "run", "--rm", "--network", "none", "--init", "--userns", "keep-id", tag, "/bin/true"]
            subprocess.run(words, check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            told = error.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
            return f"podman cannot run a container here: {told[-1]}"
        finally:
            subprocess.run(["podman", "rmi", "--force", tag], capture_output=True)
    return None


HARBOR_PROGRAMS = (
    *("base64", "dirname", "find", "head", "ln", "mkfifo", "seq"),
    *("sort", "tee", "tr", "truncate", "wc", "yes"),
)
PODMAN_SETTINGS = """\
[containers]
netns = "none"
default_ulimits = ["nofile=20000:20000", "nproc=10000:10000"]
[engine]
runtime = "runc"
"""
"""Where the limits of this machine's processes are lower than podman's defaults; crun refuses to start then."""


@contextmanager
def podman_for_harbor(folder: Path) -> Iterator[str | None]:
    """Let podman run containers of the base image of Harbor tasks; gives the reason where it cannot.

    folder: for the settings and for the files of the image, which is built once a machine.
    """
    if not shutil.which("podman"):
        yield "podman is not installed"
        return
    before = os.environ.get("CONTAINERS_CONF")
    if shutil.which("runc"):
        (folder / "containers.conf").write_text(PODMAN_SETTINGS)
        os.environ["CONTAINERS_CONF"] = str(folder / "containers.conf")
    containers.find_engine.cache_clear()
    try:
        if subprocess.run(["podman", "image", "inspect", BASE], capture_output=True).returncode:
            fill(folder / "root", runner.distribution_paths(runner.RUNNER), programs=HARBOR_PROGRAMS)
            (folder / "Containerfile").write_text(FILE)
            build(folder, BASE)
        started = subprocess.run(["podman", "run", "--rm", BASE, "ls"], capture_output=True, text=True)
        why = started.stderr.strip()[-200:]
        yield f"podman cannot run a container here: {why}" if started.returncode else None
    finally:
        os.environ.pop("CONTAINERS_CONF", None)
        if before is not None:
            os.environ["CONTAINERS_CONF"] = before
        containers.find_engine.cache_clear()
