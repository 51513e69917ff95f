"""What `swe-lite` needs of a machine to run on clones, and how long the environments that it builds will take.

Nothing is made or fetched here but one tiny wheel, which tells whether pip has an index to build from.
"""

import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stages.envs.repo import trees
from stages.envs.swe import mirrors, venvs
from stages.envs.swe.commands import GUESSED, Spec, spec_of
from stages.envs.swe.requirements import Part, Way, disk, memory
from stages.errors import InfrastructureError, UsageError
from stages.runs.records import Row
from stages.sandbox import probe

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
    found = {name: mirrors.find(Path(repos), name) for name in names} if repos else dict.fromkeys(names)
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
                "cloned": bool(repos) and mirrors.find(Path(repos), repo) is not None,
                "environments": len(versions[repo]) - building,
                "to_build": building,
                "build_s": 0 if not building else None if each is None else each * building,
            }
        )
    return found
