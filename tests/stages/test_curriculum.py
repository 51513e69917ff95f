"""curriculum: pass rates with their intervals from runs of collect, and the tasks of a band of them in order."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest
from support.environments import JudgedGuessEnv
from support.refusals import refused
from support.runs import written
from support.server import Reply, answer, serving
from support.trainings import settings

from composer_stages import collect, curriculum, export, import_traces, train
from composer_stages.comparison.sides import read_sides
from composer_stages.envs import task_table
from composer_stages.envs.config import EnvConfig
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.runs import runner
from composer_stages.runs.kinds import DIFFICULTY, ROLLOUT, TASK, TRAINING_REWARD
from composer_stages.runs.run import Inputs, Run
from composer_stages.terms import TWIN
from composer_stages.training.config import Optimisation
from composer_stages.training.rollouts import prompt_order


def measured(root: Path, passed: dict[str, list[bool | None]], prompt: str = "do it", model: str = "m") -> Run:
    """A run of collect with these rollouts."""
    tasks = [
        {"task_id": t, "env": "e", "split": "train", "family": t, "prompt": prompt, "data_json": "{}"} for t in passed
    ]
    rollouts = [
        {"rollout_id": f"{t}#{i}", "task_id": t, "hidden_pass": solved, "model": model}
        for t, all_ in passed.items()
        for i, solved in enumerate(all_)
    ]
    return Run(written(root, f"collect/{model}-{len(rollouts)}", [(TASK, tasks), (ROLLOUT, rollouts)]))


def make(root: Path, *runs: Run, **settings: Any) -> Run:
    """A run of curriculum over these runs."""
    given = {"tasks": list(runs), "rollouts": list(runs)}
    return Run(runner.execute("curriculum", given, curriculum.Config(**settings), root=root / "artifacts").path)


def ids(run: Run) -> list[str]:
    """Its tasks, in their order."""
    return [row["task_id"] for row in run.rows(TASK)]


PASSED: dict[str, list[bool | None]] = {
    "always": [True] * 8,
    "half": [True, False] * 4,
    f"half{TWIN}": [True] * 8,
    "hardly-known": [True, False, None, None],
    "mostly": [True] * 7 + [False],
    "never": [False] * 8,
    "rarely": [True, *[False] * 7],
    "unknown": [None] * 4,
}
"""Rollouts by task: solved, not solved, not graded."""


def test_difficulties_have_counts_and_wilson_intervals(tmp_path: Path) -> None:
    rows = {row["task_id"]: row for row in make(tmp_path, measured(tmp_path, PASSED)).rows(DIFFICULTY)}
    assert list(rows) == list(PASSED)
    for task, passed in PASSED.items():
        graded = [one for one in passed if one is not None]
        row = rows[task]
        assert (row["num_rollouts"], row["num_solved"]) == (len(graded), sum(graded))
        if not graded:
            assert (row["rate"], row["low"], row["high"]) == (None, None, None)
            continue
        interval = binomtest(sum(graded), len(graded)).proportion_ci(method="wilson")
        assert row["rate"] == sum(graded) / len(graded)
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), abs=1e-12)


def test_without_hidden_tests_a_full_reward_solves(tmp_path: Path) -> None:
    task = measured(tmp_path, {"a": [True]}).rows(TASK)[0]
    rollouts = [
        {"rollout_id": f"a#{i}", "task_id": "a", "reward": reward, "model": "m"}
        for i, reward in enumerate((1.0, 0.5, 0.0, None, 30.0))  # of 100, which may be any share
    ]
    run = Run(written(tmp_path, "collect/rewards", [(TASK, [task]), (ROLLOUT, rollouts)]))
    (row,) = make(tmp_path, run, min_rollouts=3).rows(DIFFICULTY)
    assert (row["num_rollouts"], row["num_solved"]) == (3, 1)


def test_tasks_within_the_band_are_ordered(tmp_path: Path) -> None:
    run = measured(tmp_path, PASSED)
    everything = make(tmp_path, run)
    assert ids(everything) == ["always", "mostly", "half", "rarely", "never"]
    assert ids(make(tmp_path, run, order="hard-first")) == ["never", "rarely", "half", "mostly", "always"]
    band = make(tmp_path, run, min_rate=0.125, max_rate=0.875, min_rollouts=2)
    assert ids(band) == ["mostly", "half", "hardly-known", "rarely"], "the ends of the band belong to it"
    places = {row["task_id"]: row["place"] for row in band.rows(DIFFICULTY)}
    assert [places[name] for name in ids(band)] == [0, 1, 2, 3] and places["always"] is None


def test_report_counts_reasons(tmp_path: Path) -> None:
    run = make(tmp_path, measured(tmp_path, PASSED), min_rate=0.1, max_rate=0.9)
    report = (run.path / "report.txt").read_text()
    assert report.startswith("3 of 8 tasks, by 50 graded rollouts of m\n")
    for line in (
        "2  left out, fewer than 4 graded rollouts",
        "1  left out, solved by less than 10 %",
        "1  left out, solved by more than 90 %",
        "1  left out, impossible variants, whose passes are hacks",
        "6  rollouts that count for nothing: not graded, or with a reward above 1 and no verdict of tests",
        "2  tasks solved by all",
        "1  tasks solved by none",
        "1  tasks solved by less than all",
    ):
        assert f"     {line}\n" in report, line
    assert run.manifest.counts["left out, solved by less than 10 %"] == 1 and run.manifest.counts["ungraded"] == 6


def test_rollouts_of_several_runs_are_added_once(tmp_path: Path) -> None:
    one = measured(tmp_path, {"half": [True, True]})
    other = measured(tmp_path, {"half": [False, False, False], "never": [False] * 4}, model="n")
    run = make(tmp_path, one, other, Run(one.path))
    rows = {row["task_id"]: row for row in run.rows(DIFFICULTY)}
    assert (rows["half"]["num_solved"], rows["half"]["num_rollouts"]) == (2, 5)
    assert "Several models played" in (run.path / "report.txt").read_text()


def test_another_task_under_the_same_id_is_refused(tmp_path: Path) -> None:
    one, other = (measured(tmp_path / p, {"half": [True]}, prompt=p) for p in ("do it", "do something else"))
    with pytest.raises(BadInput, match="another task under the id half"):
        make(tmp_path, one, other)


def test_rollouts_without_their_task_are_refused(tmp_path: Path) -> None:
    rollout = {"rollout_id": "a#0", "task_id": "a", "hidden_pass": True}
    run = Run(written(tmp_path, "collect/x", [(TASK, []), (ROLLOUT, [rollout])]))
    refused(lambda: make(tmp_path, run), BadInput, code="rollouts-without-task", task_id="a")


def test_an_empty_band_and_an_impossible_one_are_refused(tmp_path: Path) -> None:
    run = measured(tmp_path, {"never": [False] * 4})
    refused(lambda: make(tmp_path, run, min_rate=0.1), Incomplete, code="no-task-in-band", num_tasks=1)
    with pytest.raises(ValueError, match=r"min_rate is 0\.5, above max_rate"):
        curriculum.Config(min_rate=0.5, max_rate=0.4)


def test_identity_of_a_curriculum_is_its_tasks(tmp_path: Path) -> None:
    one = make(tmp_path / "a", measured(tmp_path / "a", PASSED))
    same = make(tmp_path / "b", measured(tmp_path / "b", PASSED))
    other = make(tmp_path / "c", measured(tmp_path / "c", PASSED), order="hard-first")
    first, second, third = (EnvConfig(curriculum=str(run.path)).identity() for run in (one, same, other))
    assert first == second != third and "curriculum" not in EnvConfig().identity()
    assert one.manifest.content == same.manifest.content


ENV = "support.environments:JudgedGuessEnv"


def collected(root: Path, url: str, **env: Any) -> Run:
    policy = {"model": "m", "base_url": url}
    config = collect.Config(env={"name": ENV, **env}, policy=policy, tasks=6, samples=8, max_steps=1)
    return Run(runner.execute("collect", {}, config, root=root / "artifacts").path)


def with_copies(run: Run, root: Path) -> list[str]:
    """The paths of a run, of its export, and of that imported."""
    made = [run]

    def add(stage: str, given: dict[str, Run], config: Any) -> Run:
        made.append(Run(runner.execute(stage, given, config, root=root / "artifacts").path))
        return made[-1]

    exported = add("export", {"rollouts": run}, export.Config(format="verifiers"))
    add("import", {}, import_traces.Config(paths=[str(exported.path)]))
    return [str(each.path) for each in made]


def test_collect_plays_the_tasks_of_a_curriculum_in_its_order(tmp_path: Path) -> None:
    """The policy of the second run is asked about the tasks that the first one's rollouts put first."""

    def says(body: dict[str, Any], earlier: int) -> Reply:
        letter = body["messages"][-1]["content"][-1]
        return Reply(body=answer("b" if letter == "b" or body["seed"] % 4 == 0 else "a"))

    with serving(says) as server:
        first = collected(tmp_path, server.url)
        rates = make(tmp_path, first, min_rollouts=8, max_rate=0.99)
        ordered = ids(rates)
        rows = {row["task_id"]: row["rate"] for row in rates.rows(DIFFICULTY)}
        assert ordered and all(0 < rows[name] < 1 for name in ordered) and len(ordered) < 6
        assert [rows[name] for name in ordered] == sorted((rows[name] for name in ordered), reverse=True)
        again = collected(tmp_path, server.url, curriculum=str(rates.path))
    assert ids(again) == ordered and again.rows(TASK) == rates.rows(TASK)
    assert len(again.rows(ROLLOUT)) == 8 * len(ordered)
    selecting, later = with_copies(first, tmp_path), with_copies(again, tmp_path)
    for one, other in [*product(selecting, later), *product(later, selecting)]:
        with pytest.raises(BadInput) as error:
            read_sides([one, other])
        assert error.value.code == "comparison.selected-by-side" and error.value.values["selecting"] in selecting
    further = make(tmp_path, again, min_rollouts=8, max_rate=0.99)
    assert {first.manifest.content, again.manifest.content} == {*task_table.selected_by([str(further.path)])}


def test_curriculum_of_another_environment_is_refused(tmp_path: Path) -> None:
    run = make(tmp_path, measured(tmp_path, {"half": [True, False] * 2}))
    for split, words in (("train", "holds tasks of e, and guess is to be"), ("eval", "no task of the split 'eval'")):
        config = collect.Config(env={"name": ENV, "curriculum": str(run.path), "split": split}, tasks=1)
        with pytest.raises(UsageError, match=words):
            config.draw(config.opener(), 1)


def test_training_keeps_the_order_of_a_curriculum() -> None:
    size = Optimisation(steps=3, prompts_per_step=2)
    assert prompt_order(4, size, seed=0, as_given=True) == [0, 1, 2, 3, 0, 1]
    assert sorted(prompt_order(4, size, seed=0)[:4]) == [0, 1, 2, 3]
    assert prompt_order(4, size, seed=0) != prompt_order(4, size, seed=0, as_given=True)


def test_a_training_takes_its_tasks_from_one_curriculum(tmp_path: Path) -> None:
    given = make(tmp_path, measured(tmp_path, {"half": [True, False] * 2}))
    taken = train._with_runs(Inputs({"curriculum": given}), train.Config())
    assert taken.env.curriculum == str(given.path)
    with pytest.raises(UsageError, match="Give one of them"):
        train._with_runs(Inputs({"curriculum": given}), taken)


@pytest.mark.slow
def test_training_follows_a_curriculum(tmp_path: Path, tiny: Path) -> None:
    """Two steps of two tasks each, which are the curriculum's in its order."""
    tasks = {task.task_id: task for task in JudgedGuessEnv().tasks("train", 3, 0)}
    solved = dict(zip(tasks, (1, 3, 2), strict=True))
    columns = ("task_id", "env", "split", "family", "prompt")
    rows = [{name: getattr(task, name) for name in columns} | {"data_json": "{}"} for task in tasks.values()]
    rollouts = [
        {"rollout_id": f"{name}#{number}", "task_id": name, "hidden_pass": number < count, "model": "m"}
        for name, count in solved.items()
        for number in range(4)
    ]
    rates = make(tmp_path, Run(written(tmp_path, "collect/guesses", [(TASK, rows), (ROLLOUT, rollouts)])))
    config = settings(tiny, env={"name": ENV}, optimisation={"steps": 2, "prompts_per_step": 2, "generations": 2})
    done = Run(runner.execute("train", {"curriculum": rates}, config, root=tmp_path / "artifacts").path)
    steps: dict[int, list[str]] = {}
    for row in done.rows(TRAINING_REWARD):
        steps.setdefault(row["training_step"], []).append(row["task_id"])
    first, second, third = ids(rates)
    assert [solved[name] for name in (first, second, third)] == [3, 2, 1]
    assert [sorted(names) for names in steps.values()] == [sorted([first, second] * 2), sorted([third, first] * 2)]
