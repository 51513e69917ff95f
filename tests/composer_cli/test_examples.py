"""The examples: dry runs for real models, and fifty rows from the file to a verdict."""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.command_line import call
from support.models import save_tiny
from support.server import Reply, answer, serving

from composer_cli.preset import configure_preset, load_preset
from composer_stages.envs import task_table
from composer_stages.envs.bash import fenced
from composer_stages.envs.repo.session import write_script
from composer_stages.envs.tasks import rows
from composer_stages.envs.tasks.env import file_changes
from composer_stages.replay_teachers import Config
from composer_stages.runs import settings
from composer_stages.runs.kinds import EVAL_ITEM, PAIR, ROLLOUT, TASK
from composer_stages.runs.run import Run

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = EXAMPLES / "teachers.toml"


def table(url: str) -> str:
    """The example's teachers on a server of the test's, which needs no key, as a value of --set."""
    rows = settings.read_table(TABLE, "teachers")["teachers"]
    own = [{**row, "base_url": url, "api_key_env": ""} for row in rows]
    return "[" + ", ".join("{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in row.items()) + "}" for row in own) + "]"


def test_the_teachers_of_the_example_are_those_of_the_preset_and_have_prices() -> None:
    teachers = Config(**settings.read_table(TABLE, "teachers")).teachers
    assert [teacher.name for teacher in teachers] == ["opus", "gpt", "deepseek"]
    assert all(teacher.priced and teacher.cost(1_000_000, 0) > 1 for teacher in teachers)
    configs = configure_preset(load_preset("examples/three-arms.toml"), [])
    assert configs["replay-teachers"].teachers == teachers  # type: ignore[attr-defined]


def test_a_replay_by_the_examples_teachers_can_be_planned(made: Path) -> None:
    with serving(lambda body, n: Reply(body=answer("a"))) as server:
        words = ["replay-teachers", "--dry-run", "--json", "--from", made / "collect" / "latest"]
        done = call(made, *words, "-s", f"teachers={table(server.url)}")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    # Per answer and teacher at most 8,192 tokens at 25, 30 and 3.48 USD a million, and the prompt.
    answers = plan["units"] // 3
    assert answers * 8192 * 58.48e-6 < plan["max_cost_usd"] < answers * (8192 * 58.48e-6 + 0.05)


def test_the_arms_differ_in_channels_and_seeds_alone() -> None:
    configs = configure_preset(load_preset("examples/three-arms.toml"), [])
    trained = {title: config.model_dump() for title, config in configs.items() if hasattr(config, "weights")}
    of_arm = {
        "grpo": {"grpo"},
        "grpo-pairs": {"grpo", "dpo", "sft"},
        "grpo-imitation": {"grpo", "sft"},
        "grpo-opd": {"grpo", "opd"},
    }
    assert sorted(trained) == sorted(f"{arm}-{seed}" for arm in of_arm for seed in range(5))
    alike = []
    for title, config in trained.items():
        arm, _, seed = title.rpartition("-")
        assert (config.pop("arm"), config.pop("seed")) == (arm, int(seed))
        weights = {name for name, weight in config.pop("weights").items() if weight}
        assert weights == of_arm[arm]
        assert (config.pop("teacher") is None) == (arm != "grpo-opd")
        config["policy"]["server"]["args"].pop("gpu-memory-utilization")  # nor does a pass' size change what is learned
        config["optimisation"].pop("micro_batch")
        alike.append(config)
    assert all(config == alike[0] for config in alike)


def test_a_dry_run_of_the_arms_checks_models_and_teachers(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    with serving(lambda body, n: Reply(body=answer("a"))) as server:
        words = ["run", "--preset", "examples/three-arms.toml", "--policy", model, "--dry-run"]
        teachers = ["-s", f"replay-teachers.teachers={table(server.url)}"]
        teachers += [word for seed in range(5) for word in ("-s", f"grpo-opd-{seed}.teacher.model={model}")]
        done = call(tmp_path / "artifacts", *words, *teachers, COMPOSER_VLLM=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "grpo-opd-4" in done.stdout and f"vllm:{model}" not in done.stderr and server.url in done.stdout


# Fifty rows


ROWS = Path(__file__).parents[2] / "examples" / "tasks.jsonl"
ENV = ["--env", "tasks", "-s", f"env.path={ROWS}", "-s", "max_steps=2"]
POLICY = ["-s", "policy.max_tokens=24", "-s", "policy.temperature=1.0"]
ALL = bool(os.environ.get("COMPOSER_ALL_ROWS"))
CHECKED, TRAIN, EVAL = ((), 40, 10) if ALL else (("-n", "1"), 4, 4)
"""The limit of the check, a split; and how many rows are collected and evaluated."""
SMALL = ["-s", "optimisation.steps=2", "-s", "optimisation.prompts_per_step=2", "-s", "optimisation.generations=2"]


def solving(asked: dict[str, Any], earlier: int) -> Reply:
    """A teacher that knows the rows by their prompts: it writes the solution, then submits. `wrong` only looks."""
    del earlier
    first = next(message["content"] for message in asked["messages"] if message["role"] == "user")
    row = next(row for row in rows.load(str(ROWS)) if row["prompt"] == first)
    turn = sum(message["role"] == "assistant" for message in asked["messages"])
    script = "ls" if asked["model"] == "wrong" else write_script(file_changes(row["solution"]))
    return Reply(body=answer(fenced("submit" if turn else script)))


def ending(model: Path) -> None:
    """Let a third of the tokens end an answer: an answer that was cut gives no pair."""
    path = model / "generation_config.json"
    config = json.loads(path.read_text())
    config["eos_token_id"] = [config["eos_token_id"], *range(100, 190)]  # bytes that are no ASCII
    path.write_text(json.dumps(config))


def test_the_rows_are_fifty_in_ten_families() -> None:
    loaded = rows.load(str(ROWS))
    assert len(loaded) == 50 and set(Counter(row["family"] for row in loaded).values()) == {5}
    parts = task_table.split_rows(loaded, 0, 0.25)
    assert [len(parts[name]) for name in ("train", "eval")] == [40, 10]
    assert all(row["solution"] and (row["hidden"] or row["files"]) for row in loaded)


@pytest.mark.slow
@pytest.mark.timeout(5400 if ALL else 600)
def test_rows_are_collected_trained_and_evaluated(composer, tmp_path):
    def run(*words: object, codes: tuple[int, ...] = (0,)) -> str:
        started, used = time.monotonic(), sum(os.times()[:4])
        done = composer(*words)
        print(f"{words[0]}: {time.monotonic() - started:.0f} s, {sum(os.times()[:4]) - used:.0f} s of processors")
        assert done.returncode in codes, (words, done.stdout[-2000:], done.stderr[-3000:])
        return str(done.stdout)

    checked = json.loads(run("tasks", "check", ROWS, *CHECKED, "-s", "repeats=1", "--json", codes=(0, 4)))
    print(checked["counts"], [(one["task_id"], one["reason"]) for one in checked["tasks"] if one["verdict"] != "ok"])
    assert sum(checked["counts"].values()) == (50 if ALL else 2)
    assert set(checked["counts"]) == {"ok"}
    model = save_tiny(tmp_path / "model", characters=None)
    ending(model)
    # The collection checks fail (1): a random model writes no action. What it wrote is kept, and teachers are asked all
    # the same.
    run("collect", *ENV, "--policy", model, *POLICY, "-n", TRAIN, "-s", "samples=2", codes=(0, 1))
    artifacts = tmp_path / "artifacts"
    collected = Run(artifacts / "collect" / "latest")
    drawn = [json.loads(row["data_json"])["divided_by"] for row in collected.rows(TASK)]
    assert drawn == [{"split_seed": 0, "eval_share": 0.25}] * len(drawn), "recorded, though neither was given"
    assert len(collected.rows(TASK)) == TRAIN
    assert [row["reward"] for row in collected.rows(ROLLOUT)] == [0.0] * 2 * TRAIN
    with serving(solving) as server:
        tables = [
            f'[[teachers]]\nname = "{name}"\nmodel = "{name}"\nbase_url = "{server.url}"\nmax_tokens = 2048\n'
            for name in ("one", "two", "wrong")
        ]
        (tmp_path / "teachers.toml").write_text("\n".join(tables))
        run("replay-teachers", "--teachers", tmp_path / "teachers.toml", codes=(0, 1))
    run("extract-pairs", codes=(0, 1, 3))
    pairs = Run(artifacts / "extract-pairs" / "latest").rows(PAIR)
    first = [pair["chosen"] for pair in pairs if pair["step"] == 0]
    assert first and all("base64 -d" in chosen for chosen in first)
    assert {pair["chosen"] for pair in pairs if pair["step"] == 1} <= {fenced("submit")}
    arms = {"A": [], "B": ["-s", "weights.dpo=1", "-s", "weights.sft=1", "--from", "extract-pairs"]}
    for arm, more in arms.items():
        run("train", *ENV, "--policy", model, *POLICY, *SMALL, "-s", f"tasks={TRAIN}", "--arm", arm, *more)
    given = [word for run_ in sorted((artifacts / "train").glob("2*")) for word in ("--from", run_)]
    run("evaluate", *ENV, *given, "-n", EVAL, codes=(0, 1, 3))
    evaluated = Run(artifacts / "evaluate" / "latest")
    assert evaluated.manifest.status == "complete" and evaluated.manifest.summary["verdict"]
    print(len(pairs), "pairs;", evaluated.manifest.summary["verdict"], evaluated.manifest.summary.get("why", ""))
    held_out = {row["task_id"] for row in evaluated.rows(EVAL_ITEM)}
    assert len(held_out) == EVAL and not held_out & {row["task_id"] for row in collected.rows(TASK)}
