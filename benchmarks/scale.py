"""A thousand sampling workers, 64 graders, teachers and one trainer, simulated: who waits, and what a pair costs.

    python benchmarks/scale.py                    # the table, two simulated hours a row
    python benchmarks/scale.py --check            # 16 workers in real threads that sleep, beside the simulation

Needs simpy (the extra `bench`). Rollouts, their turns and pauses, grading times, losses and prices are drawn from what
was measured (`MEASURED`, each with its source); what was not is in `ASSUMED`. A worker plays a rollout, hands it to a
grader's queue (bounded, so that workers wait when graders are behind), and begins the next one. The states of a graded
rollout go to three teachers, each of which answers so many calls at once, through a process that has one core; states
with an accepted pair go to the trainer.
"""

import argparse
import threading
import time
from dataclasses import dataclass, field, replace

import numpy as np
import records
from peers import needed

needed("simpy")

import simpy
from scale_inputs import ASSUMED, MEASURED


@dataclass(frozen=True)
class Fleet:
    workers: int
    graders: int = 64
    in_flight: int = 1024  # calls that each teacher answers at once
    clients: int = 1  # processes that ask the teachers


@dataclass
class Tally:
    """Seconds at work, by whom, and what came of it."""

    busy: dict = field(
        default_factory=lambda: dict.fromkeys(("playing", "waiting", "grading", "asking", "client", "training"), 0.0)
    )
    rollouts: int = 0
    lost: int = 0
    states: int = 0
    asked: int = 0
    pairs: int = 0
    trained: int = 0


class Draws:
    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def rollout(self):
        """Turns, and seconds of all of them."""
        turns = int(self.random.choice(MEASURED["turns"]))
        return turns, float(self.latencies(turns))

    def latencies(self, count):
        return np.interp(self.random.random(count), *MEASURED["turn_s"]).sum()

    def grade(self):
        return float(self.random.choice(MEASURED["grade_s"]))


def simulate(fleet, hours=2.0, warm_up_h=0.5, seed=0, teachers=True):
    """A `Tally` of the hours after the warm-up."""
    env, draws, tally = simpy.Environment(), Draws(seed), Tally()
    grading, trainer = simpy.Store(env, capacity=2 * fleet.graders), simpy.Container(env)
    asking = [simpy.Resource(env, fleet.in_flight) for _ in range(ASSUMED["teachers"] if teachers else 0)]
    client = simpy.Resource(env, fleet.clients)
    begins, ends = warm_up_h * 3600, (warm_up_h + hours) * 3600

    def took(who, since):
        tally.busy[who] += max(0.0, min(env.now, ends) - max(since, begins))

    def count(**numbers):
        if env.now >= begins:
            for name, number in numbers.items():
                setattr(tally, name, getattr(tally, name) + number)

    def worker(first):
        yield env.timeout(first)
        while True:
            (turns, seconds), since = draws.rollout(), env.now
            if draws.random.random() < MEASURED["lost"]:
                yield env.timeout(seconds * draws.random.random())
                took("playing", since)
                count(lost=1)
                continue
            yield env.timeout(seconds)
            took("playing", since)
            since = env.now
            yield grading.put(turns)
            took("waiting", since)

    def grader():
        while True:
            turns = yield grading.get()
            since = env.now
            yield env.timeout(draws.grade())
            took("grading", since)
            count(rollouts=1, states=turns)
            if teachers:
                env.process(states(turns))

    def states(turns):
        yield simpy.AllOf(env, [env.process(teacher(pool, turns)) for pool in asking])
        count(asked=turns, pairs=(found := int(draws.random.binomial(turns, MEASURED["pairs_a_state"]))))
        if found:
            yield trainer.put(found)

    def teacher(pool, turns):
        """One rollout's states in one place of the pool, one after the other: the same work as one place each."""
        with client.request() as core:
            yield core
            since = env.now
            yield env.timeout(turns * MEASURED["client_cpu_s"])
            took("client", since)
        with pool.request() as place:
            yield place
            since = env.now
            yield env.timeout(float(draws.latencies(turns)))
            took("asking", since)

    def training():
        while True:
            yield trainer.get(ASSUMED["pairs_a_step"])
            since = env.now
            yield env.timeout(ASSUMED["step_s"] + ASSUMED["sync_s"])
            took("training", since)
            count(trained=ASSUMED["pairs_a_step"])

    for _ in range(fleet.workers):
        env.process(worker(draws.random.random() * 300))
    for _ in range(fleet.graders):
        env.process(grader())
    env.process(training())
    env.run(ends)
    return tally


def shares(fleet, tally, hours=2.0):
    """Who is at work how much of the time. What a process is in the middle of when the clock stops is not counted."""
    seconds = hours * 3600
    return {
        "playing": tally.busy["playing"] / seconds / fleet.workers,
        "waiting": tally.busy["waiting"] / seconds / fleet.workers,
        "graders": tally.busy["grading"] / seconds / fleet.graders,
        "teachers": tally.busy["asking"] / seconds / fleet.in_flight / ASSUMED["teachers"],
        "client": tally.busy["client"] / seconds / fleet.clients,
        "trainer": tally.busy["training"] / seconds,
    }


def cost(fleet, tally, hours=2.0):
    """USD an accepted pair: calls of the policy and of the teachers, and the machines."""
    played = tally.states * (1 + MEASURED["lost"] / 2)
    calls = (played + tally.asked * ASSUMED["teachers"]) * MEASURED["call_usd"]
    machines = (
        fleet.workers * ASSUMED["worker_usd_h"] + fleet.graders * ASSUMED["grader_usd_h"] + ASSUMED["trainer_usd_h"]
    )
    return calls / tally.pairs, machines * hours / tally.pairs


def table(fleets):
    settings, used = ("workers", "graders", "in flight", "clients"), ("playing", "waiting", "graders", "teachers")
    titles = (*settings, *used, "client", "trainer", "rollouts/h", "pairs/h", "USD a pair: calls, machines")
    print(f"| {' | '.join(titles)} |")
    print("| --- " * len(titles) + "|")
    for fleet in fleets:
        tally = simulate(fleet)
        shared = [f"{share:.0%}" for share in shares(fleet, tally).values()]
        made = [f"{tally.rollouts / 2:.0f}", f"{tally.pairs / 2:.0f}", "{:.2f}, {:.2f}".format(*cost(fleet, tally))]
        sizes = [str(size) for size in (fleet.workers, fleet.graders, fleet.in_flight, fleet.clients)]
        print(f"| {' | '.join([*sizes, *shared, *made])} |", flush=True)
        names = zip(("workers", "graders", "calls in flight a teacher", "processes that ask"), sizes, strict=True)
        what = "simulated: " + ", ".join(f"{size} {name}" for name, size in names)
        claims = [
            records.measured(f"{what}: rollouts an hour", tally.rollouts / 2, n=tally.rollouts),
            records.measured(f"{what}: price of a pair", sum(cost(fleet, tally)), unit="USD", n=tally.pairs),
        ]
        records.write(__file__, claims)


def check(workers, graders, seconds, faster):
    """Rollouts an hour that threads get done which sleep a `faster`th of the time, beside the simulation's."""
    from queue import Empty, Full, Queue

    queue, done, stop = Queue(2 * graders), [], threading.Event()

    def play(seed):
        draws = Draws(seed)
        time.sleep(draws.random.random() * 300 / faster)
        while not stop.is_set():
            turns, took = draws.rollout()
            if draws.random.random() < MEASURED["lost"]:
                time.sleep(took * draws.random.random() / faster)
                continue
            time.sleep(took / faster)
            while not stop.is_set():
                try:
                    queue.put(turns, timeout=0.5)
                    break
                except Full:
                    continue

    def grade(seed):
        draws = Draws(seed)
        while not stop.is_set():
            try:
                turns = queue.get(timeout=0.5)
            except Empty:
                continue
            time.sleep(draws.grade() / faster)
            done.append((time.monotonic(), turns))

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(workers)]
    threads += [threading.Thread(target=grade, args=(1000 + seed,)) for seed in range(graders)]
    began, warm = time.monotonic(), 600 / faster
    for thread in threads:
        thread.start()
    time.sleep(warm + seconds)
    stop.set()
    for thread in threads:
        thread.join()
    counted = [turns for at, turns in done if warm <= at - began <= warm + seconds]
    real = len(counted) / seconds * 3600 / faster
    runs = [simulate(Fleet(workers, graders), 2.0, 1 / 6, seed, teachers=False).rollouts / 2 for seed in range(5)]
    simulated = f"{np.mean(runs):.0f} simulated ({min(runs):.0f} to {max(runs):.0f})"
    print(f"{workers} workers, {graders} graders: {real:.0f} rollouts/h in threads, {simulated}", flush=True)
    claim = f"{workers} sleeping workers, {graders} graders: rollouts an hour beside the simulation's mean"
    records.write(__file__, [records.measured(claim, real / np.mean(runs), n=len(counted))])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args()
    if asked.check:
        for graders in (1, 2, 4):
            check(16, graders, asked.seconds, 100)
    else:
        base = Fleet(1000)
        table(
            [
                *(replace(base, workers=number) for number in (125, 250, 500, 1000)),
                replace(base, graders=128),
                replace(base, graders=128, clients=2),
                replace(base, graders=128, clients=4),
                replace(base, graders=128, clients=4, in_flight=2048),
            ]
        )
