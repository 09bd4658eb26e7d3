"""A streamed answer whose client leaves: its frames are closed at once, wherever it was cut."""

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest
from sse_starlette import ServerSentEvent

from gateway.wire.openai import streaming


@pytest.mark.parametrize("sent", [1, 2, 5])
async def test_frames_are_closed_when_the_client_leaves_while_one_is_being_sent(sent: int) -> None:
    closed, gone, messages = asyncio.Event(), asyncio.Event(), 0

    async def frames() -> AsyncGenerator[ServerSentEvent]:
        try:
            for number in range(1000):
                yield ServerSentEvent(data=str(number), sep="\n")
        finally:
            closed.set()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: MutableMapping[str, Any]) -> None:
        nonlocal messages
        messages += 1
        if messages == sent:
            gone.set()
            await asyncio.Event().wait()

    body = frames()
    response = streaming._Response(await anext(body), body, {})  # pyright: ignore[reportPrivateUsage]
    await asyncio.wait_for(response({"type": "http", "method": "POST"}, receive, send), 20)

    assert closed.is_set()
