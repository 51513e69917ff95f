"""The example of the probe on leetcode-rh, with recorded rows and a tiny model."""

import json
from pathlib import Path

import pytest
from probe_faults.loophole_world import tiny_qwen3
from support import leetcode
from support.command_line import call
from support.models import tiny_tokenizer

from composer_cli.preset import load_preset
from composer_stages.runs.kinds import POOL_ROW, PROBE_CHECK, PROBE_ROW
from composer_stages.runs.run import Run


def recorded(folder: Path, problems: int) -> None:
    """Rows of a pool as another program records them, in ids of the tiny model's tokenizer."""
    tokenizer = tiny_tokenizer()
    for problem in range(problems):
        rows = []
        answers = [("abba", True, False), ("cd", True, True), ("ef", False, True)]
        for sample, (text, hacked, passed) in enumerate(answers):
            row = leetcode.pool_row(problem, sample, text, hacked, passed)
            messages = row["problem_messages"]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            tokens = {"prompt_ids": tokenizer.encode(prompt, add_special_tokens=False), "completion_ids": ids}
            told = {"step": problem, "src_pool": "teacher", "fmt_ok": True, "comp_len": len(ids), "prompt": prompt}
            rows.append({**row, **tokens, **told})
        leetcode.write(folder / f"prompt_{problem:04d}.jsonl.gz", rows)


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
