"""GRPO on kata with rollouts from vLLM beside the sampler in this process, and what max_staleness = 1 gains.

    python benchmarks/served_training.py [NAME ...] [--rounds 2] [--steps 4] [--wait 0.0]

Three trainings of the same settings, or those that are named, take turns: LoRA of rank 8, 4 prompts x 8 rollouts a
step. The start of the server is not counted, nor the first step of each training, for which nobody can have played
ahead. Trainer and server share this machine's cores, so that only what neither of them computes can be gained: `--wait`
lets every command of a rollout take so many seconds more, as a slow tool would. Needs vLLM: `./dev vllm`, or
COMPOSER_VLLM.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import records

from stages import train
from stages.envs.base import Observation
from stages.envs.kata.env import KataEnv
from stages.policy import server as model_server
from stages.policy.base import PolicyConfig
from stages.runs import runner
from stages.runs.run import Run

STUDENT = "kata:student-served"
SIDES = {"here": "in this process", "vllm": "vLLM", "ahead": "vLLM, one step ahead"}
WAIT = "COMPOSER_BENCHMARK_WAIT"


class WaitingKata(KataEnv):
    """Every command takes a while."""

    def step(self, text: str) -> Observation:
        """Wait, then as in kata."""
        time.sleep(float(os.environ[WAIT]))
        return super().step(text)


def steps_of(root: Path, policy: dict[str, Any], size: dict[str, Any], seed: int) -> list[dict[str, float]]:
    """The metrics of each step of one training."""
    config = train.Config(
        env={"name": "served_training:WaitingKata"},
        policy=policy,
        tasks=40,
        seed=seed,
        optimisation={"prompts_per_step": 4, "generations": 8, "learning_rate": 1e-3, "threads": 1, **size},
        adapter={"rank": 8},
    )
    run = Run(runner.execute("train", {}, config, root=root).path)
    lines = [json.loads(line) for line in (run.read_file("metrics.jsonl") or b"").splitlines()]
    return [line for line in lines if "step_time" in line]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", choices=[*SIDES, []], help="all of them, if none is named")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--wait", type=float, default=0.0)
    asked = parser.parse_args()
    os.environ[WAIT] = str(asked.wait)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if made := os.environ.get("COMPOSER_TEST_MODELS"):
            (root / "models").symlink_to(made)
        config = PolicyConfig(model=f"vllm:{STUDENT}")
        server = model_server.start(
            config, root / "vllm.log", cache=root / "models", rank=8, listener=lambda *a: None, check=lambda: None
        )
        served = {"model": f"vllm:{STUDENT}", "base_url": server.url}
        settings = {"here": ({"model": STUDENT}, {}), "vllm": (served, {}), "ahead": (served, {"max_staleness": 1})}
        sides = {SIDES[name]: settings[name] for name in asked.names or SIDES}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        rewards: dict[str, list[float]] = {name: [] for name in sides}
        try:
            steps_of(root, served, {"steps": 1}, seed=99)
            for seed in range(asked.rounds):
                for name, (policy, more) in sides.items():
                    lines = steps_of(root, policy, {"steps": asked.steps, **more}, seed)
                    seconds[name] += [line["step_time"] for line in lines[1:]]
                    rewards[name] += [line["reward"] for line in lines]
                    print(f"{name}: {[round(line['step_time'], 1) for line in lines]} s", flush=True)
        finally:
            server.stop()
    for name, times in seconds.items():
        mean = sum(rewards[name]) / len(rewards[name])
        print(f"{name:<22}{median(times):>7.2f} s a step, mean reward {mean:.3f}")
    if {"vLLM", "vLLM, one step ahead"} <= seconds.keys():
        gain, between = records.ratio(seconds["vLLM, one step ahead"], seconds["vLLM"])
        print(f"max_staleness = 1 takes {gain:.2f} of the time")
        waited = f", commands of {asked.wait:g} s" if asked.wait else ""
        claim = f"training on vLLM's rollouts of kata{waited}: time of a step with max_staleness 1 beside 0"
        records.write(__file__, [records.measured(claim, gain, between, n=len(seconds["vLLM"]))])


if __name__ == "__main__":
    main()
