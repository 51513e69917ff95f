"""Which settings differ between arms: of trainings and of models of the settings."""

from pathlib import Path

import pytest

from composer_stages.envs import sampling_unit
from composer_stages.evaluation.arm_comparison import EvalQuestion
from composer_stages.evaluation.arm_settings import (
    policy_differences,
    settings_differences,
    trained_differences,
    training_settings,
)
from composer_stages.evaluation.outcomes import items_table
from composer_stages.evaluation.verdict import decide
from composer_stages.evaluation.words import describe_verdict
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import store
from composer_stages.runs.run import Manifest, Run, write_manifest
from composer_stages.runs.settings import merge

FIXTURE = Path(__file__).parents[2] / "fixtures" / "demo.json"
"""The demo of 2026-11, whose arm A was trained at another rate than B and C: one manifest and what
the arms change of it, and which tasks passed."""
SHARED = {"tasks": "200", "weights.grpo": "1", "weights.dpo": "0", "weights.sft": "0", "pairs.beta": "0.1"}


def found(**arms):
    """The differences between arms of one training each, as text."""
    return [str(each) for each in settings_differences({arm: {0: SHARED | settings} for arm, settings in arms.items()})]


PAIRS = {"weights.dpo": "1", "pairs.beta": "0.5"}
DIFFERENCES = {
    "equal arms": ({"A": {}, "B": {}}, []),
    "every value of every arm, channels first": (
        {"A": {"tasks": "100"}, "B": {"weights.dpo": "1"}},
        ["weights.dpo: A 0, B 1", "tasks: A 100, B 200"],
    ),
    "a setting that one arm lacks": ({"A": {}, "B": {"trl.warmup_steps": "5"}}, ["trl.warmup_steps: A unset, B 5"]),
    "settings of a channel that one arm has": ({"A": {}, "B": PAIRS}, ["weights.dpo: A 0, B 1"]),
    "settings of what a channel needs": (
        {"A": {"hints.per_step": "1"}, "B": {"weights.sdpo": "1", "hints.per_step": "2", "teacher.model": "t"}},
        ["weights.sdpo: A unset, B 1"],
    ),
    "settings of a need that two channels share": (
        {"A": {"weights.taid": "1", "teacher.model": "s"}, "B": {"weights.eopd": "1", "teacher.model": "t"}},
        ["weights.eopd: A unset, B 1", "weights.taid: A 1, B unset", "teacher.model: A s, B t"],
    ),
    "settings of channels that both have": (
        {"B": PAIRS, "C": {"weights.sft": "2"}},
        ["weights.dpo: B 1, C 0", "weights.sft: B 0, C 2", "pairs.beta: B 0.5, C 0.1"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_settings_that_differ_are_listed_where_they_matter(name):
    arms, expected = DIFFERENCES[name]
    assert found(**arms) == expected


def test_other_pairs_for_the_same_seed_are_a_difference_and_a_set_for_each_seed_is_none():
    def arm(*sets):
        return {seed: SHARED | {"weights.sft": "1", "pair sets": name} for seed, name in enumerate(sets)}

    assert not settings_differences({"B": arm("p", "q"), "C": arm("p", "q")})
    (swapped,) = settings_differences({"B": arm("p", "q"), "C": arm("q", "p")})
    assert swapped.setting == "pair sets" and not swapped.channel


def test_trainings_of_one_arm_that_differ_show_all_their_values():
    arms = {"A": {0: SHARED, 1: SHARED | {"tasks": "9"}}, "B": {0: SHARED, 1: SHARED}}
    assert [str(each) for each in settings_differences(arms)] == ["tasks: A 200 and 9, B 200"]


def test_models_of_the_settings_differ_in_more_than_their_names():
    policies = {
        "A": PolicyConfig(model="a", base_url="http://127.0.0.1:1/v1", max_tokens=64),
        "B": PolicyConfig(model="b", base_url="http://127.0.0.1:2/v1", max_tokens=128),
    }
    assert [str(each) for each in policy_differences(policies)] == ["max_tokens: A 64, B 128"]


@pytest.fixture
def demo(tmp_path):
    """Arm, seed and run of each training of the demo."""
    runs, fixture = [], store.read_json(FIXTURE)
    for name, fingerprint in fixture["fingerprints"].items():
        arm, seed = name.split("-")
        drawn = {"seed": int(seed)}
        training = {"fingerprint": fingerprint, "label": f"kata-{arm}-s{seed}", "identity": drawn, "config": drawn}
        manifest = merge(merge(fixture["training"], fixture["arms"][arm]), training)
        (tmp_path / name).mkdir()
        write_manifest(tmp_path / name, Manifest.model_validate(manifest))
        runs.append((arm, int(seed), Run(tmp_path / name)))
    return runs


def test_the_demos_arms_differed_in_their_learning_rate(demo):
    differences = {each.setting: each for each in trained_differences(demo)}
    rate = differences["optimisation.learning_rate"]
    assert rate.values == {"A": "0.0002", "B": "0.0006", "C": "0.0006"} and not rate.channel
    assert rate.between(("A", "B")) and not rate.between(("B", "C"))
    assert [name for name, each in differences.items() if each.channel] == ["weights.dpo", "weights.sft"]
    assert set(differences) == {"optimisation.learning_rate", "weights.dpo", "weights.sft"}
    assert training_settings(demo[0][2])["weights.grpo"] == "1"


def test_the_demo_is_underpowered_by_its_operations_and_its_rates_are_part_of_the_reasons(demo):
    """Over 24 families it was VALIDATED, as both families of an operation rise together."""
    fixture, unit = store.read_json(FIXTURE), sampling_unit("kata")
    columns = {"sample_idx": 0, "hacked": False, "protocol_ok": True, "error_type": None}
    items = [
        {**columns, "arm": arm, "train_seed": int(seed), "task_id": task, "family": family, "passed": bit == "1"}
        | {"unit": unit.of_family(family)}
        for name, bits in fixture["passed"].items()
        for arm, seed in [name.split("/")]
        for (task, family), bit in zip(fixture["tasks"].items(), bits, strict=True)
    ]
    verdict = decide(items_table(items), EvalQuestion(sampling=unit), trained_differences(demo))
    assert verdict.decision == "UNDERPOWERED" and verdict.gain.units == "12 operations"
    assert (100 * verdict.gain.low, 100 * verdict.gain.high) == pytest.approx((-2.8, 44.2), abs=0.1)
    why = describe_verdict(verdict).why
    assert "B and A differ in more than their channels: optimisation.learning_rate (A 0.0002, B 0.0006)" in why
    as_families = decide(items_table(item | {"unit": item["family"]} for item in items))
    assert as_families.decision == "VALIDATED", "what the wrong unit would claim"
