"""How many requests a server gets: more while it answers, fewer when it pushes back, none while it asks to wait."""

import asyncio
import time

from stages.policy.endpoint import START, HostLimit, host_limit


def test_the_number_grows_while_the_server_keeps_up_and_falls_when_it_pushes_back() -> None:
    async def play() -> tuple[float, float, float]:
        host = HostLimit()
        for _ in range(6):
            entered = int(host.limit)
            for _ in range(entered):
                await host.enter()
            for _ in range(entered):
                host.leave()
        grown = host.limit
        for _ in range(20):
            await host.enter()
        for _ in range(20):
            host.leave(pushed_back=True)
        fallen = host.limit
        await host.enter()
        host.leave()
        return grown, fallen, host.limit

    grown, fallen, idle = asyncio.run(play())
    assert grown > START
    assert fallen == 0.7 * grown, "twenty push-backs of one moment are one"
    assert idle == fallen, "an idle door tells nothing"


def test_a_capped_server_is_found_out() -> None:
    """A server that takes 40 at once and refuses more: few refusals, and the number settles near 40."""
    capacity, refused, peak = 40, 0, 0

    async def play() -> float:
        nonlocal refused, peak
        host, inside = HostLimit(), 0

        async def request() -> None:
            nonlocal inside, refused, peak
            while True:
                await host.enter()
                inside += 1
                peak = max(peak, inside)
                too_many = inside > capacity
                await asyncio.sleep(0.001 if too_many else 0.02)
                inside -= 1
                host.leave(pushed_back=too_many)
                if not too_many:
                    return
                refused += 1

        await asyncio.gather(*(request() for _ in range(3000)))
        return host.limit

    limit = asyncio.run(play())
    assert 15 <= limit <= 60
    assert peak > 30 and refused < 600


def test_a_wait_that_the_server_asks_for_holds_for_everyone() -> None:
    async def play() -> float:
        host = HostLimit()
        await host.enter()
        host.leave(pushed_back=True, wait_s=0.2)
        started = time.monotonic()
        await asyncio.gather(host.enter(), host.enter())
        return time.monotonic() - started

    assert 0.2 <= asyncio.run(play()) < 2.0


def test_one_door_a_server() -> None:
    assert host_limit("http://a:1/v1") is host_limit("http://a:1/v2") is not host_limit("http://a:2/v1")


def test_a_waiter_that_gives_up_does_not_take_a_turn_away() -> None:
    async def play() -> None:
        host = HostLimit()
        for _ in range(START):
            await host.enter()
        gone, waiting = asyncio.create_task(host.enter()), asyncio.create_task(host.enter())
        await asyncio.sleep(0)
        gone.cancel()
        host.leave()
        await asyncio.wait_for(waiting, 2.0)

    asyncio.run(play())
