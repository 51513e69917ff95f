"""evaluate without training: models behind a server, rollouts that were recorded, planned looks."""

import shutil

import orjson
import pytest
from support.server import Reply, answer, serving

from composer_cli.show.runs import folders, name
from stages import collect, evaluate
from stages.errors import BadInput, UsageError
from stages.runs import runner
from stages.runs.kinds import EVAL_ITEM
from stages.runs.run import Inputs, Run
from stages.runs.stage import assign_inputs

ENV = "support.environments:GuessEnv"


@pytest.fixture
def url():
    """Model `right` says the letter that is asked for, `wrong` another one."""

    def reply(body, earlier):
        letter = body["messages"][0]["content"][-1]
        return Reply(body=answer(letter if body["model"] == "right" else "z"))

    with serving(reply) as server:
        yield server.url


def recorded(root, url, model, **more):
    config = collect.Config(env={"name": ENV}, policy={"model": model, "base_url": url}, **{"tasks": 14, **more})
    return Run(runner.execute("collect", {}, config, root=root / model).path)


def evaluated(root, inputs, **settings):
    config = evaluate.Config(env={"name": ENV, "split": "train"}, **settings)
    result = runner.execute("evaluate", inputs, config, root=root)
    run = Run(result.path)
    return run, orjson.loads((run.path / "verdict.json").read_bytes())


def models(url):
    return {"A": {"model": "wrong", "base_url": url}, "B": {"model": "right", "base_url": url}}


def test_models_behind_a_server_are_arms_and_play_no_more_than_needed(tmp_path, url):
    """Seven families that all rise have p = 2**-6, which passes at the third of four looks (.018) and not before."""
    run, verdict = evaluated(tmp_path, {}, policies=models(url), tasks=40, looks=4, control=None)
    assert verdict["decision"] == "PARTIAL" and verdict["claim"] == "a gain of 2 points"
    assert [look["tasks"] for look in verdict["looks"]] == [10, 20, 30]
    assert [look["decision"] for look in verdict["looks"]] == ["UNDERPOWERED", "UNDERPOWERED", "PARTIAL"]
    said = (run.path / "report.txt").read_text()
    assert "10 tasks, at the level of 5.2e-05: " in said and "30 tasks, at the level of 0.019: +100.0" in said
    assert len(run.rows(EVAL_ITEM)) == 60 and "Decided at look 3 of 4, after 30 of 40 tasks" in verdict["why"]
    assert all(len(orjson.loads(item["steps_json"])) == item["num_steps"] for item in run.rows(EVAL_ITEM))
    whole, at_once = evaluated(tmp_path, {}, policies=models(url), tasks=30, control=None)
    assert whole.rows(EVAL_ITEM) and at_once["looks"] == [] and at_once["gain"]["estimate"] == 1.0


def test_looks_that_decide_nothing_play_everything(tmp_path, url):
    policies = {name: {"model": "wrong", "base_url": url} for name in "AB"}
    run, verdict = evaluated(tmp_path, {}, policies=policies, tasks=7, looks=2, control=None)
    assert len(verdict["looks"]) == 2 and len(run.rows(EVAL_ITEM)) == 14
    assert "All 2 planned looks were taken" in verdict["why"]


def test_recorded_rollouts_are_arms(tmp_path, url):
    runs = [recorded(tmp_path, url, model) for model in ("right", "wrong")]
    inputs = assign_inputs(evaluate.STAGE, runs)
    run, verdict = evaluated(tmp_path, inputs, baseline="wrong", treatment="right", control=None)
    assert {item["arm"] for item in run.rows(EVAL_ITEM)} == {"right", "wrong"}
    assert verdict["gain"]["estimate"] == 1.0 and verdict["gain"]["num_tasks"] == 14
    assert "(sign flips of each family's difference, " in verdict["gain"]["method"]
    _, fixed = evaluated(tmp_path, inputs, baseline="wrong", treatment="right", control=None, units="fixed")
    assert "sign flips of each task's difference within its family" in fixed["gain"]["method"]


def test_recorded_rollouts_of_other_tasks_are_compared_on_what_is_shared(tmp_path, url):
    inputs = {"recorded": [recorded(tmp_path, url, "right"), recorded(tmp_path, url, "wrong", tasks=13)]}
    names = {"baseline": "wrong", "treatment": "right", "control": None}
    _, refused = evaluated(tmp_path, inputs, **names)
    assert refused["decision"] == "INVALID-RUN" and "missing=excluded" in refused["why"]
    _, verdict = evaluated(tmp_path, inputs, **names, missing="excluded")
    assert verdict["gain"]["num_tasks"] == 13 and "not every arm has them: 1 task." in verdict["why"]


def test_two_runs_of_one_model_cannot_be_told_apart(tmp_path, url):
    run = recorded(tmp_path, url, "right")
    other = shutil.copytree(run.path, tmp_path / "other")
    with pytest.raises(BadInput, match="both hold rollouts of right"):
        evaluated(tmp_path, {"recorded": [run, Run(other)]}, baseline="right", treatment="right")


def test_arms_that_do_not_exist_are_refused_with_the_names_that_do(tmp_path, url):
    inputs = assign_inputs(evaluate.STAGE, [recorded(tmp_path, url, model) for model in ("right", "wrong")])
    asked = "arm 'A', and the arms here are right, wrong.* --set baseline=right --set treatment=wrong"
    for do in (evaluate.plan, lambda inputs, config: runner.execute("evaluate", inputs, config, root=tmp_path)):
        with pytest.raises(UsageError, match=asked):
            do(inputs, evaluate.Config(env={"name": ENV}))
    with pytest.raises(UsageError, match="The treatment is to be the arm 'B'"):
        evaluate.plan(inputs, evaluate.Config(baseline="right"))
    assert not list((tmp_path / "evaluate").glob("*/manifest.json"))


@pytest.mark.parametrize("model", ["org/right", "../right", "right" * 60, "a\nright"])
def test_a_models_name_cannot_move_the_run(tmp_path, url, model):
    """The folder is where `status`, `show` and `latest` look, and the work is not repeated."""
    inputs = assign_inputs(evaluate.STAGE, [recorded(tmp_path, url, "wrong")])
    policies = {model: {"model": "right", "base_url": url}}
    run, _ = evaluated(tmp_path, inputs, policies=policies, tasks=14, baseline="wrong", treatment=model, control=None)
    assert [name(path) for path in folders(tmp_path)] == [f"evaluate/{run.path.name}"]
    assert (tmp_path / "evaluate" / "latest").resolve() == run.path and len(run.path.name) < 200
    again, _ = evaluated(tmp_path, inputs, policies=policies, tasks=14, baseline="wrong", treatment=model, control=None)
    assert again.path == run.path and again.manifest.attempts == 1


def test_a_comparison_of_recorded_rollouts_is_named_after_their_environment(tmp_path, url):
    inputs = assign_inputs(evaluate.STAGE, [recorded(tmp_path, url, model) for model in ("right", "wrong")])
    config = evaluate.Config(baseline="wrong", treatment="right", control=None)
    run = Run(runner.execute("evaluate", inputs, config, root=tmp_path).path)
    assert run.manifest.label == "guess-right-vs-wrong" and "kata" not in run.path.name


def test_nothing_to_compare_is_said():
    with pytest.raises(BadInput, match="There is nothing to compare"):
        evaluate.plan(Inputs(), evaluate.Config())
