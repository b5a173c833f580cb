"""Output streams that callers read on an event loop, and mailboxes that deliver the engine's deltas to them."""

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
    """Outputs of one request, as an asynchronous iterator that ends after the finished output.

    SamplingParams.output_kind selects the content: everything so far, only what is new, or only the finished output. If the
    reader is slower than the engine, one output covers several steps. Texts are made when an output is read.
    """

    def __init__(self, state: RequestState, close: Callable[[], None]) -> None:
        """close: called once, when the stream has been read to its end or closed."""
        self.request_id = state.request_id
        self.state = state
        self._close: Callable[[], None] | None = close
        self._has_news = False  # True if there may be something to read
        self._waiter: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next output.

        :raises HeadwayError: if the request is rejected.
        :raises EngineDeadError: if the engine has ended.
        """
        if not await self._wait():
            raise StopAsyncIteration
        output = self.state.next_output()
        if output.finished:
            self.close()
        return output

    async def news(self) -> list[CompletionOutput] | None:
        """Return each completion's new tokens and text, without fields that stay the same; None at the end. Raises the same
        errors as `__anext__`."""
        if not await self._wait():
            return None
        news = self.state.news()
        if self.state.finished:
            self.close()
        return news

    async def _wait(self) -> bool:
        """Wait until there is something to read. Return False if the stream has ended."""
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
        """Resume the reader. Uses a bare future, since an asyncio.Event would cost twice as much per token."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """End the stream, and also its request if the request still runs. A waiting reader receives the end of the stream."""
        close = self._close
        self._close = None
        if close is not None:
            self._wake_reader()
            close()

    def wake(self) -> None:
        """Resume the reader if there is anything new."""
        if self.state.has_news:
            self._wake_reader()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, unless the request has ended."""
        if not self.state.finished:
            self._error = error
            self._wake_reader()

    def abort(self) -> None:
        """End the stream with an output of everything so far; unfinished completions get finish_reason "abort"."""
        self.state.abort()
        self.wake()


class Mailbox:
    """Delivery of each step's deltas to one event loop's streams, in one call. `post` is thread-safe."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer | None, abort: Callable[[str, int | None], None]
    ) -> None:
        """abort: function (key, index) that makes the engine end one completion of a request, or all completions if the index is
        None."""
        self.loop = loop
        self._abort = abort
        self._processor = OutputProcessor(tokenizer)
        self.streams: dict[str, RequestStream] = {}
        """Engine's name for a request -> the request's stream."""

    def post(self, handle: Callable[..., None], *arguments: object) -> bool:
        """Schedule a call of `take`, `fail` or `abort` on the loop. Return False if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(handle, *arguments)
        except RuntimeError:
            return False
        return True

    def open(self, name: RequestName, request: CheckedRequest, close: Callable[[], None]) -> RequestStream:
        """Return the stream of a request that is about to be queued."""
        state = self._processor.add(name.request_id, request, Progress(), key=name.key)
        self.streams[name.key] = RequestStream(state, close)
        return self.streams[name.key]

    def remove(self, key: str) -> RequestState:
        """Remove a request and return its last state."""
        self._processor.remove(key)
        return self.streams.pop(key).state

    def take(self, deltas: Sequence[OutputDelta]) -> None:
        """Process the deltas of a step."""
        for key, index in self._processor.process(deltas):
            self._abort(key, index)
        for delta in deltas:
            stream = self.streams.get(delta.request_id)
            if stream is not None:
                stream.wake()

    def fail(self, error: BaseException, key: str | None) -> None:
        """End one stream with an error, or all streams if key is None."""
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
    """Mailboxes of all event loops that use one engine. Thread-safe."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._boxes: tuple[Mailbox, ...] = ()

    @property
    def num_streams(self) -> int:
        """Number of streams that have not ended."""
        return sum(len(box.streams) for box in self._boxes)

    def of(
        self, loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer | None, abort: Callable[[str, int | None], None]
    ) -> Mailbox:
        """Return the mailbox of a loop, created at the first call; see Mailbox."""
        with self._guard:
            found = next((box for box in self._boxes if box.loop is loop), None)
            if found is None:
                found = Mailbox(loop, tokenizer, abort)
                open_ones = (box for box in self._boxes if box.streams or not box.loop.is_closed())
                self._boxes = (*open_ones, found)
        return found

    def post(self, deltas: list[OutputDelta]) -> list[tuple[str, int | None]]:
        """Deliver the deltas of a step. Return the requests whose event loop was closed, for the engine to abort."""
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
        """End a request. request_id: the caller's id."""
        for box in self._boxes:
            for key, stream in list(box.streams.items()):
                if stream.request_id == request_id:
                    box.post(box.abort, key)

    def abort_all(self) -> list[str]:
        """End all requests. Return the engine's names for them."""
        found = [(box, key) for box in self._boxes for key in list(box.streams)]
        for box, key in found:
            box.post(box.abort, key)
        return [key for _, key in found]

    def _drop(self, box: Mailbox) -> list[str]:
        with self._guard:
            self._boxes = tuple(each for each in self._boxes if each is not box)
        return list(box.streams)
