"""Neighbours in a chain run at once: what waits for what, and what a failure, a signal or a kill does to the others."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.chains import SILENT, SMALL, entry
from support.command_line import command, environment, until

from composer_cli import chain
from composer_cli.call import RunOptions
from stages import STAGES, collect, train
from stages.runs.stage import load_stage

PAIR_OF_COLLECTIONS = entry("collect", "one", *SMALL, parallel="both") + entry(
    "collect", "two", *SMALL, "seed = 1", parallel="both"
)


def test_neighbours_run_in_processes_of_their_own(composer, write):
    done = composer("run", "--preset", write(PAIR_OF_COLLECTIONS), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["entries"]
    assert [found[name]["counts"]["done"] for name in ("one", "two")] == [4, 4]
    assert found["one"]["path"] != found["two"]["path"]
    again = composer("run", "--preset", write(PAIR_OF_COLLECTIONS))
    assert {"one: up to date", "two: up to date"} <= set(again.stderr.splitlines())


@pytest.mark.parametrize(
    ("policy", "together"),
    [
        ({"model": "kata:student"}, True),
        ({"model": "vllm:kata:student-served"}, False),  # each would start a server
        ({"model": "vllm:kata:student-served", "base_url": "http://127.0.0.1:8000/v1", "device": "cpu"}, False),
        ({"model": "vllm:kata:student-served", "base_url": "http://127.0.0.1:8000/v1", "device": "cuda"}, True),
        ({"model": "vllm:kata:student-served", "base_url": "http://gpu.example:8000/v1"}, True),
    ],
)
def test_neighbours_that_need_a_server_to_themselves_take_turns(policy, together, tmp_path):
    configs = [collect.Config(policy=policy) for _ in range(2)]
    assert chain.at_once(configs, RunOptions(tmp_path)) is together


@pytest.mark.parametrize("rank", [0, 16])
def test_trainings_of_all_weights_on_one_server_take_turns(rank, tmp_path):
    policy = {"model": "vllm:kata:student-served", "base_url": "http://gpu.example:8000/v1"}
    configs = [train.Config(policy=policy, adapter={"rank": rank}) for _ in range(2)]
    assert chain.at_once(configs, RunOptions(tmp_path)) is (rank > 0)


def test_what_neighbours_import_beforehand_exists():
    """A name that is not there would be passed over without a word, and every process would import for itself."""
    named = [name for stage in STAGES for name in load_stage(stage).preload]
    assert named and all(find_spec(name) for name in named)


def test_when_one_neighbour_fails_the_other_is_finished(composer, write, tmp_path):
    broken = entry("collect", "two", "SCRIPTED", 'env = { name = "no-such-env" }', parallel="both")
    done = composer("run", "--preset", write(entry("collect", "one", *SMALL, parallel="both") + broken))
    assert done.returncode == 2 and "no environment" in done.stderr.splitlines()[-1]
    assert "one: done in" in done.stderr and (tmp_path / "artifacts" / "collect" / "latest").exists()


def test_a_neighbour_waits_for_what_it_reads_and_for_nothing_else(composer, write):
    slow = [entry("collect", "one", *SMALL, parallel="all").replace("SCRIPTED", "SLOW")]
    slow += [entry("replay-teachers", "ask", "TEACHERS", reads=("one",), parallel="all")]
    slow += [entry("collect", "two", *SMALL, "seed = 1", parallel="all")]
    done = composer("run", "--preset", write("\n".join(slow)), "--json")
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^(\w+): (starts|done)", done.stderr, re.M)
    assert told.index(("one", "done")) < told.index(("ask", "starts"))
    assert told.index(("two", "starts")) < told.index(("one", "done")), "it stands last, and reads nothing"
    assert list(json.loads(done.stdout)["entries"]) == ["one", "ask", "two"]
    again = composer("run", "--preset", write("\n".join(slow)))
    assert re.findall(r"^(\w+): up to date", again.stderr, re.M) == ["one", "ask", "two"]


def test_what_a_failed_neighbour_would_be_read_by_is_not_begun(composer, write):
    broken = entry("collect", "one", "SCRIPTED", 'env = { name = "no-such-env" }', parallel="all")
    rest = entry("replay-teachers", "ask", "TEACHERS", reads=("one",), parallel="all")
    done = composer("run", "--preset", write(broken + rest + entry("collect", "two", *SMALL, parallel="all")))
    assert done.returncode == 2 and "no environment" in done.stderr.splitlines()[-1]
    assert "two: done in" in done.stderr and "ask: " not in done.stderr


@pytest.mark.slow
def test_a_neighbour_that_is_not_ok_stops_the_others_from_beginning(composer, write, tmp_path):
    (tmp_path / "silent_env.py").write_text(SILENT)
    silent = [*SMALL, 'env = { name = "silent_env:Silent" }']
    text = entry("collect", "one", *silent, parallel="all")
    text += entry("collect", "two", *SMALL, reads=(), parallel="all").replace("SCRIPTED", "SLOW")
    text += entry("replay-teachers", "ask", "TEACHERS", reads=("two",), parallel="all")
    done = composer("run", "--preset", write(text), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "one did not pass its own checks" in done.stderr.splitlines()[-1]
    assert "two: done in" in done.stderr and "ask: starts" not in done.stderr


SLOW_PAIR = PAIR_OF_COLLECTIONS.replace("SCRIPTED", "SLOW").replace(
    "samples = 2", "samples = 1\nin_flight = { rollouts = 1 }"
)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=SLOW)])
def test_a_signal_reaches_every_neighbour_and_resume_goes_on(composer, write, tmp_path, sent, code):
    root = tmp_path / "artifacts"
    words = command("run", "--preset", write(SLOW_PAIR))
    with subprocess.Popen(words, env=environment(root), stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(list(root.glob("collect/2*/steps"))) == 2)
        process.send_signal(sent)
        errors = process.stderr.read()
    assert process.returncode == code, errors
    assert "one: interrupted" in errors and "two: interrupted" in errors and "Traceback" not in errors
    states = [json.loads(path.read_text())["status"] for path in root.glob("collect/2*/manifest.json")]
    assert states == ["interrupted"] * 2
    assert composer("run", "--preset", write(SLOW_PAIR), "--resume").returncode == 0


ENDS_SLOWLY = """
import threading, time
from stages.envs.kata.env import KataEnv
class Slow(KataEnv):
    def __init__(self):
        super().__init__()
        threading.Thread(target=time.sleep, args=(9,)).start()  # the process waits for it before it exits
class Late(KataEnv):
    def tasks(self, *given, **more):
        time.sleep(1)  # the run's folder is there, and the stage cannot be interrupted yet
        return super().tasks(*given, **more)
"""


@pytest.mark.slow
def test_a_neighbour_that_takes_long_to_exit_keeps_no_signal_from_the_other(composer, write, tmp_path):
    (tmp_path / "odd_ends.py").write_text(ENDS_SLOWLY)
    one, two = SLOW_PAIR.split("[[stage]]")[1:]
    text = "".join(
        f'[[stage]]{part}env = {{ name = "odd_ends:{name}" }}\n' for part, name in ((one, "Slow"), (two, "Late"))
    )
    root = tmp_path / "artifacts"
    words, env = command("run", "--preset", write(text)), environment(root, PYTHONPATH=str(tmp_path))
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(list(root.glob("collect/2*/steps"))) == 2)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130 and "one: interrupted" in errors and "two: interrupted" in errors, errors


def test_a_neighbour_that_is_killed_is_reported(composer, write, tmp_path):
    root = tmp_path / "artifacts"
    words = command("run", "--preset", write(SLOW_PAIR))
    with subprocess.Popen(words, env=environment(root), stderr=subprocess.PIPE, text=True) as process:
        until(lambda: len(list(root.glob("collect/2*/steps"))) == 2)
        os.kill(_child_of(process.pid), signal.SIGKILL)
        errors = process.stderr.read()
    assert process.returncode == 1 and "died (exit code -9)" in errors and "--resume" in errors


@pytest.mark.slow
def test_neighbours_whose_chain_is_killed_stop_by_themselves(write, tmp_path):
    root = tmp_path / "artifacts"
    with subprocess.Popen(
        command("run", "--preset", write(SLOW_PAIR)), env=environment(root), stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: len(list(root.glob("collect/2*/steps"))) == 2)
        process.kill()
    until(lambda: not any("running" in path.read_text() for path in root.glob("collect/2*/manifest.json")))


@pytest.mark.slow
def test_a_failure_that_cannot_travel_is_still_told(composer, write, tmp_path):
    (tmp_path / "odd_env.py").write_text(
        "class Odd(Exception):\n"
        "    def __init__(self, one, two):\n"
        "        super().__init__(f'{one} and {two}')\n"
        "class Env:\n"
        "    def __init__(self):\n"
        "        raise Odd('salt', 'pepper')\n"
        "    def tasks(self, split, count, seed): ...\n"
        "    def reset(self, task): ...\n"
        "    def step(self, text): ...\n"
        "    def grade(self): ...\n"
        "    def close(self): ...\n"
    )
    odd = entry("collect", "two", "SCRIPTED", 'env = { name = "odd_env:Env" }', parallel="both")
    preset = write(entry("collect", "one", *SMALL, parallel="both") + odd)
    done = composer("run", "--preset", preset, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "salt and pepper" in done.stderr and "Traceback" not in done.stderr


def _child_of(pid: int) -> int:
    """A process below that carries out a stage: it leads a session of its own."""
    return next(below for below in _below(pid) if os.getsid(below) == below)


def _below(pid: int) -> Iterator[int]:
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        yield child
        yield from _below(child)
