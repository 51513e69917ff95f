"""What several folders of tests share: the command line, a model server, and a set of finished runs."""

import copy
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook
from needs import NEEDS, skip_without
from support import changed, checker, fork_server
from support.command_line import call, collect, repair, teachers
from support.runs import rewritten
from support.server import serving
from support.shared import made_once
from support.wheel import build, install

from composer_stages import redaction

collect_ignore = ["fixtures"]  # tests of packages that ours ask
# Containers often forbid to write bytecode; every process that a test starts would then compile torch and TRL again,
# which takes 20 s where reading the bytecode takes 6 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # TRL's trainer would report each training from a thread of its own
sys.dont_write_bytecode = False
# Shapes in the signatures of the losses are checked while tests run, by whichever test imports them first.
install_import_hook(["composer_stages.losses"], f"{checker.__name__}.checked")

# Torch, transformers and 3,900 collected tests are a million objects, and a full collection of garbage walks over
# all of them: 0.5 s, once for each training (accelerate asks for it) and now and then by itself. So the collector is
# off until the tests are collected, and leaves out what exists then; later what tests import, which is as much again.
gc.disable()
MANY_OBJECTS = 50_000
# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

Composer = Callable[..., subprocess.CompletedProcess[str]]


SECONDS = "composer/seconds"
"""Where pytest's cache keeps the seconds of each file's tests in the last run."""
LAST_S = 60
seconds: dict[str, float] = defaultdict(float)
cpu_seconds: dict[str, float] = defaultdict(float)
ended: dict[str, float] = {}
untested: list[str] = []
CPU = pytest.StashKey[Callable[[], float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--changed`."""
    parser.addoption("--changed", action="store_true", help="only tests of files that differ from the last commit")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out other test files than those of changed files, with --changed."""
    if not config.getoption("--changed") or collection_path.suffix != ".py":
        return None
    return str(collection_path.relative_to(changed.ROOT)) not in tests_of_changes()


@cache
def tests_of_changes() -> set[str]:
    """The test files of what differs from the last commit."""
    files = (str(path.relative_to(changed.ROOT)) for path in (changed.ROOT / "tests").rglob("test_*.py"))
    return changed.own_tests(changed.changed_files(), files)


def pytest_configure(config: pytest.Config) -> None:
    """Let `-m ray` select the tests that need Ray, and so on for every need."""
    for name, need in NEEDS.items():
        config.addinivalue_line("markers", f"{name}: needs {need.get}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test by the name of each thing that it needs."""
    for name in (name for mark in item.iter_markers("needs") for name in mark.args):
        item.add_marker(name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[bool]:
    """Measure the processor time of a test, its fixtures and the processes that ended within it."""
    begun = sum(os.times()[:4])
    item.stash[CPU] = lambda: sum(os.times()[:4]) - begun
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """Add the processor time to the last report of a test, which xdist sends to the process that sums up."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cpu", item.stash[CPU]()))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test, before its fixtures are made, where something is absent that it needs."""
    for mark in item.iter_markers("needs"):
        skip_without(*mark.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that took longest the last time, so that none runs alone at the end; else the largest."""
    known = config.cache.get(SECONDS, {}) if hasattr(config, "cache") else {}  # absent with -p no:cacheprovider
    items.sort(key=lambda item: -known.get(item.location[0], item.path.stat().st_size / 1000))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what each file takes, when it ended, and why tests were skipped."""
    seconds[report.location[0]] += report.duration
    ended[report.location[0]] = time.monotonic()
    if report.when == "teardown":
        folder = "/".join(report.location[0].split("/")[1:-1][:2])
        cpu_seconds[folder] += dict(report.user_properties).get("cpu", 0.0)
    if report.skipped and isinstance(report.longrepr, tuple) and "NOT TESTED" in report.longrepr[2]:
        untested.append(report.longrepr[2].removeprefix("Skipped: "))


def pytest_collection_finish() -> None:
    """Set aside from the garbage collector whatever exists before the first test, and later what a test imported."""
    gc.freeze()
    gc.callbacks.append(_set_aside)
    gc.enable()


def _set_aside(phase: str, info: dict[str, int]) -> None:
    """Leave out of further full collections what one found in use, where it is much."""
    if phase == "stop" and info["generation"] == 2 and len(gc.get_objects(generation=2)) > MANY_OBJECTS:
        gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around what pytest does with logs and warnings meanwhile
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Start what forks the processes of chains and documents, once in each process that runs tests."""
    if not session.items:
        return (yield)
    fork_server.start()
    try:
        return (yield)
    finally:
        fork_server.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report at the end what was not tested as this machine lacks it, and, of a complete run, which files ran last."""
    for reason, tests in sorted(Counter(untested).items()):
        terminalreporter.write_line(f"{reason} ({tests} tests)", yellow=True, bold=True)
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return
    if hasattr(config, "cache"):
        config.cache.set(SECONDS, {**config.cache.get(SECONDS, {}), **seconds})
    last = [file for file in seconds if ended[file] > time.monotonic() - LAST_S]
    folders = sorted(cpu_seconds, key=lambda folder: -cpu_seconds[folder])
    table = ", ".join(f"{folder or 'tests'} {cpu_seconds[folder]:.0f}" for folder in folders)
    terminalreporter.write_line(f"processor seconds: {sum(cpu_seconds.values()):.0f}: {table}")
    rows = (f"{file} {seconds[file]:.0f} s" for file in sorted(last, key=lambda file: -seconds[file])[:5])
    terminalreporter.write_line(f"running in the last {LAST_S} s: {', '.join(rows)}")


@pytest.fixture(autouse=True)
def own_secrets() -> Iterator[None]:
    """Let no test search its texts for the keys of all tests before it."""
    # A command is a process with a key or two; here thousands of commands run in one.
    before = copy.deepcopy(vars(redaction._OF_THIS_PROCESS))
    yield
    vars(redaction._OF_THIS_PROCESS).update(before)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The base URL of a model server."""
    with serving(repair) as running:
        yield running.url


@pytest.fixture
def composer(tmp_path: Path) -> Composer:
    """`composer(*words)` with an artifacts folder of the test's own, `tmp_path / "artifacts"`."""
    return lambda *words, **more: call(tmp_path / "artifacts", *words, **more)


@pytest.fixture(scope="session")
def made(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifacts folder with one run each of collect, replay-teachers and extract-pairs; tests only read it."""
    folder = tmp_path_factory.mktemp("made")
    table = teachers(folder, server)
    for words in (collect(server), ["replay-teachers", "--teachers", table], ["extract-pairs"]):
        done = call(folder / "artifacts", *words)
        assert done.returncode == (3 if words == ["extract-pairs"] else 0), done.stderr  # four rollouts are few
    return folder / "artifacts"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree."""
    (built,) = made_once(tmp_path_factory, "wheel", build).glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program `composer` of an environment in which the wheel is installed, and nothing of the tree is found."""
    return made_once(tmp_path_factory, "installed", partial(install, wheel)) / "bin" / "composer"


@pytest.fixture
def own_runs(made: Path, tmp_path: Path) -> Path:
    """A copy of the finished runs, which read each other, to be changed; `composer` finds it."""
    root = Path(shutil.copytree(made, tmp_path / "artifacts", symlinks=True))
    for path in root.glob("*/2*/manifest.json"):
        rewritten(path, lambda fields: json.loads(json.dumps(fields).replace(str(made), str(root))))
    return root
