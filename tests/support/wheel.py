"""A wheel of this tree, and an environment in which it is installed."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = "import sys, setuptools.build_meta as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"


def build(folder: Path) -> None:
    """Build the wheel from the sdist into a folder, as `python -m build` does, without fetching a backend."""
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


def install(wheel: Path, folder: Path) -> None:
    """Make an environment with the wheel alone; what it depends on is found where it lies for these tests."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    words = ["-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    # Not from the clone, whose egg-info pip would take for the installed package.
    subprocess.run([sys.executable, *words], cwd=folder, check=True, capture_output=True)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A path in a .pth file adds that folder alone, and not the clone to which a .pth file in it points.
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
