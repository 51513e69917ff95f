"""The simulation of many workers (`benchmarks/scale.py`) beside real ones that sleep: local processes, and Ray.

python benchmarks/scale_engines.py [--faster 200] [--each 12]    # 1 to 16 workers of each engine of `--on`
"""

import argparse
import time

import records
from scale import Draws, simpy
from scale_inputs import MEASURED
from workers import WORKERS, nap, on_ray, processes


def dealt(seconds, workers, deal_s):
    """Seconds until workers are done with these jobs, which one process gives out in order, one at a time."""
    env, left = simpy.Environment(), iter(seconds)
    dealer = simpy.Resource(env)

    def worker():
        for took in left:
            with dealer.request() as turn:
                yield turn
                yield env.timeout(deal_s)
            yield env.timeout(took)

    for _ in range(workers):
        env.process(worker())
    env.run()
    return env.now


def played(draws):
    """Seconds of a rollout whose worker grades it, as in `composer collect`."""
    (_, seconds), lost = draws.rollout(), draws.random.random() < MEASURED["lost"]
    return seconds * draws.random.random() if lost else seconds + draws.grade()


def check(faster, each, seed=0):
    """Seconds in which real workers sleep through drawn rollouts, `each` a worker, beside the simulation's.

    What giving out a job costs comes from the processor time of the process that does it, in a run before with jobs of
    no length; so nothing is fitted to the clocks that are compared.
    """
    print("| engine | workers | jobs | simulated s | measured s | apart | ms of CPU to give out a job |")
    print("| --- " * 7 + "|")
    for name, start in (("processes", processes), ("ray", on_ray)):
        for workers in WORKERS:
            draws = Draws(seed)
            seconds = [played(draws) / faster for _ in range(each * workers)]
            with start(workers) as engine:
                list(engine.map(nap, [3.0] * workers))  # long enough that nobody takes two while others start
                began = time.process_time()
                list(engine.map(nap, [0.0] * 200))
                deal_s = (time.process_time() - began) / 200
                began = time.monotonic()
                list(engine.map(nap, seconds))
                measured = time.monotonic() - began
            said = dealt(seconds, workers, deal_s)
            cells = (f"{said:.2f}", f"{measured:.2f}", f"{measured / said - 1:+.1%}", f"{1000 * deal_s:.2f}")
            print("|", " | ".join((name, str(workers), str(len(seconds)), *cells)), "|", flush=True)
            what = f"{workers} real workers, {name}"
            claims = [
                records.measured(f"{what}: time beside the simulation's", measured / said, n=len(seconds)),
                records.measured(f"{what}: processor time to give out a job", 1000 * deal_s, unit="ms", n=200),
            ]
            records.write(__file__, claims)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--faster", type=float, default=200, help="how many times shorter the jobs sleep")
    parser.add_argument("--each", type=int, default=12, help="jobs for each worker")
    asked = parser.parse_args()
    check(asked.faster, asked.each)
