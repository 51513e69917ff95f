"""Rounds in a bucket: one winner, damage, stragglers, joiners, leavers."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import orjson
import pytest
from support.replicas import Replica, together

from composer_stages.diloco import loop as loops
from composer_stages.diloco.arrays import Fragments
from composer_stages.diloco.loop import OuterLoop, Stopped
from composer_stages.diloco.rounds import GlobalState, ObjectStore, agree, claim, number
from composer_stages.diloco.settings import Diloco
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.runs.bucket import Bucket, open_bucket


def settings(replicas: int = 3, **more: object) -> Diloco:
    """Of replicas that meet every four steps."""
    return Diloco.model_validate({"replicas": replicas, "inner_steps": 4, "grace_s": 60.0, "timeout_s": 20.0, **more})


Pair = tuple[Replica, OuterLoop]


def offered(*pairs: Pair, steps: int = 4) -> None:
    """So many steps of each replica, then its offer."""
    for replica, loop in pairs:
        for _ in range(steps):
            replica.step()
        loop.offer()


def joined(bucket: Bucket, chosen: Diloco, place: int, rounds: int, **more: object) -> Pair:
    """A replica that has begun in the bucket."""
    replica = Replica(place)
    loop = replica.in_bucket(bucket, chosen, place, rounds, **more)
    loop.start()
    return replica, loop


def started(bucket: Bucket, chosen: Diloco, rounds: int, **more: object) -> list[Pair]:
    """As many replicas as are chosen, each in the bucket and begun."""
    return [joined(bucket, chosen, place, rounds, **more) for place in range(chosen.replicas)]


def held(pairs: list[Pair], steps: int = 4) -> None:
    """One round, offers first."""
    offered(*pairs, steps=steps)
    for _, loop in pairs:
        loop.collect()


@pytest.mark.parametrize("more", [{}, {"codec": "int4", "fragments": 2}, {"codec": "float32"}])
def test_a_folder_gives_the_bytes_that_memory_gives(bucket: Bucket, more: dict[str, object]):
    chosen = settings(**more)
    pairs = started(bucket, chosen, 6)
    for _ in range(6):
        held(pairs, chosen.every)
    assert {loop.state.digest for _, loop in pairs} == {together(chosen, 6)[0].state.digest}
    assert {replica.bytes() for replica, _ in pairs} == {pairs[0][0].bytes()}


def test_sixteen_racing_writers_have_one_winner_in_each_of_60_rounds(bucket: Bucket):
    """Every writer believes that it is time to settle each round, and with others than the next writer does."""
    chosen, rounds = settings(16, quorum=1, grace_s=0.0), 60
    fragments = Fragments({"w": (4,)}, 1)
    places = [ObjectStore(Bucket(bucket.store, ""), chosen, n, fragments=fragments, rounds=rounds) for n in range(16)]
    gate = threading.Barrier(16)

    def race(place: ObjectStore) -> list[tuple[bool, bytes]]:
        seen = []
        for round_ in range(rounds):
            state = GlobalState(round_, {"w": np.full(4, round_, np.float32)}, {"w": np.zeros(4, np.float32)})
            gate.wait()
            place.publish(state, bytes([round_, place._replica] * 10)[:8])
            took_part = place.poll_round(round_)
            seen.append((bool(took_part), bucket.read(f"r/{round_:06d}/commit.json") or b""))
        return seen

    with ThreadPoolExecutor(16) as pool:
        seen = list(pool.map(race, places))
    for round_ in range(rounds):
        assert len({said for _, said in (one[round_] for one in seen)}) == 1
        assert sum(round_ in place._own for place in places) == 1
        (said,) = {said for _, said in (one[round_] for one in seen)}
        counted = {number(key) for key in orjson.loads(said)["keys"]}
        assert counted == {place for place, one in enumerate(seen) if one[round_][0]} and counted


def test_a_quorum_goes_on_after_the_grace_period_and_the_slow_one_catches_up(bucket: Bucket):
    now = [0.0]
    pairs = started(bucket, settings(grace_s=30.0), 4, clock=lambda: now[0])
    held(pairs)
    (slow, behind), others = pairs[2], pairs[:2]
    for _ in range(2):
        offered(*others)
        assert others[0][1]._store.poll_round(others[0][1].state.round) in (None, True)
        now[0] += 31
        for _, loop in others:
            assert loop.collect().replicas == (0, 1)
    offered((slow, behind))
    assert not behind.collect().took_part, "its steps are from a round that is over"
    assert behind.state.digest == others[0][1].state.digest and behind.state.round == 3
    assert slow.bytes() == others[0][0].bytes()
    held(pairs)
    assert pairs[0][1].history[-1].replicas == (0, 1, 2), "back in the next round, without waiting for the grace period"
    assert {loop.state.digest for _, loop in pairs} == {behind.state.digest}


def test_a_round_does_not_wait_for_a_replica_that_left(bucket: Bucket):
    """The grace period is waited once, for the round in which it is missed first."""
    now = [0.0]
    pairs = started(bucket, settings(), 5, clock=lambda: now[0])
    held(pairs)
    offered(*pairs[:2])
    assert pairs[0][1]._store.poll_round(1) is None
    now[0] += 61
    for _, loop in pairs[:2]:
        loop.collect()
    held(pairs[:2])
    held(pairs[:2])
    assert pairs[0][1].history[-1].replicas == (0, 1)


def test_a_round_waits_for_a_replica_that_announced_itself(bucket: Bucket):
    pairs = started(bucket, settings(2), 4)
    held(pairs)
    third, new = joined(bucket, settings(2), 2, 4)
    assert new.state.round == 1 and third.bytes() == pairs[0][0].bytes()
    offered(*pairs)
    assert pairs[0][1]._store.poll_round(1) is None
    offered((third, new))
    for loop in (new, pairs[0][1], pairs[1][1]):
        assert loop.collect().replicas == (0, 1, 2)


def test_a_replica_that_joins_after_the_last_round_loads_the_result(bucket: Bucket):
    pairs = started(bucket, settings(2), 3)
    for _ in range(3):
        held(pairs)
    late, loop = joined(bucket, settings(2), 5, 3)
    assert loop.finished and late.bytes() == pairs[0][0].bytes()


def test_another_replica_computes_the_mean_of_a_killed_one(bucket: Bucket):
    """The winner dies between settling the round and its mean."""
    now = [0.0]
    pairs = started(bucket, settings(), 3, clock=lambda: now[0])
    offered(*pairs)
    assert pairs[0][1]._store.poll_round(0)  # and is never heard of again
    place = pairs[1][1]._store
    assert place.reduce(0) is None and bucket.read("r/000000/mean") is None
    now[0] += 61
    for _, loop in pairs[1:]:
        assert loop.collect().replicas == (0, 1, 2)
    assert pairs[1][1].state.digest == pairs[2][1].state.digest == together(settings(), 1)[0].state.digest


def test_too_few_replicas_give_up_in_time(bucket: Bucket):
    replica, loop = joined(bucket, settings(timeout_s=0.05), 0, 2)
    offered((replica, loop))
    with pytest.raises(InfrastructureError, match="Fewer than 2 replicas took part in round 0 within"):
        loop.collect()


def test_a_stopped_wait_is_resumed(bucket: Bucket):
    chosen, first = settings(2), Replica(0)
    place = ObjectStore(bucket, chosen, 0, fragments=first.fragments(chosen), rounds=1)
    loop = OuterLoop(first.parameters, chosen, place, 1, stop=lambda: True)
    loop.start()
    for _ in range(3):
        first.step()
        assert loop.after_step() is None
    first.step()
    with pytest.raises(Stopped):
        loop.after_step()
    at, residual = loop.saved()
    assert at == {"round": 0, "steps": 4}

    second, other = joined(bucket, chosen, 1, 1)
    offered((second, other))
    other.collect()
    resumed = first.in_bucket(bucket, chosen, 0, 1)
    resumed.start(at, residual)
    assert resumed.finished and first.bytes() == second.bytes()
    assert resumed.state.digest == together(chosen, 1)[0].state.digest


def test_old_rounds_are_deleted_and_a_joiner_needs_them_no_more(bucket: Bucket):
    pairs = started(bucket, settings(2), 60)
    for _ in range(57):
        held(pairs)
    assert bucket.keys("s/") == ["s/000025", "s/000050"]
    rounds = {key[2:8] for key in bucket.keys("r/") if key.endswith("/mean")}
    assert min(rounds) == "000025"
    assert {key[2:8] for key in bucket.keys("r/") if "/d/" in key} == {"000055", "000056"}
    _, loop = joined(bucket, settings(2), 2, 60)
    assert loop.state.digest == pairs[0][1].state.digest and loop.state.round == 57
    assert {name: array.tobytes() for name, array in loop.state.momentum.items()} == {
        name: array.tobytes() for name, array in pairs[0][1].state.momentum.items()
    }


def test_a_replica_far_behind_loads_the_newest_state(bucket: Bucket):
    chosen = settings(3, quorum=1, grace_s=0.0)
    pairs = started(bucket, chosen, 80)
    for _ in range(76):
        held(pairs[:1])
    slow, behind = pairs[2]
    offered((slow, behind))
    behind.collect()
    assert behind.state.digest == pairs[0][1].state.digest and slow.bytes() == pairs[0][0].bytes()


def test_a_replica_polls_for_settled_rounds_between_steps(bucket: Bucket):
    chosen = settings(3, quorum=1, grace_s=0.0)
    pairs = started(bucket, chosen, 4)
    held(pairs[:1])
    slow, behind = pairs[2]
    behind._looked -= loops.LOOK_S
    slow.step()
    found = behind.after_step()
    assert found is not None and not found.took_part and slow.bytes() == pairs[0][0].bytes()


def test_numbers_are_given_once_and_kept(bucket: Bucket):
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda owner: claim(bucket, owner), "abcdefgh"))
    assert sorted(numbers) == list(range(8))
    assert claim(bucket, "c") == numbers[2]
    assert claim(bucket, "i", chosen=9) == claim(bucket, "i", chosen=9) == 9
    with pytest.raises(UsageError) as refused:
        claim(bucket, "j", chosen=9)
    assert refused.value.values["key"] == "n/0009"
    assert [claim(bucket, owner) for owner in "jk"] == [8, 10]


def test_replicas_of_other_settings_are_refused(bucket: Bucket):
    agree(bucket, {"settings": {"inner_steps": 20, "codec": "int8"}})
    agree(bucket, {"settings": {"inner_steps": 20, "codec": "int8"}})
    with pytest.raises(UsageError, match=r"settings\.inner_steps is 20 there and 10 here"):
        agree(bucket, {"settings": {"inner_steps": 10, "codec": "int8"}})
    bucket.write("run.json", b'{"settings": {')
    with pytest.raises(InfrastructureError, match=r"run\.json is damaged"):
        agree(bucket, {"settings": {"inner_steps": 20, "codec": "int8"}})


def test_files_of_other_programs_are_left_alone(bucket: Bucket):
    foreign = ["s/.DS_Store", "s/000000 (conflicted copy)", "r/000000/.nfs01", "r/000000/a/._0000", "r/.DS_Store"]
    for key in foreign:
        bucket.write(key, b"x")
    pairs = started(bucket, settings(2), 60)
    for _ in range(27):
        held(pairs)
    assert pairs[0][0].bytes() == pairs[1][0].bytes() and {*foreign} < {*bucket.keys("s/"), *bucket.keys("r/")}


@pytest.mark.parametrize("url", ["bucket/run", "ftp://bucket/run", "file://relative", "az://container/run"])
def test_malformed_addresses_are_refused(url: str):
    with pytest.raises(UsageError, match=r"not understood|cannot be opened"):
        open_bucket(url)


def test_a_store_that_fails_is_named(tmp_path: Path):
    bucket = open_bucket(f"file://{tmp_path}/run")
    (tmp_path / "run" / "r").write_text("a file where a folder belongs")
    with pytest.raises(InfrastructureError, match="failed at writing r/x"):
        bucket.write("r/x", b"1")


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-1] + b"?"]
)
def test_a_damaged_offer_is_left_out_by_all(bucket: Bucket, damage: Callable[[bytes], bytes]):
    pairs = started(bucket, settings(), 2)
    offered(*pairs)
    (key,) = (key for key in bucket.keys("r/000000/d/") if number(key) == 1)
    bucket.write(key, damage(bucket.read(key) or b""))
    for _, loop in pairs:
        found = loop.collect()
        assert found.replicas == (0, 2) and found.unreadable == (1,)
    assert len({loop.state.digest for _, loop in pairs}) == 1
    held(pairs)
    assert pairs[1][1].history[-1].replicas == (0, 1, 2)


def test_a_damaged_mean_is_computed_again(bucket: Bucket):
    pairs = started(bucket, settings(), 2)
    offered(*pairs)
    pairs[0][1].collect()
    whole = bucket.read("r/000000/mean") or b""
    bucket.write("r/000000/mean", whole[:50])
    for _, loop in pairs[1:]:
        loop.collect()
    assert bucket.read("r/000000/mean") == whole
    assert len({loop.state.digest for _, loop in pairs}) == 1


def test_an_offer_from_other_weights_does_not_count(bucket: Bucket):
    pairs = started(bucket, settings(quorum=2, grace_s=0.0), 2)
    astray = pairs[2][1]
    name = next(iter(astray.state.weights))
    other = {**astray.state.weights, name: astray.state.weights[name] + 1}
    astray.state = GlobalState(0, other, astray.state.momentum)
    offered(*pairs)
    for _, loop in pairs[:2]:
        assert loop.collect().replicas == (0, 1)
    with pytest.raises(InfrastructureError, match="round 0 are not those of the other replicas"):
        astray.collect()


def test_a_damaged_commit_is_refused(bucket: Bucket):
    pairs = started(bucket, settings(), 2)
    offered(*pairs)
    bucket.write("r/000000/commit.json", b'{"keys": [')
    with pytest.raises(InfrastructureError, match=re.escape("r/000000/commit.json is damaged")):
        pairs[0][1].collect()


def test_without_any_whole_offer_the_round_is_refused(bucket: Bucket):
    pairs = started(bucket, settings(), 2)
    offered(*pairs)
    assert pairs[0][1]._store.poll_round(0)
    for key in bucket.keys("r/000000/d/"):
        bucket.write(key, b"x")
    with pytest.raises(InfrastructureError, match="none of the 3 offers of round 0 can be read"):
        pairs[0][1].collect()


def test_a_damaged_state_falls_back_to_the_one_before(bucket: Bucket):
    pairs = started(bucket, settings(2), 60)
    for _ in range(52):
        held(pairs)
    bucket.write("s/000050", (bucket.read("s/000050") or b"")[:-1])
    _, loop = joined(bucket, settings(2), 2, 60)
    assert loop.state.digest == pairs[0][1].state.digest


def test_without_any_whole_state_a_joiner_is_refused(bucket: Bucket):
    started(bucket, settings(2), 2)
    bucket.write("s/000000", b"torn")
    with pytest.raises(InfrastructureError, match="no complete state is left"):
        joined(bucket, settings(2), 2, 2)
