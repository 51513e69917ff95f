"""Registered experiments: the preset is the design that was registered, and the result follows from the table alone."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from composer_cli.preset import configure_preset, load_preset
from stages.envs.kata import tasks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import teacher_pairs  # noqa: E402 (a script of benchmarks/)


def test_the_preset_is_the_registered_design(tmp_path: Path) -> None:
    """Four trainings of each arm on each of six collections, which differ in nothing but their weights."""
    (tmp_path / "preset.toml").write_text(teacher_pairs.preset())
    loaded = load_preset(str(tmp_path / "preset.toml"))
    configs: dict[str, Any] = configure_preset(loaded, [])
    reads = {entry.title: entry.reads for entry in loaded.stage}
    assert len(reads["evaluate"]) == 6 * 24
    same = configs["A-0"].model_dump(exclude={"arm", "seed", "weights", "pairs"})
    for arm, weights in teacher_pairs.ARMS.items():
        for seed in range(24):
            config = configs[f"{arm}-{seed}"]
            assert (config.arm, config.seed) == (arm, seed)
            assert reads[f"{arm}-{seed}"] == ([f"pairs-{seed // 4}"] if "sft" in weights else [])
            assert config.model_dump(exclude={"arm", "seed", "weights", "pairs"}) == same
    assert configs["F-0"].weights.grpo == 0 and configs["B-0"].weights.active() == {"dpo": 1.0, "sft": 2.0}
    assert len({configs[f"collect-{number}"].seed for number in range(6)}) == 6
    question = configs["evaluate"]
    assert (question.tasks, question.seed, question.temperature, question.units) == (360, 7, 0.0, "fixed")


def table(folder: Path, gains: dict[str, float]) -> Path:
    """A table of outcomes in which each arm passes a share of the tasks of every operation."""
    rows = []
    names = [tasks.draw("eval", teacher_pairs.EVAL_SEED, index) for index in range(60)]
    for arm, share in gains.items():
        for seed in range(1 if arm == "start" else 24):
            for number, task in enumerate(names):
                rows.append(
                    {
                        "arm": arm,
                        "train_seed": seed,
                        "task_id": task.task_id,
                        "family": task.family,
                        "unit": tasks.operation_of(task.family),
                        "sample_idx": 0,
                        "protocol_ok": True,
                        "pair_set": f"set{seed // 4}" if arm in "BCEF" else None,
                        "passed": (number * 7 + seed) % 60 < 60 * share,
                    }
                )
    pq.write_table(pa.Table.from_pylist(rows), folder / "items.parquet")
    return folder / "items.parquet"


def test_arms_are_dropped_once_all_are_tuned() -> None:
    """What remains has the rates that the tuning chose, and all else as it was."""
    whole = tomllib.loads(teacher_pairs.preset())["stage"]
    left = tomllib.loads(teacher_pairs.preset(["A", "B"], {"A": 4e-4, "B": 8e-4}))["stage"]
    rates = {"A": 4e-4, "B": 8e-4}
    for entry in whole:
        if entry["stage"] == "train" and (rate := rates.get(entry["config"]["arm"])):
            entry["config"]["optimisation"]["learning_rate"] = rate
    expected = [entry for entry in whole if entry["stage"] != "train" or entry["config"]["arm"] in rates]
    expected[-1]["from"] = [f"{arm}-{seed}" for arm in "AB" for seed in range(24)]
    assert left == expected


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is measured in the test's own folder."""
    monkeypatch.setenv("COMPOSER_BENCHMARK_RESULTS", str(tmp_path))


def test_every_number_follows_from_the_table(tmp_path: Path) -> None:
    shares = {"start": 0.4, "A": 0.5, "B": 0.7, "C": 0.7, "D": 0.5, "E": 0.7, "F": 0.6}
    made = table(tmp_path, shares)
    document = tmp_path / "teacher-pairs.md"
    document.write_text(teacher_pairs.DOCUMENT.read_text())
    teacher_pairs.result(made, document, tmp_path / "figure.svg")
    text = document.read_text()
    assert "| B | GRPO + DPO + SFT on the chosen | 70.0 % |" in text
    assert "| these twelve operations | +20.0 points" in text and "+0.0 points" in text
    assert "6 sets of pairs" in (tmp_path / "teacher_pairs.json").read_text()
    assert "| secondary | difference | p after Holm |" in text and "has not been started" not in text
    assert b"svg" in (tmp_path / "figure.svg").read_bytes()
    before = teacher_pairs.DOCUMENT.read_text().partition("## Result")[0]
    assert text.startswith(before), "what was registered stays as it was"


def test_the_published_result_is_what_the_table_gives(tmp_path: Path) -> None:
    document = tmp_path / "teacher-pairs.md"
    document.write_text(teacher_pairs.DOCUMENT.read_text())
    teacher_pairs.result(teacher_pairs.ITEMS, document, tmp_path / "figure.svg")
    assert document.read_text() == teacher_pairs.DOCUMENT.read_text()
    assert (tmp_path / "figure.svg").read_bytes() == teacher_pairs.FIGURE.read_bytes()
