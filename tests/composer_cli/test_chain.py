"""A chain: its order, what is up to date, workers, entries that run at the same time, and the GPUs that they get."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import blocks
from support.chains import SILENT, SMALL, entry
from support.command_line import command, environment, until
from support.refusals import refused
from support.server import Reply, answer, serving

import composer_post_training as composer_python
from composer_cli import chain
from composer_cli.call import Arguments
from composer_cli.console import Console
from composer_cli.parallel import ParallelEntries, WaitingEntry
from composer_cli.preset import configure_preset, load_preset
from composer_cli.show.runs import RunLine
from composer_cli.show.text import status_tables
from composer_stages import STAGES, collect, extract_pairs, train
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.pairs.stage import _collection_settings
from composer_stages.policy.adapters import CheckpointInfo
from composer_stages.rollouts.trace import played_by
from composer_stages.runs import catalog, ledger
from composer_stages.runs.kinds import CHECKPOINT, EVAL_ITEM, STEP, TASK
from composer_stages.runs.run import Run
from composer_stages.runs.stage import load_stage
from tests.stages.test_extract_pairs import ACTORS

CHAIN = "\n".join(
    [
        'next = "Type something."',
        entry("collect", "collect", *SMALL),
        entry("replay-teachers", "ask", "TEACHERS", reads=("collect",)),
        entry("extract-pairs", "pairs", reads=("collect", "ask")),
    ]
)
WITNESS = """
import os
from pathlib import Path
from composer_stages.envs.kata.env import KataEnv
class Witness(KataEnv):
    def reset(self, task):
        (Path(__file__).parent / f'played-in-{os.getpid()}').touch()
        return super().reset(task)
"""


def outputs(summary):
    """What a run's manifest says of its outputs."""
    return json.loads(Path(summary["path"], "manifest.json").read_text())["outputs"]


def test_trainings_of_several_seeds_are_a_chain_without_a_folder_of_its_own() -> None:
    asked = train.Config(seed=5, seeds=2)
    preset, configs = chain.of_seeds("train", asked, Arguments())
    assert {title: (config.seed, config.label()) for title, config in configs.items()} == {
        "train-5": (5, "kata-A-s5"),
        "train-6": (6, "kata-A-s6"),
    }
    assert preset.groups() == [preset.stage] and preset.to_the_end
    assert asked.identity() == train.Config(seed=5).identity(), "each is the same work as that of its seed"
    refused(
        lambda: chain.of_seeds("train", asked, Arguments(out="run")),
        UsageError,
        code="cli.seeds-into-one-folder",
        out="run",
    )


@pytest.mark.timeout(120)
def test_trainings_of_several_seeds_are_evaluated_together(tmp_path: Path) -> None:
    size = {"steps": 1, "prompts_per_step": 1, "generations": 2, "threads": 1}
    settings: dict[str, Any] = {"policy": {"model": "kata:student", "max_tokens": 4}, "env": "kata", "tasks": 4}
    settings |= {"max_steps": 1, "optimisation": size, "seed": 5, "artifacts": tmp_path, "quiet": True}
    begun: Any = composer_python.train(seeds=3, **settings)
    assert [(name, run.manifest.config["seed"]) for name, run in begun.items()] == [
        (f"train-{seed}", seed) for seed in (5, 6, 7)
    ]

    def read(stage: str, *names: str) -> set[str]:
        notes = list[str]()
        inputs = catalog.choose(stage, names, tmp_path, notes.append)
        read = {run.path.name for run in inputs.runs()}
        assert len(notes) == (len(read) > 1)
        return read

    shutil.rmtree(begun["train-7"].path)
    refused(lambda: read("evaluate", "train"), BadInput, code="runs.seeds-incomplete", complete=2, asked=3)
    asked: Any = composer_python.train(seeds=2, **settings)
    assert [run.path for run in asked.values()] == [begun[name].path for name in ("train-5", "train-6")], "up to date"
    planned = composer_python.train.plan(seeds=2, **settings)
    assert (planned.units, planned.max_completion_tokens) == (2, 2 * 2 * 4)
    folders = {run.path.name for run in asked.values()}
    latest = catalog.latest(tmp_path, "train")
    assert latest and read("evaluate", "train") == folders and read("export", "train") == {latest.name}
    assert read("evaluate", f"train/{latest.name}") == {latest.name}, "a name means this run"


def test_a_chain_runs_in_order_and_is_then_up_to_date_but_for_a_deleted_run(composer, write, tmp_path):
    done = composer("run", "--preset", write(CHAIN), "--dry-run")
    assert done.returncode == 0 and "after collect, ask" in done.stdout and "4 rollouts" in done.stdout
    assert "  checked: model scripted: " in done.stdout and "GiB free" in done.stdout
    assert not (tmp_path / "artifacts").exists()
    done = composer("run", "--preset", write(CHAIN))
    assert done.returncode == 3 and "pairs is TOO LITTLE DATA" in done.stdout, done.stderr
    assert re.findall(r"^(\w+): (?:starts|done)", done.stderr, re.M) == ["collect"] * 2 + ["ask"] * 2 + ["pairs"] * 2
    assert "ask: starts (stage 2 of 3), " in done.stderr
    page = Path(re.search(r"^The report: (.*)$", done.stdout, re.M)[1])
    assert page.exists() and page.with_suffix(".json").exists()
    assert "pairs from" in done.stdout and done.stdout.endswith("Type something.\n")
    again = composer("run", "--preset", write(CHAIN), "--json")
    assert re.findall(r"^(\w+): up to date", again.stderr, re.M) == ["collect", "ask", "pairs"]
    answers = json.loads(again.stdout)["entries"]["ask"]
    planned = composer("run", "--preset", write(CHAIN), "--dry-run").stdout.splitlines()
    assert [line.endswith(", up to date") for line in planned[:3]] == [True] * 3 and len(planned) == 4, planned
    entries = json.loads(composer("run", "--preset", write(CHAIN), "--dry-run", "--json", "--clean").stdout)["entries"]
    assert [entry["up_to_date"] for entry in entries] == [None] * 3 and entries[0]["plan"]["units"] == 4
    changed = composer("run", "--preset", write(CHAIN), "--dry-run", "--resume", "--set", "pairs.compare=canonical")
    assert re.search(r"^pairs .*after collect, ask, \d+ states$", changed.stdout, re.M) and not changed.stderr
    other = composer("run", "--preset", write(CHAIN), "--dry-run", "--resume", "--set", "pairs.seed=3").stderr
    newest = r"seed is 3, the newest run extract-pairs/\S+ has 0"
    assert re.fullmatch(rf"pairs: Nothing to resume with these settings: {newest}\. A new run starts\.\n", other)
    before = outputs(answers)["teacher_actions"]["content_sha256"]
    shutil.rmtree(answers["path"])
    entries = json.loads(composer("run", "--preset", write(CHAIN), "--json").stdout)["entries"]
    assert [entries[name]["fresh"] for name in ("collect", "ask", "pairs")] == [False, True, False]
    assert outputs(entries["ask"])["teacher_actions"]["content_sha256"] == before


def test_the_columns_of_a_dry_run_are_apart_however_long_the_names_are(composer, write):
    text = entry("collect", "collect-in-an-environment", *SMALL) + entry("collect", "short", *SMALL, "seed = 1")
    first, second = composer("run", "--preset", write(text), "--dry-run").stdout.splitlines()[:2]
    assert re.split(" {2,}", first)[:2] == ["collect-in-an-environment", "collect"]
    assert first.index("  collect  ") == second.index("  collect  ")


@pytest.mark.slow
def test_an_entry_has_workers_of_its_own(composer, write, tmp_path):
    """Those of its `on`, or of --on where that is given; the rollouts are those of one process."""
    (tmp_path / "witness_env.py").write_text(WITNESS)
    plain = entry("collect", "collect", *SMALL, 'env = { name = "witness_env:Witness" }')
    found, digests = dict[str, int](), list[str]()
    for on, *words in (("",), ("processes:2",), ("processes:2", "--on", "processes:1")):
        text = plain.replace("[stage.config]", f'on = "{on}"\n[stage.config]', 1)
        done = composer("run", "--preset", write(text), "--json", "--clean", *words, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        digests.append(outputs(json.loads(done.stdout)["entries"]["collect"])["rollouts"]["content_sha256"])
        witnesses = list(tmp_path.glob("played-in-*"))
        found[" ".join([on, *words])] = len(witnesses)
        for witness in witnesses:
            witness.unlink()
    assert found == {"": 1, "processes:2": 2, "processes:2 --on processes:1": 1}
    assert len(set(digests)) == 1
    assert ", on processes:2" in composer("run", "--preset", "demo", "--dry-run").stdout


# --- entries at the same time


PAIR_OF_COLLECTIONS = entry("collect", "one", *SMALL, parallel="both") + entry(
    "collect", "two", *SMALL, "seed = 1", parallel="both"
)


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
def test_parallel_entries_that_need_an_exclusive_server_run_in_turn(policy, together, tmp_path):
    configs = [collect.Config(policy=policy) for _ in range(2)]
    assert chain.can_run_in_parallel(configs, Arguments(artifacts=tmp_path)) is together
    for rank, parallel in ((16, together), (0, together and policy["model"] == "kata:student")):
        configs = [train.Config(policy=policy, adapter={"rank": rank}) for _ in range(2)]
        assert chain.can_run_in_parallel(configs, Arguments(artifacts=tmp_path)) is parallel, rank


def test_preloaded_modules_exist():
    """A name that is not there would be passed over without a word, and every process would import for itself."""
    named = [name for stage in STAGES for name in load_stage(stage).preload]
    assert named and all(find_spec(name) for name in named)


def test_a_parallel_entry_waits_for_its_inputs_alone(composer, write):
    slow = [entry("collect", "one", *SMALL, parallel="all").replace("SCRIPTED", "SLOW")]
    slow += [entry("replay-teachers", "ask", "TEACHERS", reads=("one",), parallel="all")]
    slow += [entry("collect", "two", *SMALL, "seed = 1", parallel="all")]
    done = composer("run", "--preset", write("\n".join(slow)), "--json")
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^(\w+): (starts|done)", done.stderr, re.M)
    assert told.index(("one", "done")) < told.index(("ask", "starts"))
    assert told.index(("two", "starts")) < told.index(("one", "done")), "it stands last, and reads nothing"
    found = json.loads(done.stdout)["entries"]
    assert list(found) == ["one", "ask", "two"] and found["one"]["path"] != found["two"]["path"]
    assert [found[name]["counts"]["done"] for name in ("one", "two")] == [4, 4]
    again = composer("run", "--preset", write("\n".join(slow)))
    assert re.findall(r"^(\w+): up to date", again.stderr, re.M) == ["one", "ask", "two"]


def test_a_failed_parallel_entry_lets_others_finish_but_not_its_readers_start(composer, write):
    broken = entry("collect", "one", "SCRIPTED", 'env = { name = "no-such-env" }', parallel="all")
    rest = entry("replay-teachers", "ask", "TEACHERS", reads=("one",), parallel="all")
    done = composer("run", "--preset", write(broken + rest + entry("collect", "two", *SMALL, parallel="all")))
    assert done.returncode == 2 and "no environment" in done.stderr.splitlines()[-1]
    assert "two: done in" in done.stderr and "ask: " not in done.stderr


def test_a_failed_check_starts_no_further_parallel_entries(composer, write, tmp_path):
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


def test_a_signal_reaches_every_parallel_entry_and_resume_continues(composer, write, tmp_path):
    root = tmp_path / "artifacts"
    code, errors = disturbed(write(SLOW_PAIR), tmp_path, lambda pid: os.kill(pid, signal.SIGTERM))
    assert code == 143, errors
    assert "one: interrupted" in errors and "two: interrupted" in errors and "Traceback" not in errors
    states = [json.loads(path.read_text())["status"] for path in root.glob("collect/2*/manifest.json")]
    assert states == ["interrupted"] * 2
    assert composer("run", "--preset", write(SLOW_PAIR), "--resume").returncode == 0


def disturbed(preset: str, folder: Path, disturb: Callable[[int], None], **more: str) -> tuple[int | None, str]:
    """Exit code and messages of a chain that is disturbed, by its process' id, once both entries have begun."""
    root = folder / "artifacts"
    process = blocks.start(["run", "--preset", preset], folder, environment(root, **more))
    until(lambda: len(list(root.glob("collect/2*/steps"))) == 2)
    disturb(process.pid or 0)
    process.join()
    return process.exitcode, (folder / blocks.PRINTED).read_text()


ENDS_SLOWLY = """
import threading, time
from composer_stages.envs.kata.env import KataEnv
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
def test_a_parallel_entry_that_exits_slowly_does_not_delay_signals(write, tmp_path):
    (tmp_path / "odd_ends.py").write_text(ENDS_SLOWLY)
    one, two = SLOW_PAIR.split("[[stage]]")[1:]
    text = "".join(
        f'[[stage]]{part}env = {{ name = "odd_ends:{name}" }}\n' for part, name in ((one, "Slow"), (two, "Late"))
    )
    interrupt = lambda pid: os.kill(pid, signal.SIGINT)  # noqa: E731
    found, errors = disturbed(write(text), tmp_path, interrupt, PYTHONPATH=str(tmp_path))
    assert found == 130 and "one: interrupted" in errors and "two: interrupted" in errors, errors


def test_a_killed_parallel_entry_is_reported(write, tmp_path):
    found, errors = disturbed(write(SLOW_PAIR), tmp_path, lambda pid: os.kill(_child_of(pid), signal.SIGKILL))
    assert found == 5 and "died (exit code -9)" in errors and "--resume" in errors


@pytest.mark.slow
def test_parallel_entries_stop_when_their_chain_is_killed(write, tmp_path):
    root = tmp_path / "artifacts"
    with subprocess.Popen(
        command("run", "--preset", write(SLOW_PAIR)), env=environment(root), stderr=subprocess.DEVNULL
    ) as process:
        until(lambda: len(list(root.glob("collect/2*/steps"))) == 2)
        process.kill()
    until(lambda: not any("running" in path.read_text() for path in root.glob("collect/2*/manifest.json")))


@pytest.mark.slow
def test_an_exception_that_cannot_be_pickled_is_reported(composer, write, tmp_path):
    (tmp_path / "odd_env.py").write_text(
        "class Odd(Exception):\n"
        "    def __init__(self, one, two):\n"
        "        super().__init__(f'{one} and {two}')\n"
        "from composer_stages.envs.kata.env import KataEnv\n"
        "class Env(KataEnv):\n"
        "    def __init__(self):\n"
        "        raise Odd('salt', 'pepper')\n"
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


# --- GPUs, with device lists that this machine does not have


CORES = len(os.sched_getaffinity(0))
ONE_GPU = {"COMPOSER_GPUS": "8", "CUDA_VISIBLE_DEVICES": "MIG-5d3e"}


def on_gpus(text: str, gpus: int) -> str:
    """An entry of a preset that takes so many GPUs."""
    return text.replace("[stage.config]", f"gpus = {gpus}\n[stage.config]")


def test_entries_queue_for_gpus_see_their_own_alone_and_others_do_not_wait(composer, write):
    slow = [line.replace("SCRIPTED", "SLOW") for line in SMALL]
    text = on_gpus(entry("collect", "one", *slow, parallel="all"), 1)
    text += on_gpus(entry("collect", "quick", *SMALL, "seed = 3", parallel="all"), 1)
    text += on_gpus(entry("collect", "two", *SMALL, "seed = 1", parallel="all"), 2)
    text += entry("collect", "remote", *SMALL, "seed = 2", parallel="all")
    done = composer("run", "--preset", write(text), "--json", COMPOSER_GPUS="8", CUDA_VISIBLE_DEVICES="3,MIG-5d3e")
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^(\w+): (starts|done)", done.stderr, re.M)
    assert told.index(("one", "done")) < told.index(("two", "starts")), "there are two GPUs, and it needs both"
    assert told.index(("remote", "starts")) < told.index(("one", "done")), "it needs none, and stands last"
    assert "one: starts (stage 1 of 4) on GPU 3, " in done.stderr
    paths = {name: Path(found["path"]) for name, found in json.loads(done.stdout)["entries"].items()}
    written = {name: json.loads((path / "manifest.json").read_text())["device"] for name, path in paths.items()}
    second = "MIG-5d3e" if CORES > 1 else "GPU 3"
    assert written == {"one": "GPU 3", "quick": second, "two": "GPU 3, MIG-5d3e", "remote": "cpu"}
    shown = composer("status").stdout.splitlines()
    assert "device" in shown[0] and sum("GPU 3" in line for line in shown) >= 2


@pytest.mark.parametrize(
    ("entries", "begun"),
    [
        ([("a", 1, ["a"]), ("b", 1, []), ("c", 2, []), ("d", 1, []), ("e", 0, [])], [("b", ("3",)), ("e", ()), None]),
        ([("a", 1, []), ("b", 1, []), ("c", 1, [])], [("a", ("3",)), ("b", ("MIG-5d3e",)), None]),
    ],
    ids=["d waits behind c, a for itself, e for nothing", "each has a GPU of its own"],
)
def test_an_entry_that_needs_several_gpus_is_not_overtaken(tmp_path, monkeypatch, entries, begun):
    monkeypatch.setenv("COMPOSER_GPUS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,MIG-5d3e")
    waiting = [WaitingEntry(name, "collect", reads, gpus, lambda results: None) for name, gpus, reads in entries]
    neighbours = ParallelEntries(
        waiting, {}, Arguments(artifacts=tmp_path), Console(quiet=True), lambda title, result: None
    )
    assert [one and (one[0].title, one[1]) for one in (neighbours.choose() for _ in range(3))] == begun


def test_more_gpus_than_there_are_are_refused_before_anything_runs(composer, write, tmp_path):
    text = entry("collect", "one", *SMALL) + on_gpus(entry("collect", "large", *SMALL, "seed = 1"), 2)
    for words in ([], ["--dry-run"]):
        done = composer("run", "--preset", write(text), *words, **ONE_GPU)
        assert done.returncode == 2 and "large asks for 2 GPUs, and this machine lets it use 1" in done.stderr
    assert not list(tmp_path.glob("artifacts/collect/*/manifest.json"))


def placed(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a dry run says about the places of a preset's entries."""
    (tmp_path / "preset.toml").write_text(text)
    preset = load_preset(str(tmp_path / "preset.toml"))
    configs = configure_preset(preset, [])
    chain.show_plan(preset, configs, Arguments(artifacts=tmp_path), Console(quiet=True), False, [], lambda _: configs)
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  placed:")]


TRAININGS = "".join(entry("train", f"seed-{n}", f"seed = {n}", parallel="train") for n in range(3))


@pytest.mark.parametrize(
    ("visible", "gpus", "words"),
    [
        ("3", None, "at most 1 at the same time, one GPU each, of GPU 3"),
        ("0,3", None, f"at most {min(CORES, 2)} at the same time, one GPU each, of GPU 0, 3"),
        ("0,1,2,3,4", 3, "at most 1 at the same time, 3 GPUs each, of GPU 0, 1, 2, 3, 4"),
        ("", None, f"at most {CORES} at the same time, one a core"),
    ],
)
def test_a_dry_run_says_how_many_trainings_run_at_the_same_time(visible, gpus, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPOSER_GPUS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = TRAININGS if gpus is None else on_gpus(TRAININGS, gpus)
    assert placed(text, tmp_path, capsys) == [f"placed: seed-0 to seed-2: {words}"]


def test_entries_without_gpus_do_not_count_toward_placement(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPOSER_GPUS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both = entry("train", "here", parallel="all") + on_gpus(entry("collect", "none", parallel="all"), 0)
    assert placed(both, tmp_path, capsys) == [
        "placed: here to none: 1 of these 2: at most 1 at the same time, one GPU each, of GPU 0"
    ]
    served = "".join(
        entry("train", f"seed-{n}", f"seed = {n}", 'policy = { model = "vllm:kata:student-served" }', parallel="all")
        for n in range(2)
    )
    monkeypatch.setenv("COMPOSER_VLLM", sys.executable)
    assert "one after another" in placed(served, tmp_path, capsys)[0]


def test_a_run_without_a_device_has_none_in_the_table():
    assert RunLine("train/x", "complete").device == ""
    table = status_tables([RunLine("train/x", "complete"), RunLine("train/y", "running", device="GPU 3")], [])
    assert table.splitlines()[0].split() == ["run", "status", "age", "units", "USD", "took", "device", "reason"]
    assert "GPU 3" in table


def test_a_chain_stops_at_an_inconclusive_entry_that_later_entries_read(composer, tmp_path):
    """Trainings used to learn from pairs whose check had ended with exit code 3."""
    with serving(lambda body, earlier: Reply(body=answer(ACTORS[body["model"]](body["messages"])))) as server:
        policy = f'base_url = "{server.url}", max_tokens = 99'
        teachers = ", ".join(f'{{ name = "{name}", model = "sometimes", {policy} }}' for name in "abc")
        text = [
            entry("collect", "collect", f'policy = {{ model = "looks", {policy} }}', "tasks = 2", "samples = 1"),
            entry("replay-teachers", "ask", f"teachers = [{teachers}]", reads=("collect",)),
            entry("extract-pairs", "pairs", 'outcome = "ignore"', reads=("collect", "ask")),
        ]
        preset = tmp_path / "preset.toml"
        preset.write_text("\n".join(text))
        alone = composer("run", "--preset", str(preset))
        assert alone.returncode == 3 and "Every entry was run" in alone.stdout, "nothing reads its pairs"
        preset.write_text("\n".join([*text, entry("export", "file", 'format = "trl"', reads=("collect", "pairs"))]))
        stopped = composer("run", "--preset", str(preset))
        assert stopped.returncode == 3 and "file: " not in stopped.stderr
        assert "pairs ended in TOO LITTLE DATA" in stopped.stderr
        assert "--to-the-end" in stopped.stderr
        done = composer("run", "--preset", str(preset), "--to-the-end")
        assert done.returncode == 3 and "file: done" in done.stderr


def test_one_budget_is_for_all_entries_of_a_chain_and_for_all_attempts(tmp_path):
    """Three entries of two calls, 1.8 USD an entry; before a call its bound is set aside, 12.80 USD."""
    prices = "usd_per_mtok_in = 20000, usd_per_mtok_out = 20000, max_tokens = 6"
    with serving(lambda body, number: Reply(body=answer("a", 40, 5))) as server:
        policy = f'policy = {{ model = "m", base_url = "{server.url}", {prices} }}'
        settings = ("tasks = 2", "samples = 1", "max_steps = 1", 'env = { name = "support.environments:GuessEnv" }')
        parts = [entry("collect", f"c{n}", *settings, f"seed = {n}", policy, parallel="x") for n in range(3)]
        (tmp_path / "chain.toml").write_text("\n".join(parts))

        def run(max_cost, **more):
            path, where = tmp_path / "chain.toml", tmp_path / "artifacts"
            return composer_python.run(path, max_cost=max_cost, artifacts=where, quiet=True, **more)

        with pytest.raises(Incomplete, match="max_cost"):
            run(16.0)
        before = len(server.requests)
        spent = sum(ledger.totals(path.parent)[0] for path in (tmp_path / "artifacts").rglob("ledger.jsonl"))
        assert before == 4 and spent == pytest.approx(3.6)
        done = run(30.0, resume=True)
    assert len(server.requests) == 6, "nothing is paid twice"
    assert sum(run.manifest.cost_usd for run in done.values()) == pytest.approx(5.4)


@pytest.mark.slow
def test_each_round_collects_with_the_student_that_the_round_before_trained(tmp_path):
    """The shipped preset, small: three rounds of one step, evaluated against the model before all of them."""
    small = {"collect.tasks": 6, "train.optimisation.steps": 1, "train.pairs.per_step": 4, "evaluate.tasks": 12}
    runs = composer_python.run("dagger", small, artifacts=tmp_path, quiet=True)
    trained = [Run(runs[f"train-{number}"].path) for number in (1, 2, 3)]
    played = [Run(runs[f"collect-{number}"].path) for number in (1, 2, 3)]
    assert [len(run.manifest.inputs["pairs"]) for run in trained] == [1, 2, 3]
    students = [refs[0].path for run in played[1:] if (refs := run.manifest.inputs["student"])]
    continuing = [_collection_settings(run, extract_pairs.Config())[0].model for run in played]
    assert continuing == ["kata:student", *(str(run.folder(CHECKPOINT)) for run in trained[:2])], (
        "what pairs are tested by"
    )
    assert students == [str(run.path) for run in trained[:2]] and "student" not in played[0].manifest.inputs
    assert all({*map(played_by, run.rows(STEP))} > {None} for run in played)
    assert len({row["task_id"] for run in played for row in run.rows(TASK)}) == 18, "each round has tasks of its own"
    starts = {CheckpointInfo.of(run).start_identity for run in trained}
    items = Run(runs["evaluate"].path).rows(EVAL_ITEM)
    assert len(starts) == 1 and {item["arm"] for item in items} == {"start", "dagger"}
