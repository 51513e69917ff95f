"""Task folders in Harbor's format: read them, validate them, and name every reason why one cannot be used.

A folder holds task.toml (schema 1.0 to 1.4), instruction.md, environment/ with a Dockerfile, tests/test.sh, and maybe
solution/solve.sh; a task of several steps holds instruction, tests and solution in steps/NAME/ instead. The fields and
their defaults are those of harbor 0.24 (`harbor.models.task`): unknown keys are ignored there, and here.

`load` reads all folders below a path. Nothing in a folder is trusted: no link is followed that leads out of it, sizes
are checked before anything is read, and special files are refused. A problem names file, line and reason.
"""

import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_stages.envs import folders
from composer_stages.envs.base import Split
from composer_stages.errors import BadInput, refusal
from composer_stages.sandbox.containers import User
from composer_stages.words import Sentence

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MOST_TEXT = 1 << 20
"""Bytes of task.toml, of an instruction, and of a compose file."""
MOST_BYTES = 2 << 30
"""Apparent bytes of all files of a task."""
MOST_FILES = 100_000
"""Files, folders and links of a task."""
DEEPEST_TASK = 4
"""Folders between the given path and a task's: an organisation, a data set, a version."""
MAIN = "main"
"""The service of a compose file in which the agent works."""
CONFIG, INSTRUCTION, ENVIRONMENT, TESTS, SOLUTION = "task.toml", "instruction.md", "environment", "tests", "solution"
TEST_SCRIPT, SOLVE_SCRIPT, COMPOSE = "test.sh", "solve.sh", "docker-compose.yaml"
ARTIFACTS = "/logs/artifacts"
"""The folder in which an agent may publish files; it always travels to a separate verifier."""


def _check_step_name(name: str) -> str:
    """Return the name of a step, which is one folder below steps/; ValueError for anything else."""
    if not name.strip() or name in (".", "..") or re.search(r'[<>:"/\\|?*\x00-\x1f\x7f]|[. ]$', name):
        raise ValueError(Sentence("envs.harbor.not-a-folder-name", name=name[:80]))
    return name


def _check_container_path(path: str) -> str:
    """Return an absolute path in a container; ValueError where it has `..` in it."""
    if not path or "\0" in path or ".." in PurePosixPath(path).parts:
        raise ValueError(Sentence("envs.harbor.not-a-container-path", path=path[:80]))
    return str(PurePosixPath("/", path))


def _fill_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Fill templates of variables with their defaults; ValueError for one that reads this machine's environment."""
    variables = {}
    for name, value in env.items():
        if (template := re.fullmatch(r"\$\{([^}:]+)(?::-(.*))?\}", value, re.DOTALL)) is None:
            variables[name] = value
        elif template[2] is None:
            # Its value would be readable by the agent's commands, and keys are what it usually names.
            raise ValueError(Sentence("envs.harbor.host-variable", name=name, variable=template[1]))
        else:
            variables[name] = template[2]
    return variables


def _megabytes(size: Any) -> Any:
    """Return a size such as "2G" in MB, as schema 1.0 wrote it."""
    if isinstance(size, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GMK])B?\s*", size, re.IGNORECASE)):
        return int(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2].upper()])
    return size


Seconds = Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)]
Variables = Annotated[dict[str, str], AfterValidator(_fill_variables)]
Keys = Sequence[str | int]
"""Where a value is in task.toml."""
Network = Literal["public", "no-network", "allowlist"]


class TaskTable(BaseModel):
    """A table of task.toml."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Healthcheck(TaskTable):
    """A command that must succeed before the agent begins, as Docker's HEALTHCHECK."""

    command: str
    interval_sec: Annotated[float, Field(ge=0, le=3600)] = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    start_interval_sec: Annotated[float, Field(ge=0, le=3600)] = 5.0
    retries: Annotated[int, Field(ge=1, le=1000)] = 3


class EnvironmentSection(TaskTable):
    """The container of the agent, or of a separate verifier."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Annotated[str, AfterValidator(str.lower)] = "linux"
    cpus: Annotated[int, Field(ge=1)] | None = None
    memory_mb: Annotated[int, Field(ge=1)] | None = None
    storage_mb: Annotated[int, Field(ge=1)] | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: Annotated[str, AfterValidator(_check_container_path)] | None = None
    network_mode: Network | None = None
    """None where the file does not say; Harbor's default is then "public"."""
    allowed_hosts: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _older_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        renamed = dict(fields)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if (size := renamed.pop(old, None)) is not None and renamed.setdefault(new, _megabytes(size)) != _megabytes(
                size
            ):
                raise ValueError(Sentence("envs.harbor.contradicting-keys", old=old, new=new))
        internet = renamed.pop("allow_internet", None)
        if internet is not None and "network_mode" not in renamed:
            renamed["network_mode"] = "public" if internet else "no-network"
        return renamed

    @model_validator(mode="after")
    def _check(self) -> "EnvironmentSection":
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError(Sentence("envs.harbor.hosts-without-allowlist"))
        return self


class AgentSection(TaskTable):
    """The agent's phase of a task or step."""

    timeout_sec: Seconds | None = None
    user: User = None
    network_mode: Network | None = None


class CollectHook(TaskTable):
    """A command after the agent's phase, whose output a separate verifier may get as an artifact."""

    command: str
    service: str = MAIN
    timeout_sec: Seconds = 60.0
    user: User = None


class VerifierSection(TaskTable):
    """The verifier of a task or step. `environment_mode`: None where the file does not say."""

    timeout_sec: Seconds = 600.0
    env: Variables = {}
    user: User = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentSection | None = None
    collect: list[CollectHook] = []
    network_mode: Network | None = None

    @model_validator(mode="after")
    def _check(self) -> "VerifierSection":
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError(Sentence("envs.harbor.shared-with-environment"))
        return self

    def mode(self) -> Literal["shared", "separate"] | None:
        """Return the mode that this table asks for; an environment of its own asks for "separate"."""
        return self.environment_mode or ("separate" if self.environment else None)


class SolutionSection(TaskTable):
    """The reference solution."""

    env: Variables = {}


class Artifact(TaskTable):
    """A file or folder of the agent's container that a separate verifier gets, at the same path."""

    source: Annotated[str, AfterValidator(_check_container_path)]
    exclude: list[str] = []
    service: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, fields: Any) -> Any:
        return {"source": fields} if isinstance(fields, str) else fields


class StepSection(TaskTable):
    """One step of a task of several."""

    name: Annotated[str, AfterValidator(_check_step_name)]
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[Artifact] = []


class PackageSection(TaskTable):
    """The identity of a task."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", max_length=200)]
    description: str = ""


class TaskConfig(TaskTable):
    """A task.toml."""

    schema_version: Annotated[str, Field(validation_alias=AliasChoices("schema_version", "version"))] = "1.4"
    task: PackageSection | None = None
    metadata: dict[str, Any] = {}
    verifier: VerifierSection = VerifierSection()
    agent: AgentSection = AgentSection()
    environment: EnvironmentSection = EnvironmentSection()
    solution: SolutionSection = SolutionSection()
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepSection] = []
    artifacts: list[Artifact] = []

    @model_validator(mode="after")
    def _check(self) -> "TaskConfig":
        if self.schema_version not in VERSIONS:
            raise ValueError(
                Sentence("envs.harbor.unknown-schema", schema_version=self.schema_version, versions=VERSIONS)
            )
        names = [step.name.casefold() for step in self.steps]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(Sentence("envs.harbor.repeated-step", name=twice[0]))
        return self


@dataclass(frozen=True)
class ContainerSource:
    """What a container is made from: an image, or a folder with a Dockerfile, and its settings.

    context: the folder below the task's, "environment" or a folder of tests. own_tests: the image holds the tests
    itself, so that none are uploaded.
    """

    settings: EnvironmentSection
    context: str
    own_tests: bool = False


@dataclass(frozen=True)
class HarborStep:
    """An instruction with its verifier; a task without steps has one, whose name is empty.

    tests: folders below the task's that are uploaded to /tests, in order. script: the test script's path below /tests.
    solution, workdir: folders below the task's, None where there is none. separate: what a separate verifier runs in,
    None for a verifier that shares the agent's container.
    """

    name: str
    instruction: str
    tests: tuple[str, ...]
    solution: str | None
    workdir: str | None
    separate: ContainerSource | None
    agent_timeout_s: float | None
    agent_user: User
    verifier_timeout_s: float
    verifier_user: User
    verifier_env: Mapping[str, str]
    artifacts: tuple[Artifact, ...]
    collect: tuple[CollectHook, ...]
    min_reward: float | Mapping[str, float] | None
    healthcheck: Healthcheck | None


@dataclass(frozen=True)
class HarborTask:
    """A valid task folder. digest: of all of its files; name: unique among those that were loaded together."""

    folder: Path
    name: str
    digest: str
    config: TaskConfig
    container: ContainerSource
    steps: tuple[HarborStep, ...]

    @property
    def split(self) -> Split | None:
        """Return the split that the metadata name, if any."""
        split: Split | None = self.config.metadata.get("split")
        return split

    def family(self, key: str) -> str:
        """Return what the metadata have under a key, else the name without the number at its end."""
        named = self.config.metadata.get(key)
        return str(named) if named not in (None, "") else re.sub(r"[-_.]*\d+$", "", self.name) or self.name


class BadTask(Exception):
    """A folder is no usable task. Its arguments are the problems, each with file, line and reason.

    task: what could be read of it all the same.
    """

    def __init__(self, *problems: str, task: HarborTask | None = None) -> None:
        super().__init__(*problems)
        self.task = task


def load(
    path: str, check: Callable[[HarborTask], Sequence[str]] = lambda task: ()
) -> tuple[list[HarborTask], list[str]]:
    """Return the tasks below a path in the order of their folders, and the problems of unusable folders.

    check: gives further reasons against a task, which are named with the problems of its files, all in one round.
    BadInput where the path is not a folder.
    """
    root = Path(path).expanduser().absolute()
    if not root.is_dir():
        raise BadInput("envs.harbor.no-folder", path=path)
    tasks: list[HarborTask] = []
    problems: list[str] = []
    seen: dict[str, Path] = {}
    for folder in find_folders(root):
        reasons: Sequence[str] = ()
        try:
            task: HarborTask | None = read(folder, root)
        except BadTask as error:
            task, reasons = error.task, error.args
        if task is not None:
            reasons = [*reasons, *(f"{task.name}: {reason}" for reason in check(task))]
        if reasons or task is None:
            problems += reasons
            continue
        if (first := seen.setdefault(task.name, folder)) != folder:
            where = _relative_path(folder / CONFIG, root)
            problems.append(
                Sentence("envs.harbor.repeated-name", where=where, name=task.name, first=_relative_path(first, root))
            )
            continue
        tasks.append(task)
    return tasks, problems


def find_folders(root: Path) -> Iterator[Path]:
    """Yield the folders of tasks below a folder, or the folder itself; folders that resemble a task are among them."""
    waiting = [(root, 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError:
            continue
        names = {entry.name for entry in entries}
        # A task without its task.toml is a mistake to report, and no folder to pass over in silence.
        if CONFIG in names or (INSTRUCTION in names and names & {TESTS, ENVIRONMENT}):
            yield folder
        elif depth < DEEPEST_TASK:
            below = [entry for entry in entries if entry.is_dir(follow_symlinks=False) and entry.name[0] != "."]
            waiting += [(Path(entry.path), depth + 1) for entry in reversed(below)]


def read(folder: Path, root: Path | None = None) -> HarborTask:
    """Read and validate one task folder; BadTask names all of its problems, with paths below `root`."""
    root = root or folder.parent
    problems: list[str] = []
    digest, paths = _digest_tree(folder, root, problems)
    text = _read_text(folder, CONFIG, root, problems)
    if problems or text is None:
        raise BadTask(*problems)
    try:
        config = TaskConfig.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadTask(_problem(folder, root, (), f"no valid TOML ({error})")) from None
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            keys = [key for key in detail["loc"] if isinstance(key, int) or re.fullmatch(r"[a-z_]+", key)]
            problems.append(_problem(folder, root, keys, refusal(detail)))
        raise BadTask(*problems) from None
    name = config.task.name if config.task else str(PurePosixPath(folder.relative_to(root)))
    task = _make_step(folder, name if name != "." else folder.name, digest, config, paths, root, problems)
    problems += [_problem(folder, root, keys, reason) for keys, reason in _find_refusals(config, paths)]
    _check_compose(folder, root, paths, problems)
    if problems:
        raise BadTask(*problems, task=task)
    return task


def _make_step(
    folder: Path, name: str, digest: str, config: TaskConfig, paths: frozenset[str], root: Path, problems: list[str]
) -> HarborTask:
    """Return the task with inherited settings of its steps resolved; add the problems of its files."""
    container = ContainerSource(config.environment, ENVIRONMENT)
    if config.environment.docker_image is None and f"{ENVIRONMENT}/Dockerfile" not in paths:
        problems.append(_problem(folder, root, (), Sentence("envs.harbor.no-image")))
    steps = []
    sections: Sequence[StepSection | None] = config.steps or [None]
    for section in sections:
        above = "" if section is None else f"steps/{section.name}/"
        instruction = _read_text(folder, f"{above}{INSTRUCTION}", root, problems)
        if instruction is not None and not remove_canary(instruction).strip():
            problems.append(f"{_relative_path(folder / above / INSTRUCTION, root)}: it is empty")
        tests = tuple(path for path in dict.fromkeys((TESTS, f"{above}{TESTS}")) if _has_folder(paths, path))
        separate = _separate_verifier(config, section, paths)
        if not (separate and separate.own_tests) and not any(f"{path}/{TEST_SCRIPT}" in paths for path in tests):
            problems.append(f"{_relative_path(folder / above / TESTS, root)}: there is no {TEST_SCRIPT}")
        solution = next((path for path in (f"{above}{SOLUTION}", SOLUTION) if f"{path}/{SOLVE_SCRIPT}" in paths), None)
        agent, verifier = config.agent, config.verifier
        step_verifier = section.verifier if section else VerifierSection()
        says_timeout = section is not None and "timeout_sec" in step_verifier.model_fields_set
        steps.append(
            HarborStep(
                name=section.name if section else "",
                instruction=remove_canary(instruction or ""),
                tests=tests,
                solution=solution,
                workdir=f"{above}workdir" if section and _has_folder(paths, f"{above}workdir") else None,
                separate=separate,
                agent_timeout_s=(section.agent.timeout_sec if section else None) or agent.timeout_sec,
                agent_user=section.agent.user if section and section.agent.user is not None else agent.user,
                verifier_timeout_s=step_verifier.timeout_sec if says_timeout else verifier.timeout_sec,
                verifier_user=step_verifier.user if step_verifier.user is not None else verifier.user,
                verifier_env={**verifier.env, **step_verifier.env},
                artifacts=(*config.artifacts, *(section.artifacts if section else ())),
                collect=(*verifier.collect, *step_verifier.collect),
                min_reward=section.min_reward if section else None,
                healthcheck=section.healthcheck if section else None,
            )
        )
    return HarborTask(folder, name, digest, config, container, tuple(steps))


def _separate_verifier(config: TaskConfig, step: StepSection | None, paths: frozenset[str]) -> ContainerSource | None:
    """Return what a separate verifier runs in; None where it shares the agent's container.

    A step's own choice comes before the task's. The image: that of the verifier's environment, else a Dockerfile beside
    the tests, which then holds them, else a fresh one of the agent's.
    """
    mode = (step.verifier.mode() if step else None) or config.verifier.mode()
    if mode != "separate":
        return None
    of_step = (step.verifier.environment, f"steps/{step.name}/{TESTS}") if step else (None, "")
    choices = [choice for choice in (of_step, (config.verifier.environment, TESTS)) if choice[1]]
    settings = next((environment for environment, _ in choices if environment), config.environment)
    for environment, tests in choices:
        if environment is not None and environment.docker_image:
            changed = settings.model_copy(update={"docker_image": environment.docker_image})
            return ContainerSource(changed, tests, own_tests=True)
        if f"{tests}/Dockerfile" in paths:
            return ContainerSource(settings.model_copy(update={"docker_image": None}), tests, own_tests=True)
    image = config.environment.docker_image
    return ContainerSource(settings.model_copy(update={"docker_image": image}), ENVIRONMENT)


def _find_refusals(config: TaskConfig, paths: frozenset[str]) -> Iterator[tuple[Keys, str]]:
    """Yield the settings that Harbor supports and Composer does not: the keys in task.toml, and the reason."""
    verifiers: list[tuple[Keys, VerifierSection]] = [(["verifier"], config.verifier)]
    verifiers += [(["steps", number, "verifier"], step.verifier) for number, step in enumerate(config.steps)]
    environments: list[tuple[Keys, EnvironmentSection]] = [(["environment"], config.environment)]
    environments += [
        ([*keys, "environment"], verifier.environment) for keys, verifier in verifiers if verifier.environment
    ]
    for keys, environment in environments:
        if environment.os != "linux":
            yield [*keys, "os"], Sentence("envs.harbor.not-linux", os=environment.os)
        if environment.gpus:
            yield [*keys, "gpus"], Sentence("envs.harbor.needs-gpus", gpus=environment.gpus)
        if environment.tpu:
            yield [*keys, "tpu"], Sentence("envs.harbor.needs-tpu")
        if environment.mcp_servers:
            yield [*keys, "mcp_servers"], Sentence("envs.harbor.needs-mcp")
        if environment.skills_dir:
            yield [*keys, "skills_dir"], Sentence("envs.harbor.brings-skills")
        if environment.network_mode == "allowlist":
            yield [*keys, "network_mode"], Sentence("envs.harbor.needs-some-hosts")
    phases: list[tuple[Keys, AgentSection | VerifierSection]] = [(["agent"], config.agent), *verifiers]
    phases += [(["steps", number, "agent"], step.agent) for number, step in enumerate(config.steps)]
    for keys, phase in phases:
        if phase.network_mode not in (None, config.environment.network_mode):
            yield [*keys, "network_mode"], Sentence("envs.harbor.changes-network")
    for keys, verifier in verifiers:
        for number, hook in enumerate(verifier.collect):
            if hook.service != MAIN:
                yield [*keys, "collect", number, "service"], Sentence("envs.harbor.needs-service", service=hook.service)
    for artifact in [*config.artifacts, *(artifact for step in config.steps for artifact in step.artifacts)]:
        if artifact.service not in (None, MAIN):
            yield ["artifacts"], Sentence("envs.harbor.needs-service", service=artifact.service)
    if config.metadata.get("split") not in (None, "train", "eval"):
        yield ["metadata", "split"], Sentence("envs.harbor.no-such-split", split=config.metadata["split"])
    for path in sorted(paths):
        if PurePosixPath(path).name == "trajectory.json" and (path.count("/") == 0 or path.startswith("steps/")):
            yield [], Sentence("envs.harbor.recorded-conversation", path=path)


def _check_compose(folder: Path, root: Path, paths: frozenset[str], problems: list[str]) -> None:
    """Add a problem for each compose file that asks for more than the one container made from the Dockerfile.

    Harbor reads that of an environment alone: of the agent's, and of tests that have a Dockerfile. Others are data.
    """
    for path in sorted(paths):
        above, _, name = path.rpartition("/")
        if name != COMPOSE or not (above == ENVIRONMENT or PurePosixPath(above).name == TESTS):
            continue
        if (text := _read_text(folder, path, root, problems)) is None:
            continue
        where = _relative_path(folder / path, root)
        try:
            services = (yaml.safe_load(text) or {}).get("services") or {}
            further = sorted(map(str, set(services) - {MAIN}))
            keys = sorted(map(str, set(services.get(MAIN) or ()) - {"build", "image"}))
        except (yaml.YAMLError, AttributeError, TypeError, RecursionError) as error:
            problems.append(Sentence("envs.harbor.invalid-compose", where=where, error=str(error).splitlines()[0]))
            continue
        if further:
            problems.append(Sentence("envs.harbor.needs-services", where=where, services=further))
        elif keys:
            problems.append(Sentence("envs.harbor.compose-setting", where=where, key=keys[0]))


def _digest_tree(folder: Path, root: Path, problems: list[str]) -> tuple[str, frozenset[str]]:
    """Return a digest of a folder's files and their paths; add a problem for each entry that no task may hold."""
    digest, paths = hashlib.sha256(), set()
    above, top = _relative_path(folder, root), os.path.realpath(folder)
    size, count = 0, 0
    try:
        for entry in folders.entries(folder):
            where, mode = f"{above}/{entry.path}", entry.status.st_mode
            count += 1
            size += entry.status.st_size if entry.is_file else 0
            # Before the file is read: a sparse one is small on the disk and large in memory.
            if size > MOST_BYTES or count > MOST_FILES:
                problems.append(
                    Sentence("envs.harbor.task-too-large", where=where, most_mb=MOST_BYTES >> 20, most_files=MOST_FILES)
                )
                break
            if stat.S_ISLNK(mode):
                target = os.readlink(entry.name, dir_fd=entry.folder)
                real = os.path.realpath(folder / entry.path)
                if not (real == top or real.startswith(f"{top}{os.sep}")):
                    problems.append(Sentence("envs.harbor.link-outside", where=where, target=target[:80]))
                elif os.path.isfile(real):
                    paths.add(entry.path)
                digest.update(f"link {entry.path}\0{target}\0".encode(errors="surrogateescape"))
            elif entry.is_file:
                paths.add(entry.path)
                executable = bool(mode & stat.S_IXUSR)
                digest.update(f"file {entry.path}\0{executable}\0".encode(errors="surrogateescape"))
                try:
                    with os.fdopen(os.open(entry.name, folders.FILE, dir_fd=entry.folder), "rb") as file:
                        digest.update(hashlib.file_digest(file, "sha256").digest())
                except OSError as error:
                    problems.append(Sentence("envs.harbor.unreadable-file", where=where, reason=error.strerror))
            elif not entry.is_folder:
                problems.append(Sentence("envs.harbor.special-file", where=where))
    except folders.UnwieldyTree as error:
        problems.append(f"{above}: {error}")
    return digest.hexdigest(), frozenset(paths)


def _read_text(folder: Path, path: str, root: Path, problems: list[str]) -> str | None:
    """Return the text of a file of a task; None, with a problem added, where there is none or it is too long."""
    where = _relative_path(folder / path, root)
    file = folders.read(folder, path)
    if file is None:
        problems.append(Sentence("envs.harbor.no-file", where=where))
    elif len(file[0]) > MOST_TEXT:
        problems.append(Sentence("envs.harbor.text-too-long", where=where, most_mb=MOST_TEXT >> 20))
    else:
        try:
            return file[0].decode()
        except UnicodeDecodeError as error:
            line = file[0][: error.start].count(b"\n") + 1
            problems.append(Sentence("envs.harbor.not-utf8", where=where, line=line))
    return None


def _has_folder(paths: frozenset[str], folder: str) -> bool:
    return any(path.startswith(f"{folder}/") for path in paths)


def _relative_path(path: Path, root: Path) -> str:
    """Return a path relative to the parent of the root folder."""
    return str(Path(root.name) / path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _problem(folder: Path, root: Path, keys: Keys, reason: str) -> str:
    """Return a problem of task.toml: its path, the key where there is one, and the reason."""
    return ": ".join([_relative_path(folder / CONFIG, root), *([".".join(map(str, keys))] if keys else []), reason])


def remove_canary(text: str) -> str:
    """Return an instruction without leading lines of a canary, which mark a file for filters of training data."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and re.fullmatch(r"(<!--.*canary.*-->|#.*canary.*)", lines[start].strip(), re.IGNORECASE):
        start += 1
    return "\n".join(lines[start:]).lstrip("\n") if start else text
