"""GRPO with hints inside PRIME-RL: a reference KL at faulty turns, in addition to the rl loss of the same tokens.

    python -m composer_post_training.prime_rl rl @ rl.toml

PRIME-RL sums the losses rl, ce and ref_kl, each over the tokens that have a weight in its stream, each over its own
count. A custom loss replaces rl alone and never sees a token of ref_kl, so hints are an algorithm here: GRPO as it is,
and at a turn that went wrong the live policy scores the same tokens behind a hint. Their log-probs go to the node as
`reference_logprobs`, their weight as `loss_weights["ref_kl"]`; a node without a score gets neither. No rl weights are
written: their absence means weight 1 on every sampled token. The loss in the trainer stays PRIME-RL's own.

Read from PrimeIntellect-ai/prime-rl 559b447 src/prime_rl/orchestrator/{algo,trajectories.py,train_sink.py}, and from
PrimeIntellect-ai/verifiers a60a606 verifiers/v1/graph.py: a sampled node begins with the generation prompt, so what is
put before its tokens is between two messages.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_stages.envs import bash
from composer_stages.envs.base import Observation
from composer_stages.errors import BadInput, UsageError
from composer_stages.runs import store

PROGRAMS = ("rl", "orchestrator")
WEIGHT, RENDERER = "COMPOSER_HINT_WEIGHT", "COMPOSER_HINT_RENDERER"
"""Environment variables of the orchestrator, as PRIME-RL's algorithms take no settings of others."""
FIRST = {"role": "user", "content": "."}
SHIM = """#!{python}
import sys
sys.path[:0] = {path!r}
from composer_stages.integrations.prime_rl_hints import main
main(["orchestrator", *sys.argv[1:]])
"""


@dataclass(frozen=True)
class HintSettings:
    """weight: of the reference KL, a mean over the tokens of hinted turns. renderer: name of PRIME-RL's, of hints."""

    weight: float = 1.0
    renderer: str = "auto"

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "HintSettings":
        """Return the settings in environment variables; `UsageError` for a weight that is no positive number."""
        text = variables.get(WEIGHT, "1.0")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not 0.0 < weight < float("inf"):
            raise UsageError("integrations.hint-weight-not-positive", weight=WEIGHT, text=text)
        return cls(weight, variables.get(RENDERER, "auto"))


def hints(trace: Any) -> dict[int, str]:
    """Return the hint for each faulty turn of a verifiers trace, by the index of its sampled node.

    An environment names them in `trace.info["hints"]`, a list of {"turn": number of the sampled message, "hint": text};
    where it does not, shell errors are searched for in the messages that follow each turn.
    """
    sampled = [index for index, node in enumerate(trace.nodes) if node.sampled and any(node.mask)]
    if (rows := (trace.info or {}).get("hints")) is not None:
        return {sampled[row["turn"]]: str(row["hint"]) for row in rows if 0 <= row["turn"] < len(sampled)}
    hints_by_node: dict[int, str] = {}
    for node in trace.nodes:
        if node.parent in sampled and not node.sampled:
            content = node.message.content or ""
            text = content if isinstance(content, str) else "\n".join(getattr(part, "text", "") for part in content)
            # A trace has no exit code. Any but 0 will do: `faults` recognises these errors by their words.
            for fault in bash.find_faults([Observation(text, returncode=1)]):
                hints_by_node.setdefault(node.parent, f"Hint: {fault.advice}")
    return hints_by_node


def hint_ids(renderer: Any, hint: str) -> list[int]:
    """Return the token ids of a hint as a second user message; `UsageError` if it changes the ids of the first."""
    # The difference of two renderings: a template has no call for a message in the middle of a conversation.
    before = list(renderer.render_ids([FIRST], add_generation_prompt=False))
    both = list(renderer.render_ids([FIRST, {"role": "user", "content": hint}], add_generation_prompt=False))
    if both[: len(before)] != before:
        raise UsageError("integrations.renderer-rewrites-messages", renderer=RENDERER)
    return both[len(before) :]


def stamp(node: Any, logps: Sequence[float], weight: float) -> None:
    """Set a node's reference log-probs (`logps`: nats, one a token) and the weight of ref_kl at its sampled tokens."""
    node.reference_logprobs = [float(value) for value, sampled in zip(logps, node.mask, strict=True) if sampled]
    node.loss_weights = {**(node.loss_weights or {}), "ref_kl": [weight if sampled else 0.0 for sampled in node.mask]}


class HintedScores:
    """The part that `hinted` mixes into PRIME-RL's GRPOAlgorithm. `policy_pool` scores, as in upstream's opsd."""

    settings: HintSettings
    policy_pool: Any
    renderer: Any = None

    async def setup(self) -> None:
        """Build the renderer of hints, on the policy's tokenizer."""
        await super().setup()  # type: ignore[misc]  # GRPOAlgorithm's, which is mixed in
        from pydantic import TypeAdapter
        from renderers import RendererConfig
        from renderers.base import create_renderer, load_tokenizer

        config = TypeAdapter(RendererConfig).validate_python({"name": self.settings.renderer})
        self.renderer = create_renderer(load_tokenizer(self.policy_pool.model_name), config)

    async def score_episode(self, episode: Any) -> None:
        """Score the faulty turns of an episode behind their hints, concurrently."""
        await super().score_episode(episode)  # type: ignore[misc]
        turns = [turn for trace in episode.traces for turn in self._turns(trace)]
        scores = await asyncio.gather(*(self.policy_pool.score(ids) for _, ids in turns))
        for (node, ids), logps in zip(turns, scores, strict=True):
            if len(logps) != len(ids):
                raise BadInput("integrations.hint-beyond-context", num_logps=len(logps), num_ids=len(ids))
            stamp(node, logps[-len(node.token_ids) :], self.settings.weight)

    def _turns(self, trace: Any) -> Iterator[tuple[Any, list[int]]]:
        """Yield the node of each faulty turn once, with the ids to score: the context, the hint, the node's tokens."""
        if trace.has_error or not trace.agent.trainable:
            return
        # By id(): branches share nodes, and `pop` yields a shared one with its first branch only.
        by_node = {id(trace.nodes[index]): text for index, text in hints(trace).items()}
        for branch in trace.branches:
            context: list[int] = []
            for node in branch.nodes:
                if (hint := by_node.pop(id(node), None)) is not None:
                    yield node, [*context, *hint_ids(self.renderer, hint), *node.token_ids]
                context += node.token_ids


def hinted(grpo: type, settings: HintSettings) -> type:
    """Return a subclass of PRIME-RL's GRPO that adds hints."""
    return type("HintedGRPOAlgorithm", (HintedScores, grpo), {"settings": settings, "__doc__": HintedScores.__doc__})


def register() -> None:
    """Let `type = "grpo"` mean GRPO with hints in this process, the orchestrator's."""
    from prime_rl.orchestrator import algo

    algo.ALGORITHM_CLASSES["grpo"] = hinted(algo.GRPOAlgorithm, HintSettings.read(os.environ))


def main(arguments: Sequence[str]) -> None:
    """Run PRIME-RL's `rl` or `orchestrator` with the algorithm registered; their arguments follow the program's name.

    `rl` starts the orchestrator as a program of that name, so one that registers first is put before it in PATH.
    """
    if not arguments or arguments[0] not in PROGRAMS:
        raise UsageError("integrations.unknown-program", words=arguments, programs=PROGRAMS)
    program, *words = arguments
    sys.argv = [program, *words]
    if program == "orchestrator":
        register()
        from prime_rl.entrypoints.orchestrator import main as orchestrator

        orchestrator()
        return
    from prime_rl.entrypoints.rl import main as rl

    with tempfile.TemporaryDirectory() as folder:
        shim = Path(folder) / "orchestrator"
        program_text = SHIM.format(python=sys.executable, path=[str(Path(__file__).parents[2])])
        store.write_sealed(shim, program_text.encode())
        shim.chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
        rl()
