"""Small replicas: a linear model with data of its own each, in one process or in several."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_cli.__main__ import main as composer
from composer_stages.diloco.arrays import Fragments, shapes
from composer_stages.diloco.loop import OuterLoop
from composer_stages.diloco.rounds import ObjectStore
from composer_stages.diloco.settings import Diloco
from composer_stages.runs.bucket import Bucket, open_bucket
from support.fork_server import IMPORTED


class Replica:
    """A model of two layers, AdamW, and data that depend on the replica's number."""

    def __init__(self, number: int, width: int = 8) -> None:
        torch.manual_seed(7)  # all start alike
        self.model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
        self.random = torch.Generator().manual_seed(number)
        self.target = torch.randn(width, 3, generator=torch.Generator().manual_seed(99))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.02)

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def step(self) -> float:
        x = torch.randn(16, self.target.shape[0], generator=self.random)
        loss = (self.model(x) - x @ self.target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def bytes(self) -> bytes:
        return b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())

    def fragments(self, settings: Diloco) -> Fragments:
        return Fragments(shapes(self.parameters), settings.fragments)

    def in_bucket(self, bucket: Bucket, settings: Diloco, number: int, rounds: int, **more: Any) -> OuterLoop:
        store = ObjectStore(bucket, settings, number, fragments=self.fragments(settings), rounds=rounds, **more)
        return OuterLoop(self.parameters, settings, store, rounds)


def together(
    settings: Diloco, rounds: int, replicas: Sequence[Replica] | None = None, *, of: int | None = None
) -> list[OuterLoop]:
    """Rounds in memory, one replica's steps after the other's; `of`: rounds of the whole training."""
    replicas = replicas or [Replica(number) for number in range(settings.replicas)]
    memory = open_bucket("memory:///").store
    # Each with a bucket of its own over the same objects, so that each counts its own bytes.
    loops = [r.in_bucket(Bucket(memory, ""), settings, n, of or rounds) for n, r in enumerate(replicas)]
    for loop in loops:
        loop.start()
    for _ in range(rounds):
        for replica, loop in zip(replicas, loops, strict=True):
            for _ in range(settings.every):
                replica.step()
            loop.offer()
        for loop in loops:
            loop.collect()
    return loops


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([*IMPORTED, "support.replicas"])
"""Processes that start in no time, because torch is imported once and not once in each."""


def command(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
    """One `composer WORDS` in a process of its own; what it says goes to files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(variables)
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream.fileno())
    sys.argv = ["composer", *words]
    composer()


def main(url: str, number: int, rounds: int, script: dict[str, Any], settings: str) -> None:
    """One replica in a process of its own; writes the digest of its weights and the rounds that it took part in.

    script: `die_in`, a round after whose offer it kills itself; `hold`, an object to wait for before a round, by
    round; `say`, an object to write once it has started.
    """
    chosen, bucket = Diloco.model_validate_json(settings), open_bucket(url)
    replica = Replica(number)
    loop = replica.in_bucket(bucket, chosen, number, rounds)
    loop.start()
    if "say" in script:
        bucket.write(script["say"], b"")
    while not loop.finished:
        while bucket.read(script.get("hold", {}).get(loop.state.round, "run.json")) is None:
            time.sleep(0.05)
        one_round(replica, loop, chosen, script)
    took_part = [held.round for held in loop.history if held.took_part]
    assert replica.bytes() == b"".join(array.tobytes() for array in loop.state.weights.values())
    bucket.write(f"end/{number}", json.dumps([loop.state.digest, took_part]).encode())


def one_round(replica: Replica, loop: OuterLoop, chosen: Diloco, script: dict[str, Any]) -> None:
    """The steps of a round, and the round; where the script says so, death after the offer."""
    for _ in range(chosen.every - 1):
        replica.step()
        loop.after_step()
        if loop.finished:  # it has caught up with the end, whose weights another step would change
            return
    replica.step()
    if loop.state.round == script.get("die_in"):
        loop.offer()
        os.kill(os.getpid(), signal.SIGKILL)
    loop.after_step()
