"""`composer run --tune`: equal trials for every arm, on tasks that no evaluation uses, and the choice recorded."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from support.models import save_tiny

from composer_cli import tuning
from composer_cli.call import Arguments
from composer_cli.console import Console
from composer_cli.preset import configure_preset, load_preset
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.runs.kinds import EVAL_ITEM
from composer_stages.runs.run import Run
from composer_stages.terms import TWIN

ARM = """
[[stage]]
stage = "train"
name = "{arm}-0"
parallel = "train"
[stage.config]
arm = "{arm}"
tasks = 2
env = {{ name = "support.environments:{env}" }}
policy = {{ model = "{model}", max_tokens = 6 }}
optimisation = {{ steps = 1, prompts_per_step = 1, generations = 2, threads = 1 }}
"""
EVALUATION = """
[[stage]]
stage = "evaluate"
from = ["A-0", "B-0"]
[stage.config]
tasks = 3
control = ""
env = {{ name = "support.environments:{env}" }}
"""


def preset(tmp_path: Path, env: str = "EndlessGuessEnv") -> tuple[Any, Any]:
    """A preset of two arms and its configurations."""
    model = save_tiny(tmp_path / "model")
    text = "".join(
        part.format(arm=arm, env=env, model=model) for part, arm in ((ARM, "A"), (ARM, "B"), (EVALUATION, ""))
    )
    (tmp_path / "arms.toml").write_text(text)
    loaded = load_preset(str(tmp_path / "arms.toml"))
    return loaded, configure_preset(loaded, [])


@pytest.mark.slow
def test_every_arm_keeps_the_value_whose_trial_passes_most(tmp_path: Path) -> None:
    wanted, configs = preset(tmp_path)
    rate = "optimisation.learning_rate"
    tuned, choice = tuning.tune(
        wanted, configs, f"{rate}=1e-3,0.5", Arguments(artifacts=tmp_path / "runs"), Console(quiet=True)
    )
    run = Run(next(p for p in (tmp_path / "runs" / "evaluate").iterdir() if p.name == choice.evaluation))
    items = run.rows(EVAL_ITEM)
    assert {item["arm"] for item in items} == {"A.1", "A.2", "B.1", "B.2"} and len(items) == 4 * 3
    for arm in "AB":
        passed = [[item["passed"] for item in items if item["arm"] == f"{arm}.{n}"] for n in (1, 2)]
        rates = [sum(each) / 3 for each in passed]
        assert list(choice.rates[arm].values()) == rates
        assert choice.chosen[arm] == (0.001, 0.5)[rates[1] > rates[0]]
        assert tuned[f"{arm}-0"].optimisation.learning_rate == choice.chosen[arm]
        assert tuned[f"{arm}-0"].seed == configs[f"{arm}-0"].seed == 0
    held_out = {task.task_id for task in configs["evaluate"].draw(configs["evaluate"].opener(), 3)}
    assert not held_out & {item["task_id"] for item in items}
    (written,) = (tmp_path / "runs" / "tuning").iterdir()
    assert orjson.loads(written.read_bytes())["chosen"] == dict(choice.chosen)
    assert "0.001" in str(choice) and "3 tuning tasks" in str(choice)
    again, _ = tuning.tune(
        wanted, configs, f"{rate}=1e-3,0.5", Arguments(artifacts=tmp_path / "runs"), Console(quiet=True)
    )
    assert again == tuned and len(list((tmp_path / "runs" / "train").glob("2*"))) == 4, "trials are not run twice"


TRIALS = [tuning.Trial("A", 0.1, "A.1"), tuning.Trial("A", 0.2, "A.2"), tuning.Trial("A", 0.3, "A.3")]


def choice_of(*outcomes: tuple[str, str, bool | None, bool | None]) -> tuning.TunedSetting:
    """Of items, each with trial, task, whether it passed and whether it kept the protocol."""
    names = ("arm", "task_id", "passed", "protocol_ok")
    return tuning.choose("rate", TRIALS, [dict(zip(names, one, strict=True)) for one in outcomes], "e")


def test_trials_are_compared_by_passes() -> None:
    """A pass that broke the protocol counts, one of an impossible twin never."""
    broke = [("A.1", "t1", True, False), ("A.1", "t2", True, False), ("A.1", f"t3{TWIN}", True, True)]
    kept = [("A.2", "t1", True, True), ("A.2", "t2", False, True)]
    found = choice_of(*broke, *kept)
    assert (found.chosen, found.tasks) == ({"A": 0.1}, 2)
    assert found.rates["A"] == {"0.1": 1.0, "0.2": 0.5, "0.3": None}
    assert choice_of(*kept, ("A.1", f"t3{TWIN}", True, True)).rates["A"]["0.1"] is None
    assert "pass@1" in str(found)


def test_lost_rollouts_give_no_rate() -> None:
    lost = [("A.2", "t1", None, None)]
    assert choice_of(("A.1", "t1", False, True), *lost).chosen == {"A": 0.1}
    with pytest.raises(InfrastructureError, match=r"any trial of arm A .* in e, so no value of rate"):
        choice_of(*lost)


def test_all_arms_get_equally_many_trials_and_only_what_they_read_is_run() -> None:
    demo = load_preset("demo-kata")
    configs = configure_preset(demo, [])
    trials, entries, of_trials = tuning.trial_entries(demo, configs, "optimisation.learning_rate", [1e-4, 2e-4, 6e-4])
    assert [(trial.arm, trial.value) for trial in trials] == [(a, v) for a in "ABC" for v in (1e-4, 2e-4, 6e-4)]
    titles = [entry.title for entry in entries.stage]
    assert (
        titles[:3] == ["collect", "replay-teachers", "extract-pairs"] and titles[-1] == "tuning" and len(titles) == 13
    )
    evaluation: Any = of_trials["tuning"]
    assert evaluation.env.split == "train" and evaluation.tasks == configs["evaluate"].tasks  # type: ignore[attr-defined]
    for trial in trials:
        config: Any = of_trials[f"tuning-{trial.name}"]
        assert config.seed == tuning.TRIAL_SEED and config.optimisation.learning_rate == trial.value
        assert config.weights == configs[f"{trial.arm}-0"].weights  # type: ignore[attr-defined]


def test_tuning_tasks_that_are_evaluated_are_refused(tmp_path: Path) -> None:
    wanted, configs = preset(tmp_path, "OneSplitEnv")
    with pytest.raises(UsageError, match=r"3 tuning tasks, for example .*, are tasks of an evaluation"):
        tuning.trial_entries(wanted, configs, "optimisation.learning_rate", [1, 2])


@pytest.mark.parametrize("asked", ["optimisation.learning_rate", "a=1", "a=1,1", "=1,2", "a=,", "a=[1,2"])
def test_tune_arguments_without_values_are_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="two or more different values"):
        tuning.parse(asked)
