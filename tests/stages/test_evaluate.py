"""evaluate: trainings, models behind a server as arms; planned looks; what is not compared."""

from dataclasses import replace
from functools import partial

import orjson
import pytest
from huggingface_hub import constants
from support.broken_models import broken
from support.environments import GuessEnv
from support.models import on_hub
from support.refusals import refused
from support.runs import eval_item, written
from support.server import Reply, answer, serving
from support.trainings import ENV, LORA, metrics_of, trained
from transformers import AutoModelForCausalLM

from composer_stages import envs, evaluate
from composer_stages.arms.stage import passed_by, planned
from composer_stages.comparison import config as comparison, logs
from composer_stages.comparison.decision import compare, compare_settings
from composer_stages.comparison.sides import read_sides
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.evaluation.planner import DRAWN_TASKS
from composer_stages.evaluation.verdict import EXIT_CODES
from composer_stages.evaluation.words import SENTENCES
from composer_stages.policy.adapters import CheckpointInfo
from composer_stages.policy.base import PolicyConfig
from composer_stages.runs import runner, store
from composer_stages.runs.catalog import folders, name
from composer_stages.runs.kinds import CHECKPOINT, EVAL_ITEM
from composer_stages.runs.run import Inputs, Run
from composer_stages.runs.stage import with_inherited
from composer_stages.terms import SamplingUnit

HELD_OUT = evaluate.Config(env={"name": ENV, "split": "eval"}, tasks=5)


@pytest.fixture(scope="module")
def url():
    """Model `right` says the letter that is asked for, `wrong` another one."""

    def reply(body, earlier):
        letter = body["messages"][0]["content"][-1]
        return Reply(body=answer(letter if body["model"] == "right" else "z"))

    with serving(reply) as server:
        yield server.url


def evaluated(root, inputs, **settings):
    config = evaluate.Config(env={"name": ENV, "split": "train"}, **settings)
    result = runner.execute("evaluate", inputs, config, root=root)
    run = Run(result.path)
    return run, orjson.loads((run.path / "verdict.json").read_bytes())


def test_settings_of_later_versions_change_no_identity_at_their_defaults():
    asked = evaluate.Config(env={"name": ENV}, greedy=True)
    assert "greedy" not in HELD_OUT.identity() and "greedy" in asked.identity()


class RudeEnv(GuessEnv):
    """An environment whose protocol nobody keeps."""

    def grade(self):
        return replace(super().grade(), protocol_ok=False)


def test_passes_decide_and_compare_tells_the_same_whatever_the_conduct(tmp_path, url):
    """Every pass breaks the protocol."""
    asked = {"env": {"name": f"{__name__}:RudeEnv", "split": "train"}, "control": None}
    config = evaluate.Config(policies=models(url), tasks=6, max_steps=1, **asked)
    run = Run(runner.execute("evaluate", {}, config, root=tmp_path).path)
    verdict = orjson.loads((run.path / "verdict.json").read_bytes())
    assert verdict["gain"]["estimate"] == 1.0 and {arm["kept_rate"] for arm in verdict["arms"]} == {0.0}
    compared = [each for each in verdict["comparisons"] if each["rate"].startswith("pass@1")]
    assert [each["difference"]["estimate"] for each in compared] == [1.0, 0.0]
    config = comparison.Config(paths=[str(run.path)])
    difference = compare(read_sides(config.paths, config.columns), config)[0].differences[0]
    numbers = tuple(verdict["gain"][name] for name in ("estimate", "low", "high", "p_value"))
    assert (difference.estimate, difference.low, difference.high, difference.p_value) == pytest.approx(numbers)


def test_compare_names_the_settings_by_which_two_evaluations_were_played(tmp_path, url):
    settings = {"policies": models(url), "tasks": 1, "samples": 1, "max_steps": 1, "control": None}
    runs = [
        runner.execute("evaluate", {}, evaluate.Config(env={"name": ENV, **options}, **settings, **more), root=tmp_path)
        for options, more in (({}, {}), ({"greeting": "Please: "}, {"temperature": 0.5}))
    ]
    found = compare_settings(*(logs.read(str(run.path)) for run in runs))
    assert [(each.name, each.baseline, each.treatment) for each in found] == [
        ("environment options", "defaults", "greeting=Please: "),
        ("temperature", "1.0", "0.5"),
    ]


class PercentEnv(GuessEnv):
    """Rewards from 0 to 100."""

    def grade(self):
        return replace(super().grade(), reward=super().grade().reward * 70 + 30, hidden_pass=None)


def test_a_reward_on_another_scale_is_no_pass(tmp_path, url):
    config = evaluate.Config(
        env={"name": f"{__name__}:PercentEnv"}, policies=models(url), tasks=2, max_steps=1, control=None
    )
    with pytest.raises(Incomplete, match="without hidden_pass"):
        runner.execute("evaluate", {}, config, root=tmp_path)


@pytest.mark.parametrize(
    ("reward", "hidden_pass", "passed"),
    [
        *((None, True, None), (0.5, True, False), (1.0, False, True), (0.1 * 3 + 0.7, None, True), (-1.0, None, False)),
        *((30.0, None, None), (30.0, False, False), (1.2, True, True)),
    ],
)
def test_a_pass_is_a_full_reward_and_above_1_what_the_hidden_tests_say(reward, hidden_pass, passed):
    assert passed_by(reward, hidden_pass) is passed


def test_a_plan_counts_the_rollouts_that_the_evaluation_plays():
    """Models that are there, with the default control not among them, and at temperature 0 too."""
    config = evaluate.Config(env={"name": ENV}, tasks=5, samples=2, greedy=True, policies=models("http://127.0.0.1:1"))
    found = planned([], config)
    assert found.rollouts(found.design) == evaluate.STAGE.plan(Inputs(), config).units == 5 * (2 + 1) * 2
    assert found.design.untrained and found.design.seeds == 1
    to_train = planned([], evaluate.Config(env={"name": ENV}, tasks=5, policies={"A": {"model": "a"}}))
    assert not to_train.design.untrained and to_train.design.one_baseline
    assert to_train.rollouts(replace(to_train.design, seeds=3)) == 5 * (2 + 2 * 3), "start and A; B and C are to train"


class FewEnv(GuessEnv):
    """An environment that refuses to give more tasks than it has."""

    has = 12

    def tasks(self, split, count, seed):
        if count > self.has:
            raise ValueError(f"only {self.has} tasks, not {count}")
        return super().tasks(split, count, seed)


class EmptyEnv(GuessEnv):
    def tasks(self, split, count, seed):
        return []


def test_a_plan_draws_what_is_played_and_more_only_where_that_costs_nothing(tmp_path):
    asked = {"tasks": FewEnv.has, "policies": models("http://127.0.0.1:1"), "sandbox": "none"}
    own = planned([], evaluate.Config(env={"name": f"{__name__}:FewEnv"}, **asked))
    assert own.design.num_tasks == FewEnv.has and not own.supply.complete
    skills = planned([], evaluate.Config(env={"name": "skills", "families": "date,snake"}, **asked)).supply
    assert len(skills.unit_T) == DRAWN_TASKS and len(skills.sizes(10_000)) == 2
    assert not any(map(envs.lists_tasks, ("swe-mini", ENV)))
    empty = evaluate.Config(env={"name": f"{__name__}:EmptyEnv"}, **asked)
    for work in (lambda: planned([], empty), lambda: runner.execute("evaluate", {}, empty, root=tmp_path)):
        with pytest.raises(UsageError, match=r"EmptyEnv' has no task of the split 'eval'.*env\.split"):
            work()


def test_a_plan_of_an_earlier_evaluation_is_of_its_environment_arms_and_tasks(tmp_path):
    items = [
        eval_item(arm, task, task >= 3) | {"train_seed": seed}
        for arm, seeds in (("start", [0]), ("A", [3, 4]), ("B", [3, 4]))
        for seed in seeds
        for task in range(6)
    ]
    settings = {"env": {"name": ENV, "options": {"turns": 1}}, "tasks": 200, "baseline": "start", "control": None}
    pilot = Run(written(tmp_path, "evaluate/20260102T030405Z-x", [(EVAL_ITEM, items)], config=settings))
    found = planned([pilot], evaluate.Config())
    assert found.rollouts(found.design) == len(items) and found.design.seeds == 2 and found.design.num_tasks == 6
    assert found.config.env.options == {"turns": 1} and found.config.control is None
    more = planned([pilot], evaluate.Config(tasks=7, planning={"seeds": 4}))
    assert more.rollouts(more.design) == 7 * (1 + 2 * 4)
    for asked, words in (
        ({"treatment": "start"}, "both 'start'.*two arms"),
        ({"control": "B"}, "both 'B'.*control=null"),
    ):
        with pytest.raises(UsageError, match=words):
            planned([pilot], evaluate.Config(**asked))

    settings["env"] = {"name": ENV, "options": {"turns": 2}}
    failed = [{**item, "passed": None, "error_type": "OSError", "error": "gone"} for item in items]
    other = Run(written(tmp_path, "evaluate/20260102T030406Z-x", [(EVAL_ITEM, failed)], config=settings))
    with pytest.raises(UsageError, match=r"turns=1\) for evaluate/2.*5Z-x, .*turns=2\) for evaluate/2.*6Z"):
        planned([pilot, other], evaluate.Config())
    with pytest.raises(BadInput, match=r"None of the pilot's 30 rollouts .* \(OSError: gone\)"):
        planned([other], evaluate.Config())


def test_models_of_an_earlier_evaluation_are_none_to_train(tmp_path):
    items = [eval_item(arm, task, task >= 3) for arm in "AB" for task in range(6)]
    settings = {"env": {"name": ENV, "options": {}}, "policies": {"A": {"model": "a"}, "B": {"model": "b"}}}
    settings["control"] = None
    pilot = Run(written(tmp_path, "evaluate/20260102T030405Z-x", [(EVAL_ITEM, items)], config=settings))
    found = planned([pilot], evaluate.Config(policies={"z": {"model": "z"}}))
    assert found.design.untrained and found.rollouts(found.design) == 6 * 3


def test_too_few_units_are_named_before_anything_is_played():
    config = evaluate.Config(env={"name": "skills", "families": "date,snake"}, tasks=4, sandbox="none")
    (said,) = (line for line in config.check() if "too few" in line)
    assert said.startswith("2 families are too few to show") and "from 6 on. Play tasks of more families" in said
    assert "--set units=fixed" in said and not HELD_OUT.remarks(HELD_OUT.draw(HELD_OUT.opener(), 7))
    (fixed,) = evaluate.Config(env={"name": ENV}, tasks=5, units="fixed").remarks(HELD_OUT.draw(HELD_OUT.opener(), 5))
    assert fixed.startswith("5 tasks are too few") and fixed.endswith("Play more tasks")
    one = SENTENCES.text("few_units", 1, SamplingUnit(), 6)
    assert one.startswith("1 family is too few")


def models(url):
    return {"A": {"model": "wrong", "base_url": url}, "B": {"model": "right", "base_url": url}}


# Trainings as arms


def test_arms_train_and_are_judged(tmp_path, artifacts, tiny, pairs):
    a = trained(artifacts, tiny)
    b = trained(artifacts, tiny, "B", pairs, weights={"dpo": 1.0, "sft": 1.0})
    c = trained(artifacts, tiny, "C", pairs, weights={"sft": 1.0})
    AutoModelForCausalLM.from_pretrained(b.folder(CHECKPOINT))
    metrics = metrics_of(b)
    assert len(metrics) == 2 and metrics[0]["dpo/denominator"] > 0 and "sft/loss" in metrics[0]
    assert b.manifest.outputs["checkpoint"]["sha256"] != c.manifest.outputs["checkpoint"]["sha256"]

    run = Run(runner.execute("evaluate", {"arms": [a, b, c]}, HELD_OUT, root=tmp_path).path)
    items = run.rows(EVAL_ITEM)
    assert {item["arm"] for item in items} == {"start", "A", "B", "C"} and len(items) == 20
    assert all(item["sampled_tokens"] > 0 for item in items)
    verdict = orjson.loads((run.path / "verdict.json").read_bytes())
    assert verdict["decision"] in {"INVALIDATED", "PARTIAL", "UNDERPOWERED"}, "one seed validates nothing"
    assert run.manifest.outcome.exit_code == EXIT_CODES[verdict["decision"]] and run.manifest.outcome.ok
    assert verdict["decision"] in (run.path / "report.txt").read_text()
    assert (run.path / "chart.svg").read_bytes().startswith(b"<?xml")
    done = []
    pilot, text = evaluate.STAGE.study([run], HELD_OUT, lambda *ready: done.append(ready))
    assert done == [("designs", number, 6) for number in range(1, 7)]
    assert pilot["lines"][0]["rollouts"] == len(items) and pilot["pilot_items"] == 5
    again = planned([a, b, c], HELD_OUT)
    assert again.rollouts(again.design) == len(items), "of trainings, what they would play"
    assert pilot["rates"]["pass_rate"][1] == "pilot" and pilot["rates"]["seed_sd"][1] == "assumed"
    assert pilot["pilots"] == (f"evaluate/{run.path.name}",) and f"evaluate/{run.path.name}" in text


def test_a_start_that_moved_on_on_the_hub_is_no_start(tmp_path, monkeypatch):
    first, second = "a" * 40, "b" * 40
    point = on_hub(tmp_path / "hub", [first, second])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    point(first)
    run = trained(tmp_path, "of/hub", optimisation={"steps": 1}, adapter=LORA)
    assert store.read_json(run.folder(CHECKPOINT) / "composer_base.json")["revision"] == first
    point(second)
    config = HELD_OUT.model_copy(update={"baseline": "start", "treatment": "A", "control": None, "tasks": 1})
    call = partial(runner.execute, "evaluate", {"arms": [run]}, config, root=tmp_path)
    refused(call, BadInput, code="arms.start-changed", revision=first, now=second)


@pytest.mark.parametrize("what", ["one weight NaN", "weights that overflow"])
def test_an_arm_whose_weights_are_no_numbers_is_invalid_by_name(tmp_path, tiny, what):
    policies = {"A": {"model": str(tiny), "max_tokens": 4}, "B": {"model": str(broken(what, tmp_path / "b"))}}
    run, verdict = evaluated(tmp_path, {}, policies=policies, control=None, tasks=2, looks=2, max_steps=1)
    assert verdict["decision"] == "INVALID-RUN" and "arm B, seed 0, is INVALID" in verdict["why"]
    assert run.manifest.outcome.exit_code == 4 and "max_tokens" not in verdict["why"]
    assert {item["arm"] for item in run.rows(EVAL_ITEM)} == {"A"}, "what was played is kept"


def test_a_broken_arm_is_refused_before_another_is_played(tmp_path, tiny):
    policies = {"A": {"model": str(tiny)}, "B": {"model": str(broken("tensor missing", tmp_path / "b"))}}
    with pytest.raises(BadInput, match="1 missing"):
        evaluated(tmp_path, {}, policies=policies, control=None, tasks=2)
    assert not list((tmp_path / "evaluate").glob("2*")), "nothing was begun"


def test_a_checkpoint_records_what_was_trained(tmp_path, tiny):
    a = trained(tmp_path, tiny)
    info = CheckpointInfo.of(a)
    assert (info.arm, info.train_seed, info.env, info.split) == ("A", 0, ENV, "train")
    assert info.start == PolicyConfig(model=str(tiny), max_tokens=20)
    assert set(info.task_ids) == {f"guess-{i}" for i in range(4)}
    (a.path / "checkpoint.json").unlink()
    with pytest.raises(BadInput, match=r"checkpoint\.json"):
        evaluate.STAGE.plan(Inputs({"arms": a}), HELD_OUT)


def test_arms_that_cannot_be_compared_are_refused(artifacts, tiny):
    a = trained(artifacts, tiny)
    from_a = trained(artifacts, a.folder(CHECKPOINT), "B")
    for arms, words in (([a, a], "given twice"), ([a, from_a], "did not start from the same model"), ([], "nothing")):
        with pytest.raises(BadInput, match=words):
            evaluate.STAGE.plan(Inputs({"arms": arms}), HELD_OUT)


def test_choosing_an_environment_does_not_choose_its_training_tasks():
    assert evaluate.Config().env.split == evaluate.Config(env={"name": ENV}).env.split == "eval"
    assert evaluate.Config(env={"name": ENV, "turns": 3}).env.options == {"turns": 3}


def test_tasks_that_an_arm_was_trained_on_are_refused(tmp_path, artifacts, tiny):
    a = trained(artifacts, tiny)
    alone = evaluate.Config(env={"name": ENV, "split": "train"}, tasks=6)
    assert inherited(alone, a).treatment == "A", "the start is the baseline of one trained arm"
    named = alone.model_copy(update={"baseline": "start", "treatment": "A"})
    remedy = "'B'.*start, A.*--set baseline=start --set treatment=A"
    with pytest.raises(UsageError, match=remedy):
        evaluate.STAGE.plan(Inputs({"arms": a}), alone)
    for config, words in ((alone, remedy), (named, r"4 of 6 tasks, for example guess-\d, .*arm .A.")):
        with pytest.raises(UsageError, match=words):
            runner.execute("evaluate", {"arms": a}, config, root=tmp_path)
    assert not list((tmp_path / "evaluate").glob("2*"))


def inherited(config, *trainings):
    return with_inherited("evaluate", Inputs({"arms": trainings}), config)


def test_an_evaluation_is_played_as_its_trainings_were(tmp_path, artifacts, tiny):
    a = trained(artifacts, tiny)
    found = inherited(evaluate.Config(tasks=5, greedy=True), a)
    assert (found.env.name, found.env.split, found.max_steps) == (ENV, "eval", a.manifest.config["max_steps"])
    assert (found.baseline, found.treatment, found.control) == ("start", "A", None)
    assert inherited(found, a) == found and found.identity() != evaluate.Config(tasks=5, greedy=True).identity()
    plan = evaluate.STAGE.plan(Inputs({"arms": a}), found)
    assert plan.units == 20 and f"environment {ENV}, as trained" in plan.notes and "A against start" in plan.notes
    run = Run(runner.execute("evaluate", {"arms": a}, found, root=tmp_path).path)
    assert {item["arm"] for item in run.rows(EVAL_ITEM)} == {"start", "A", "start@0", "A@0"}
    zero = orjson.loads((run.path / "verdict.json").read_bytes())["at_zero"]
    assert zero["num_tasks"] == 5 and "start@0" in (run.path / "report.txt").read_text()


def test_what_is_given_is_not_taken_from_trainings():
    trained = {"arm": "A", "max_steps": 4}
    trees = [{**trained, "seed": seed, "env": {"name": "e", "options": {"x": seed}}} for seed in (0, 1)]
    reads = [("train", tree) for tree in trees]
    with pytest.raises(UsageError, match=r"environment.*e \(x=0\) for arm A with seed 0, e \(x=1\).*--env NAME"):
        evaluate.STAGE.inherit(evaluate.Config(), reads)
    own = evaluate.STAGE.inherit(evaluate.Config(env={"y": 2}, max_steps=3, treatment="B", with_start=False), reads)
    assert (own.env.name, own.env.options, own.max_steps, own.baseline) == ("e", {"y": 2}, 3, "A")
    other = evaluate.STAGE.inherit(evaluate.Config(env="kata"), reads)
    assert (other.env.name, other.env.options, other.max_steps) == ("kata", {}, 4)
    both = evaluate.STAGE.inherit(evaluate.Config(env="kata"), [*reads, ("train", {**trees[0], "arm": "B"})])
    assert (both.baseline, both.treatment, both.control) == ("A", "B", "C")
    with pytest.raises(ValueError, match="greedy"):
        evaluate.Config(greedy=True, temperature=0)


# Models behind a server, and planned looks


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
    assert verdict["why"].startswith("A and B are one model with equal settings")


def test_arms_that_do_not_exist_are_refused_with_the_names_that_do(url):
    policies = {name: {"model": name, "base_url": url} for name in ("wrong", "right")}
    with pytest.raises(UsageError, match=r"'A'.*wrong, right.* --set baseline=wrong --set treatment=right"):
        evaluate.STAGE.plan(Inputs({}), evaluate.Config(env={"name": ENV}, policies=policies))
    with pytest.raises(UsageError, match="'B'"):
        evaluate.STAGE.plan(Inputs({}), evaluate.Config(env={"name": ENV}, policies=policies, baseline="right"))


@pytest.mark.parametrize("model", ["../right", "right" * 60, "a\nright"])
def test_a_models_name_cannot_move_the_run(tmp_path, url, model):
    """The folder is where `status`, `show` and `latest` look, and the work is not repeated."""
    policies = {name: {"model": "right", "base_url": url} for name in ("wrong", model)}
    asked = {"policies": policies, "tasks": 14, "baseline": "wrong", "treatment": model, "control": None}
    run, _ = evaluated(tmp_path, {}, **asked)
    assert [name(path) for path in folders(tmp_path)] == [f"evaluate/{run.path.name}"]
    assert (tmp_path / "evaluate" / "latest").resolve() == run.path and len(run.path.name) < 200
    again, _ = evaluated(tmp_path, {}, **asked)
    assert again.path == run.path and again.manifest.attempts == 1


def test_units_of_an_environment_are_all_there_are_where_that_is_set(tmp_path, url):
    for units, method in (("auto", "each family's difference"), ("fixed", "each task's difference within its family")):
        _, found = evaluated(tmp_path, {}, policies=models(url), tasks=14, control=None, units=units)
        assert method in found["gain"]["method"]
