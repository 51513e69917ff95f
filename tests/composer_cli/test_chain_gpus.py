"""Which GPU each entry of a chain gets, with device lists that this machine does not have."""

import json
import os
import re
from pathlib import Path

import pytest
from support.chains import SMALL, entry

from composer_cli import chain
from composer_cli.call import RunOptions
from composer_cli.console import Console
from composer_cli.parallel import ParallelEntries, WaitingEntry
from composer_cli.preset import Preset, configure_preset, load_preset
from composer_cli.show.runs import RunLine
from composer_cli.show.text import status_tables
from stages.errors import UsageError
from stages.runs import settings

CORES = len(os.sched_getaffinity(0))
ONE_MIG = {"COMPOSER_GPUS": "8", "CUDA_VISIBLE_DEVICES": "MIG-5d3e"}


def on_gpus(text: str, gpus: int) -> str:
    """An entry of a preset that takes so many GPUs."""
    return text.replace("[stage.config]", f"gpus = {gpus}\n[stage.config]")


def test_entries_queue_for_the_gpu_and_others_do_not(composer, write, tmp_path):
    slow = [line.replace("SCRIPTED", "SLOW") for line in SMALL]
    text = on_gpus(entry("collect", "one", *slow, parallel="all"), 1)
    text += on_gpus(entry("collect", "two", *SMALL, "seed = 1", parallel="all"), 1)
    text += entry("collect", "remote", *SMALL, "seed = 2", parallel="all")
    done = composer("run", "--preset", write(text), "--json", **ONE_MIG)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^(\w+): (starts|done)", done.stderr, re.M)
    assert told.index(("one", "done")) < told.index(("two", "starts")), "there is one GPU"
    assert told.index(("remote", "starts")) < told.index(("one", "done")), "it needs none, and stands last"
    assert "one: starts (stage 1 of 3) on MIG-5d3e, " in done.stderr
    paths = {name: Path(found["path"]) for name, found in json.loads(done.stdout)["entries"].items()}
    written = {name: json.loads((path / "manifest.json").read_text())["device"] for name, path in paths.items()}
    assert written == {"one": "MIG-5d3e", "two": "MIG-5d3e", "remote": "cpu"}
    shown = composer("status").stdout.splitlines()
    assert "device" in shown[0] and sum("MIG-5d3e" in line for line in shown) == 2


def test_each_entry_sees_its_own_gpu_alone(composer, write):
    text = "".join(
        on_gpus(entry("collect", name, *SMALL, f"seed = {seed}", parallel="all"), 1)
        for seed, name in enumerate(("one", "two"))
    )
    text = text.replace("SCRIPTED", "SLOW")
    done = composer("run", "--preset", write(text), "--json", COMPOSER_GPUS="8", CUDA_VISIBLE_DEVICES="3,MIG-5d3e")
    assert done.returncode == 0, done.stderr
    paths = [Path(found["path"]) for found in json.loads(done.stdout)["entries"].values()]
    written = [json.loads((path / "manifest.json").read_text())["device"] for path in paths]
    assert written == (["GPU 3", "MIG-5d3e"] if CORES > 1 else ["GPU 3", "GPU 3"])


def test_an_entry_that_needs_several_is_not_overtaken(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER_GPUS", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    waiting = [
        WaitingEntry(name, "collect", reads, gpus, lambda results: None)
        for name, gpus, reads in (("a", 1, ["a"]), ("b", 1, []), ("c", 2, []), ("d", 1, []), ("e", 0, []))
    ]
    neighbours = ParallelEntries(waiting, {}, RunOptions(tmp_path), Console(quiet=True), lambda title, result: None)
    begun = [neighbours.choose() for _ in range(3)]
    assert begun == [(waiting[1], ("0",)), (waiting[4], ()), None], "d waits behind c, a for itself, e for nothing"


def test_more_gpus_than_there_are_are_refused_before_anything_runs(composer, write, tmp_path):
    text = entry("collect", "one", *SMALL) + on_gpus(entry("collect", "large", *SMALL, "seed = 1"), 2)
    for words in ([], ["--dry-run"]):
        done = composer("run", "--preset", write(text), *words, **ONE_MIG)
        assert done.returncode == 2 and "large asks for 2 GPUs, and this machine lets it use 1" in done.stderr
    assert not list(tmp_path.glob("artifacts/collect/*/manifest.json"))


def placed(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a dry run says about the places of a preset's entries."""
    (tmp_path / "preset.toml").write_text(text)
    preset = load_preset(str(tmp_path / "preset.toml"))
    configs = configure_preset(preset, [])
    chain.show_plan(preset, configs, RunOptions(tmp_path), Console(quiet=True), as_json=False)
    return [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  placed:")]


TRAININGS = "".join(entry("train", f"seed-{n}", f"seed = {n}", parallel="train") for n in range(12))


@pytest.mark.parametrize(
    ("visible", "gpus", "words"),
    [
        ("3", None, "at most 1 at the same time, one GPU each, of GPU 3"),
        ("0,3", None, f"at most {min(CORES, 2)} at the same time, one GPU each, of GPU 0, 3"),
        ("0,1,2,3,4", 3, "at most 1 at the same time, 3 GPUs each, of GPU 0, 1, 2, 3, 4"),
        ("", None, f"at most {CORES} at the same time, one a core"),
        ("", 3, f"at most {CORES} at the same time, one a core"),
    ],
)
def test_a_dry_run_says_how_many_trainings_run_at_the_same_time(visible, gpus, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COMPOSER_GPUS", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = TRAININGS if gpus is None else on_gpus(TRAININGS, gpus)
    assert placed(text, tmp_path, capsys) == [f"placed: seed-0 to seed-11: {words}"]


def test_what_needs_no_gpu_does_not_count(tmp_path, monkeypatch, capsys):
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
    preset = Preset.model_validate(settings.read_file(_file(tmp_path, served)))
    configs = configure_preset(preset, [])
    assert "one after another" in chain.placement(preset.stage, configs, chain.devices.Pool())


def _file(folder: Path, text: str) -> Path:
    (folder / "served.toml").write_text(text)
    return folder / "served.toml"


def test_a_number_of_gpus_is_not_negative(tmp_path):
    (tmp_path / "preset.toml").write_text(on_gpus(TRAININGS, -1))
    with pytest.raises(UsageError, match="gpus"):
        load_preset(str(tmp_path / "preset.toml"))


def test_a_run_without_a_device_has_none_in_the_table():
    assert RunLine("train/x", "complete").device == ""
    table = status_tables([RunLine("train/x", "complete"), RunLine("train/y", "running", device="GPU 3")], [])
    assert table.splitlines()[0].split() == ["run", "status", "age", "units", "USD", "took", "device", "reason"]
    assert "GPU 3" in table
