"""Virtual environments of repository versions: built once, outside the sandbox, from a specification, or given.

The repository itself is installed in place, as if it lay at /testbed, so an environment holds nothing of it but
generated files, which are kept beside the environment and put over every checkout.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from stages.envs.repo import trees
from stages.envs.repo.grading import IMPORT_ROOTS, TEST_FOLDERS
from stages.envs.swe import commands
from stages.envs.swe.commands import GUESSED, Spec
from stages.errors import InfrastructureError
from stages.sandbox.bubblewrap import TESTBED

DONE = "composer-environment.json"
OVERLAY = "overlay"
BUILD_TIMEOUT_S = 1800
INSTALLED_BY_PATH = ("*.pth", "*.egg-link", "__editable__*", "*.dist-info/direct_url.json")
LEFT_OUT = frozenset({"site-packages", "ensurepip", "test", "idlelib", "lib2to3", "turtledemo", "tkinter"})
NOT_INSTALLED = TEST_FOLDERS | {"doc", "docs", "examples", "scripts", "benchmarks", "tools"}
GUESS = (
    "%s is not in a table of swebench here, so its environment gets the newest of what it asks for, in which its tests "
    "may fail. "
    "Better: pip install 'swebench>=4.1,<5', delete the environment, and see benchmarks/swe_gold.py."
)
log = logging.getLogger(__name__)
_lock = threading.Lock()
_failed: dict[Path, str] = {}
"""What could not be built in this process, and why; it is not tried again for every rollout."""


@dataclass(frozen=True)
class Venv:
    """A ready environment. `overlay` holds generated files of the repository; None where it was given without any."""

    folder: Path
    overlay: Path | None

    @property
    def python(self) -> Path:
        """The interpreter, a link out of the environment."""
        return self.folder / "bin" / "python"

    def readonly(self) -> tuple[Path, ...]:
        """What a sandbox shows: the environment, and its base interpreter without packages that are installed there."""
        base = Path(os.path.realpath(self.python)).parent.parent
        return (self.folder, *(() if base == Path("/usr") else _base_parts(base)))

    def environment(self) -> dict[str, str]:
        """Variables that make it the one in use."""
        return {"VIRTUAL_ENV": str(self.folder), "PATH": f"{self.folder}/bin:/usr/local/bin:/usr/bin:/bin"}


def _base_parts(base: Path) -> Iterator[Path]:
    yield base / "bin"
    for library in sorted((base / "lib").iterdir()):
        if library.is_dir() and re.fullmatch(r"python3\.\d+", library.name):
            yield from (part for part in sorted(library.iterdir()) if part.name not in LEFT_OUT)
        elif library.is_file():
            yield library


def name_of(row: Mapping[str, Any]) -> str:
    """What the environment of a repository version is called."""
    return f"{row['repo'].replace('/', '__')}-{row.get('version', '0')}"


def ready(row: Mapping[str, Any], spec: Spec, mirror: Path, folder: Path) -> Venv:
    """The environment of a repository version below `folder`: there already, or built now.

    `InfrastructureError` where it cannot be built; the reason is kept for this process.
    """
    place = folder / name_of(row)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock, FileLock(f"{place}.lock"):
        if place in _failed:
            raise InfrastructureError(_failed[place])
        if not (place / "bin" / "python").exists() and not (place / DONE).exists():
            try:
                build(row, spec, mirror, place)
            except InfrastructureError as error:
                _failed[place] = str(error)
                raise
    return existing(place)


def existing(place: Path) -> Venv:
    """An environment that we built, or one that the user gave (a plain virtual environment)."""
    folder, overlay = place / "venv", place / OVERLAY
    return Venv((folder if folder.is_dir() else place).absolute(), overlay if overlay.is_dir() else None)


def build(row: Mapping[str, Any], spec: Spec, mirror: Path, place: Path) -> None:
    """Build an environment in the folder `place`, which appears only when everything worked."""
    if spec.needs_conda:
        raise InfrastructureError(
            f"The specification of {name_of(row)} is a conda environment. "
            f"Build it yourself and put it, or a link to it, at {place}."
        )
    if spec.source == GUESSED:
        log.warning(GUESS, name_of(row))
    python = interpreter(spec.python, name_of(row))
    shutil.rmtree(place, ignore_errors=True)
    build_log = place.with_name(f"{place.name}.log")
    try:
        with build_log.open("wb") as out, trees.scratch() as source:
            commands.extract(mirror, row["base_commit"], source)
            _run([python, "-m", "venv", str(place / "venv")], source, {}, out)
            _install(spec, source, place / "venv", str(row.get("version", "0")), out)
            _keep(source, mirror, row["base_commit"], place)
    except subprocess.SubprocessError as error:
        shutil.rmtree(place, ignore_errors=True)
        raise InfrastructureError(
            f"The environment {place.name} could not be built ({error}); its log is {build_log}."
        ) from None
    (place / DONE).write_text(json.dumps({"spec": vars(spec), "python": python}))


def interpreter(version: str, wanted_by: str) -> str:
    """The path of a Python of this version: of pyenv, in /opt/python, or on PATH."""
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions", Path("/opt/python")]
    places = [path for root in roots for path in sorted(root.glob(f"{version}.*/bin/python{version}"))]
    if path := str(places[-1]) if places else shutil.which(f"python{version}"):
        return path
    raise InfrastructureError(
        f"{wanted_by} needs Python {version}, which is not installed: for instance `pyenv install {version}`."
    )


def _install(spec: Spec, source: Path, venv: Path, version: str, out: Any) -> None:
    # Without history no tag says which version this is.
    env = {"SETUPTOOLS_SCM_PRETEND_VERSION": f"{version}.0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for command in spec.pre_install:
        _run(["bash", "-c", command], source, {**env, "PATH": f"{venv}/bin:{os.defpath}"}, out)
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet"]
    files = [name for name in spec.requirements if (source / name).is_file()][:1]
    for names in ([word for file in files for word in ("-r", file)], list(spec.packages)):
        if names:
            _run([*pip, *names], source, env, out)
    if spec.install:
        _run(["bash", "-c", spec.install], source, {**env, "PATH": f"{venv}/bin:{os.defpath}"}, out)
    _point_to_testbed(source, venv)
    _redact_metadata(source, venv)
    # pip brings copies of packages along that are repositories here, such as requests.
    _run([str(venv / "bin/python"), "-m", "pip", "uninstall", "--quiet", "--yes", "pip"], source, env, out)


def _run(command: list[str], source: Path, env: Mapping[str, str], out: Any) -> None:
    kept = {
        name: os.environ[name]
        for name in os.environ
        if name.lower().endswith("_proxy") or name.startswith(("PIP_", "HOME"))
    }
    subprocess.run(
        command,
        cwd=source,
        env={"PATH": os.defpath, "LANG": "C.UTF-8", **kept, **env},
        stdout=out,
        stderr=out,
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=BUILD_TIMEOUT_S,
    )


def _point_to_testbed(source: Path, venv: Path) -> None:
    """Let every file that says where the repository is installed from say /testbed."""
    for pattern in INSTALLED_BY_PATH:
        for path in venv.glob(f"lib/python*/site-packages/{pattern}"):
            if path.is_file():
                path.write_text(path.read_text().replace(str(source), TESTBED))


def _redact_metadata(source: Path, venv: Path) -> None:
    """Take the description, often a changelog, and the list of files out of the repository's own metadata."""
    ours = [path.parent for path in venv.glob("lib/python*/site-packages/*.dist-info/direct_url.json")]
    for folder in (*ours, *source.glob("*.egg-info"), *source.glob("*/*.egg-info")):
        (folder / "SOURCES.txt").unlink(missing_ok=True)
        for path in (folder / "METADATA", folder / "PKG-INFO"):
            if path.is_file():
                path.write_text(without_description(path.read_text(errors="replace")))


def without_description(metadata: str) -> str:
    """Core metadata without the description: a header with indented lines in old versions, the body in newer ones."""
    headers = metadata.partition("\n\n")[0].rstrip() + "\n"
    return re.sub(r"^Description: .*\n(?:[ \t|].*\n)*", "", headers, flags=re.MULTILINE)


def _keep(source: Path, mirror: Path, commit: str, place: Path) -> None:
    """Keep the files that the installation made in the source, such as metadata, and none that it changed."""
    with trees.scratch() as pristine:
        commands.extract(mirror, commit, pristine)
        before = set(trees.walk(pristine))
        made = {path: trees.read(source, path) for path in trees.walk(source) if path not in before}
    (place / OVERLAY).mkdir()
    trees.apply(
        {path: file for path, file in made.items() if file and not path.startswith(("build/", "dist/"))},
        place / OVERLAY,
    )


def packages_of(delivered: Path) -> set[str]:
    """What the repository installs, by the look of its tree."""
    packages = {path.parent.name for root in IMPORT_ROOTS for path in (delivered / root).glob("*/__init__.py")}
    return packages - NOT_INSTALLED


def refuse_copies(venv: Venv, delivered: Path, name: str) -> None:
    """Raise `InfrastructureError` where the environment holds a package of the repository, and maybe the answer."""
    for site in venv.folder.glob("lib/python*/site-packages"):
        if copies := sorted(p for p in packages_of(delivered) if (site / p / "__init__.py").is_file()):
            raise InfrastructureError(
                f"The environment of {name} holds a copy of {copies[0]} at {site / copies[0]}, which may be of a later "
                "commit than the instance and hold the answer. Install the repository in place (`pip install -e .`), "
                "or delete the copy."
            )
