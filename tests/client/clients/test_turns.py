"""Turns: never more at once than there are, none is lost, and who waits gets one."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from waiting import until_inside

from expertd_client.clients.turns import LoopTurns, Turns


def test_there_are_as_many_turns_as_were_made():
    turns = Turns(2)
    assert [turns.acquire(0.0), turns.acquire(0.0), turns.acquire(0.0)] == [True, True, False]
    turns.release()
    assert turns.acquire()


def test_who_waits_gets_the_turn_that_is_given_back():
    turns = Turns(1)
    turns.acquire()
    got = []
    thread = threading.Thread(target=lambda: got.append(turns.acquire(60.0)))
    thread.start()
    until_inside(thread, "acquire")
    assert got == []
    turns.release()
    thread.join(60.0)
    assert got == [True]
    start = time.monotonic()
    assert not turns.acquire(0.05)
    assert time.monotonic() - start >= 0.05


@pytest.mark.timeout(60)
def test_no_turn_is_lost_or_made_between_many_threads():
    turns, inside, most, lock = Turns(3), [0], [0], threading.Lock()

    def work():
        for n in range(300):
            if not turns.acquire(None if n % 3 else 30.0):
                raise AssertionError("a turn was lost")
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            if n % 7 == 0:
                time.sleep(0.0001)
            with lock:
                inside[0] -= 1
            turns.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50.0)
    assert not any(thread.is_alive() for thread in threads)
    assert most[0] == 3
    assert [turns.acquire(0.0) for _ in range(4)] == [True, True, True, False]


async def test_tasks_get_turns_in_the_order_of_coming():
    turns, order = LoopTurns(0), []

    async def work(n):
        await turns.wait()
        order.append(n)

    tasks = [asyncio.create_task(work(n)) for n in range(3)]
    await asyncio.sleep(0)
    for _ in range(3):
        turns.release()
    assert turns.free == 0, "they were given to those who wait"
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    turns.release()
    assert turns.free == 1


async def test_a_task_that_is_cancelled_leaves_its_turn_to_the_next():
    turns = LoopTurns(0)
    waits, given, last = (asyncio.create_task(turns.wait()) for _ in range(3))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    turns.release()
    given.cancel()  # it has been given the turn, and does not know it yet
    await asyncio.gather(given, return_exceptions=True)
    await asyncio.wait_for(last, 5.0)
    turns.release()
    assert turns.free == 1
