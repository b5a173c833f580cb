"""Reading asynchronous streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from headway import RequestOutput


async def read(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


def plain(output: RequestOutput) -> list[tuple[int, str, list[int], str | None]]:
    """Completions without their log-probabilities, whose last bits depend on the batch."""
    return [(each.index, each.text, each.token_ids, each.finish_reason) for each in output.outputs]
