"""Signals: the first lets calls in flight come home and ends the stage and its chain; the second ends the process.

Each test prints a line: calls received after the signal, seconds from the last signal to the exit, exit code.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chains import entry
from support.command_line import PATHS, call, command, environment, repair, settings, teachers, until
from support.models import save_tiny
from support.server import Reply, Server, answer, serving

from composer_cli.executors.base import JobSettings, SubmittedChain, script
from composer_stages.runs.run import read_manifest
from composer_stages.stopping import GRACE_S, REPEATS_S

SLOW = pytest.mark.slow
IN_FLIGHT, TASKS = 4, 12
INTERRUPT, TERMINATE = signal.SIGINT, signal.SIGTERM
ENVIRONMENTS = """
import hashlib, time
from pathlib import Path
from support.environments import GuessEnv, NumberedEnv

def mark():
    (Path(__file__).parent / "begun").touch()

class Once(NumberedEnv):
    def __init__(self):
        super().__init__(turns=1)

class Endless(GuessEnv):
    def reset(self, task):
        mark()
        return [{"role": "user", "content": "a"}]

class Held(GuessEnv):
    def tasks(self, split, count, seed):
        mark()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # one call of C, for minutes
"""
"""Modules that say when work has begun: `Held` then keeps the main thread from handling any signal."""


@pytest.fixture
def server() -> Iterator[Server]:
    """Repairs katas and says a letter, after half a second."""

    def reply(body: dict[str, Any], earlier: int) -> Reply:
        is_kata = "solution.py" in str(body["messages"][0]["content"])
        return Reply(body=repair(body, earlier).body if is_kata else answer("a"), delay_s=0.5)

    with serving(reply) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def paths(folder: Path) -> str:
    return os.pathsep.join([str(folder), PATHS])


def stop(
    folder: Path,
    words: list[str],
    ready: Callable[[], bool],
    *signals: int,
    server: Server | None = None,
    started_by: Callable[..., list[str]] = command,
    group: bool = False,
) -> tuple[int, int, float, str]:
    """Send the signals once a command is ready, each as soon as it counts; return the exit code, calls after, seconds.

    And what it printed on stderr. started_by: returns what to execute for the words. group: whether the signals go to
    the process and to all that it has started.
    """
    (folder / "stops_env.py").write_text(ENVIRONMENTS)
    env = environment(folder / "artifacts", PYTHONPATH=paths(folder))
    with subprocess.Popen(
        started_by(*words), env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        until(lambda: ready() or process.poll() is not None)
        asked = len(server.requests) if server else 0
        for number, sent in enumerate(signals):
            time.sleep((REPEATS_S + 0.1) * bool(number))
            (os.killpg if group else os.kill)(process.pid, sent)
        started = time.monotonic()
        errors = process.communicate(timeout=120)[1]
    seconds, after = time.monotonic() - started, len(server.requests) - asked if server else 0
    name = f"{started_by.__name__} {Path(words[0]).name}"
    print(f"{name}: {after} calls after the signal, {seconds:.1f} s, exit code {process.returncode}")
    assert "Traceback" not in errors, errors
    return process.returncode, after, seconds, errors


def collecting(server: Server, env: str = "Once") -> list[str]:
    served = [f"policy.base_url={server.url}", "policy.max_tokens=8"]
    given = settings(*served, f"tasks={TASKS}", "samples=1", f"in_flight.rollouts={IN_FLIGHT}")
    return ["collect", "--env", f"stops_env:{env}", "--policy", "scripted", *given]


def local(stage: str, model: Path, env: str) -> list[str]:
    """A model in the process whose answers would take minutes; GuessEnv ends a rollout after the first answers."""
    given = {"tasks": "4", "policy.model": model, "policy.max_tokens": "20000"}
    if stage == "train":
        given |= {"optimisation.memory_limit": "10000", "optimisation.prompts_per_step": "1"}
    if stage == "evaluate":
        given = {"tasks": "4"} | {f"policies.{arm}": f'{{model="{model}", max_tokens=20000}}' for arm in "AB"}
    return [stage, "--env", f"stops_env:{env}", *settings(*(f"{key}={value}" for key, value in given.items()))]


def asked_once(server: Server) -> int:
    """How many calls were asked; asserts that none is paid for twice."""
    asked = [str((body["model"], body["messages"], body.get("seed"))) for body in server.requests]
    assert len(asked) == len(set(asked))
    return len(asked)


def statuses(folder: Path, stage: str) -> list[str]:
    return [read_manifest(path.parent).status for path in folder.glob(f"artifacts/{stage}/2*/manifest.json")]


def chain(folder: Path, server: Server, in_flight: int, *, parallel: bool = False) -> list[str]:
    """A collection, and a stage that reads it; or two collections at the same time."""
    policy = f'policy = {{ model = "m", base_url = "{server.url}", max_tokens = 8 }}'
    lines = [policy, 'env = { name = "stops_env:Once" }', f"in_flight = {{ rollouts = {in_flight} }}"]
    lines += [f"tasks = {TASKS}", "samples = 1"]
    teacher = f'teachers = [{{ name = "t", model = "t", base_url = "{server.url}", max_tokens = 64 }}]'
    if parallel:
        stages = [
            entry("collect", name, *lines, f"seed = {name == 'two':d}", parallel="both") for name in ("one", "two")
        ]
    else:
        stages = [entry("collect", "collect", *lines), entry("replay-teachers", "ask", teacher, reads=("collect",))]
    (folder / "chain.toml").write_text("\n".join(stages))
    return ["run", "--preset", str(folder / "chain.toml")]


@pytest.mark.parametrize(
    ("sent", "in_flight", "status"),
    [(INTERRUPT, TASKS, "complete"), pytest.param(TERMINATE, IN_FLIGHT, "interrupted", marks=SLOW)],
)
def test_a_chain_ends_with_the_stage_that_was_stopped(
    tmp_path: Path, server: Server, sent: int, in_flight: int, status: str
) -> None:
    """Also where all rollouts of the stage had begun, so that it comes to its end."""
    words = chain(tmp_path, server, in_flight)
    code, after, _, errors = stop(tmp_path, words, lambda: len(server.requests) >= in_flight, sent, server=server)
    assert code == 128 + sent and after <= in_flight % TASKS, errors
    assert statuses(tmp_path, "collect") == [status] and "ask: starts" not in errors
    done = call(tmp_path / "artifacts", *words, "--resume", PYTHONPATH=paths(tmp_path))
    asked = [str(body["messages"]) for body in server.requests if body["model"] == "m"]
    assert done.returncode == 0 and len(asked) == len(set(asked)) == TASKS, done.stderr


def evaluating(server: Server) -> list[str]:
    """Two models of a server on tasks that are played once."""
    served = [f'policies.{arm}={{model="{arm}", base_url="{server.url}", max_tokens=8}}' for arm in "AB"]
    sized = [f"tasks={TASKS}", f"in_flight.rollouts={IN_FLIGHT}"]
    return ["evaluate", "--env", "stops_env:Once", *settings(*served, *sized)]


def asking(server: Server) -> list[str]:
    """A teacher on every state of the collection that was made before."""
    teacher = f'teachers=[{{name="t", model="t", base_url="{server.url}", max_tokens=64, concurrency={IN_FLIGHT}}}]'
    return ["replay-teachers", *settings(teacher)]


def repairing(server: Server, tasks: int = 2) -> list[str]:
    """Katas, by a model of the server."""
    served = [f"policy.base_url={server.url}", "policy.max_tokens=64", f"policy.concurrency={IN_FLIGHT}"]
    return ["collect", "--policy", "scripted", *settings(*served, f"tasks={tasks}", "samples=1")]


def pairing(server: Server) -> list[str]:
    """The policy of the collection that was made before, asked on from both actions of every pair."""
    return ["extract-pairs", *settings("signal.rollouts=2", "min_pairs_per_rollout=0")]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [INTERRUPT, TERMINATE])
@pytest.mark.parametrize(
    ("stage", "on"), [(collecting, ""), (collecting, "processes:2"), (asking, ""), (evaluating, ""), (pairing, "")]
)
def test_calls_in_flight_finish_and_no_further_call_starts(
    tmp_path: Path, server: Server, sent: int, stage: Callable[[Server], list[str]], on: str
) -> None:
    words, where = stage(server), {"PYTHONPATH": paths(tmp_path)}
    words += ["--on", on] if on else []
    (tmp_path / "stops_env.py").write_text(ENVIRONMENTS)
    answered = ["replay-teachers", "--config", str(teachers(tmp_path, server.url))]
    for earlier in {asking: [collecting(server)], pairing: [repairing(server), answered]}.get(stage, []):
        assert call(tmp_path / "artifacts", *earlier, **where).returncode == 0
    server.requests.clear()
    code, after, _, errors = stop(tmp_path, words, lambda: len(server.requests) >= 6, sent, server=server)
    assert code == 128 + sent and after <= IN_FLIGHT * (2 if on else 1), errors
    done = call(tmp_path / "artifacts", *words, "--resume", **where)
    assert done.returncode in (0, 3) and statuses(tmp_path, words[0]) == ["complete"], done.stderr
    assert asked_once(server) > 6


@pytest.mark.slow
def test_pairs_stop_between_two_states(tmp_path: Path) -> None:
    words, states = ["extract-pairs", *settings("min_pairs_per_rollout=0")], tmp_path / "artifacts" / "extract-pairs"
    with serving(repair) as server:
        for earlier in (repairing(server, 20), ["replay-teachers", "--config", str(teachers(tmp_path, server.url))]):
            assert call(tmp_path / "artifacts", *earlier).returncode == 0

        def begun() -> bool:
            return any(path.stat().st_size for path in states.glob("2*/steps/*.open"))

        code, after, _, errors = stop(tmp_path, words, begun, TERMINATE, server=server)
    assert code == 143 and after == 0 and statuses(tmp_path, "extract-pairs") == ["interrupted"], errors
    assert call(tmp_path / "artifacts", *words, "--resume").returncode in (0, 3)
    assert statuses(tmp_path, "extract-pairs") == ["complete"]


PYTHON = """
import sys
import composer_post_training as composer

preset, artifacts, is_notebook = sys.argv[1:]
try:
    composer.run(preset, artifacts=artifacts)
except KeyboardInterrupt as stopped:  # as a cell of a notebook that is interrupted: the kernel goes on
    assert "resume=True goes on" in str(stopped), stopped
    if not is_notebook:
        raise SystemExit(130)
    composer.run(preset, artifacts=artifacts, resume=True, quiet=True)
"""


def in_python(*words: str) -> list[str]:
    """The same chain in a program of Python."""
    return [sys.executable, "-c", PYTHON, *words]


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "notebook"), [(INTERRUPT, "a notebook"), (INTERRUPT, ""), (TERMINATE, "")])
def test_a_chain_in_python_ends_as_the_command_does(tmp_path: Path, server: Server, sent: int, notebook: str) -> None:
    words = chain(tmp_path, server, IN_FLIGHT)
    given, how = [words[2], str(tmp_path / "artifacts"), notebook], {"server": server, "started_by": in_python}
    code, after, _, errors = stop(tmp_path, given, lambda: len(server.requests) >= IN_FLIGHT, sent, **how)
    assert (code, after > IN_FLIGHT) == ((0, True) if notebook else (128 + sent, False)), errors
    assert statuses(tmp_path, "collect") == ["complete" if notebook else "interrupted"]
    if not notebook:
        assert "resume=True goes on" in errors or sent == INTERRUPT
        assert call(tmp_path / "artifacts", *words, "--resume", PYTHONPATH=paths(tmp_path)).returncode == 0
    assert asked_once(server) == 2 * TASKS


@pytest.mark.slow
def test_a_submitted_job_that_is_cancelled_ends_as_the_command_does(tmp_path: Path, server: Server) -> None:
    def in_shell(submitted: SubmittedChain) -> str:
        return script(submitted, JobSettings(), python=sys.executable, artifacts=str(tmp_path / "artifacts"))

    assert_cancellation_ends_job(tmp_path, server, in_shell)


def assert_cancellation_ends_job(
    tmp_path: Path, server: Server, script_of: Callable[[SubmittedChain], str], group: bool = False
) -> None:
    """Cancel a job and submit it again: its script gets SIGTERM, alone or with all that it has started (scancel)."""
    words = chain(tmp_path, server, IN_FLIGHT)
    folder = tmp_path / "artifacts" / "submitted" / "job"
    folder.mkdir(parents=True)
    files = {"chain.toml": Path(words[2]).read_text()}
    submitted = SubmittedChain("job", folder, [*words[:2], "chain.toml"], files, [])
    (tmp_path / "job.sh").write_text(script_of(submitted))

    def by_shell(*words: str) -> list[str]:
        return ["/bin/sh", *words]

    how = {"server": server, "started_by": by_shell, "group": group}
    job = [str(tmp_path / "job.sh")]
    code, after, _, errors = stop(tmp_path, job, lambda: len(server.requests) >= IN_FLIGHT, TERMINATE, **how)
    assert code == 143 and after <= IN_FLIGHT, errors
    assert statuses(tmp_path, "collect") == ["interrupted"]
    env = environment(tmp_path / "artifacts", PYTHONPATH=paths(tmp_path))
    assert subprocess.run(by_shell(str(tmp_path / "job.sh")), env=env, timeout=120).returncode == 0
    assert asked_once(server) == 2 * TASKS


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(INTERRUPT,), (TERMINATE, TERMINATE)])
def test_parallel_entries_stop_together(tmp_path: Path, server: Server, signals: tuple[int, ...]) -> None:
    words, first = chain(tmp_path, server, 1, parallel=True), len(signals) == 1
    code, after, seconds, errors = stop(tmp_path, words, lambda: len(server.requests) >= 6, *signals, server=server)
    assert code == 128 + signals[0] and after <= 2 and seconds < 6, errors
    assert statuses(tmp_path, "collect") == ["interrupted"] * 2
    assert not first or errors.count("interrupted") == 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["collect", "train", "evaluate"])
def test_a_local_model_stops_between_two_tokens(tmp_path: Path, model: Path, stage: str) -> None:
    words = local(stage, model, "Endless")
    code, _, seconds, errors = stop(tmp_path, words, (tmp_path / "begun").exists, TERMINATE)
    assert code == 143 and seconds < 20, errors  # most of them the exit of Python on a busy machine
    assert statuses(tmp_path, stage) == ["interrupted"]


@pytest.mark.parametrize("signals", [(TERMINATE, TERMINATE), pytest.param((INTERRUPT, TERMINATE), marks=SLOW)])
def test_the_second_signal_ends_a_process_whose_main_thread_is_held(
    tmp_path: Path, server: Server, signals: tuple[int, ...]
) -> None:
    words = collecting(server, "Held")
    code, _, seconds, errors = stop(tmp_path, words, (tmp_path / "begun").exists, *signals)
    assert code == 128 + signals[-1] and GRACE_S - 1 < seconds < GRACE_S + 2, errors
    assert "Stopped at once. What was finished is saved." in errors
    assert statuses(tmp_path, "collect") == ["running"]
