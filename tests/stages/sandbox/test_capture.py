"""Head and tail of a stream, however it is cut into chunks."""

import random
import tracemalloc

from hypothesis import given, strategies as st

from composer_stages.sandbox.guest.capture import Capture

LIMIT = 256


@given(st.lists(st.integers(0, 300), max_size=8), st.randoms())
def test_long_streams_keep_both_ends(sizes: list[int], source: random.Random) -> None:
    capture, chunks = Capture(LIMIT), [source.randbytes(size) for size in sizes]
    for chunk in chunks:
        capture.add(chunk)
    stream, kept = b"".join(chunks), capture.kept()
    assert capture.total == len(stream) and len(kept) <= LIMIT
    if len(stream) <= LIMIT:
        assert kept == stream
    else:
        assert kept[:64] == stream[:64] and kept[-128:] == stream[-128:] and b"bytes left out" in kept


def test_notice_counts_missing_bytes() -> None:
    capture = Capture(LIMIT)
    capture.add(b"x" * 1000)
    kept = capture.kept()
    assert len(kept) <= LIMIT and kept.count(b"x") + int(kept.split(b"[... ")[1].split()[0]) == 1000


def test_a_long_stream_takes_little_memory() -> None:
    capture, chunk = Capture(LIMIT), b"x" * 65_536
    tracemalloc.start()
    for _ in range(100):
        capture.add(chunk)
    assert tracemalloc.get_traced_memory()[1] < 20 * len(chunk)
    tracemalloc.stop()
