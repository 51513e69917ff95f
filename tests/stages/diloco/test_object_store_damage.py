"""What is damaged in a bucket, or from other weights, is left out, made again, or refused."""

import re
from collections.abc import Callable

import pytest
from support.replicas import Replica
from support.rounds import held, offered, settings, started

from stages.diloco import object_store
from stages.diloco.transport import GlobalState
from stages.errors import InfrastructureError
from stages.runs.bucket import Bucket

pytest.importorskip("obstore", reason="the extra `diloco` is not installed")


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-1] + b"?"]
)
def test_a_damaged_offer_is_left_out_by_all(bucket: Bucket, damage: Callable[[bytes], bytes]):
    pairs = started(bucket, settings(), 2)
    for replica, loop in pairs:
        offered(replica, loop)
    (key,) = (key for key in bucket.keys("r/000000/d/") if object_store.number(key) == 1)
    bucket.write(key, damage(bucket.read(key) or b""))
    for _, loop in pairs:
        found = loop.collect()
        assert found.replicas == (0, 2) and found.unreadable == (1,)
    assert len({loop.state.digest for _, loop in pairs}) == 1
    held(pairs)
    assert pairs[1][1].history[-1].replicas == (0, 1, 2)


def test_a_damaged_mean_is_computed_again(bucket: Bucket):
    pairs = started(bucket, settings(), 2)
    for replica, loop in pairs:
        offered(replica, loop)
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
    for replica, loop in pairs:
        offered(replica, loop)
    for _, loop in pairs[:2]:
        assert loop.collect().replicas == (0, 1)
    with pytest.raises(InfrastructureError, match="round 0 are not those of the other replicas"):
        astray.collect()


def test_a_damaged_commit_is_refused(bucket: Bucket):
    pairs = started(bucket, settings(), 2)
    for replica, loop in pairs:
        offered(replica, loop)
    bucket.write("r/000000/commit.json", b'{"keys": [')
    with pytest.raises(InfrastructureError, match=re.escape("r/000000/commit.json is damaged")):
        pairs[0][1].collect()


def test_without_any_whole_offer_the_round_is_refused(bucket: Bucket):
    pairs = started(bucket, settings(), 2)
    for replica, loop in pairs:
        offered(replica, loop)
    assert pairs[0][1]._transport.poll_round(0)
    for key in bucket.keys("r/000000/d/"):
        bucket.write(key, b"x")
    with pytest.raises(InfrastructureError, match="none of the 3 offers of round 0 can be read"):
        pairs[0][1].collect()


def test_a_damaged_state_falls_back_to_the_one_before(bucket: Bucket):
    pairs = started(bucket, settings(2), 60)
    for _ in range(52):
        held(pairs)
    bucket.write("s/000050", (bucket.read("s/000050") or b"")[:-1])
    late = Replica(2)
    loop = late.in_bucket(bucket, settings(2), 2, 60)
    loop.start()
    assert loop.state.digest == pairs[0][1].state.digest


def test_without_any_whole_state_a_joiner_is_refused(bucket: Bucket):
    started(bucket, settings(2), 2)
    bucket.write("s/000000", b"torn")
    with pytest.raises(InfrastructureError, match="no whole state is left"):
        Replica(2).in_bucket(bucket, settings(2), 2, 2).start()
