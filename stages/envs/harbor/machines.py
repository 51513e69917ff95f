"""The machine of a task: a container of its image, or bubblewrap on the files of its Dockerfile.

Both run commands, take folders, and give files back, at the paths that Harbor's format fixes (/tests, /solution, /logs)
and those of the task. In a container what a command starts goes on running, as a service does; in bubblewrap every
command ends with all that it started. What a machine gives back are regular files and folders: no link, no pipe.
"""

import atexit
import fnmatch
import hashlib
import os
import shlex
import stat
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from composer_stages.envs import folders
from composer_stages.envs.folders import UnwieldyTree
from composer_stages.envs.harbor import dockerfile
from composer_stages.envs.harbor.dockerfile import IMAGE_PATH, CopiedFiles, DockerRecipe, NotFollowed
from composer_stages.envs.harbor.task_folder import ARTIFACTS, ContainerSource, HarborTask, Healthcheck
from composer_stages.envs.repo import runner, trees
from composer_stages.errors import InfrastructureError
from composer_stages.sandbox import CommandResult, Limits, Sandbox, View, containers, open_sandbox
from composer_stages.sandbox.bubblewrap import LINKS
from composer_stages.sandbox.containers import START_S, WAITING, Container, User, last_line, run_bounded, run_engine
from composer_stages.words import Sentence

COMMAND_S = 300.0
"""Wall-clock seconds of one command, where the task's own limits do not apply."""
MEMORY_MB, DISK_MB, PROCESSES = 2048, 2048, 256
"""Of a task that asks for nothing else."""
OUTPUT_BYTES = 1 << 20
LOGS = "/logs"
TEMPORARY, ROOT_HOME = "/tmp", "/root"  # noqa: S108 (of the machine)
FIXED = (LOGS, "/tests", "/solution", TEMPORARY)
"""Folders of every machine: those of the format, and one that agents and verifiers leave files in."""
SYSTEM_FOLDERS = frozenset({"bin", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr"})
"""Folders at the top that hold this machine's programs, or none of the task's files."""
SHARED = {"home": ("agent",), "opt": ("composer",), "var": ("tmp", "run", "lib")}
"""Folders at the top in which a task may have a folder of its own, except these."""
BUILT = "localhost/composer-harbor"


@dataclass(frozen=True)
class PlayedIn:
    """The host of tasks. engine: the program of a container engine, None for bubblewrap.

    network: containers get the engine's network where their task asks for one, else none does.
    """

    engine: str | None
    network: bool = False

    @property
    def kind(self) -> str:
        """Return the name that is recorded of the sandbox."""
        return "container" if self.engine else "bubblewrap"


class Machine(Protocol):
    """A running machine. Paths are absolute paths inside."""

    description: str
    """What it was made from."""

    def run(
        self, command: str, wall_s: float, env: Mapping[str, str] | None = None, user: User = None
    ) -> CommandResult:
        """Run a command by bash in the working folder."""
        ...

    def upload(self, folder: Path, target: str) -> None:
        """Copy the content of a folder into a folder of the machine, made where it is missing."""
        ...

    def empty(self, folder: str) -> set[str]:
        """Empty a folder, made where it is missing; return the names of its former entries."""
        ...

    def fetch(self, source: str, target: Path, exclude: Sequence[str], most_bytes: int) -> int:
        """Copy a file or folder to the path `target` of this machine, without links; return its bytes, 0 for none.

        Raises UnwieldyTree for more than `most_bytes`.
        """
        ...

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """Return a file's bytes, None where there is none; ValueError where it is no file, or larger."""
        ...

    def close(self) -> None:
        """End everything; safe to call twice."""
        ...


def list_obstacles(task: HarborTask, host: PlayedIn) -> list[str]:
    """Return why a task cannot be played; images that an engine must have are checked by `find_missing_images`."""
    sources = [(task.container, "environment")]
    sources += [(step.separate, "its verifier") for step in task.steps if step.separate]
    reasons = list[str]()
    for source, name in sources:
        settings = source.settings
        if settings.network_mode == "public" and not host.network:
            reasons.append(Sentence("envs.harbor.asks-for-network", name=name))
        if (settings.memory_mb or 0) > physical_memory_mb():
            reasons.append(
                Sentence(
                    "envs.harbor.not-enough-memory",
                    name=name,
                    memory_mb=settings.memory_mb,
                    physical_mb=physical_memory_mb(),
                )
            )
        if host.engine is None:
            reasons += [f"{name}: {reason}" for reason in _bubblewrap_obstacles(task, source)]
    if host.engine is None:
        if task.config.environment.healthcheck or any(step.healthcheck for step in task.steps):
            reasons.append(Sentence("envs.harbor.health-check-in-bubblewrap"))
        users = [user for step in task.steps for user in (step.agent_user, step.verifier_user)]
        if named := [user for user in users if user not in (None, "root", 0)]:
            reasons.append(Sentence("envs.harbor.user-in-bubblewrap", user=named[0]))
    return list(dict.fromkeys(reasons))


def _bubblewrap_obstacles(task: HarborTask, source: ContainerSource) -> list[str]:
    """Return why a container cannot be replaced by bubblewrap."""
    if not source.settings.docker_image and not (task.folder / source.context / "Dockerfile").is_file():
        return []  # a problem of its own
    try:
        recipe = read_recipe(task, source)
        mounted_folders(recipe, task)
    except NotFollowed as error:
        return [Sentence("envs.harbor.dockerfile-not-followed", context=source.context, error=error)]
    return []


def find_missing_images(tasks: Iterable[HarborTask], engine: str) -> list[str]:
    """Return a problem for every task whose images are neither here nor in a registry that answers."""
    needed: dict[str, list[HarborTask]] = {}
    for task in tasks:
        sources = [task.container, *(step.separate for step in task.steps if step.separate)]
        for image in dict.fromkeys(image for source in sources for image in _images(task, source)):
            needed.setdefault(image, []).append(task)
    with ThreadPoolExecutor(8) as pool:
        failures = dict(zip(needed, pool.map(lambda image: _image_failure(engine, image), needed), strict=True))
    return [
        Sentence("envs.harbor.image-missing", task=task.name, image=image, reason=reason)
        for image, reason in failures.items()
        if reason
        for task in needed[image]
    ]


def _images(task: HarborTask, source: ContainerSource) -> list[str]:
    if source.settings.docker_image:
        return [source.settings.docker_image]
    return dockerfile.base_images((task.folder / source.context / "Dockerfile").read_text(errors="replace"))


def _image_failure(engine: str, image: str) -> str | None:
    """Return why an image cannot be fetched; None where it can."""
    if subprocess.run([engine, "image", "inspect", image], capture_output=True, timeout=START_S).returncode == 0:
        return None
    return containers.manifest_failure(engine, image)


@cache
def physical_memory_mb() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20


def open_machine(task: HarborTask, source: ContainerSource, host: PlayedIn) -> Machine:
    """Start the machine of a task or of its verifier; `InfrastructureError` where that fails."""
    if host.engine is None:
        return BubblewrapMachine(task, source)
    machine = ContainerMachine(host.engine, build_image(task, source, host.engine), source, host)
    try:
        # As Harbor does for an image that is not built from the folder.
        if source.settings.docker_image and not (task.folder / source.context / "Dockerfile").exists():
            machine.upload_beside(task.folder / source.context)
    except BaseException:
        machine.close()
        raise
    return machine


def check_health(machine: Machine, check: Healthcheck) -> None:
    """Wait until a health check succeeds; `InfrastructureError` after its last retry, as Docker counts them."""
    begin, failures = time.monotonic() + check.start_period_sec, 0
    while (result := machine.run(check.command, check.timeout_sec)).returncode:
        early = time.monotonic() < begin
        failures += not early
        if failures >= check.retries:
            output = result.output.strip()[-200:]
            raise InfrastructureError(
                "envs.harbor.health-check-failed", command_=check.command, failures=failures, output=output
            )
        time.sleep(check.start_interval_sec if early else check.interval_sec)


# A container.

_building = threading.Lock()
_locks: dict[str, threading.Lock] = {}


def build_image(task: HarborTask, source: ContainerSource, engine: str) -> str:
    """Return the image of a container, built where it is missing; its tag is a digest of the files."""
    if source.settings.docker_image:
        return source.settings.docker_image
    context = task.folder / source.context
    digest = hashlib.sha256(f"{task.digest} {source.context}".encode()).hexdigest()[:20]
    tag = f"{BUILT}:{digest}"
    with _building:
        lock = _locks.setdefault(tag, threading.Lock())
    with lock:
        if subprocess.run([engine, "image", "inspect", tag], capture_output=True, timeout=START_S).returncode:
            words = [engine, "build", "--quiet", "--tag", tag, str(context)]
            done = run_bounded(words, source.settings.build_timeout_sec, OUTPUT_BYTES)
            if done.returncode:
                limit_s = source.settings.build_timeout_sec if done.timed_out else None
                raise InfrastructureError(
                    "envs.harbor.image-not-built", task=task.name, limit_s=limit_s, output=last_line(done.output)
                )
    return tag


class ContainerMachine(Container):
    """Implements Machine: a container whose services go on running, with its files read and written by the engine."""

    def __init__(self, engine: str, image: str, source: ContainerSource, host: PlayedIn) -> None:
        self.settings, self.description = source.settings, image
        limits = Limits(
            wall_s=COMMAND_S,
            memory_mb=self.settings.memory_mb or MEMORY_MB,
            processes=PROCESSES,
            output_bytes=OUTPUT_BYTES,
        )
        has_network = host.network and self.settings.network_mode != "no-network"
        options = [] if has_network else ["--network", "none"]
        if self.settings.cpus:
            options += ["--cpus", str(min(self.settings.cpus, os.cpu_count() or 1))]
        options += [word for key, value in self.settings.env.items() for word in ("--env", f"{key}={value}")]
        # The image's entrypoint is kept: it may start the service that a task is about.
        command = ["sh", "-c", WAITING]
        super().__init__(engine, image, limits, options, command, workdir=self.settings.workdir, keeps_processes=True)
        try:
            self._as_root(f"mkdir -p {LOGS}/agent {LOGS}/verifier {ARTIFACTS} && chmod -R 777 {LOGS}")
            if self.settings.workdir:
                # Docker makes the folder of `run --workdir`; podman 4.3 refuses one that the image does not have.
                self._as_root(f"mkdir -p {shlex.quote(self.settings.workdir)}")
        except BaseException:
            self.close()
            raise

    def _as_root(self, command: str) -> str:
        """Run a command that must succeed; return its output."""
        done = run_bounded([self.engine, "exec", "--user", "0", self.name, "sh", "-c", command], START_S, OUTPUT_BYTES)
        if done.returncode:
            raise InfrastructureError(
                "envs.harbor.exec-failed",
                engine=Path(self.engine).name,
                command_=command[:60],
                output=last_line(done.output),
            )
        return done.output

    def upload(self, folder: Path, target: str) -> None:
        """Copy a folder's content into the container, by the engine."""
        self._as_root(f"mkdir -p {shlex.quote(target)}")
        run_engine([self.engine, "cp", f"{folder}/.", f"{self.name}:{target}"])

    def upload_beside(self, folder: Path) -> None:
        """Copy a folder's content into the working folder, where there is any."""
        if folder.is_dir() and any(folder.iterdir()):
            self.upload(folder, self.settings.workdir or self.run("pwd", COMMAND_S).output.strip() or "/")

    def empty(self, folder: str) -> set[str]:
        """Delete the folder, or what is at its path, and create it."""
        quoted = shlex.quote(folder)
        names = self._as_root(f"ls -A {quoted} 2>/dev/null; rm -rf {quoted} && mkdir -p {quoted} && chmod 777 {quoted}")
        return set(names.splitlines())

    def fetch(self, source: str, target: Path, exclude: Sequence[str], most_bytes: int) -> int:
        """Read the engine's tar of a path as a stream, and keep files and folders of it."""
        written = 0
        target.parent.mkdir(parents=True, exist_ok=True)
        for name, info, data in self._members(source):
            path = "" if "/" not in name else name.partition("/")[2]
            if _is_excluded(path or PurePosixPath(source).name, exclude) or not info.isreg():
                continue
            written += info.size + 1
            if written > most_bytes:
                raise UnwieldyTree("envs.harbor.too-many-bytes", source=source, most_bytes=most_bytes)
            content = data.read() if data else b""
            folders.write(target.parent, str(PurePosixPath(target.name, path)), content, info.mode & 0o777 | 0o600)
        return written

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """Read one file of the engine's tar."""
        for name, info, data in self._members(path):
            # The engine follows a link within the container and names the file that it leads to.
            if not info.isreg() or name != PurePosixPath(path).name:
                raise ValueError(Sentence("envs.harbor.not-a-file"))
            if info.size > most_bytes:
                raise ValueError(Sentence("envs.harbor.file-too-large", size=info.size, most_bytes=most_bytes))
            return data.read() if data else b""
        return None

    def _members(self, path: str) -> Iterable[tuple[str, tarfile.TarInfo, IO[bytes] | None]]:
        """Yield the members of the engine's tar of a path; none where there is nothing."""
        words = [self.engine, "cp", f"{self.name}:{path}", "-"]
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            patience = threading.Timer(START_S, process.kill)
            patience.start()
            try:
                with suppress(tarfile.ReadError), tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                    for info in archive:
                        name = str(PurePosixPath(info.name))
                        if not info.name.startswith("/") and ".." not in PurePosixPath(name).parts:
                            yield name, info, archive.extractfile(info) if info.isreg() else None
                    return
                # No archive: its output has ended, and it tells why.
                stderr = process.stderr.read().decode(errors="replace") if process.stderr else ""
            finally:
                patience.cancel()
                process.kill()
        if not any(words in stderr.lower() for words in ("no such file", "could not find", "could not be found")):
            raise InfrastructureError(
                "envs.harbor.copy-failed", engine=Path(self.engine).name, path=path, output=last_line(stderr)
            )


# Bubblewrap.


def read_recipe(task: HarborTask, source: ContainerSource) -> DockerRecipe:
    """Return the steps of a container's Dockerfile; `NotFollowed` where it needs an engine."""
    file = task.folder / source.context / "Dockerfile"
    settings = source.settings
    if settings.docker_image and not file.exists():
        recipe = dockerfile.follow_dockerfile(
            f"FROM {settings.docker_image}\nWORKDIR {settings.workdir or '/app'}\n", file.parent
        )
        if (task.folder / source.context).is_dir() and not source.own_tests:
            recipe.steps.append(CopiedFiles(("",), recipe.workdir, True, False))
    else:
        if (file.parent / ".dockerignore").exists():
            raise NotFollowed("envs.harbor.dockerignore")
        recipe = dockerfile.follow_dockerfile(file.read_text(errors="replace"), file.parent)
    recipe.workdir = settings.workdir or recipe.workdir
    recipe.env |= settings.env
    return recipe


def mounted_folders(recipe: DockerRecipe, task: HarborTask) -> list[str]:
    """Return the folders that bubblewrap mounts for a task; `NotFollowed` for a folder of the system."""
    artifacts = [PurePosixPath(artifact.source) for step in task.steps for artifact in step.artifacts]
    folders_inside = [recipe.workdir, *recipe.folders, *FIXED]
    # A file's folder; a folder at the top is its own.
    folders_inside += [str(path.parent if len(path.parts) > 2 else path) for path in artifacts]
    mounted = []
    for path in folders_inside:
        top, *below = PurePosixPath(path).parts[1:] or ("",)
        if not top or top in SYSTEM_FOLDERS or (top in SHARED and (not below or below[0] in SHARED[top])):
            raise NotFollowed("envs.harbor.system-folder", path=path)
        mounted.append(f"/{top}/{below[0]}" if top in SHARED else f"/{top}")
    return list(dict.fromkeys(mounted))


@cache
def programs() -> Path:
    """Return a folder with the program `pytest`, which images install with the module."""
    folder = folders.make("programs")
    atexit.register(folders.remove, folder)
    (folder / "pytest").write_text('#!/bin/sh\nexec python3 -m pytest "$@"\n')
    (folder / "pytest").chmod(0o755)
    return folder


class BubblewrapMachine:
    """Implements Machine: a folder that mirrors the task's folders from the top, and a sandbox on it.

    The sandbox shows this machine's programs and Python, and pytest. It is opened with the first command, and ended
    before files are read or written from outside.
    """

    def __init__(self, task: HarborTask, source: ContainerSource) -> None:
        recipe, settings = read_recipe(task, source), source.settings
        self.description = f"{recipe.image} (not built: bubblewrap)"
        self.workdir = recipe.workdir
        self._places = mounted_folders(recipe, task)
        self._limits = Limits(
            wall_s=COMMAND_S,
            cpu_s=86_400,
            memory_mb=settings.memory_mb or MEMORY_MB,
            processes=PROCESSES,
            file_mb=settings.storage_mb or DISK_MB,
            disk_mb=settings.storage_mb or DISK_MB,
            output_bytes=OUTPUT_BYTES,
        )
        home = {"HOME": ROOT_HOME} if ROOT_HOME in self._places else {}  # as in a container, whose user is root
        here = f"{LINKS}:{programs()}:/usr/local/bin:/usr/bin:/bin"
        path = recipe.env.get("PATH", IMAGE_PATH).replace(IMAGE_PATH, here)
        self._env = {**home, **recipe.env, "PATH": path}
        self._sandbox: Sandbox | None = None
        self.root = folders.make("machine")
        try:
            self._make(task.folder / source.context, recipe)
        except BaseException:
            self.close()
            raise

    def _make(self, context: Path, recipe: DockerRecipe) -> None:
        """Run the steps of the Dockerfile in order."""
        for folder in (*self._places, *recipe.folders, recipe.workdir, f"{LOGS}/agent", f"{LOGS}/verifier", ARTIFACTS):
            self._host(folder).mkdir(parents=True, exist_ok=True)
        for step in recipe.steps:
            if isinstance(step, CopiedFiles):
                self.end()
                self._copy(context, step)
            else:
                command, workdir = step
                result = self.run(f"cd {shlex.quote(workdir)} && {command}", COMMAND_S)
                if result.returncode:
                    raise InfrastructureError(
                        "envs.harbor.run-failed", command_=command[:60], output=result.output[-200:]
                    )

    def _copy(self, context: Path, step: CopiedFiles) -> None:
        """Run one COPY or ADD."""
        matches = [
            path for pattern in step.patterns for path in (sorted(context.glob(pattern)) if pattern else [context])
        ]
        if not matches:
            raise InfrastructureError("envs.harbor.copy-without-file", pattern=step.patterns[0])
        for path in matches:
            if path.is_dir():
                self.upload(path, step.target)
            elif step.unpacks and path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
                with trees.scratch() as scratch:
                    trees.extract_archive(path, scratch)
                    self.upload(scratch, step.target)
            else:
                into = step.into_folder or len(matches) > 1 or self._is_folder(step.target)
                target = f"{step.target}/{path.name}" if into else step.target
                mode = step.mode if step.mode is not None else stat.S_IMODE(path.stat().st_mode)
                folders.write(self.root, target.strip("/"), path.read_bytes(), mode | 0o600)

    def _is_folder(self, path: str) -> bool:
        status = self._status(path.strip("/"))
        return status is not None and stat.S_ISDIR(status.st_mode)

    def _host(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def run(
        self, command: str, wall_s: float, env: Mapping[str, str] | None = None, user: User = None
    ) -> CommandResult:
        """Run a command in the working folder; all that it started ends with it."""
        del user  # the sandbox has one, and a task that needs another is not played here
        if self._sandbox is None:
            # The agent sees the folder around them too (MACHINE), where it may have put a link to this machine.
            for path in self._places:
                self._make_folder(path)
            # This machine's Python may lie below a place such as /root, and is shown there.
            for visible in (Path(sys.base_prefix).parent, Path(sys.base_prefix).resolve(), programs()):
                if any(visible.is_relative_to(path) for path in self._places):
                    self._make_folder(str(visible))
            self._sandbox = open_sandbox(
                "bubblewrap",
                self.root,
                limits=self._limits,
                view=View(
                    readonly=(programs(),),
                    packages=runner.distribution_paths(runner.RUNNER),
                    env=self._env,
                    places={path: self._host(path) for path in self._places},
                ),
            )
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in (env or {}).items())
        return self._sandbox.run(f"cd {shlex.quote(self.workdir)} || exit 126\n{exports}{command}", wall_s=wall_s)

    def end(self) -> None:
        """End all processes, so that files can be read and written; the next command gets a fresh sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()

    def upload(self, folder: Path, target: str) -> None:
        """Write a folder's files, one by one: a link that the agent left in their way is deleted, and not followed."""
        self.end()
        self._make_folder(target)
        for entry in folders.entries(folder):
            path, mode = folder / entry.path, stat.S_IMODE(entry.status.st_mode)
            if entry.is_folder:
                self._make_folder(f"{target}/{entry.path}")
            elif path.is_file():  # also a link to one, which the reader found to stay within the task
                folders.write(self.root, f"{target}/{entry.path}".strip("/"), path.read_bytes(), mode & 0o777 | 0o600)

    def empty(self, folder: str) -> set[str]:
        """Delete what is in a folder, or in its place, and make it."""
        self.end()
        self._make_folder(folder)
        names = set(os.listdir(self._host(folder)))
        for name in names:
            folders.unlink(self.root, f"{folder.strip('/')}/{name}")
        return names

    def _make_folder(self, folder: str) -> None:
        """Make a folder and those above it; a link or file in their place is deleted. Nothing may run meanwhile."""
        folders.make_folder(self.root, folder.strip("/"))

    def fetch(self, source: str, target: Path, exclude: Sequence[str], most_bytes: int) -> int:
        """Copy a file or folder without its links; no link on the path is followed."""
        self.end()
        relative = source.lstrip("/")
        status = self._status(relative)
        if status is None or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            return 0
        if stat.S_ISREG(status.st_mode):
            entries = [("", status)]
        else:
            listed = folders.entries(self._host(source), lambda path: not _is_excluded(path, exclude))
            entries = [(entry.path, entry.status) for entry in listed if entry.is_file]
        entries = [(path, status) for path, status in entries if not _is_excluded(path or Path(source).name, exclude)]
        # Before anything is read: a sparse file is small on the disk and large in memory.
        if (size := sum(status.st_size + 1 for _, status in entries)) > most_bytes:
            raise UnwieldyTree("envs.harbor.too-many-bytes", source=source, most_bytes=most_bytes)
        target.parent.mkdir(parents=True, exist_ok=True)
        for path, file_status in entries:
            if (content := folders.read(self.root, f"{relative}/{path}" if path else relative)) is not None:
                mode = file_status.st_mode & 0o777 | 0o600
                folders.write(target.parent, str(PurePosixPath(target.name, path)), content[0], mode)
        return size

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """Read one file; a link, a pipe or a folder is none."""
        self.end()
        if (status := self._status(path.lstrip("/"))) is None:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(Sentence("envs.harbor.not-a-file"))
        if status.st_size > most_bytes:
            raise ValueError(Sentence("envs.harbor.file-too-large", size=status.st_size, most_bytes=most_bytes))
        file = folders.read(self.root, path.lstrip("/"))
        return file[0] if file else None

    def _status(self, relative: str) -> os.stat_result | None:
        with suppress(OSError), folders.parent_of(self.root, relative) as above:
            return os.lstat(PurePosixPath(relative).name, dir_fd=above)
        return None

    def close(self) -> None:
        """End everything and delete the folder."""
        self.end()
        folders.remove(self.root)


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Return whether tar's --exclude would leave a path out: a pattern matches it, or a folder or name in it."""
    parts = PurePosixPath(path).parts
    ends = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatch(part, pattern) for pattern in patterns for part in (*ends, *parts))
