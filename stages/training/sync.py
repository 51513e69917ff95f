"""The adapter under training and its copy on a server: written after every step, loaded there, and checked by a score.

A server that says it has loaded weights is not believed: the log-probs of a fixed text must agree on both sides. It
stands where TRL keeps its own vLLM client (`GRPOTrainer.vllm_generation`), which calls `sync_weights` before rollouts.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

from stages.errors import ComposerError
from stages.policy import adapters
from stages.policy.vllm import VllmPolicy
from stages.training.servers import Place
from stages.training.trees import Tree, score, token_log_probs

TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
"""Mean difference in nats that rounding explains: two programs in 16 bits, and in float32."""
CHECKED = 64
"""Tokens of the fixed text that are scored."""


class AdapterSync:
    """Keeps a server's copy of an adapter at the newest version, which is the number of optimiser steps done.

    base: the record that is written beside the adapter. text: token ids whose log-probs are compared. keep: older
    versions that are still sampled from. place: this process among several, each of which compares with its server.
    """

    def __init__(
        self,
        sampler: VllmPolicy,
        base: adapters.Base,
        folder: Path,
        text: list[int],
        *,
        tolerance: float | None = None,
        keep: int = 0,
        place: Place | None = None,
    ) -> None:
        self.sampler, self.differences, self.place = sampler, dict[int, float](), place or Place()
        self._base, self._folder, self._keep, self._tolerance = base, folder, keep, tolerance
        cut = max(len(text) - CHECKED, 1)
        self._tree = Tree(text[:cut], (text[cut:],))
        self._held: list[tuple[str, Path]] = []
        self._run = self.place.ranks.of_first(lambda: secrets.token_hex(4))
        """Several runs, or attempts at one, may share a server, where a name must never stand for two adapters."""
        self._trained: Callable[[], tuple[Any, int]] | None = None

    def follow(self, trained: Callable[[], tuple[Any, int]]) -> None:
        """From now on the adapter is that of this model, at this version."""
        self._trained = trained

    def sync_weights(self) -> None:
        """Write the adapter, load it under a new name and compare; `ComposerError` where a server has another."""
        if self._trained is None:
            raise RuntimeError("follow was not called")
        model, version = self._trained()
        folder, name = self._folder / f"version-{version:06d}", f"{self._run}-version-{version}"
        self.place.ranks.of_first(lambda: self._write(model, folder))
        self.place.in_turn(lambda: self.sampler.load(name, folder) if self.place.loads else None)
        self.sampler.take(name, version)
        self._held = [*(held for held in self._held if held[0] != name), (name, folder)]
        self.differences[version] = self._checked(model, version)
        self._forget(self._keep + 1)

    def _write(self, model: Any, folder: Path) -> None:
        rmtree(folder, ignore_errors=True)
        adapters.save(model, self._base, folder)

    def _checked(self, model: Any, version: int) -> float:
        """The largest of all processes' differences, if all of them are small enough."""
        own = self.place.in_turn(lambda: self._difference(model))
        allowed = self._tolerance or TOLERANCE.get(model.get_base_model().dtype, HALF_TOLERANCE)
        found = self.place.ranks.gather((own, self.sampler.url))
        for difference, url in found:
            if not difference <= allowed:
                raise ComposerError(
                    f"After step {version} the server at {url} samples from other weights than those under training: "
                    f"the log-probs of a fixed text differ by {difference:.3g} nats on average, and {allowed:g} is "
                    "allowed (optimisation.sync_tolerance). Restart the server on the model that is trained."
                )
        return max(difference for difference, _ in found)

    @torch.no_grad()
    def _difference(self, model: Any) -> float:
        """The mean difference in nats between this process and its server."""
        plain = model.get_base_model()
        was_training = plain.training
        plain.eval()
        own = token_log_probs(plain, score(plain, [self._tree])).cpu().tolist()
        plain.train(was_training)
        theirs = self.sampler.score(self._tree.prompt, self._tree.branches[0])
        return sum(abs(a - b) for a, b in zip(own, theirs, strict=True)) / len(own)

    def end(self) -> None:
        """Let a server that others go on with forget all that this training loaded."""
        with suppress(ComposerError):  # one that is broken has nothing to forget, and must not hide why
            self._forget(0)

    def _forget(self, left: int) -> None:
        """Let the server forget versions that nobody samples from any more."""
        while len(self._held) > left:
            name, folder = self._held.pop(0)
            if self.place.loads:
                self.sampler.unload(name)
            if self.place.ranks.first:
                rmtree(folder, ignore_errors=True)
