"""A coroutine that begins at once."""

from __future__ import annotations

import asyncio

import pytest

from expertd.common.begun import begin


def test_the_first_step_is_taken_at_once_and_the_rest_when_it_may_go_on() -> None:
    seen: list[object] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        first: asyncio.Future[str] = loop.create_future()
        broken: asyncio.Future[str] = loop.create_future()
        ended = asyncio.Event()

        async def work() -> None:
            seen.append("begun")
            seen.append(await first)
            await asyncio.sleep(0)
            seen.append("slept")
            try:
                await broken
            except OSError as e:
                seen.append(str(e))
            await asyncio.sleep(0.001)
            seen.append("done")
            ended.set()

        begin(work())
        assert seen == ["begun"]
        first.set_result("first")
        assert seen == ["begun"]
        await asyncio.sleep(0)
        assert seen == ["begun", "first"]
        broken.set_exception(OSError("broken"))
        await asyncio.wait_for(ended.wait(), 20)

    asyncio.run(main())
    assert seen == ["begun", "first", "slept", "broken", "done"]


def test_what_it_raises_before_its_first_wait_is_the_callers() -> None:
    async def work() -> None:
        raise OSError("at once")

    async def main() -> None:
        with pytest.raises(OSError, match="at once"):
            begin(work())

    asyncio.run(main())


def test_what_it_raises_later_is_the_loops() -> None:
    told: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0)
        raise OSError("later")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, facts: told.append(str(facts["exception"])))
        begin(work())
        for _ in range(10):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert told == ["later"]
