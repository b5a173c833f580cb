"""Streams of outputs that callers read on an event loop, and the mailboxes that bring the engine's deltas to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Lock

from headway.core.engine.data.request_limits import CheckedRequest
from headway.core.engine.data.step import OutputDelta
from headway.core.sampling.detokenizer import Tokenizer
from headway.outputs import CompletionOutput, RequestOutput
from headway.requests.request_state import OutputProcessor, Progress, RequestState
from headway.requests.validation import RequestName


class RequestStream:
    """The outputs of one request as they come: an asynchronous iterator that ends after the output that is finished.

    SamplingParams.output_kind says what an output holds: all so far, only what is new since the last output, or the finished
    output alone. A reader who is slower than the engine finds several steps in one output. Texts are made when an output is read.
    """

    def __init__(self, state: RequestState, close: Callable[[], None]) -> None:
        """close: called once, when the stream was read to its end or given up."""
        self.request_id = state.request_id
        self.state = state
        self._close: Callable[[], None] | None = close
        self._has_news = False  # Whether there may be something to read
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next output. :raises HeadwayError: the engine refused the request. :raises EngineDeadError: it has ended."""
        if not await self._wait():
            raise StopAsyncIteration
        output = self.state.next_output()
        if output.finished:
            self.close()
        return output

    async def news(self) -> list[CompletionOutput] | None:
        """Return each completion's new tokens and text, without constant parts; None at the end. Raises as `__anext__`."""
        if not await self._wait():
            return None
        news = self.state.news()
        if self.state.finished:
            self.close()
        return news

    async def _wait(self) -> bool:
        """Wait until there is something to read; False: the stream has ended."""
        if self._close is None:
            return False
        if not self._has_news:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.close()
                raise
            if self._close is None:
                return False
        self._has_news = False
        if self._error is not None:
            self.close()
            raise self._error
        return True

    def _wake_reader(self) -> None:
        """Let the reader go on. A bare future: an asyncio.Event would cost twice as much, for every token."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """End the stream, and a request that still runs; a reader who waits for an output finds the stream at its end."""
        close = self._close
        self._close = None
        if close is not None:
            self._wake_reader()
            close()

    def wake(self) -> None:
        """Let the reader go on if there is anything new."""
        if self.state.has_news:
            self._wake_reader()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, unless the request has ended."""
        if not self.state.finished:
            self._error = error
            self._wake_reader()

    def abort(self) -> None:
        """End the stream with an output of all so far, whose unfinished completions have finish_reason "abort"."""
        self.state.abort()
        self.wake()


class Mailbox:
    """Carries each step's deltas to the streams of one event loop in one call. Any thread posts; the rest runs on the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer | None, abort: Callable[[str, int | None], None]
    ) -> None:
        """abort: makes the engine end a completion of a request, or (None) all of them."""
        self.loop = loop
        self._abort = abort
        self._processor = OutputProcessor(tokenizer)
        self.streams: dict[str, RequestStream] = {}
        """Engine's name of a request -> its stream."""

    def post(self, handle: Callable[..., None], *arguments: object) -> bool:
        """Have `take`, `fail` or `abort` called on the loop; False if the loop is closed, with requests unfinished."""
        try:
            self.loop.call_soon_threadsafe(handle, *arguments)
        except RuntimeError:
            return False
        return True

    def open(self, name: RequestName, request: CheckedRequest, close: Callable[[], None]) -> RequestStream:
        """Make the stream of a request that is about to be queued."""
        state = self._processor.add(name.request_id, request, Progress(), key=name.key)
        self.streams[name.key] = RequestStream(state, close)
        return self.streams[name.key]

    def remove(self, key: str) -> RequestState:
        """Forget a request; returns its last state."""
        self._processor.remove(key)
        return self.streams.pop(key).state

    def take(self, deltas: Sequence[OutputDelta]) -> None:
        """Take in the deltas of a step."""
        for key, index in self._processor.process(deltas):
            self._abort(key, index)
        for delta in deltas:
            stream = self.streams.get(delta.request_id)
            if stream is not None:
                stream.wake()

    def fail(self, error: BaseException, key: str | None) -> None:
        """End one stream, or (None) all of them, with an error."""
        for own, stream in list(self.streams.items()):
            if key in (None, own):
                stream.fail(error)

    def abort(self, key: str) -> None:
        """End a request."""
        stream = self.streams.get(key)
        if stream is not None and not stream.state.finished:
            self._abort(key, None)
            stream.abort()


class Mailboxes:
    """The mailboxes of all event loops that use one engine. Any thread may call it."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._boxes: tuple[Mailbox, ...] = ()

    @property
    def num_streams(self) -> int:
        """Streams that have not ended."""
        return sum(len(box.streams) for box in self._boxes)

    def of(
        self, loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer | None, abort: Callable[[str, int | None], None]
    ) -> Mailbox:
        """The mailbox of a loop, made at the first call; see Mailbox."""
        with self._guard:
            found = next((box for box in self._boxes if box.loop is loop), None)
            if found is None:
                found = Mailbox(loop, tokenizer, abort)
                open_ones = (box for box in self._boxes if box.streams or not box.loop.is_closed())
                self._boxes = (*open_ones, found)
        return found

    def post(self, deltas: list[OutputDelta]) -> list[tuple[str, int | None]]:
        """Deliver the deltas of a step; returns the requests to end, because their loop was closed."""
        left: list[tuple[str, int | None]] = []
        if deltas:
            for box in self._boxes:
                if box.streams and not box.post(box.take, deltas):
                    left += [(key, None) for key in self._drop(box)]
        return left

    def fail(self, error: BaseException) -> None:
        """End all streams with an error."""
        for box in self._boxes:
            box.post(box.fail, error, None)

    def abort(self, request_id: str) -> None:
        """End a request. request_id: its caller's name for it."""
        for box in self._boxes:
            for key, stream in list(box.streams.items()):
                if stream.request_id == request_id:
                    box.post(box.abort, key)

    def abort_all(self) -> list[str]:
        """End all requests; returns the engine's names for them."""
        found = [(box, key) for box in self._boxes for key in list(box.streams)]
        for box, key in found:
            box.post(box.abort, key)
        return [key for _, key in found]

    def _drop(self, box: Mailbox) -> list[str]:
        with self._guard:
            self._boxes = tuple(each for each in self._boxes if each is not box)
        return list(box.streams)
