"""Registered experiments: the preset is the design that was registered, and the result follows from the table alone."""

import json
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from composer_cli.preset import configure_preset, load_preset
from composer_stages.evaluation.outcomes import COLUMNS as COLUMNS_OF_ITEMS
from composer_stages.evaluation.words import SENTENCES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import coder_teacher  # noqa: E402 (a script of benchmarks/)
import dagger  # noqa: E402
import demo  # noqa: E402
import recompute  # noqa: E402
import recompute_teacher_pairs  # noqa: E402
import skills_teachers  # noqa: E402
import teacher_pairs  # noqa: E402
from experiment import Experiment, toml  # noqa: E402

PAIRS, SKILLS, CODER = map(Experiment.named, ("teacher-pairs", "skills-teachers", "coder-teacher"))
DAGGER = dagger.EXPERIMENT


def configured(folder: Path, chain: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The settings of each entry of a chain, and what it reads."""
    (folder / "preset.toml").write_text(chain)
    loaded = load_preset(str(folder / "preset.toml"))
    return configure_preset(loaded, []), {entry.title: entry.reads for entry in loaded.stage}


@pytest.mark.parametrize("design", [PAIRS, SKILLS, CODER], ids=lambda one: one.name)
def test_the_preset_is_the_registered_design(tmp_path: Path, design: Experiment) -> None:
    """As many trainings of each arm on each collection, which differ in nothing but what the arm is about."""
    configs, reads = configured(tmp_path, design.preset(design.trainings(design.arms)))
    assert reads["evaluate"] == [f"{arm}-{seed}" for seed in range(design.seeds) for arm in design.arms]
    about = {"arm", "seed", "weights", "pairs", "opd"}
    same, each = configs["A-0"].model_dump(exclude=about), design.seeds // design.collections
    for arm, given in design.arms.items():
        for seed in range(design.seeds):
            config = configs[f"{arm}-{seed}"]
            assert (config.arm, config.seed) == (arm, seed) and config.model_dump(exclude=about) == same
            assert reads[f"{arm}-{seed}"] == [f"{stage}-{seed // each}" for stage in given.get("from", ())]
            assert ("extract-pairs" in given.get("from", ())) == bool({"sft", "dpo"} & config.weights.active().keys())
    assert len({configs[f"collect-{number}"].seed for number in range(design.collections)}) == design.collections
    question = {
        PAIRS.name: (360, 7, 0.0, "fixed"),
        SKILLS.name: (355, 51, 1.0, "auto"),
        CODER.name: (499, 0, 0.0, "auto"),
    }[design.name]
    found = configs["evaluate"]
    assert (found.tasks, found.seed, found.temperature, found.units) == question


def test_one_rate_for_all_arms_is_chosen_on_training_tasks(tmp_path: Path) -> None:
    """By several trainings at each, on collections of their own; nothing of it is evaluated later."""
    configs, reads = configured(tmp_path, SKILLS.tuning_preset(SKILLS.tuning["rates"]))
    question, tried = configs["evaluate"], [configs[name] for name in reads["evaluate"]]
    assert question.env.split == "train" and not question.with_start
    assert [(one.optimisation.learning_rate, one.seed) for one in tried] == [
        (rate, seed) for seed in range(3) for rate in (5e-5, 1e-4, 2e-4, 4e-4, 8e-4)
    ]
    assert {one.arm for one in tried} == {"5e-05", "0.0001", "0.0002", "0.0004", "0.0008"}
    ours = {configs[name].seed for name in configs if name.startswith("collect")}
    later, _ = configured(tmp_path, SKILLS.preset(SKILLS.trainings(SKILLS.arms)))
    assert not ours & {later[name].seed for name in later if name.startswith("collect")} and len(ours) == 3


BURNS = """
import subprocess, sys
from experiment import adopt, processor_seconds
adopt()
inner = "import time\\nwhile time.process_time() < 0.5: pass"
outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}])"
subprocess.run([sys.executable, "-c", outer])
print(processor_seconds())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere orphans are not adopted")
def test_processor_seconds_are_those_of_orphans_too() -> None:
    words = {"cwd": ROOT / "benchmarks", "capture_output": True, "text": True, "check": True}
    assert float(subprocess.run([sys.executable, "-c", BURNS], **words).stdout) > 0.5


def test_arms_are_dropped_once_all_are_tuned() -> None:
    """What remains has the rates that the tuning chose, and all else as it was."""
    rates = {"A": 4e-4, "B": 8e-4}
    whole = tomllib.loads(PAIRS.preset(PAIRS.trainings(PAIRS.arms)))["stage"]
    left = tomllib.loads(PAIRS.preset(PAIRS.trainings(rates, rates)))["stage"]
    for entry in whole:
        if entry["stage"] == "train" and (rate := rates.get(entry["config"]["arm"])):
            entry["config"]["optimisation"]["learning_rate"] = rate
    expected = [entry for entry in whole if entry["stage"] != "train" or entry["config"]["arm"] in rates]
    expected[-1]["from"] = [f"{arm}-{seed}" for seed in range(24) for arm in "AB"]
    assert left == expected


def test_settings_are_written_as_toml() -> None:
    given = {"a": {"b.c": [1, 2.5, "x\n"], "d": True}, "e": 5e-05}
    assert tomllib.loads(f"x = {toml(given)}")["x"] == given


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is measured in the test's own folder."""
    monkeypatch.setenv("COMPOSER_BENCHMARK_RESULTS", str(tmp_path))


@pytest.mark.parametrize(("design", "module"), [(PAIRS, teacher_pairs), (SKILLS, skills_teachers), (DAGGER, dagger)])
def test_a_published_result_is_what_its_tables_give(tmp_path: Path, design: Experiment, module: Any) -> None:
    for source in (design.document, design.items, design.document.with_suffix(".json")):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    document = tmp_path / design.document.name
    figure = tmp_path / "figure.svg"
    module.result(tmp_path / design.items.name, document, *([figure] if design.figure.exists() else []))
    assert document.read_text() == design.document.read_text()
    assert not design.figure.exists() or figure.read_bytes() == design.figure.read_bytes()


@pytest.mark.parametrize("name", ["demo", "coder", "coder-3e-4"])
def test_a_recorded_verdict_says_how_many_seeds_it_is_about(name: str) -> None:
    verdict, words = demo._kept(name)
    said = SENTENCES.text("seeds", verdict)
    assert said.removeprefix("One training seed was run: this is about ") in words.why


def skills_table(folder: Path, rates: dict[str, float]) -> Path:
    """Outcomes in which a training passes the families up to a share, with noise; and what trainings recorded."""
    rng, names = random.Random(0), [f"f{number:02}" for number in range(71)]
    ease = {(name, task): 0.7 * rank / 71 + 0.3 * rng.random() for rank, name in enumerate(names) for task in range(2)}
    rows, trainings = [], []
    for arm, rate in rates.items():
        for seed in range(1 if arm == "start" else 8):
            shift = rng.gauss(0, 0.02)
            for end in ("", "@0"):
                for (family, task), difficulty in ease.items():
                    row = {"arm": arm + end, "train_seed": seed, "task_id": f"{family}-{task}", "family": family}
                    row |= {"unit": family, "sample_idx": 0, "pair_set": f"s{seed}" if arm in "BC" else None}
                    row |= {"passed": difficulty < rate + shift + rng.gauss(0, 0.05), "sampled_tokens": 5}
                    rows.append({**row, "protocol_ok": True, "error_type": None, "terminated_by": None})
            of = {"arm": arm, "seed": seed, "pairs": 40, "minutes": 3.0, "collapsed": "", "entropy_first": 0.4}
            of |= {"entropy_last": 0.1, "reward_first": 0.2, "reward_last": 0.5}
            of |= {"tokens_first": 9.0, "tokens_last": 5.0, "num_tokens": 9000.0, "pairs_other": 8}
            trainings += [] if arm == "start" else [{**of, "families_other": ["f03", "f70"]}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "items.parquet")
    (folder / "items.json").write_text(json.dumps({"trainings": trainings, "processor_hours": 5.0}))
    return folder / "items.parquet"


def test_without_a_gain_gated_comparisons_are_descriptions(tmp_path: Path) -> None:
    """The second experiment found a gain; here the arms with and without the teacher are alike."""
    items = SKILLS.read_items(skills_table(tmp_path, {"A": 0.5, "B": 0.62, "C": 0.5, "D": 0.5}))
    found = skills_teachers.primary(items)
    assert found["C − A"][1] != "a gain is shown"
    assert found["C − D"][1] == found["B − C"][1] == "a description, as no gain of C − A is shown"


@pytest.mark.parametrize(
    ("gain", "follows"),
    [(0.3, "the teacher's answers help by at least 2 points"), (0.0, "undecided"), (-0.3, "a loss is shown")],
)
def test_the_coders_numbers_follow_from_its_table(tmp_path: Path, gain: float, follows: str) -> None:
    """By the registered rule; a training that did not end is named."""
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- result -->\n<!-- end of result -->\nafter\n")
    made = skills_table(tmp_path, {"start": 0.3, "A": 0.5, "C": 0.5 + gain})
    record, rows = json.loads(made.with_suffix(".json").read_text()), pq.read_table(made).to_pylist()
    record["trainings"] = [
        one for one in record["trainings"] if one["seed"] < 5 or (one["arm"], one["seed"]) == ("A", 5)
    ]
    made.with_suffix(".json").write_text(json.dumps(record))
    pq.write_table(pa.Table.from_pylist([{**row, "unit": row["task_id"]} for row in rows]), made)
    coder_teacher.result(made, document, tmp_path / "figure.svg")
    text = document.read_text()
    assert follows in next(line for line in text.splitlines() if line.startswith("| C − A |"))
    assert "Trainings that did not end: C 5; that left their course: none." in text and text.count("| C − start |") == 1


def test_trainings_collapse_by_the_registered_rule_alone() -> None:
    """Passes or protocol below half of the others' median and three standard errors; lengths and losses are not."""

    def found(last: dict[str, Any], passes: int = 20, others: int = 20, entropy_last: float = 0.8) -> list[str]:
        rows = []
        for seed in range(4):
            for number in range(40):
                row = {"arm": "A@0", "train_seed": seed, "task_id": f"t{number}", "protocol_ok": True}
                row |= {"passed": number < others, "sampled_tokens": 5, "terminated_by": None, "error_type": None}
                rows.append({**row, "passed": number < passes, **last} if seed == 3 else row)
        courses = [{"arm": "A", "seed": 2, "entropy_first": 0.4, "collapsed": "", "entropy_last": entropy_last}]
        return skills_teachers.collapsed_trainings(pa.Table.from_pylist(rows, schema=COLUMNS_OF_ITEMS), courses)

    assert found({}, passes=8) == ["A@0 with seed 3 passes 20 % of the tasks, its other trainings 50 %"]
    assert found({}, passes=11) == [], "more than half of the others"
    assert found({}, passes=1, others=4) == [], "within three standard errors"
    assert found({}, passes=20, others=0) == [], "the one that learns"
    assert found({"protocol_ok": False})[0].startswith("A@0 with seed 3 keeps the protocol in 0 % of answers")
    assert found({"sampled_tokens": 200}) == found({"error_type": "Timeout", "passed": None}) == []
    assert found({"terminated_by": "max_tokens"}) == ["A with seed 3 cuts 100 % of its answers"]
    assert found({}, entropy_last=0.9) == ["A with seed 2 has entropy 0.90 at its end and 0.40 before"]


def test_an_independent_program_computes_the_same_comparisons(tmp_path: Path) -> None:
    made = skills_table(tmp_path, {"A": 0.5, "B": 0.6, "C": 0.58, "D": 0.55})
    rows = pq.read_table(made).to_pylist()
    for name, (found, _) in skills_teachers.primary(SKILLS.read_items(made)).items():
        one, other = name.split(" − ")
        again = recompute.compare(rows, f"{one}@0", f"{other}@0")
        assert again[0] == pytest.approx(found.estimate, abs=1e-12)
        # Families that are alike are flipped together there, by other draws.
        assert again[1:] == pytest.approx((found.low, found.high, found.p_value), abs=1e-3)


def test_the_arms_with_rounds_have_the_tasks_steps_and_pairs_of_the_others(tmp_path: Path) -> None:
    """Of each seed; and the tasks of the collections are those of the trainings, which no held-out task is."""
    per_step = {seed: 40 + seed for seed in range(DAGGER.seeds)}
    arms = [*DAGGER.arms, *DAGGER.beside]
    configs, reads = configured(tmp_path, DAGGER.preset(DAGGER.trainings(arms), per_step=per_step))
    assert reads["evaluate"] == [f"{arm}-{seed}{'-3' * (arm == 'C')}" for seed in range(10) for arm in "ABCD"]
    assert configs["evaluate"].env.split == "eval" and configs["evaluate"].greedy
    for seed in range(DAGGER.seeds):
        rounds = [configs[f"C-{seed}-{number}"] for number in (1, 2, 3)]
        trained = [configs[f"{arm}-{seed}"] for arm in "ABD"] + rounds
        played = [configs[f"collect-C-{seed}-{number}"] for number in (1, 2, 3)]
        collected = [configs[f"collect-{seed}"], *played]
        assert {(one.seed, one.tasks, one.env.split) for one in (*trained, *collected)} == {(seed, 144, "train")}
        assert len({(repr(one.env), one.max_steps, one.policy.model) for one in (*trained, *collected)}) == 1
        assert collected[0].samples == sum(one.samples for one in played)
        assert [one.rollouts.mixed for one in collected] == [0.0, 0.3, 0.15, 0.0]
        assert {one.optimisation.learning_rate for one in trained} == {2e-4}
        assert sum(one.optimisation.steps for one in rounds) == configs[f"A-{seed}"].optimisation.steps == 36
        assert {one.pairs.per_step for one in (configs[f"B-{seed}"], *rounds)} == {40 + seed}
        assert reads[f"collect-C-{seed}-3"] == [f"C-{seed}-2"]
        assert reads[f"C-{seed}-3"] == [f"C-{seed}-2", *(f"extract-pairs-C-{seed}-{number}" for number in (1, 2, 3))]
    size = configs["A-0"].optimisation
    assert size.steps * size.prompts_per_step == 144, "each task once"


def test_the_result_of_the_rounds_is_complete_and_an_independent_program_computes_it(tmp_path: Path) -> None:
    made = skills_table(tmp_path, {"start": 0.4, "A": 0.5, "B": 0.53, "C": 0.6, "D": 0.55})
    record, page = json.loads(made.with_suffix(".json").read_text()), tmp_path / "page.md"
    for one in record["trainings"]:
        one |= {"tasks": 144, "task_set": f"of {one['seed']}", "round": 1, "tokens_trained": 9000}
        one["tokens_trained"] += 600 * (one["arm"] == "D")
    cosines = [{"arm": "cosines", "seed": n, "gradient/cosine/grpo~sft": 0.1 + n / 100} for n in range(8)]
    made.with_suffix(".json").write_text(json.dumps({**record, "trainings": [*record["trainings"], *cosines]}))
    page.write_text("before\n<!-- result -->\n<!-- end of result -->\n")
    dagger.result(made, page)
    lines = page.read_text().splitlines()
    share = {line[2]: line.split("|")[5].strip() for line in lines if line.count("|") == 7 and line[2] in "ABCD"}
    assert share == {"A": "1.000, equal", "B": "1.000, equal", "C": "1.000, equal", "D": "1.067, NOT EQUAL"}
    assert "| grpo, sft | 0.135 [0.115, 0.155] |" in lines and "Seeds whose arms differ in their tasks: none." in lines
    assert "a gain is shown" in next(line for line in lines if line.startswith("| C − B |"))
    paragraph, line = dagger.told(made)
    assert "a gain is shown" in line and "D 1.07 (equal by the registration is within 0.05)" in paragraph
    # A difference of arms with other tokens is told with that word, and no other is.
    assert (dagger.UNEQUAL in line, paragraph.count(dagger.UNEQUAL)) == (False, 1)
    assert {line[2:7] for line in lines if dagger.UNEQUAL in line} == {"C − D", "D@0 −", "B@0 −"}
    claims = [claim["claim"] for claim in json.loads((tmp_path / "experiment-dagger.json").read_text())]
    assert sum(dagger.UNEQUAL in claim for claim in claims) == 1
    rows = [{**row, "pair_set": row["train_seed"]} for row in pq.read_table(made).to_pylist()]
    values = recompute_teacher_pairs.VALUES["passed and kept"]
    for fixed, sampling in ((True, dagger.FIXED), (False, dagger.FAMILIES)):
        for name, (one, _) in dagger.primary(DAGGER.read_items(made), sampling, dagger.COMPARED, power=False).items():
            again = recompute_teacher_pairs.compare(rows, f"{name[0]}@0", f"{name[-1]}@0", values, fixed)
            assert again[0] == pytest.approx(one.estimate, abs=1e-12)
            assert again[1:] == pytest.approx((one.low, one.high, one.p_value), abs=3e-3)
