"""The log of the events of a response in the background: its size, and readers at any place."""

from __future__ import annotations

import asyncio
import json

import pytest

from metal_engine.server.errors import APIError
from metal_engine.server.generation.streaming import named_sse
from metal_engine.server.openai.event_log import EventLog


def event(number: int, text: str = "") -> bytes:
    return named_sse({"type": "t", "text": text, "sequence_number": number})


def numbers(data: bytes) -> list[int]:
    return [json.loads(one.split(b"data: ")[1])["sequence_number"] for one in data.split(b"\n\n") if one]


def test_a_log_is_bounded() -> None:
    async def read(log: EventLog, after: int) -> list[int]:
        return numbers(b"".join([data async for data in log.read(after)]))

    async def check() -> None:
        log = EventLog(max_characters=20_000)
        slow_reader = log.read()
        for i in range(0, 200, 2):
            log.append(event(i, "x" * 50) + event(i + 1))
            if not i:
                assert numbers(await anext(slow_reader)) == [0, 1]
        log.append(b"")
        log.close()
        assert log.num_characters <= 20_000 and log.num_readers == 1
        assert b"events_dropped" in await anext(slow_reader)
        assert [data async for data in slow_reader] == [] and log.num_readers == 0
        with pytest.raises(APIError) as info:
            log.check(5)
        assert (info.value.status_code, info.value.param) == (400, "starting_after")
        log.check(150)
        assert await read(log, 150) == list(range(151, 200))
        assert await read(log, 151) == list(range(152, 200))
        assert await read(log, 199) == await read(log, 10**20) == []

    asyncio.run(check())


def test_a_long_log_is_read_in_pieces() -> None:
    async def check() -> None:
        log = EventLog()
        for i in range(3000):
            log.append(event(i, "x" * 100))
        log.close()
        pieces = [data async for data in log.read()]
        assert numbers(b"".join(pieces)) == list(range(3000))
        assert len(pieces) > 3 and max(map(len, pieces)) < 100_000

    asyncio.run(check())
