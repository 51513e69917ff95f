"""frameworks: TRL's rollouts and a user's file, or their own export; resumed; which of two sides is cleaner."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from needs import REAL, needs, where
from support.transcripts import assistant, jsonl, user

from composer_stages import compare_frameworks as frameworks
from composer_stages.errors import BadInput
from composer_stages.integrations.frameworks import Side, cleaner, table
from composer_stages.rollouts import missing
from composer_stages.rollouts.trace import state_sha256
from composer_stages.runs import runner, store
from composer_stages.runs.run import Run

ENV = "support.environments:NumberedEnv"


@pytest.fixture
def compared(tmp_path: Path, tiny: Path) -> Callable[..., Run]:
    def run(env: str = ENV, folder: str = "one", max_tokens: int = 200, how: Any = None, **more: Any) -> Run:
        settings = {"tasks": 3, "samples": 2, "max_steps": 3, **more}
        config = frameworks.Config(env={"name": env}, policy={"model": str(tiny), "max_tokens": max_tokens}, **settings)
        return Run(runner.execute("frameworks", {}, config, root=tmp_path / folder, **(how or {})).path)

    return run


def sides(run: Run) -> list[dict[str, Any]]:
    return json.loads(run.read_file("comparison.json"))["sides"]


def verdicts(side: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["verdict"] for check in side["checks"]}


def test_without_a_file_the_format_is_compared_and_the_report_says_so(compared):
    run = compared()
    ours, theirs = sides(run)
    assert ours["rollouts"] == theirs["rollouts"] == 6 and ours["steps"] == theirs["steps"] > 0
    assert ours["capture_levels"] == theirs["capture_levels"] == {"tokens": ours["steps"]}
    assert [name for name, verdict in verdicts(ours).items() if verdict != "ok"] == [
        "answers of one model",  # the library in this process names none
        "100 rollouts or more",
    ]
    assert verdicts(theirs)["no output elided"] == "not recorded" and verdicts(theirs)["state hash chain"] == "ok"
    report = run.read_file("report.txt").decode()
    assert "nothing is said of prime-rl" in report and "Cleaner" not in report and "Neither is called" in report
    assert run.manifest.summary["cleaner"] is None and json.loads(run.read_file("comparison.json"))["cleaner"] is None
    assert {unit["rollout"]["source"] for unit in run.units()} == {"trl"} and run.manifest.counts["done"] == 6


def test_a_users_file_is_held_to_the_same_checks(compared, tmp_path):
    said = {"id": 0, "prompt": [user("what?")], "completion": [assistant("hollow ship")]}
    row = {**said, "answer": "x", "reward": 1.0, "task": "t"}
    run = compared(traces=str(jsonl(tmp_path / "results.jsonl", row, '{"id": 1, "pro')))
    _, theirs = sides(run)
    assert [theirs["rollouts"], theirs["capture_levels"], theirs["dropped"]] == [1, {"text": 1}, {"not_json": 1}]
    assert verdicts(theirs)["token ids captured"] == verdicts(theirs)["records readable"] == "FAIL"
    assert run.manifest.summary["cleaner"] == "trl" and "nothing is said" not in run.read_file("report.txt").decode()


@needs("real")
def test_a_real_run_is_read(compared):
    traces = REAL / "trajectories" / "wiki-search" / "qwen3-4b-instruct-2507.results.jsonl.gz"
    _, theirs = sides(compared(tasks=1, traces=str(traces)))
    assert theirs["rollouts"] == 60 and theirs["capture_levels"].keys() == {"text"}
    assert theirs["nulls"]["step.returncode"]


def test_a_file_without_rollouts_is_refused(compared, tmp_path):
    with pytest.raises(BadInput, match="no rollout of prime-rl"):
        compared(traces=str(jsonl(tmp_path / "other.jsonl", {"a": 1}, {"a": 2})))
    with pytest.raises(BadInput, match="no file or folder"):
        compared(traces=str(tmp_path / "nothing"))


def test_the_content_of_the_file_counts_not_its_place(compared, tmp_path):
    rows = [{"id": 0, "prompt": "a", "completion": "b", "answer": "", "reward": 1.0, "task": "t"}]
    one, other = (jsonl(tmp_path / folder / "x" / "results.jsonl", *rows) for folder in ("a", "b"))
    assert frameworks.Config(traces=str(one)).identity() == frameworks.Config(traces=str(other)).identity()
    jsonl(other, *rows, *rows)
    assert frameworks.Config(traces=str(one)).identity() != frameworks.Config(traces=str(other)).identity()


def test_an_interrupted_comparison_goes_on_where_it_was(compared):
    def stop(what: str, done: int, total: int) -> None:
        if what == "rollouts" and done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compared(tasks=11, max_tokens=9, how={"listener": stop})
    played: list[int] = []
    how = {"resume": True, "listener": lambda what, done, total: played.append(done)}
    resumed = compared(tasks=11, max_tokens=9, how=how)
    whole = compared(tasks=11, max_tokens=9, folder="two")
    assert min(number for number in played if number) == 6
    assert steps(resumed) == steps(whole)


def steps(run: Run) -> list[tuple[str, list[Any]]]:
    told = ("rollout_id", "action", "logprobs", "reward")
    return sorted((unit["unit"], [[step[name] for name in told] for step in unit["steps"]]) for unit in run.units())


def test_failed_rollouts_are_counted_and_fail_the_checks(compared):
    run = compared(env="support.environments:BreakingEnv", tasks=2)
    ours, _ = sides(run)
    assert run.manifest.counts["failed"] == 2 and verdicts(ours)["rollouts scored"] == "FAIL"


def test_a_model_behind_a_server_is_refused():
    with pytest.raises(ValueError, match="in this process"):
        frameworks.Config(policy={"model": "m", "base_url": "http://127.0.0.1:9/v1"})


@needs("openenv")
@pytest.mark.slow
def test_through_an_openenv_server_the_rollouts_are_those_of_this_process(compared, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    through = compared(through="openenv", openenv_python=where("openenv"))
    assert steps(through) == steps(compared(folder="two"))
    assert "through an OpenEnv server" in through.read_file("report.txt").decode()


@needs("openenv")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_rollouts_through_an_openenv_server_pass_the_checks(compared):
    run = compared(env="kata", tasks=25, samples=4, max_tokens=12, through="openenv", openenv_python=where("openenv"))
    ours, _ = sides(run)
    assert ours["rollouts"] == ours["planned"] == 100 and run.manifest.counts["failed"] == 0
    of_a_random_model = {"actions well-formed", "answers not truncated"}
    assert {name for name, verdict in verdicts(ours).items() if verdict == "FAIL"} == of_a_random_model


OPENING = [user("q")]


def side(name: str = "trl", number: int = 100, **changes: Any) -> Side:
    """Rollouts of one sound step each; changes of the step, or of what the side says of itself."""
    own = {key: changes.pop(key) for key in ("absent", "dropped") if key in changes}
    rollouts = [{"rollout_id": f"r{i}", "reward": 1.0, "error": None, "seed": 0} for i in range(number)]
    step = {"step": 0, "new_messages_json": store.encode(OPENING).decode(), "state_sha256": state_sha256(OPENING)}
    step |= {"action": "a", "observation": "", "reward": 1.0, "done": True}
    step |= {"truncated": False, "finish_reason": "stop", "served_model": "m", "elided_chars": 0, "parse_error": None}
    step |= {"capture_level": "tokens", "logprobs": [-0.12345678], "completion_token_ids": [3]}
    step |= {"prompt_delta_token_ids": [1, 2], "prefix_ok": True, "prompt_len": 2, **changes}
    steps = [{"rollout_id": row["rollout_id"], **step} for row in rollouts]
    return Side(name, "somewhere", rollouts, steps, number, **own)


def test_sound_traces_meet_every_criterion():
    one = side()
    assert one.standing == (0, 0) and len(one.verdicts("ok")) == len(one.checks) == 21
    assert one.levels == {"tokens": 100} and one.nulls == {} and cleaner(one, side("other")) is None
    assert "Neither is cleaner" in table(one, side("other"), ())


def test_text_without_tokens_fails_what_training_needs():
    told = {"capture_level": "text", "prefix_ok": None, "prompt_len": None, "logprobs": None}
    told |= {"completion_token_ids": None, "prompt_delta_token_ids": None}
    absent = {f"r{i}": {missing.TOKENS, missing.LOGPROBS} for i in range(100)}
    other = side("other", absent=absent, **told)
    assert other.verdicts("FAIL") == ["token ids captured", "log-probs beyond 4 decimals"]
    assert "ids as many as log-probs" in other.verdicts("not recorded")
    assert other.nulls["step.logprobs"] == 100 and "step.parse_error" not in other.nulls
    assert other.not_recorded[missing.TOKENS] == 100
    assert cleaner(side(), other) == "trl" and cleaner(other, side()) == "trl"


def test_rounded_log_probs_few_rollouts_and_lost_records_fail():
    rounded = side(absent={f"r{i}": {missing.EXACT_LOGPROBS} for i in range(100)})
    assert rounded.verdicts("FAIL") == ["log-probs beyond 4 decimals"]
    few = side(number=99, dropped={"not_json": 2})
    assert few.verdicts("FAIL") == ["100 rollouts or more", "records readable"]
    assert all(words in table(few, side("other"), ()) for words in ("99 of 100", "not_json"))


def test_a_failure_weighs_more_than_silence():
    silent = side("other", absent={f"r{i}": {missing.ELISION, missing.PARSE, missing.FINISH} for i in range(100)})
    assert silent.standing == (0, 4) and cleaner(side(), silent) == "trl"
    assert cleaner(side(truncated=True), silent) == "other"
