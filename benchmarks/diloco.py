"""Replicas that meet every 20 steps beside synchronous training of as many tokens: kata's supervised fine-tuning.

    python benchmarks/diloco.py [--steps 400] [--global-batch 8] [--seed 11] [SPEC ...]
    python benchmarks/diloco.py --equivalence 8 --processes 2 --rate 2e-3 --steps 1600 --seed 21 \\
        synchronous 4:int8:0.9/0.5

A SPEC is `synchronous` or REPLICAS:CODEC:OUTER_RATE/MOMENTUM[:INNER_STEPS[:FRAGMENTS]], such as 4:int8:0.9/0.5.

All start from kata's novice and learn the student's transcripts, each seen once, with AdamW, whose rate rises for 40
steps and falls to a twentieth along a cosine. The synchronous run takes `--global-batch` transcripts a step; N replicas
take 1/N of them each, of their own data. The replicas take turns in this process, over the in-process transport, whose
bytes are those of a bucket (tests/stages/diloco/test_object_store.py). The loss is that of 256 transcripts that nobody
trained on, the mean of eight batches, whose spread gives its standard error; `beside_first` is the difference from the
first SPEC of the call, with the standard error of the batches' differences. The seed chooses the transcripts, those
held out too.

`--equivalence N` repeats the first SPEC and the others over N seeds, the first of which is `--seed`, and asks whether
the mean difference over seeds is smaller than MARGIN: two one-sided t tests at 5 % (Schuirmann, Journal of
Pharmacokinetics and Biopharmaceutics 1987), which is whether the 90 % interval over seeds lies within the margin. The
smallest margin that these seeds show is reported with it. MARGIN was fixed before they were run (docs/replicas.md).

Bytes: what one replica sends, measured; for a replica of a bucket that includes its share of the means. Data parallel
sends every gradient in float32: once a step through a server (S), or 2 (N - 1) / N times in a ring.
"""

import argparse
import copy
import math
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import orjson
import records
import torch
from scipy.stats import t

from stages.diloco.arrays import Fragments, shapes
from stages.diloco.loop import OuterLoop
from stages.diloco.rounds import ObjectStore
from stages.diloco.settings import Diloco
from stages.envs.kata import checkpoints, transcripts
from stages.envs.kata.checkpoints import encode
from stages.envs.kata.recipes import RECIPES
from stages.runs.bucket import Bucket, open_bucket
from stages.tiny_models import training

H = 20
HELD_OUT = 256
WARM_UP = 40
MARGIN = 0.002
"""Nats: half a per cent of what this training takes off the loss, from about .38 to .007."""
REGISTERED_SEED, REGISTRATION = 21, "cb03477"
"""First seed of the registered equivalence test, and the commit that fixed its margin."""
SPECS = ("synchronous", "4:float32:0.9/0.5", "4:int8:0.9/0.5", "4:int4:0.9/0.5", "2:int8:0.9/0.5", "8:int8:0.9/0.5")


def settings_of(spec):
    """What a SPEC says; None for the synchronous run."""
    if spec == "synchronous":
        return None
    replicas, codec, outer, *rest = spec.split(":")
    rate, momentum = outer.split("/")
    return Diloco(
        replicas=int(replicas),
        codec=codec,
        outer_learning_rate=float(rate),
        outer_momentum=float(momentum),
        inner_steps=int(rest[0]) if rest else H,
        fragments=int(rest[1]) if rest[1:] else 1,
    )


def decayed(steps):
    """The share of the rate at a step."""
    return lambda step: min(1, (step + 1) / WARM_UP) * (0.525 + 0.475 * math.cos(math.pi * step / steps))


def batch(examples):
    width = max(len(ids) for ids, _ in examples)
    return (
        torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in examples]),
        torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in examples]),
        torch.tensor([learned + [False] * (width - len(learned)) for _, learned in examples]),
    )


class Learner:
    """A model with AdamW and examples of its own."""

    def __init__(self, start, examples, size, rate, steps):
        self.model, self.examples, self.size = copy.deepcopy(start).train(), examples, size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.rate = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decayed(steps))

    def step(self, number):
        self.optimizer.zero_grad()
        training.loss(self.model, *batch(self.examples[number * self.size : (number + 1) * self.size])).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.rate.step()


def held_out_losses(model, examples):
    """Of each batch of 32."""
    model.eval()
    with torch.no_grad():
        return np.array([training.loss(model, *batch(examples[i : i + 32])).item() for i in range(0, HELD_OUT, 32)])


def mean(losses):
    """With its standard error."""
    return {"mean": float(losses.mean()), "se": float(losses.std(ddof=1) / math.sqrt(len(losses)))}


def synchronous(start, examples, size, steps, rate):
    learner = Learner(start, examples, size, rate, steps)
    for number in range(steps):
        learner.step(number)
    return learner.model, None


def apart(start, examples, size, steps, rate, settings):
    """The model, and the transports of all replicas."""
    own = size // settings.replicas
    learners = [
        Learner(start, [e for s in range(steps) for e in examples[s * size + n * own :][:own]], own, rate, steps)
        for n in range(settings.replicas)
    ]
    parameters = [dict(learner.model.named_parameters()) for learner in learners]
    fragments = Fragments(shapes(parameters[0]), settings.fragments)
    rounds, memory = steps // settings.every, open_bucket("memory:///").store
    # Each with a bucket of its own over the same objects, so that each counts its own bytes.
    places = [
        ObjectStore(Bucket(memory, ""), settings, n, fragments=fragments, rounds=rounds)
        for n in range(settings.replicas)
    ]
    loops = [OuterLoop(p, settings, place, rounds) for p, place in zip(parameters, places, strict=True)]
    for loop in loops:
        loop.start()
    for round_ in range(rounds):
        for learner, loop in zip(learners, loops, strict=True):
            for number in range(round_ * settings.every, (round_ + 1) * settings.every):
                learner.step(number)
            loop.offer()
        for loop in loops:
            loop.collect()
    return learners[0].model, places


def beside(what, found):
    """Claims on replicas beside synchronous training."""
    difference, error = found["beside_first"]["mean"], found["beside_first"]["se"]
    between = (difference - 1.96 * error, difference + 1.96 * error)
    claim = f"{what}: held-out loss less synchronous training's (interval over rows)"
    return [
        records.measured(claim, difference, between, unit="nats", n=HELD_OUT),
        records.measured(f"{what}: less sent than all gradients to a server, times", found["less_own"], n=1),
    ]


def equivalence(differences):
    """The mean over seeds, its 90 % interval by Student's t, and the smallest margin that the interval lies within."""
    d = np.asarray(differences)
    half = float(t.ppf(0.95, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d)))
    low, high = float(d.mean()) - half, float(d.mean()) + half
    return float(d.mean()), (low, high), max(abs(low), abs(high))


def losses_of_seed(asked, seed):
    """The held-out loss of each SPEC."""
    torch.set_num_threads(1)
    start, examples, held_out = prepared(asked, seed)
    found = []
    for spec in asked.specs:
        settings = settings_of(spec)
        work = (start, examples, asked.global_batch, asked.steps, asked.rate)
        model, _ = apart(*work, settings) if settings else synchronous(*work)
        found.append(float(held_out_losses(model, held_out).mean()))
        print(orjson.dumps({"seed": seed, "spec": spec, "loss": found[-1]}).decode(), flush=True)
    return found


def over_seeds(asked):
    """Ask for each SPEC after the first whether its loss is equivalent to the first's."""
    seeds = range(asked.seed, asked.seed + asked.equivalence)
    with ProcessPoolExecutor(asked.processes, multiprocessing.get_context("spawn")) as pool:
        losses = list(pool.map(partial(losses_of_seed, asked), seeds))
    found = dict(zip(asked.specs, zip(*losses, strict=True), strict=True))
    first = np.array(found[asked.specs[0]])
    for spec in asked.specs[1:]:
        settings = settings_of(spec)
        mean_, between, least = equivalence(np.array(found[spec]) - first)
        what = f"{settings.replicas} replicas in {settings.codec}, {asked.steps // settings.every} rounds, "
        what += f"{asked.equivalence} seeds from {asked.seed}"
        registration = REGISTRATION if asked.seed == REGISTERED_SEED else None
        print(orjson.dumps({"spec": spec, "mean": mean_, "interval": between, "least_margin": least}).decode())
        records.write(
            __file__,
            [
                records.measured(
                    f"{what}: held-out loss less synchronous training's (90 % interval over seeds)",
                    *(mean_, between),
                    n=asked.equivalence,
                    unit="nats",
                    registration=registration,
                ),
                records.measured(
                    f"{what}: smallest margin of equivalence that is shown",
                    least,
                    n=asked.equivalence,
                    unit="nats",
                    goal=f"<= {MARGIN}",
                    registration=registration,
                ),
            ],
        )


def prepared(asked, seed):
    """The model to start from, the transcripts to learn, and those held out."""
    start, tokenizer = training.load(checkpoints.ensure("novice", asked.models, lambda *said: None))
    knowledge, count = RECIPES["student"].knowledge, asked.steps * asked.global_batch
    examples = [
        encode(tokenizer, taught) for taught in transcripts.knowledge_transcripts(count + HELD_OUT, seed, knowledge)
    ]
    return start, examples[:-HELD_OUT], examples[-HELD_OUT:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("specs", nargs="*", default=SPECS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--equivalence", type=int, default=0, help="number of seeds")
    parser.add_argument("--processes", type=int, default=1, help="seeds of --equivalence that are trained at once")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "composer-models")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.equivalence:
        over_seeds(asked)
        return
    start, examples, held_out = prepared(asked, asked.seed)
    whole = 4 * sum(p.numel() for p in start.parameters())
    tokens = sum(len(ids) for ids, _ in examples)
    told = {"seed": asked.seed, "steps": asked.steps, "rate": asked.rate, "bytes": whole, "tokens": tokens}
    print(orjson.dumps({"start": float(held_out_losses(start, held_out).mean()), **told}).decode(), flush=True)
    first = None
    for spec in asked.specs:
        began, settings = time.process_time(), settings_of(spec)
        work = (start, examples, asked.global_batch, asked.steps, asked.rate)
        model, places = apart(*work, settings) if settings else synchronous(*work)
        losses = held_out_losses(model, held_out)
        first = losses if first is None else first
        found = {"spec": spec, "loss": mean(losses), "cpu_s": round(time.process_time() - began, 1)}
        found |= {} if losses is first else {"beside_first": mean(losses - first)}
        if settings and places:
            # the first replica computes every mean; in a bucket each does in turn, so they share what that sends
            sent = sum(place.sent for place in places) / len(places)
            ring = 2 * (settings.replicas - 1) / settings.replicas
            found |= {
                "sent": sent,
                "received": sum(place.received for place in places) / len(places),
                "less_own": asked.steps * whole / places[-1].sent,
                "less_with_means": asked.steps * whole / sent,
                "less_than_ring": asked.steps * whole * ring / sent,
            }
        print(orjson.dumps(found | {"seed": asked.seed}).decode(), flush=True)
        if settings and asked.specs[0] == "synchronous":
            what = f"{settings.replicas} replicas in {settings.codec}, {asked.steps // settings.every} rounds"
            what += f", outer step {settings.outer_learning_rate:g}/{settings.outer_momentum:g}"
            records.write(__file__, beside(f"{what}, rate {asked.rate:g}, seed {asked.seed}", found))


if __name__ == "__main__":
    main()
