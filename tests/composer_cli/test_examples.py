"""The examples for real models: a dry run of each, and the probe on a tiny model with recorded rows."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from probe_faults.loophole_world import tiny_qwen3
from support.command_line import call
from support.models import save_tiny, tiny_tokenizer
from support.server import Reply, answer, serving

from composer_cli.preset import configure_preset, load_preset
from stages.replay_teachers import Config
from stages.runs import settings
from stages.runs.kinds import POOL_ROW, PROBE_CHECK, PROBE_ROW
from stages.runs.run import Run

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
    assert sorted(trained) == sorted(f"{arm}-{seed}" for arm in "ABC" for seed in range(5))
    alike = []
    for title, config in trained.items():
        arm, _, seed = title.partition("-")
        assert (config.pop("arm"), config.pop("seed")) == (arm, int(seed))
        weights = {name for name, weight in config.pop("weights").items() if weight}
        assert weights == {"A": {"grpo"}, "B": {"grpo", "dpo", "sft"}, "C": {"grpo", "sft"}}[arm]
        alike.append(config)
    assert all(config == alike[0] for config in alike)


def test_a_dry_run_of_the_arms_checks_models_and_teachers(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    with serving(lambda body, n: Reply(body=answer("a"))) as server:
        words = ["run", "--preset", "examples/three-arms.toml", "--policy", model, "--dry-run"]
        teachers = ["-s", f"replay-teachers.teachers={table(server.url)}"]
        done = call(tmp_path / "artifacts", *words, *teachers, COMPOSER_VLLM=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "C-4" in done.stdout and f"vllm:{model}" not in done.stderr and server.url in done.stdout


def recorded(folder: Path, problems: int) -> None:
    """Rows of a pool as another program records them, in ids of the tiny model's tokenizer."""
    tokenizer = tiny_tokenizer()
    folder.mkdir(parents=True)
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b will be evaluated by calling a function called run_tests() c"},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    for problem in range(problems):
        rows = []
        for sample, (text, hacked, passed) in enumerate(
            [("abba", True, False), ("cd", True, True), ("ef", False, True)]
        ):
            ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            about = {"problem_id": problem, "step": problem, "sample_id": sample, "src_pool": "teacher"}
            labels = {"hacked": hacked, "gt_pass": passed, "reward": 3.5, "fmt_ok": True, "comp_len": len(ids)}
            tokens = {"prompt_ids": tokenizer.encode(prompt, add_special_tokens=False), "completion_ids": ids}
            texts = {"completion": text, "prompt": prompt, "problem_messages": messages}
            rows.append({**about, **labels, **tokens, **texts})
        with gzip.open(folder / f"prompt_{problem:04d}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.slow
def test_the_probe_runs_on_a_tiny_model_of_its_architecture_with_recorded_rollouts(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tiny_qwen3(vocab=len(tokenizer)).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    recorded(tmp_path / "pool", 6)
    pairs = [{"prompt": "ab", "hack": "cc" + "d" * i, "clean": "ee" + "f" * i} for i in range(8)]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    own = f'{{ folder = "{tmp_path / "pool"}", model = "tiny", eos_id = {tokenizer.eos_token_id} }}'
    words = ["run", "--preset", "examples/probe-leetcode.toml", "--json"]
    given = [
        f"R1-svd.model.model={tmp_path / 'tiny'}",
        f"R1-direction.student.model={tmp_path / 'tiny'}",
        f"R1-direction.pairs.source={tmp_path / 'pairs.json'}",
        f"R1-pool.recorded={own}",
        "R1-pool.contract.answer_prefix=",
        f"probe-replay.student.model={tmp_path / 'tiny'}",
        "probe-replay.steps=2",
    ]
    sets = [word for one in given for word in ("-s", one)]
    checked = call(tmp_path / "artifacts", *words, *sets, "--dry-run")
    assert checked.returncode == 0, checked.stderr
    done = call(tmp_path / "artifacts", *words, *sets)
    assert done.returncode in (1, 3), done.stderr  # decided, but not in favour: the weights are random
    entries = json.loads(done.stdout)["entries"]
    assert list(entries) == [entry.title for entry in load_preset("examples/probe-leetcode.toml").stage]
    pool, vanilla, uat = (Run(Path(entries[name]["path"])) for name in ("R1-pool", "R2-vanilla", "R4-uat"))
    assert len(pool.rows(POOL_ROW)) == 18 == len(vanilla.rows(PROBE_ROW))
    assert {row["plan_item"] for row in uat.rows(PROBE_CHECK)} >= {"T1", "T2", "T3", "T4"}
