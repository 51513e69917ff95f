"""What `swe-lite` needs of a machine, looked at part by part: what both ways of running it need, and containers.

The other way, clones with an environment for every version of a repository, is in clone_requirements.py.
"""

import os
import platform
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stages.envs.repo import trees
from stages.envs.swe import commands, engine, venvs
from stages.envs.swe.commands import GUESSED, Spec, spec_of
from stages.envs.swe.instance_runtime import TEST_LIMITS
from stages.errors import InfrastructureError, UsageError
from stages.runs.records import Row
from stages.sandbox import probe

ALL_IMAGES_GB, ALL_IMAGES = 120, 300
"""What SWE-bench's own README asks for, and for how many images."""
MANIFEST_S = 30
"""Seconds for a registry to say whether it has an image."""
State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Part:
    """One thing that a way needs. `note`: it works without, but less well; `way_out` says what to do."""

    name: str
    state: State
    found: str
    way_out: str = ""


@dataclass(frozen=True)
class Way:
    """One way to run the rows. `repositories`: rows, and environments that are there and that will be built."""

    name: str
    parts: list[Part]
    repositories: list[Row] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether `collect` can begin."""
        return all(part.state != "missing" for part in self.parts)

    @property
    def build_s(self) -> float:
        """Seconds for what is still to be built, of repositories where that was measured."""
        return float(sum(each["build_s"] or 0 for each in self.repositories))

    def document(self) -> Row:
        """As JSON."""
        return {
            "way": self.name,
            "ready": self.ready,
            "build_s": self.build_s,
            "parts": [vars(part) for part in self.parts],
            "repositories": self.repositories,
        }


@dataclass(frozen=True)
class Report:
    """The rows, both ways, and which of them `collect` takes with these settings."""

    rows: Part
    ways: list[Way]
    chosen: str

    @property
    def ready(self) -> bool:
        """Whether `collect` can begin as it is set."""
        return self.rows.state != "missing" and all(way.ready for way in self.ways if way.name == self.chosen)

    def document(self) -> Row:
        """As JSON."""
        ways = [way.document() for way in self.ways]
        return {"ready": self.ready, "chosen": self.chosen, "rows": vars(self.rows), "ways": ways}


def containers(rows: Sequence[Row], program: str | None) -> Way:
    """What running in containers needs. program: an engine that answers, None where there is none."""
    if program is None:
        said = "; ".join(f"{name} {why}" for name, why in engine.refusals().items())
        way_out = "Install Docker or Podman and start it."
        return Way("containers", [Part("engine", "missing", said, way_out), architecture(), memory()])
    info = engine.info(program)
    parts = [Part("engine", "ok", f"{program}, {'rootless' if info.rootless else 'as root'}"), *_ids(info)]
    missing = sorted({engine.image_of(row) for row in rows} - engine.images(program))
    storage = disk(info.storage or Path("/"), ALL_IMAGES_GB * 1000 * len(missing) // ALL_IMAGES, "images")
    return Way("containers", [*parts, architecture(), memory(), *_images(program, rows, missing), storage])


def _ids(info: engine.Info) -> list[Part]:
    """Whether a rootless engine has user ids to give to containers."""
    if not info.rootless:
        return []
    user = pwd.getpwuid(os.getuid()).pw_name
    given = Path("/etc/subuid")
    lines = given.read_text().splitlines() if given.exists() else []
    if any(line.split(":")[0] in (user, str(os.getuid())) for line in lines):
        return [Part("user ids", "ok", f"{user} has some in {given}")]
    way_out = f"sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
    return [Part("user ids", "missing", f"{user} has none in {given}, which rootless containers need", way_out)]


def architecture() -> Part:
    """Whether the official images run on this kind of machine."""
    machine = platform.machine()
    if machine == "x86_64":
        return Part("architecture", "ok", machine)
    return Part("architecture", "missing", f"{machine}; the official images are for x86_64", "Use clones instead.")


def memory() -> Part:
    """Whether one run of tests under its limit fits; several go on at once only where there is more."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    total, needed = kib["MemTotal"] >> 10, TEST_LIMITS.memory_mb
    said = f"{total} MiB; one run of tests may take {needed}"
    return Part("memory", "ok", said) if total >= needed else Part("memory", "missing", said, "Take a larger machine.")


def _images(program: str, rows: Sequence[Row], missing: Sequence[str]) -> list[Part]:
    """How many images are here, and whether one of the others can be had."""
    total = len({engine.image_of(row) for row in rows})
    said = f"{total - len(missing)} of {total} are here"
    if not missing:
        return [Part("images", "ok", said)] if total else []
    reason = engine.refused_manifest(program, missing[0], MANIFEST_S)
    if reason is None:
        return [Part("images", "ok", f"{said}; the others are fetched when they are first used")]
    way_out = "Connect to the registry, or load the images with the engine."
    return [Part("images", "missing", f"{said}; {missing[0]} cannot be fetched ({reason})", way_out)]


def disk(folder: Path, needed_mb: int, what: str) -> Part:
    """Whether what is still to come fits below a folder, which need not be there yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free_mb = shutil.disk_usage(existing).free // 1_000_000
    said = f"{free_mb / 1000:.0f} GB free at {existing}; {what} to come need about {needed_mb / 1000:.1f}"
    return Part("disk", "ok", said) if free_mb >= needed_mb else Part("disk", "missing", said, "Make room there.")


# ---- clone_requirements
# What `swe-lite` needs of a machine to run on clones, and how long the environments that it builds will take.
#
# Nothing is made or fetched here but one tiny wheel, which tells whether pip has an index to build from.

BUILD_S = {
    "django/django": 223,
    "mwaskom/seaborn": 141,
    "pallets/flask": 74,
    "psf/requests": 18,
    "pylint-dev/pylint": 133,
    "pytest-dev/pytest": 75,
    "sphinx-doc/sphinx": 136,
    "sympy/sympy": 26,
}
"""Seconds that building one environment took, the longest that was seen on two busy cores (benchmarks/RESULTS.md)."""
ENVIRONMENT_MB = 250
"""Disk that one environment is allowed: Django's and Sphinx's took 10 and 75 MB, those with numpy take more."""
INDEX_S = 60
"""Seconds for the smallest of wheels."""
SMALL_WHEEL = "iniconfig"


def local(
    rows: Sequence[Row],
    repos: str,
    folder: Path,
    sandbox: str = "bubblewrap",
    spec: Callable[[Mapping[str, object]], Spec] = spec_of,
    index: Callable[[], str] | None = None,
) -> Way:
    """What clones need. repos: a folder of mirrors, or nothing; folder: where environments lie.

    index: says why pip cannot fetch, or nothing.
    """
    versions = {venvs.name_of(row): row for row in rows}
    specs = {name: spec(row) for name, row in versions.items()}
    to_build = {name: specs[name] for name in versions if not _is_there(folder / name)}
    parts = [_sandbox(sandbox), *_clones(rows, repos), memory()]
    if rows:
        parts += [*_environments(to_build, len(versions), index or index_refusal), _table(specs)]
        parts += [disk(folder, ENVIRONMENT_MB * len(to_build), "environments")]
    return Way("local", parts, _by_repository(rows, repos, to_build))


def _is_there(place: Path) -> bool:
    return (place / "bin" / "python").exists() or (place / venvs.DONE).exists()


def _sandbox(kind: str) -> Part:
    try:
        probe(kind)
    except UsageError as error:
        return Part("sandbox", "missing", str(error))
    return Part("sandbox", "ok", f"a command ran under {kind}")


def _clones(rows: Sequence[Row], repos: str) -> list[Part]:
    """Whether there is a mirror for every repository, and in it every base commit."""
    names = sorted({row["repo"] for row in rows})
    found = {name: commands.find(Path(repos), name) for name in names} if repos else dict.fromkeys(names)
    missing = [name for name in names if found[name] is None]
    said = f"{len(names) - len(missing)} of {len(names)} repositories" + (f" in {repos}" if repos else "")
    if missing or not repos:
        lacking = f"; {', '.join(missing)} not" if missing and repos else ""
        target = repos or "DIR"
        example = (missing or ["OWNER/NAME"])[0]
        way_out = f"git clone --mirror https://github.com/{example} {target}/{example.replace('/', '__')}.git"
        given = "" if repos else "; env.repos is not given"
        way_out += ", and the same for each" + ("" if repos else "; then --set env.repos=DIR")
        return [Part("clones", "missing", said + lacking + given, way_out)]
    gone = [row["instance_id"] for row in rows if (at := found[row["repo"]]) and not _has(at, row["base_commit"])]
    if gone:
        said += f", but no base commit of {len(gone)} rows, such as {gone[0]}"
        return [Part("clones", "missing", said, "Fetch those mirrors again (git fetch in each).")]
    return [Part("clones", "ok", said + ", every base commit in them")]


def _has(mirror: Path, commit: str) -> bool:
    try:
        trees.git(mirror, "-c", "safe.directory=*", f"--git-dir={mirror}", "cat-file", "-e", f"{commit}^{{commit}}")
    except RuntimeError:
        return False
    return True


def _environments(to_build: Mapping[str, Spec], total: int, index: Callable[[], str]) -> list[Part]:
    """Interpreters, conda, an index: what the environments need that are not there yet."""
    said = f"{total - len(to_build)} of {total} are there"
    if not to_build:
        return [Part("environments", "ok", said)]
    parts = []
    if conda := sorted(name for name, spec in to_build.items() if spec.needs_conda):
        names = f"{said}; {len(conda)} are made by conda, such as {conda[0]}"
        parts.append(Part("environments", "missing", names, "Build those yourself below env.venvs, or leave them out."))
    else:
        parts.append(Part("environments", "ok", f"{said}; the others are built when they are first used"))
    absent = defaultdict(list)
    for name, spec in to_build.items():
        try:
            venvs.interpreter(spec.python, name)
        except InfrastructureError:
            absent[spec.python].append(name)
    for version, names_ in sorted(absent.items()):
        parts.append(Part(f"Python {version}", "missing", f"for {len(names_)} of them", f"pyenv install {version}"))
    reason = index()
    way_out = "Connect to one, or let pip find packages without (PIP_FIND_LINKS)."
    parts.append(Part("index", "missing", reason, way_out) if reason else Part("index", "ok", "pip can fetch"))
    return parts


def index_refusal() -> str:
    """Why pip cannot fetch the smallest of wheels, or nothing."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory() as folder:
        words = [*command, "--no-cache-dir", "--retries", "0", "--dest", folder, SMALL_WHEEL]
        try:
            done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=INDEX_S)
        except subprocess.TimeoutExpired:
            return f"no answer within {INDEX_S} s"
    return (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1] if done.returncode else ""


def _table(specs: Mapping[str, Spec]) -> Part:
    guessed = sum(spec.source == GUESSED for spec in specs.values())
    if not guessed:
        return Part("specifications", "ok", "all versions are in swebench's table")
    said = f"{guessed} of {len(specs)} versions are in no table here, and get the newest of what they ask for"
    return Part("specifications", "note", said, "pip install 'swebench>=4.1,<5', else their tests may fail.")


def _by_repository(rows: Sequence[Row], repos: str, to_build: Mapping[str, Spec]) -> list[Row]:
    """Of each repository: rows, whether it is cloned, environments, and seconds for those that are to be built."""
    counts = Counter(row["repo"] for row in rows)
    versions: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        versions[row["repo"]].add(venvs.name_of(row))
    found = []
    for repo, number in counts.most_common():
        building = sum(name in to_build for name in versions[repo])
        each = BUILD_S.get(repo)
        found.append(
            {
                "repo": repo,
                "rows": number,
                "cloned": bool(repos) and commands.find(Path(repos), repo) is not None,
                "environments": len(versions[repo]) - building,
                "to_build": building,
                "build_s": 0 if not building else None if each is None else each * building,
            }
        )
    return found
