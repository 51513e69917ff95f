"""Virtual environments of repository versions: built once, outside the sandbox, from a specification, or given.

The repository itself is installed in place, as if it were at /testbed, so an environment holds nothing of it. The files
that the installation generates are kept in an overlay next to the environment and written into every checkout.
"""

import json
import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from composer_stages.envs.repo import trees
from composer_stages.envs.repo.runner import packages_of
from composer_stages.envs.swe.instances import check_out
from composer_stages.envs.swe.specs import GUESSED, EnvironmentSpec
from composer_stages.errors import InfrastructureError
from composer_stages.runs.activity import activity
from composer_stages.sandbox.bubblewrap import TESTBED
from composer_stages.words import Sentence

DONE = "composer-environment.json"
OVERLAY = "overlay"
BUILD_TIMEOUT_S = 1800
INSTALLED_BY_PATH = ("*.pth", "*.egg-link", "__editable__*", "*.dist-info/direct_url.json")
LEFT_OUT = frozenset({"site-packages", "ensurepip", "test", "idlelib", "lib2to3", "turtledemo", "tkinter"})
log = logging.getLogger(__name__)
_lock = threading.Lock()
_failed: dict[Path, str] = {}
"""Place -> why it could not be built in this process; it is not tried again for every rollout."""


@dataclass(frozen=True)
class Venv:
    """A ready environment. `overlay` holds generated files of the repository, None for an environment of the user."""

    folder: Path
    overlay: Path | None

    def readonly(self) -> tuple[Path, ...]:
        """Return the folders that a sandbox mounts: the environment, and its base interpreter without packages."""
        # The interpreter of an environment is a link to its base.
        base = Path(os.path.realpath(self.folder / "bin" / "python")).parent.parent
        if base == Path("/usr"):
            return (self.folder,)
        paths = [self.folder, base / "bin"]
        for library in sorted((base / "lib").iterdir()):
            if library.is_dir() and re.fullmatch(r"python3\.\d+", library.name):
                paths += [part for part in sorted(library.iterdir()) if part.name not in LEFT_OUT]
            elif library.is_file():
                paths.append(library)
        return tuple(paths)


def version_name(row: Mapping[str, Any]) -> str:
    """Return the folder name of the environment of a row's repository version."""
    return f"{row['repo'].replace('/', '__')}-{row.get('version', '0')}"


def prepare_venv(row: Mapping[str, Any], spec: EnvironmentSpec, mirror: Path, folder: Path) -> Venv:
    """Return the environment of a repository version below `folder`, and build it first where it is missing.

    `InfrastructureError` where it cannot be built; the reason is kept for this process.
    """
    path = folder / version_name(row)
    folder.mkdir(parents=True, exist_ok=True)
    with _lock, FileLock(f"{path}.lock"):
        if path in _failed:
            raise InfrastructureError(_failed[path])
        if not exists(path):
            try:
                build(row, spec, mirror, path)
            except InfrastructureError as error:
                _failed[path] = str(error)
                raise
    return open_venv(path)


def exists(path: Path) -> bool:
    """Return whether there is an environment at `path`, given by the user or built to its end."""
    return (path / "bin" / "python").exists() or (path / DONE).exists()


def open_venv(path: Path) -> Venv:
    """Return the environment at `path`: one that was built here, or a plain virtual environment of the user."""
    folder, overlay = path / "venv", path / OVERLAY
    return Venv((folder if folder.is_dir() else path).absolute(), overlay if overlay.is_dir() else None)


def build(row: Mapping[str, Any], spec: EnvironmentSpec, mirror: Path, target: Path) -> None:
    """Build an environment in the folder `target`, which is removed again where a step fails.

    It keeps as overlay the files that the installation adds to the source, such as metadata, and none that it changes.
    """
    if spec.needs_conda:
        raise InfrastructureError("envs.swe.conda-environment", version=version_name(row), target=target)
    if spec.source == GUESSED:
        log.warning(Sentence("envs.swe.environment-guessed", version=version_name(row)))
    python = find_interpreter(spec.python, version_name(row))
    shutil.rmtree(target, ignore_errors=True)
    build_log = target.with_name(f"{target.name}.log")
    try:
        with (
            activity(f"installing the environment {target.name}"),
            build_log.open("wb") as out,
            trees.scratch() as source,
        ):
            check_out(mirror, row["base_commit"], source)
            _run([python, "-m", "venv", str(target / "venv")], source, {}, out)
            _install(spec, source, target / "venv", str(row.get("version", "0")), out)
            # Only added files are kept: the environment serves all commits of a version, and a file that the
            # specification edits would be put over other commits.
            with trees.scratch() as pristine:
                check_out(mirror, row["base_commit"], pristine)
                before = set(trees.walk(pristine))
            added = [path for path in trees.walk(source) if path not in before]
            generated = {path: trees.read(source, path) for path in added if not path.startswith(("build/", "dist/"))}
            (target / OVERLAY).mkdir()
            trees.apply({path: file for path, file in generated.items() if file}, target / OVERLAY)
    except subprocess.SubprocessError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise InfrastructureError(
            "envs.swe.environment-not-built", name=target.name, error=error, build_log=build_log
        ) from None
    # Last: a build that was killed leaves no mark, and starts again.
    (target / DONE).write_text(json.dumps({"spec": vars(spec), "python": python}))


def find_interpreter(version: str, requester: str) -> str:
    """Return the path of a Python of this version: of pyenv, in /opt/python, or on PATH."""
    # The versions of pyenv first: `python3.9` on PATH may be pyenv's shim, which fails unless that version is active.
    roots = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions", Path("/opt/python")]
    pythons = [path for root in roots for path in sorted(root.glob(f"{version}.*/bin/python{version}"))]
    if path := str(pythons[-1]) if pythons else shutil.which(f"python{version}"):
        return path
    raise InfrastructureError("envs.swe.python-missing", requester=requester, version=version)


def _install(spec: EnvironmentSpec, source: Path, venv: Path, version: str, out: Any) -> None:
    """Install a specification and, in place, the repository in `source` as if it were at /testbed."""
    # Without history no tag gives the version.
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
    # Every file with the path that the repository is installed from gets /testbed instead.
    for pattern in INSTALLED_BY_PATH:
        for path in venv.glob(f"lib/python*/site-packages/{pattern}"):
            if path.is_file():
                path.write_text(path.read_text().replace(str(source), TESTBED))
    # The repository's own metadata loses its list of files and its description, which is often a changelog: they are
    # those of the first instance's commit, which may be later than another instance's and name its solution.
    installed = [path.parent for path in venv.glob("lib/python*/site-packages/*.dist-info/direct_url.json")]
    for folder in (*installed, *source.glob("*.egg-info"), *source.glob("*/*.egg-info")):
        (folder / "SOURCES.txt").unlink(missing_ok=True)
        for path in (folder / "METADATA", folder / "PKG-INFO"):
            if path.is_file():
                path.write_text(remove_description(path.read_text(errors="replace")))
    # pip vendors packages that are repositories here, such as requests.
    _run([str(venv / "bin/python"), "-m", "pip", "uninstall", "--quiet", "--yes", "pip"], source, env, out)


def _run(command: list[str], source: Path, env: Mapping[str, str], out: Any) -> None:
    """Run one command of a build; raise `SubprocessError` where it fails or takes too long."""
    # A build runs the repository's code outside of a sandbox, so no keys: of our variables it gets proxies, pip's and
    # HOME.
    variables = {
        name: os.environ[name]
        for name in os.environ
        if name.lower().endswith("_proxy") or name.startswith("PIP_") or name == "HOME"
    }
    subprocess.run(
        command,
        cwd=source,
        env={"PATH": os.defpath, "LANG": "C.UTF-8", **variables, **env},
        stdout=out,
        stderr=out,
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=BUILD_TIMEOUT_S,
    )


def remove_description(metadata: str) -> str:
    """Return core metadata without description: a header with indented lines in old versions, the body in newer."""
    headers = metadata.partition("\n\n")[0].rstrip() + "\n"
    return re.sub(r"^Description: .*\n(?:[ \t|].*\n)*", "", headers, flags=re.MULTILINE)


def refuse_copies(venv: Venv, delivered: Path, name: str) -> None:
    """Raise `InfrastructureError` where the environment holds a package of the repository, and maybe the answer."""
    for site in venv.folder.glob("lib/python*/site-packages"):
        if copies := sorted(p for p in packages_of(delivered) if (site / p / "__init__.py").is_file()):
            raise InfrastructureError("envs.swe.repository-copied", name=name, package=copies[0], path=site / copies[0])
