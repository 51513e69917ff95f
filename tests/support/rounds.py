"""Rounds of replicas in one process that meet in a bucket."""

from stages.diloco.loop import OuterLoop
from stages.diloco.settings import Diloco
from stages.runs.bucket import Bucket
from support.replicas import Replica


def settings(replicas: int = 3, **more: object) -> Diloco:
    """Of replicas that meet every four steps."""
    return Diloco.model_validate({"replicas": replicas, "inner_steps": 4, "grace_s": 60.0, "timeout_s": 20.0, **more})


def offered(replica: Replica, loop: OuterLoop, steps: int = 4) -> None:
    """So many steps of a replica, then its offer."""
    for _ in range(steps):
        replica.step()
    loop.offer()


def started(bucket: Bucket, chosen: Diloco, rounds: int, **more: object) -> list[tuple[Replica, OuterLoop]]:
    """As many replicas as are chosen, each in the bucket and begun."""
    pairs = []
    for number in range(chosen.replicas):
        replica = Replica(number)
        pairs.append((replica, replica.in_bucket(bucket, chosen, number, rounds, **more)))
        pairs[-1][1].start()
    return pairs


def held(pairs: list[tuple[Replica, OuterLoop]], steps: int = 4) -> None:
    """One round, offers first."""
    for replica, loop in pairs:
        offered(replica, loop, steps)
    for _, loop in pairs:
        loop.collect()
