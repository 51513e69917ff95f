"""Runs of collect against a scripted server, in one process or dealt to workers."""

from pathlib import Path
from typing import Any

from stages import collect
from stages.runs import runner
from stages.runs.artifact import Run
from support.server import Reply, answer

ENV = {"name": "support.environments:NumberedEnv"}
PRICES = {"usd_per_mtok_in": 100.0, "usd_per_mtok_out": 1000.0}
"""Of a scripted server, which asks for no money itself."""


def letters(body: dict[str, Any], earlier: int) -> Reply:
    """The same answer to the same question, whoever asks."""
    del earlier
    return Reply(body=answer("ab"[: 1 + len(str(body["messages"])) % 2]))


def settings(url: str, **more: Any) -> collect.Config:
    """Of twelve rollouts of six tasks."""
    policy = {"model": "scripted", "base_url": url, "max_tokens": 8, "temperature": 0.0, **more.pop("policy", {})}
    return collect.Config(env=ENV, policy=policy, tasks=6, samples=2, **more)


def contents(run: Path) -> dict[str, str]:
    """The digests of all tables of a run."""
    return {name: out["content_sha256"] for name, out in Run(run).manifest.outputs.items()}


def played(root: Path, config: collect.Config, **options: Any) -> Path:
    """The folder of a run of collect."""
    return runner.execute("collect", {}, config, root=root, **options).path
