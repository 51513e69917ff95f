"""Rollouts by verifiers' own evaluation loop, behind an OpenEnv server, held to the same collection checks."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from needs import needs, where
from support.command_line import repair
from support.server import Reply, serving

from composer_stages import compare_frameworks as frameworks
from composer_stages.envs.bash import fenced
from composer_stages.envs.kata.env import KataEnv
from composer_stages.integrations.openenv_client import ServedEnvironment, running
from composer_stages.runs import runner
from composer_stages.runs.run import Run

PLUGIN = """\
from composer_post_training.verifiers import *  # noqa: F403
from composer_post_training.verifiers import __all__  # noqa: F401
"""
EVALUATION = """\
model = "scripted"
num_rollouts = {samples}
max_concurrent = 8
output_dir = "{out}"
push = false
rich = "None"
env.taskset = {{ id = "composer_served", url = "{url}", asked = "{asked}" }}
env.player = {{ harness = {{ id = "null" }}, runtime = {{ type = "subprocess" }} }}
client = {{ type = "eval", base_url = "{model}", api_key_var = "VF_KEY" }}
sampling.max_tokens = 64
"""
TASKS, SAMPLES = 25, 4
ROOT = Path(__file__).parents[3]


def streamed(asked: dict[str, Any], earlier: int) -> Reply:
    """The scripted repair in server-sent events, as verifiers' program asks for it."""
    reply = repair(asked, earlier)
    if not asked.get("stream"):
        return reply
    text = reply.body["choices"][0]["message"]["content"]
    about = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    parts = [
        {**about, "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]},
        {**about, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {**about, "choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}},
    ]
    events = "".join(f"data: {json.dumps(part)}\n\n" for part in parts) + "data: [DONE]\n\n"
    return Reply(body=events.encode(), headers={"Content-Type": "text/event-stream"})


@needs("openenv")
@pytest.mark.slow
def test_a_session_outlives_a_model_that_thinks_for_long(tmp_path: Path) -> None:
    """Longer than a server waits by default for the answer to its ping."""
    tasks = KataEnv().tasks("train", 1, 0)
    with running("kata", {}, tasks, max_steps=2, sessions=1, folder=tmp_path, python=where("openenv")) as url:
        environment = ServedEnvironment(url, "kata", "bubblewrap", tasks)
        environment.reset(tasks[0])
        time.sleep(45)
        assert "solution.py" in environment.step(fenced("ls")).content
        environment.close()


@needs("openenv", "verifiers")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_rollouts_of_verifiers_own_loop_are_held_to_the_same_checks(tmp_path: Path, tiny: Path) -> None:
    tasks = KataEnv().tasks("train", TASKS, 0)
    (tmp_path / "composer_served.py").write_text(PLUGIN)
    python, sessions = where("openenv"), 2 * SAMPLES * TASKS
    with (
        serving(streamed) as model,
        running("kata", {}, tasks, max_steps=6, sessions=sessions, folder=tmp_path, python=python) as url,
    ):
        settings = tmp_path / "eval.toml"
        words = {"out": tmp_path / "out", "url": url, "asked": tmp_path / "openenv.json", "model": model.url}
        settings.write_text(EVALUATION.format(samples=SAMPLES, **words))
        done = subprocess.run(
            [str(Path(where("verifiers")).parent / "vf-eval"), "@", str(settings)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "VF_KEY": "none", "UV_PYTHON": where("verifiers")},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    (traces,) = (tmp_path / "out").rglob("traces.jsonl")
    config = frameworks.Config(
        env={"name": "kata"},
        policy={"model": str(tiny), "max_tokens": 12},
        tasks=TASKS,
        samples=SAMPLES,
        max_steps=2,
        through="openenv",
        openenv_python=where("openenv"),
        traces=str(traces),
    )
    run = Run(runner.execute("frameworks", {}, config, root=tmp_path / "artifacts").path)
    ours, theirs = json.loads(run.read_file("comparison.json"))["sides"]
    assert [side["rollouts"] for side in (ours, theirs)] == [TASKS * SAMPLES] * 2
    verdicts = {check["name"]: check["verdict"] for check in theirs["checks"]}
    told = ("100 rollouts or more", "rollouts scored", "rollouts collected")
    assert {verdicts[name] for name in told} == {"ok"}, (verdicts, theirs)
    assert theirs["steps"] == 4 * TASKS * SAMPLES, "look, replace, test, submit"
