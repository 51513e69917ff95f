"""A wheel is whole: built, installed into an environment of its own, and used from another folder."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from benchmarks.kata_models import RECIPES

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist, as `python -m build` builds it, without fetching a backend."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    lines = (ROOT / ".containerignore").read_text().splitlines()
    shipped = {line[1:] for line in lines if line.startswith("!")}  # what the Containerfile builds from
    for name in filter(None, map(os.fsdecode, tracked)):
        if name.partition("/")[0] in shipped:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (copy / name).symlink_to(os.readlink(ROOT / name))
            elif (ROOT / name).exists():
                (copy / name).write_bytes((ROOT / name).read_bytes())
    for source, kind, result in ((copy, "build_sdist", "*.tar.gz"), (folder / "unpacked", "build_wheel", "*.whl")):
        subprocess.run([sys.executable, "-c", BUILD, kind, str(folder)], cwd=source, check=True, capture_output=True)
        (built,) = folder.glob(result)
        if kind == "build_sdist":
            with tarfile.open(built) as archive:
                archive.extractall(folder, filter="data")
            (folder / built.name.removesuffix(".tar.gz")).rename(folder / "unpacked")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone; what it depends on is found where it lies for these tests."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    words = ["-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    # Not from the clone, whose egg-info pip would take for the installed package.
    subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "composer"


def say(program: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COMPOSER_ARTIFACTS")}
    return subprocess.run([program, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=280)


def test_the_wheel_holds_presets_examples_and_pages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (("presets", "*.toml"), ("examples", "*"), ("view/pages", "*"), ("view/static", "*")):
        files = [path for path in (ROOT / "composer_cli" / folder).glob(pattern) if path.is_file()]
        assert files and {f"composer_cli/{folder}/{path.name}" for path in files} <= names, folder
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"composer_cli", "composer_post_training", "composer_stages", *(one for one in tops if "-0" in one)}
    assert all(f"{top}/py.typed" in names for top in tops if "-0" not in top)
    for name in RECIPES:
        assert {
            f"composer_stages/envs/kata/models/{name}/{file}" for file in ("model.safetensors", "tokenizer.json")
        } <= names


def test_every_module_is_imported_beside_another_package_called_stages(wheel: Path, installed: Path) -> None:
    """No import, name of a class in a text, or subprocess of it means the common name `stages`."""
    names = [name.removesuffix(".py") for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")]
    names = [name for name in names if "/guest/" not in name and not name.endswith("__main__")]
    modules = [name.removesuffix("/__init__").replace("/", ".") for name in names]
    script = f"""
import importlib, sys
sys.modules["stages"] = None  # an import of it is an error
left = []
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except Exception as error:  # of an integration, a sentence about the package that it lacks
        left.append((error.__cause__ or error).name)
print(*left)
"""
    python = installed.parent / "python"
    done = subprocess.run([python, "-c", script], cwd=wheel.parent, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr  # an error without a name is none of these
    optional = {"prime_rl", "verifiers", "openenv", "renderers", "minisweagent"}
    assert {name.partition(".")[0] for name in done.stdout.split()} <= optional


def test_it_is_used_from_any_folder(installed: Path, tmp_path: Path) -> None:
    version = say(installed, tmp_path, "--version")
    assert version.returncode == 0 and str(installed.parent.parent) in version.stdout
    served = ("--policy", "kata:student-served", "-s", f"policy.server.python={sys.executable}")
    for preset, words in (("demo", ()), ("examples/real-model.toml", served)):
        done = say(installed, tmp_path, "run", "--preset", preset, "--dry-run", *words)
        assert done.returncode == 0 and "checked: " in done.stdout, (preset, done.stderr)
    assert list(tmp_path.iterdir()) == []
    played = say(installed, tmp_path, "collect", "--policy", "kata:student", "-n", "1")
    assert played.returncode == 0, played.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["artifacts"]
