"""Rollouts of kata through a vLLM server beside the sampler in this process: seconds for the same 160 rollouts.

    python benchmarks/serving.py [ROUNDS]

The two take turns, so that a busy machine is busy for both. The start of the server is not counted; its first rollouts,
in which it compiles, are thrown away. Needs vLLM: `./dev vllm`, or COMPOSER_VLLM.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import records

from stages import collect
from stages.policy import server as model_server
from stages.policy.base import PolicyConfig
from stages.runs import runner
from stages.runs.kinds import STEP
from stages.runs.run import Run

STUDENT = "kata:student-served"


def seconds(root: Path, policy: dict[str, object], seed: int, tasks: int = 20) -> tuple[float, int]:
    """Of one collection, and the tokens that it sampled."""
    config = collect.Config(env={"name": "kata"}, policy=policy, tasks=tasks, samples=8, seed=seed)
    started = time.monotonic()
    run = Run(runner.execute("collect", {}, config, root=root).path)
    return time.monotonic() - started, sum(row["completion_tokens"] for row in run.rows(STEP))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if made := os.environ.get("COMPOSER_TEST_MODELS"):
            (root / "models").symlink_to(made)
        config = PolicyConfig(model=f"vllm:{STUDENT}")
        server = model_server.start(
            config, root / "vllm.log", cache=root / "models", rank=8, listener=lambda *a: None, check=lambda: None
        )
        served: dict[str, object] = {"model": f"vllm:{STUDENT}", "base_url": server.url}
        try:
            seconds(root, served, seed=99, tasks=2)
            times: dict[str, list[float]] = {"vLLM": [], "in this process": []}
            for seed in range(rounds):
                for name, policy in (("vLLM", served), ("in this process", {"model": STUDENT})):
                    took, tokens = seconds(root, policy, seed)
                    times[name].append(took)
                    print(f"{name}: {took:.1f} s, {tokens / took:.0f} tokens/s", flush=True)
        finally:
            server.stop()
    both = {name: median(values) for name, values in times.items()}
    print(f"160 rollouts: vLLM {both['vLLM']:.1f} s, in this process {both['in this process']:.1f} s, ", end="")
    shared, between = records.ratio(times["vLLM"], times["in this process"])
    print(f"ratio {shared:.2f}")
    claim = "160 rollouts of kata from vLLM: time beside the sampler in this process"
    records.write(__file__, [records.measured(claim, shared, between, n=rounds)])


if __name__ == "__main__":
    main()
