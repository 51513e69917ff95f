"""A preset's stages one after another: in order, up to date, done again where something is missing, with workers."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from support.chains import SILENT, SMALL, entry

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
from stages.envs.kata.env import KataEnv
class Witness(KataEnv):
    def reset(self, task):
        (Path(__file__).parent / f'played-in-{os.getpid()}').touch()
        return super().reset(task)
"""


def outputs(summary):
    """What a run's manifest says of its outputs."""
    return json.loads(Path(summary["path"], "manifest.json").read_text())["outputs"]


def test_a_chain_runs_in_order_ends_with_the_last_result_and_is_then_up_to_date(composer, write):
    done = composer("run", "--preset", write(CHAIN))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\w+): (?:starts|done)", done.stderr, re.M) == ["collect"] * 2 + ["ask"] * 2 + ["pairs"] * 2
    assert "ask: starts (stage 2 of 3), " in done.stderr
    page = Path(re.search(r"^The report: (.*)$", done.stdout, re.M)[1])
    assert page.exists() and page.with_suffix(".json").exists()
    assert "pairs from" in done.stdout and done.stdout.endswith("Type something.\n")
    again = composer("run", "--preset", write(CHAIN))
    assert re.findall(r"^(\w+): up to date", again.stderr, re.M) == ["collect", "ask", "pairs"]
    planned = composer("run", "--preset", write(CHAIN), "--dry-run").stdout.splitlines()
    assert [line.endswith(", up to date") for line in planned[:3]] == [True] * 3 and len(planned) == 4, planned
    entries = json.loads(composer("run", "--preset", write(CHAIN), "--dry-run", "--json", "--clean").stdout)["entries"]
    assert [entry["up_to_date"] for entry in entries] == [None] * 3 and entries[0]["plan"]["units"] == 4
    changed = composer("run", "--preset", write(CHAIN), "--dry-run", "--resume", "--set", "pairs.compare=canonical")
    assert re.search(r"^pairs .*after collect, ask, \d+ states$", changed.stdout, re.M) and not changed.stderr
    other = composer("run", "--preset", write(CHAIN), "--dry-run", "--resume", "--set", "pairs.seed=3").stderr
    newest = r"seed is 3, the newest run extract-pairs/\S+ has 0"
    assert re.fullmatch(rf"pairs: Nothing to resume with these settings: {newest}\. A new run starts\.\n", other)


def test_a_deleted_run_alone_is_done_again_with_the_same_content(composer, write, tmp_path):
    preset = write(CHAIN)
    first = json.loads(composer("run", "--preset", preset, "--json").stdout)["entries"]
    before = outputs(first["ask"])
    subprocess.run(["rm", "-r", first["ask"]["path"]], check=True)
    second = json.loads(composer("run", "--preset", preset, "--json").stdout)["entries"]
    assert [second[name]["fresh"] for name in ("collect", "ask", "pairs")] == [False, True, False]
    after = outputs(second["ask"])
    assert before["teacher_actions"]["content_sha256"] == after["teacher_actions"]["content_sha256"]


def test_dry_run_shows_the_chain_and_does_nothing(composer, write, tmp_path):
    done = composer("run", "--preset", write(CHAIN), "--dry-run")
    assert done.returncode == 0 and "after collect, ask" in done.stdout and "4 rollouts" in done.stdout
    assert "  checked: model scripted: " in done.stdout and "GiB free" in done.stdout
    assert not (tmp_path / "artifacts").exists()


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


def test_a_run_that_is_not_ok_stops_the_chain(composer, write, tmp_path):
    (tmp_path / "silent_env.py").write_text(SILENT)
    text = CHAIN.replace("samples = 2", 'samples = 2\nenv = { name = "silent_env:Silent" }')
    done = composer("run", "--preset", write(text), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "collect did not pass its own checks" in done.stderr and "ask" not in done.stderr
