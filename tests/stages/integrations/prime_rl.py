"""PRIME-RL without PRIME-RL: verifiers' graph as its algorithms see it, a scripted pool, and upstream's step.

`upstream_step` runs upstream's own trace_to_samples, routing, packing and losses, taken out of a clone.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from parity.drift import Clone, functions

from composer_stages.integrations.prime_rl_hints import HintSettings, hinted


@dataclass
class Node:
    """verifiers/v1/graph.py MessageNode at a60a606, what algorithms read and write of it."""

    parent: int | None
    message: Any
    token_ids: list[int]
    mask: list[bool]
    sampled: bool = False
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] | None = None
    reference_logprobs: list[float] | None = None
    loss_weights: dict[str, list[float]] | None = None


@dataclass
class Branch:
    """verifiers/v1/trace.py Branch."""

    nodes: list[Node]

    @property
    def token_ids(self) -> list[int]:
        return [token for node in self.nodes for token in node.token_ids]

    def spread(self, name: str) -> list[float]:
        out: list[float] = []
        for node in self.nodes:
            values = iter(getattr(node, name) or [])
            out += [next(values, 0.0) if own else 0.0 for own in node.mask]
        return out

    @property
    def logprobs(self) -> list[float]:
        return self.spread("logprobs")

    @property
    def advantages(self) -> list[float] | None:
        return self.spread("advantages") if any(node.advantages is not None for node in self.nodes) else None

    @property
    def reference_logprobs(self) -> list[float] | None:
        scored = any(node.reference_logprobs is not None for node in self.nodes)
        return self.spread("reference_logprobs") if scored else None

    multi_modal_data = routed_experts = None


@dataclass
class Trace:
    """verifiers/v1/trace.py Trace; its branches are the paths to its leaves."""

    nodes: list[Node]
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    has_error: bool = False
    agent: Any = field(default_factory=lambda: SimpleNamespace(trainable=True))
    id: str = "trace"

    @property
    def branches(self) -> list[Branch]:
        parents = {node.parent for node in self.nodes}
        return [Branch(self._path(i)) for i in range(len(self.nodes)) if i not in parents]

    def _path(self, index: int | None) -> list[Node]:
        return [] if index is None else [*self._path(self.nodes[index].parent), self.nodes[index]]


class Pool:
    """The live policy: a log-prob that depends on a token, its place and all before it; keeps what was asked."""

    model_name = "policy"

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def score(self, ids: list[int]) -> list[float]:
        self.asked.append(ids)
        return [0.0, *(-((7 * ids[i] + sum(ids[:i])) % 97 + 1) / 40 for i in range(1, len(ids)))]


class Renderer:
    """Token ids of messages: 900 + role, a token a word, 999."""

    def render_ids(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> list[int]:
        return [t for m in messages for t in (900, *(len(word) + 500 for word in m["content"].split()), 999)]


class Grpo:
    """PRIME-RL's GRPOAlgorithm as far as another class builds on it: reward minus the group's mean, to every token."""

    def __init__(self, config: Any, policy_pool: Any) -> None:
        self.policy_pool = policy_pool

    async def setup(self) -> None: ...

    async def score_episode(self, episode: Any) -> None: ...

    async def score_group(self, episodes: list[Any]) -> None:
        traces = [trace for episode in episodes for trace in episode.traces]
        mean = sum(trace.reward for trace in traces) / len(traces)
        for trace in traces:
            for node in trace.nodes:
                if any(node.mask):
                    node.advantages = [trace.reward - mean] * sum(node.mask)


def said(role: str, content: str) -> Any:
    return SimpleNamespace(role=role, content=content)


def conversation(start: int, *, observed: str, reward: float, turns: int = 2) -> Trace:
    """A prompt, and turns of one token of generation prompt and some sampled ones, with observations between."""
    nodes = [Node(None, said("user", "fix it"), [start, start + 1, start + 2], [False] * 3)]
    for turn in range(turns):
        ids = [start + 10 * (turn + 1) + i for i in range(4 - turn)]
        own = [False] + [True] * (len(ids) - 1)
        logps = [-(0.2 + 0.13 * i + 0.07 * turn) for i in range(len(ids) - 1)]
        nodes.append(Node(len(nodes) - 1, said("assistant", "run"), ids, own, sampled=True, logprobs=logps))
        if turn + 1 < turns:
            nodes.append(Node(len(nodes) - 1, said("tool", observed), [start + 70, start + 71], [False] * 2))
    return Trace(nodes, reward)


def group() -> list[Trace]:
    """Two rollouts of a group: one whose first turn called an unknown command and which passed, one without errors."""
    return [
        conversation(100, observed="bash: pyest: command not found", reward=1.0),
        conversation(200, observed="2 passed", reward=0.0),
    ]


def scored(traces: list[Trace], weight: float = 1.0) -> Pool:
    """The traces through GRPO with hints, as an orchestrator would."""
    pool = Pool()
    algorithm: Any = hinted(Grpo, HintSettings(weight))(None, pool)
    algorithm.renderer = Renderer()
    episodes = [SimpleNamespace(traces=[trace]) for trace in traces]

    async def run() -> None:
        for episode in episodes:
            await algorithm.score_episode(episode)
        await algorithm.score_group(episodes)

    asyncio.run(run())
    return pool


def trainer_logprobs(inference: list[float]) -> list[float]:
    """The log-probs of a policy that has moved on a little."""
    return [value + 0.05 * ((i % 5) - 2) - 0.01 for i, value in enumerate(inference)]


STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights", "advantages", "ref_logprobs")
SAMPLE = dict.fromkeys((*STREAMS, "mm_kwargs", "routed_experts", "mm_token_type_ids"))


def record(**values: Any) -> Any:
    """PRIME-RL's TrainingSample or MicroBatch."""
    return SimpleNamespace(**{**SAMPLE, **values})


def upstream_step(clone: Clone, traces: list[Trace], beside: Callable[[Any], list[Any]] = lambda routing: []) -> Any:
    """Loss, gradient and streams of one step over GRPO's traces packed with other samples, by upstream's functions."""
    packages = "src/prime_rl"
    records = {"TrainingSample": record, "MicroBatch": record}
    given = {**records, "get_logger": lambda: SimpleNamespace(warning=print)}
    take = partial(_take, clone, packages)
    to_samples = take("orchestrator/trajectories.py", given)["trace_to_samples"]
    prune = take("orchestrator/train_sink.py")["_prune_zero_advantages"]
    stamp = take("orchestrator/algo/routing.py")["stamp_loss_routing"]
    batch = take("trainer/batch.py", records)
    loss = take("trainer/rl/loss.py")
    samples = []
    for trace in traces:
        for sample in to_samples(trace, env_name="shell"):
            stamp(sample, "rl")
            samples += [sample] if prune(sample) else []
    samples += beside(stamp)
    for sample in samples:
        sample.temperatures = [1.0] * len(sample.token_ids)
    prepared = [batch["prepare_sample"](sample, 512) for sample in samples]
    packed = batch["_materialize_bin"](batch["_MicroBatchBin"](prepared, sum(len(p.input_ids) for p in prepared)))
    return packed, _trainer_step(loss, packed)


def _take(clone: Clone, package: str, file: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    source = clone.read(f"{package}/{file}")
    assert source is not None, f"the clone has no {file}"
    return functions(source, given or {})


def _trainer_step(loss: Any, packed: Any) -> dict[str, Any]:
    """As trainer/rl/train.py:301-390: global counts as scales, sequences cut at `sequence_lengths`."""
    sizes = packed.sequence_lengths

    def cut(values: Any, dtype: Any = torch.float64) -> Any:
        return None if values is None else list(torch.tensor(values, dtype=dtype).split(sizes))

    trainer = torch.tensor(trainer_logprobs(packed.inference_logprobs), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor(packed.loss_mask)
    members = mask if packed.rl_weights is None else mask & (torch.tensor(packed.rl_weights) != 0)
    counts = {name: sum(w != 0 for w in getattr(packed, f"{name}_weights") or []) for name in ("ce", "ref_kl")}
    config = SimpleNamespace(dppo_mask_low=0.2, dppo_mask_high=0.2, adv_tau=1.0, kl_tau=1e-3)
    total, _ = loss["compute_loss"](
        list(trainer.split(sizes)),
        cut(packed.inference_logprobs),
        cut(packed.ref_logprobs),
        cut(packed.advantages),
        cut(packed.loss_mask, torch.bool),
        cut(packed.rl_weights),
        cut(packed.ce_weights),
        cut(packed.ref_kl_weights),
        lambda inputs: loss["default_loss_fn"](inputs, config),
        max(int(members.sum()), 1),
        max(counts["ce"], 1),
        max(counts["ref_kl"], 1),
    )
    (gradient,) = torch.autograd.grad(total, trainer)
    return {"loss": total.item(), "gradient": gradient.tolist()}
