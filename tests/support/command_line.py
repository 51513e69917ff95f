"""The command line, in this process or in one of its own, and the words of small runs with a scripted model."""

import io
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_cli.__main__ import main
from support.server import Reply, answer

TESTS = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join([str(TESTS), str(TESTS.parent)])
"""PYTHONPATH of processes that use environments of the tests."""
COMMANDS = ("cat solution.py", "sed -i 's|return .*|return u + v|' solution.py", "python3 test_solution.py", "submit")
TEACHERS = {"first": "scripted", "second": "other", "third": "other"}
"""Names and models: a majority disagrees with the student at every step but the first."""
OTHER = ("cat solution.py", "sed -i 's|return .*|return u * v|' solution.py", "cat test_solution.py", "ls")


def repair(asked: dict[str, Any], earlier: int) -> Reply:
    """Look, replace the expression, run the tests, submit; the model `slow` takes its time, `other` does otherwise."""
    del earlier
    turn = sum(message["role"] == "assistant" for message in asked["messages"])
    commands = OTHER if asked["model"] == "other" else COMMANDS
    delay_s = 0.3 if asked["model"] == "slow" else 0.0
    return Reply(body=answer(f"```bash\n{commands[min(turn, 3)]}\n```"), delay_s=delay_s)


def environment(artifacts: Path, **more: str) -> dict[str, str]:
    """The variables of a command: its own artifacts folder, one thread."""
    return {**os.environ, "COMPOSER_ARTIFACTS": str(artifacts), "OMP_NUM_THREADS": "1", **more}


def command(*words: object) -> list[str]:
    """What to execute for `composer WORDS`."""
    return [sys.executable, "-m", "composer_cli", *map(str, words)]


def settings(*given: str) -> list[str]:
    """The words of settings `name=value`."""
    return [word for one in given for word in ("-s", one)]


def call_process(artifacts: Path, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end in a process of its own, for tests of what only a process has."""
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=300, env=environment(artifacts, **more)
    )


def call(artifacts: Path, *words: object, stdout: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end in this process, where imports are paid once; returns what a process would.

    Everything from `main` on is the real program. Environment, working folder, streams, signal handlers, random
    numbers, threads of torch and `sys.path` are afterwards what they were before.

    stdout: a file that it writes to instead, of which nothing is returned.
    """
    arguments = ["composer", *map(str, words)]
    with _isolated(environment(artifacts, **more)), _captured(stdout) as streams:
        sys.argv = arguments
        try:
            main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    out, err = ("" if stream.name == stdout else Path(stream.name).read_text() for stream in streams)
    for stream in streams:
        stream.close()
    return subprocess.CompletedProcess(arguments, code or 0, out, err)


@contextmanager
def _captured(stdout: str) -> Iterator[list[Any]]:
    """Let descriptors 1 and 2, and Python's streams over them, write to two named files; an empty stdin."""
    # The caller reads and closes them.
    files: list[Any] = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115
    files[0] = Path(stdout).open("wb") if stdout else files[0]  # noqa: SIM115
    before, saved = (sys.stdin, sys.stdout, sys.stderr), [os.dup(1), os.dup(2)]
    for stream in before[1:]:
        stream.flush()
    for number, file in enumerate(files, start=1):
        os.dup2(file.fileno(), number)
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    try:
        yield files
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdin, sys.stdout, sys.stderr = before
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


@contextmanager
def _isolated(env: dict[str, str]) -> Iterator[None]:
    """Let the command find these variables, and nobody afterwards what it changed in this process."""
    variables, folder, argv, path = dict(os.environ), os.getcwd(), sys.argv, list(sys.path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    children, drawn = multiprocessing.active_children(), random.getstate()
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    state = (torch.get_rng_state(), torch.get_num_threads()) if torch else None
    numbers = numpy.random.get_state() if numpy else None
    own = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = own
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - set(children):
            child.kill()
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        sys.argv, sys.path[:] = argv, path
        random.setstate(drawn)
        if torch and state:
            torch.set_rng_state(state[0])
            torch.set_num_threads(state[1])
        if numpy:
            numpy.random.set_state(numbers)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, module in list(sys.modules.items()):
            if any((getattr(module, "__file__", None) or "").startswith(place) for place in own):
                del sys.modules[name]


def model(url: str, name: str = "scripted") -> list[str]:
    """The words that choose a model of the server."""
    return ["--policy", name, "--set", f"policy.base_url={url}"]


def collect(url: str, *more: object, policy: str = "scripted") -> list[object]:
    """The words of a small collection: two tasks, two rollouts each."""
    return ["collect", *model(url, policy), "-s", "tasks=2", "-s", "samples=2", *more]


def teachers(folder: Path, url: str) -> Path:
    """A file with a teacher table."""
    tables = [
        f'[[teachers]]\nname = "{n}"\nmodel = "{m}"\nbase_url = "{url}"\nmax_tokens = 64\n' for n, m in TEACHERS.items()
    ]
    path = folder / "teachers.toml"
    path.write_text("\n".join(tables))
    return path


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition, and fail where it is not met in time."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"condition not met after {seconds:.0f} s"
        time.sleep(0.05)
