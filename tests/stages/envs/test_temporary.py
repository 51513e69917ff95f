"""What a killed process leaves is deleted by the next one, and nothing else: not what lives, nor what is not ours."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer_stages.envs import folders

KATA = """
import sys
from composer_stages.envs.kata.env import KataEnv
env = KataEnv()
env.reset(env.tasks("train", 1, 0)[0])
print(env._folder, flush=True)
sys.stdin.readline()
env.close()
"""
HOME = """
import sys
from composer_stages.envs import folders
marks = []
for number in range(20):
    folders._homes.clear()  # as a process that has just begun: it sweeps, and makes a home
    marks.append(folders.make("tree") / "mark")
    marks[-1].write_text("")
print(all(mark.exists() for mark in marks))
"""
DELETED = """
from composer_stages.envs import folders
folders.home().rmdir()
print(folders.make("tree").is_dir())
folders.remove(home := folders.home())
home.parent.rmdir()
try:
    folders.make("tree")
except OSError as error:
    print(type(error).__name__)
"""
NOBODY = 65534


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Processes whose temporary folder is `tmp_path`; those that are still there afterwards are ended."""
    running = []

    def start(source: str) -> subprocess.Popen[str]:
        variables = {**os.environ, "TMPDIR": str(tmp_path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen([sys.executable, "-c", source], env=variables, **pipes))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_what_a_killed_process_leaves_is_deleted_by_the_next(
    tmp_path: Path, started: Callable[[str], subprocess.Popen[str]]
) -> None:
    killed, living = started(KATA), started(KATA)
    left, kept = (Path(process.stdout.readline().strip()) for process in (killed, living))
    assert left.parent.parent == kept.parent.parent == tmp_path and left.parent != kept.parent
    killed.kill()
    killed.wait()
    (left / "closed" / "deep").mkdir(parents=True)
    (left / "closed").chmod(0)
    assert (left / "solution.py").exists()
    following = started(KATA)
    assert following.stdout.readline()
    assert not left.parent.exists() and (kept / "solution.py").exists()
    for process in (living, following):
        process.communicate("\n", timeout=60)
    assert list(tmp_path.iterdir()) == [], "whoever ends by itself leaves nothing"


def test_what_is_no_leftover_of_ours_stays(tmp_path: Path) -> None:
    place, precious = tmp_path / "place", tmp_path / "precious"
    for folder in (place, precious, place / "other", place / f"{folders.PREFIX}alive"):
        folder.mkdir()
        (folder / "file").write_text("dear")
    (place / f"{folders.PREFIX}link").symlink_to(precious)
    (place / f"{folders.PREFIX}file").write_text("dear")
    os.mkfifo(place / f"{folders.PREFIX}pipe")
    (left := place / f"{folders.PREFIX}left").mkdir()
    (left / "leads-out").symlink_to(precious)
    precious.chmod(0o500)
    before = {path.name for path in place.iterdir()} - {left.name}
    if os.geteuid() == 0:
        (strange := place / f"{folders.PREFIX}strange").mkdir()
        os.chown(strange, NOBODY, NOBODY)
        before.add(strange.name)
    alive = os.open(place / f"{folders.PREFIX}alive", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    folders.sweep(place)
    assert {path.name for path in place.iterdir()} == before
    assert (precious / "file").read_text() == (place / f"{folders.PREFIX}alive" / "file").read_text() == "dear"
    assert precious.stat().st_mode & 0o777 == 0o500
    os.close(alive)
    folders.sweep(place)
    assert {path.name for path in place.iterdir()} == before - {f"{folders.PREFIX}alive"}


def test_processes_that_begin_at_once_do_not_sweep_each_other(started: Callable[[str], subprocess.Popen[str]]) -> None:
    beginning = [started(HOME) for _ in range(6)]
    assert [process.communicate(timeout=60)[0] for process in beginning] == ["True\n"] * 6


def test_a_deleted_home_is_made_anew_and_a_deleted_temporary_folder_is_an_error(
    started: Callable[[str], subprocess.Popen[str]],
) -> None:
    assert started(DELETED).communicate(timeout=60)[0] == "True\nFileNotFoundError\n"
    assert folders.make("tree").parent == folders.home()
