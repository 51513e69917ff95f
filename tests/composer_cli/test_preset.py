from pathlib import Path

import pytest
from support.refusals import refused

from composer_cli.preset import Preset, configure_preset, describe_unlike_presets, load_preset, preset_names
from composer_stages.errors import UsageError
from composer_stages.runs.stage import load_stage

FOLDER = Path(__file__).parents[2] / "examples"
NO_PRESETS = {FOLDER / "teachers.toml", FOLDER / "eight-gpus.toml"}
"""A table of teachers, and the settings of one training."""
EXAMPLES = sorted(set(FOLDER.glob("*.toml")) - NO_PRESETS)


@pytest.mark.parametrize("name", [*preset_names(), *map(str, EXAMPLES)])
def test_every_shipped_preset_fits_the_stages(name):
    """Its settings are known, and every entry is given the kinds of records that its stage needs."""
    preset = load_preset(name)
    assert configure_preset(preset, []).keys() == {entry.title for entry in preset.stage}
    stages = {entry.title: entry.stage for entry in preset.stage}
    for entry in preset.stage:
        held = {kind.name for read in entry.reads for kind in load_stage(stages[read]).outputs.values()}
        needed = {slot.kind.name for slot in load_stage(entry.stage).inputs.values() if not slot.optional}
        assert needed <= held, entry.title
    assert preset.about and preset.next


def test_the_arms_of_the_demo_differ_in_their_channels_alone():
    """A has no settings of pairs, as it reads none; seeds differ in nothing but the seed."""
    configs = configure_preset(load_preset("demo-kata"), [])
    seeds = {config.seed for config in configs.values() if hasattr(config, "weights")}
    assert len(seeds) == 3, "with fewer no gain can be VALIDATED"
    for seed in seeds:
        arms = {name: configs[f"{name}-{seed}"].model_dump() for name in "ABC"}
        for arm in arms.values():
            assert arm.pop("seed") == seed
            del arm["arm"], arm["weights"]
        assert arms["B"] == arms["C"]
        for name in "AB":
            del arms[name]["pairs"]
        assert arms["A"] == arms["B"]


def test_probe_presets_differ_in_sizes_and_teacher_alone():
    """The null has the directions and the rule of the chain that finds the hack; the smoke has its stages."""
    full, smoke, null = (load_preset(f"probe-{name}") for name in ("uat", "smoke", "null"))
    assert [(e.title, e.stage, e.reads) for e in smoke.stage] == [(e.title, e.stage, e.reads) for e in full.stage]
    found, nothing = configure_preset(full, []), configure_preset(null, [])
    for name in nothing.keys() - {"teacher-pool"}:
        assert nothing[name] == found[name], name
    ours, theirs = (configs["teacher-pool"] for configs in (found, nothing))
    assert {source.policy.model for source in theirs.sources} == {"kata:honest"}
    changed = [
        source.model_copy(update={"policy": other.policy})
        for source, other in zip(ours.sources, theirs.sources, strict=True)
    ]
    assert changed == theirs.sources and ours.contract == theirs.contract and ours.problems == theirs.problems


def test_probe_replays_differ_in_the_arm_alone():
    configs = configure_preset(load_preset("probe-uat"), [])
    arms = [configs[name].model_dump(exclude={"arm"}) for name in ("vanilla", "projected", "projected-random")]
    assert arms[0] == arms[1] == arms[2]


@pytest.mark.parametrize(
    ("arm", "weights", "said"),
    [
        ("C", {"dpo": 1.0, "sft": 2.0}, "arm C has dpo = 1, while the shipped presets' arm C has none."),
        ("A", {"sft": 2.0, "dpo": 0.5}, "arm A has "),
        ("rlvr", {"sdpo": 1.0}, "arm rlvr has sdpo = 1, while"),
        *((arm, weights, "") for arm, weights in (("A", {}), ("B", {"dpo": 1}), ("C", {"sft": 1}), ("X", {"dpo": 1}))),
    ],
)
def test_an_arm_that_learns_from_more_than_the_presets_arm_of_its_name_is_noted(arm, weights, said):
    found = describe_unlike_presets(load_stage("train").config(arm=arm, weights=weights)) or ""
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_stage_that_is_no_entry_stands_for_all_its_entries():
    """What is given by title goes over it, and of two layers the later."""
    preset = load_preset("three-arm")
    layer = {"rlvr-1": {"tasks": 9}, "train": {"tasks": 7, "adapter": {"rank": 4}}}
    trained = {
        title: config for title, config in configure_preset(preset, [layer]).items() if hasattr(config, "weights")
    }
    assert len(trained) == 12 and {config.adapter.rank for config in trained.values()} == {4}
    assert {title for title, config in trained.items() if config.tasks == 9} == {"rlvr-1"}
    assert {config.tasks for title, config in trained.items() if title != "rlvr-1"} == {7}
    assert trained["full-0"].weights.dpo > 0  # the preset's own settings stay underneath
    later = configure_preset(preset, [layer, {"train": {"tasks": 8}}])
    assert {later[title].tasks for title in trained} == {8}


def test_a_stage_that_is_an_entry_stands_for_that_entry_alone():
    preset = Preset.model_validate({"stage": [{"stage": "train"}, {"stage": "train", "name": "other"}]})
    configs = configure_preset(preset, [{"train": {"tasks": 7}}])
    assert (configs["train"].tasks, configs["other"].tasks) == (7, 200)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[[stage]]\nstage = 'evaluate'\nfrom = ['A']", "reads 'A'"),
        ("[[stage]]\nstage = 'collect'\non = 'processes'", "no engine 'processes'"),
        ("[[stage]]\nstage = 'train'\non = 'processes:2'", "its stage deals no units"),
        ("[[stage]]\nstage = 'collect'\non = 'ray'\nparallel = 'x'", "beside others"),
        ("[[stage]]\nstage = 'train'\nseeds = 'five'", "seeds = 'five': it should be a whole number"),
        ("[[stage]]\nstage = 'train'\nseeds = 2\nname = 'mine'", "mine has a name"),
        ("[[stage]]\nstage = 'train'\nseeds = 2\nconfig = { seed = 3 }", "leave config.seed out"),
        ("[[stage]]\nstage = 'train'\nconfig = { seeds = 3 }", "`seeds = 3` beside `stage`"),
        ("[[stage]]\nstage = 'train'\narms = { A = { from = 'x' } }", "from of the arm A is 'x'"),
        ("[[stage]]\nstage = 'train'\narms = ['A']", "a table of keys and values"),
        ("[[stage]]\nstage = 'train'\nrounds = 1", "rounds"),
        ("[[stage]]\nstage = 'train'\nrounds = 2\nseeds = 2", "rounds, and arms or seeds"),
        ("[[stage]]\nstage = 'train'\nrounds = 2\nbefore = ['collect']", "reads collect of other rounds"),
        ("[[stage]]\nstage = 'train'\nrounds = 2\nso_far = ['pairs']", "reads pairs of other rounds"),
        ("[[stage]]\nstage = 'train'\nbefore = ['train']", "set its rounds"),
        ("[[stage]]\nstage = 'train'\nrounds = 2\nby_round = { seed = [0, 1, 2] }", "3 values of seed"),
        ("[[stage]]\nstage = 'collect'\n[[stage]]\nstage = 'collect'", "two entries are called 'collect'"),
        ("[[stage]]\nstage = 'extract-pairs'\nfrom = ['collect']\n[[stage]]\nstage = 'collect'", "is the first entry"),
        ("[[stage]]\nstage = 'colect'", "colect"),
        ("", "it has no [[stage]] tables"),
        ("stage = 'collect'", "is not a preset"),
        ("[[stage]]\nstage = 'collect'\nconfig = 3", "config"),
        ("[[stage]]\nstage = 'collect'\nconfg = {}", "confg"),
        ("[[stage]]\nstage = 'collect'\nconfig.tasks = 'many'", "tasks = 'many'"),
    ],
)
def test_invalid_presets_are_refused(tmp_path, text, part):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    refused(lambda: configure_preset(load_preset(str(path)), []), UsageError, part)


ARMS = """
[[stage]]
stage = "collect"

[[stage]]
stage = "train"
seeds = 2
[stage.config]
optimisation = { steps = 2 }
[stage.arms]
A = {}
B = { from = ["collect"], weights = { sft = 1.0 }, optimisation = { threads = 1 } }

[[stage]]
stage = "evaluate"
from = ["train"]
"""


def test_arms_and_seeds_make_an_entry_each(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(ARMS)
    preset = load_preset(str(path))
    trained = ["A-0", "B-0", "A-1", "B-1"]
    assert [entry.title for entry in preset.stage] == ["collect", *trained, "evaluate"]
    assert [entry.reads for entry in preset.stage[1:]] == [[], ["collect"], [], ["collect"], trained]
    configs = configure_preset(preset, [{"B-1": {"optimisation": {"steps": 5}}}])
    assert [(configs[one].arm, configs[one].seed) for one in trained] == [("A", 0), ("B", 0), ("A", 1), ("B", 1)]
    assert [configs[one].weights.sft for one in trained] == [0, 1, 0, 1]
    assert [configs[one].optimisation.steps for one in trained] == [2, 2, 2, 5], "over the arm's, over the stage's"
    assert configs["B-0"].optimisation.threads == 1
    alone = Preset.model_validate({"stage": [{"stage": "train", "seeds": 2}]})
    assert [entry.title for entry in alone.stage] == ["train-0", "train-1"]
    arms = Preset.model_validate({"stage": [{"stage": "train", "arms": {"plain": {}, "hints": {}}}]})
    assert [entry.title for entry in arms.stage] == ["plain", "hints"]


def test_a_setting_alone_stands_for_all_entries_that_have_it(tmp_path):
    """By stage goes over it, and by entry over that; replay-teachers has no environment."""
    path = tmp_path / "mine.toml"
    path.write_text(ARMS)
    preset = load_preset(str(path))
    layer = {"env": {"name": "swe-mini"}, "train": {"tasks": 7}, "tasks": 5, "A-1": {"tasks": 9}}
    configs = configure_preset(preset, [layer])
    assert {config.env.name for config in configs.values()} == {"swe-mini"}
    assert [configs[one].tasks for one in ("collect", "A-0", "A-1", "evaluate")] == [5, 7, 9, 5]
    later = configure_preset(preset, [layer, {"tasks": 3}])
    assert {config.tasks for config in later.values()} == {3}, "a later layer goes over all of an earlier one"
    demo = configure_preset(load_preset("demo-kata"), [{"max_steps": 2}])
    assert demo["collect"].max_steps == demo["B-2"].max_steps == 2 and not hasattr(demo["replay-teachers"], "max_steps")


def test_entries_that_do_not_fit_together_are_refused_before_the_chain_starts(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f"{ARMS}config.treatment = 'C'\n")
    refused(lambda: configure_preset(load_preset(str(path)), []), UsageError, "no arm 'C'", "start, A, B")
    demo, elsewhere = load_preset("demo-kata"), {"env": {"name": "tasks", "path": "tasks.jsonl"}}
    refused(lambda: configure_preset(demo, [elsewhere]), UsageError, "know kata alone", "--teachers")
    own = {"teachers": [{"name": "one", "model": "kata:teacher-a", "max_tokens": 64}]}
    assert configure_preset(demo, [elsewhere, own])["replay-teachers"].teachers[0].name == "one"


def test_adjacent_entries_with_one_parallel_word_form_a_group():
    groups = [[entry.title for entry in group] for group in load_preset("demo-kata").groups()]
    trainings = [f"{arm}-{seed}" for seed in range(3) for arm in "ABC"]
    assert groups == [["collect", "replay-teachers", "extract-pairs", *trainings], ["evaluate"]]


def test_a_shipped_example_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_preset("examples/real-model.toml").stage[0].stage == "train"
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "real-model.toml").write_text('[[stage]]\nstage = "collect"\n')
    assert load_preset("examples/real-model.toml").stage[0].stage == "collect"


ROUNDS = """
[[stage]]
stage = "collect"

[[stage]]
stage = "collect"
name = "play"
rounds = 3
before = ["train"]
by_round = { "rollouts.mixed" = [0.5, 0.2, 0.0], seed = [7, 8, 9] }
config = { teachers = [{ name = "a", model = "m" }] }

[[stage]]
stage = "replay-teachers"
rounds = 3
from = ["play"]

[[stage]]
stage = "extract-pairs"
rounds = 3
from = ["play", "replay-teachers"]

[[stage]]
stage = "train"
rounds = 3
before = ["train"]
so_far = ["extract-pairs"]
config = { weights = { grpo = 0.0, sft = 1.0 } }

[[stage]]
stage = "evaluate"
from = ["train-3"]
"""


def test_rounds_repeat_neighbours_which_read_their_own_round_and_what_they_name_of_others(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(ROUNDS)
    preset = load_preset(str(path))
    reads = {entry.title: entry.reads for entry in preset.stage}
    assert [*reads][:6] == ["collect", "play-1", "replay-teachers-1", "extract-pairs-1", "train-1", "play-2"]
    assert len(reads) == 14 and reads["evaluate"] == ["train-3"]
    assert (reads["play-1"], reads["play-3"]) == ([], ["train-2"])
    assert reads["extract-pairs-2"] == ["play-2", "replay-teachers-2"]
    assert reads["train-1"] == ["extract-pairs-1"]
    assert reads["train-3"] == ["train-2", "extract-pairs-1", "extract-pairs-2", "extract-pairs-3"]
    configs = configure_preset(preset, [{"play-2": {"tasks": 5}, "train": {"pairs": {"per_step": 3}}}])
    played = [configs[f"play-{number}"] for number in (1, 2, 3)]
    assert [(one.rollouts.mixed, one.seed, one.tasks) for one in played] == [(0.5, 7, 25), (0.2, 8, 5), (0.0, 9, 25)]
    assert {configs[f"train-{number}"].pairs.per_step for number in (1, 2, 3)} == {3}
