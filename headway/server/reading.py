"""One prompt of a request from its first token to its last, and what is counted of it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from headway.outputs import RequestOutput
from headway.server.metrics import Metrics
from headway.server.service import Ticket
from headway.server.shapes import Shape, check_ended
from headway.streams import RequestStream


class PromptReader:
    """Reads the stream of one prompt."""

    def __init__(self, stream: RequestStream, number: int, shape: Shape, ticket: Ticket, metrics: Metrics) -> None:
        """number: of the prompt in its request."""
        self._stream, self._shape, self._ticket, self._metrics = stream, shape, ticket, metrics
        self._n = shape.asked.n or 1
        self._first = number * self._n
        """Index of its first choice."""
        self._reasons: dict[int, str] = {}
        self.num_written = 0
        """Tokens of all its completions so far."""

    @property
    def output(self) -> RequestOutput:
        """All so far."""
        return self._stream.state.output()

    async def whole(self) -> RequestOutput | None:
        """The finished output; None: the request was ended before.

        :raises ApiError: a completion has failed.
        """
        async for last in self._stream:
            if last.finished:
                break
        else:
            return None
        self._ticket.begun()
        for new in last.outputs:
            check_ended(new, self._shape.is_structured)
            self._reasons[new.index] = str(new.finish_reason)
            self.num_written += len(new.token_ids)
        self._note(last)
        return last

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of its choices, in as many parts as there was news.

        :raises ApiError: a completion has failed.
        """
        stream, shape, observe, state = self._stream, self._shape, self._metrics.next_tokens, self._stream.state
        times: dict[int, float] = {}
        while (news := await stream.news()) is not None:
            now, parts = time.perf_counter(), []
            if not times:
                self._ticket.begun()
                self._metrics.first_token(now - state.arrival_time)
            for new in news:
                index, tokens = new.index, len(new.token_ids)
                if new.finish_reason is not None:
                    check_ended(new, shape.is_structured)
                    self._reasons[index] = new.finish_reason
                self.num_written += tokens
                before = times.get(index)
                times[index] = now
                if before is None:
                    parts.append(shape.begin(self._first + index, state.output))
                    tokens -= 1  # the first has none before it; those that came with it came at once
                if tokens > 0:
                    observe((now - (before or now)) / tokens, tokens)
                used = (self.output, self.num_written) if shape.tells_usage else None
                parts.append(shape.piece(self._first + index, new, used))
            yield parts[0] if len(parts) == 1 else b"".join(parts)
        self._note(self.output)

    def _note(self, output: RequestOutput) -> None:
        """Count the request, which has ended."""
        ended = [self._reasons.get(index, "abort") for index in range(self._n)]
        times, metrics = output.metrics, self._metrics
        metrics.finished(times, len(output.prompt_token_ids), self.num_written, ended)
        if not self._shape.asked.stream and times.first_token_time is not None and times.finished_time is not None:
            metrics.first_token(times.time_to_first_token)
            later = self.num_written - len(ended)
            if later > 0:  # nobody has seen the tokens one by one: their mean stands for each
                metrics.next_tokens((times.finished_time - times.first_token_time) * len(ended) / later, later)
