"""How PRIME-RL comes to know our algorithm: its own command line, and the configuration that is shipped.

Where prime-rl is installed, its own classes take both.
"""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support import prime_rl

from stages import integrations
from stages.errors import UsageError
from stages.integrations.prime_rl_hints import HintSettings, main

RECORDED = json.loads(Path(__file__).with_name("prime_rl_step.json").read_text())
TOML = Path(integrations.__file__).with_name("rl.toml")
PACKAGE = {
    "prime_rl/__init__.py": "",
    "prime_rl/orchestrator/__init__.py": "",
    "prime_rl/orchestrator/algo.py": "class GRPOAlgorithm: ...\nALGORITHM_CLASSES = {'grpo': GRPOAlgorithm}\n",
    "prime_rl/entrypoints/__init__.py": "",
    "prime_rl/entrypoints/orchestrator.py": (
        "import sys\nfrom prime_rl.orchestrator.algo import ALGORITHM_CLASSES\n"
        "def main(): print(sys.argv[1:], [c.__name__ for c in ALGORITHM_CLASSES['grpo'].__mro__],"
        " ALGORITHM_CLASSES['grpo'].settings)\n"
    ),
    "prime_rl/entrypoints/rl.py": (  # upstream starts it so: entrypoints/rl.py:284-303
        "import os, sys\nfrom subprocess import Popen\n"
        "def main():\n    print(sys.argv, flush=True)\n"
        "    env = {**os.environ, 'COMPOSER_HINT_WEIGHT': '0.25'}\n"
        "    sys.exit(Popen(['orchestrator', '@', 'orchestrator.json'], env=env).wait())\n"
    ),
}


def test_rl_starts_an_orchestrator_that_knows_the_algorithm(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "stages.integrations.prime_rl_hints", "rl", "@", "rl.toml"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rl, orchestrator = done.stdout.splitlines()
    assert rl == "['rl', '@', 'rl.toml']"
    assert orchestrator.startswith("['@', 'orchestrator.json'] ['HintedGRPOAlgorithm', 'HintedScores', 'GRPOAlgorithm'")
    assert "weight=0.25" in orchestrator


@pytest.mark.parametrize("words", [[], ["trainer"], ["--help"]])
def test_other_programs_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="start one of rl, orchestrator"):
        main(words)


def test_the_shipped_configuration_keeps_the_default_loss_and_names_what_we_read() -> None:
    table = tomllib.loads(TOML.read_text())
    assert table["trainer"]["loss"] == {"type": "default"}
    assert table["orchestrator"]["algo"] == {"type": "grpo"}
    assert HintSettings.read(table["orchestrator"]["env_vars"]) == HintSettings(0.5, "auto")


@pytest.mark.skipif(importlib.util.find_spec("prime_rl") is None, reason="prime-rl is not installed: it needs CUDA")
def test_prime_rl_itself_takes_configuration_and_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers.v1 as vf
    from prime_rl.configs.rl import RLConfig
    from prime_rl.orchestrator import algo
    from prime_rl.orchestrator.trajectories import trace_to_samples
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.types import AssistantMessage, ToolMessage, UserMessage

    from stages.integrations.prime_rl_hints import register

    config = RLConfig.model_validate(tomllib.loads(TOML.read_text())).orchestrator
    monkeypatch.setitem(algo.ALGORITHM_CLASSES, "grpo", algo.ALGORITHM_CLASSES["grpo"])
    register()
    pool = prime_rl.Pool()
    algorithm: Any = algo.build_algorithm(config.algo, pool)
    algorithm.renderer = prime_rl.Renderer()
    kinds = {"user": UserMessage, "assistant": AssistantMessage}
    traces = []
    for trace in prime_rl.group():
        nodes = [
            MessageNode(
                parent=node.parent,
                message=kinds[node.message.role](content=node.message.content)
                if node.message.role in kinds
                else ToolMessage(tool_call_id="t", content=node.message.content),
                **{name: getattr(node, name) for name in ("sampled", "token_ids", "mask", "logprobs")},
            )
            for node in trace.nodes
        ]
        task = vf.TraceTask(type="Task", data=vf.TaskData(idx=0, prompt=None))
        agent = vf.AgentInfo(config=vf.AgentConfig())
        traces.append(
            vf.Trace(task=task, agent=agent, nodes=nodes, rewards={"passed": {"score": trace.reward}}, ok=True)
        )
    episodes = [
        vf.Episode(env=vf.EnvInfo(id="e", name="e"), task=t.task, group=vf.GroupInfo(id="g"), traces=[t])
        for t in traces
    ]

    async def score() -> None:
        for episode in episodes:
            await algorithm.finalize_episode(episode)
        await algorithm.finalize_group(episodes)

    asyncio.run(score())
    samples = [sample for trace in traces for sample in trace_to_samples(trace, env_name="e")]
    expected = RECORDED["hinted"]["streams"]
    assert [s.ref_kl_weights for s in samples] == [[2 * w for w in expected["ref_kl_weights"][:12]], None]
    assert samples[0].ref_logprobs == expected["ref_logprobs"][:12]
    assert samples[0].advantages == expected["advantages"][:12]
    assert samples[1].ref_logprobs is None
