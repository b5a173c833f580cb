"""A model that is pooled behind an event loop: requests that arrive while a batch runs share the next one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread
from typing import TypeVar

from torch import Tensor

from headway.core.pooling.engine import EncodedText
from headway.hosting.host import EngineDeadError
from headway.pooling.assembly import PoolingClient
from headway.pooling.jobs import PoolingJob

Output = TypeVar("Output")

_TOKENISERS = 2
"""Threads that tokenise; the tokenizer's native code does not hold Python's lock."""
_BATCHES = 4
"""Batches' worth of tokens that the engine is handed at a time: enough to pack texts of like lengths, little enough that a short
request does not wait for the end of a long one."""


@dataclass(eq=False)
class _Waiting:
    """A request whose texts have not all been run."""

    texts: Sequence[EncodedText]
    future: Future[list[Tensor]]
    rows: list[Tensor] = field(default_factory=list)
    begun: int = 0
    """Texts that were handed to the engine."""


class AsyncPooling:
    """Runs the engine of a `PoolingClient` in a thread of its own. Waiting requests take turns, text by text."""

    def __init__(self, client: PoolingClient) -> None:
        self.model = client.model
        self.jobs = client.jobs
        self.stats = client.engine.stats
        self._engine = client.engine
        self._waiting: deque[_Waiting] = deque()
        self._changed = Condition()
        self._stopped = False
        self._since: float | None = None
        """When the round that runs has begun."""
        self._tokenisers = ThreadPoolExecutor(_TOKENISERS, "headway-tokenise")
        self._thread = Thread(target=self._run, name="headway-pooling", daemon=True)
        self._thread.start()

    async def run(self, make: Callable[[], PoolingJob[Output]]) -> tuple[list[Output], int]:
        """Make a job in a thread, run it, and return its outputs and its tokens. A caller that is cancelled drops its texts.

        :raises HeadwayError: the arguments cannot work, or a backend raised.
        :raises EngineDeadError: the engine has been stopped.
        """
        loop = asyncio.get_running_loop()
        self._check_running()
        job = await loop.run_in_executor(self._tokenisers, make)
        rows = await asyncio.wrap_future(self._queue(job.texts))
        return await loop.run_in_executor(self._tokenisers, partial(job.finish, rows)), job.num_tokens

    def check_health(self, step_timeout: float) -> None:
        """Check that the engine can serve. step_timeout: seconds that a round of batches may take.

        :raises EngineDeadError: it has been stopped, or is stuck.
        """
        self._check_running()
        since = self._since
        if since is not None and time.monotonic() - since > step_timeout:
            seconds = time.monotonic() - since
            raise EngineDeadError(f"the engine is stuck: no batch has ended for {seconds:.0f} s (step_timeout={step_timeout:g})")

    @property
    def has_lost_engine(self) -> bool:
        """Whether a fault has ended the engine for good: an error ends the requests of its round alone."""
        return False

    @property
    def failure(self) -> EngineDeadError | None:
        """The fault that has ended the engine; see `has_lost_engine`."""
        return None

    def shutdown(self) -> None:
        """End all requests, and the engine after the round that runs now."""
        with self._changed:
            self._stopped = True
            left = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for each in left:
            _fail(each, EngineDeadError("the engine has been stopped"))
        self._tokenisers.shutdown(wait=False, cancel_futures=True)

    def _check_running(self) -> None:
        if self._stopped:
            raise EngineDeadError("the engine has been stopped")

    def _queue(self, texts: Sequence[EncodedText]) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        with self._changed:
            self._check_running()
            self._waiting.append(_Waiting(texts, future))
            self._changed.notify()
        return future

    def _run(self) -> None:
        """Run rounds until `shutdown`: the body of the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                turns = self._take()
            if not turns:
                continue
            self._since = time.monotonic()
            try:
                rows = self._engine.run([text for _, text in turns])
            except Exception as error:
                self._end([each for each, _ in turns], error)
            else:
                for (each, _), row in zip(turns, rows, strict=True):
                    each.rows.append(row)
                self._end([each for each, _ in turns], None)
            self._since = None

    def _take(self) -> list[tuple[_Waiting, EncodedText]]:
        """Texts of the next round: of each request one in turn."""
        turns: list[tuple[_Waiting, EncodedText]] = []
        tokens = 0
        most = _BATCHES * self._engine.limits.max_num_tokens
        self._waiting = deque(each for each in self._waiting if not each.future.cancelled())
        going = deque(each for each in self._waiting if each.begun < len(each.texts))
        while going and (not turns or tokens < most):
            each = going.popleft()
            text = each.texts[each.begun]
            each.begun += 1
            turns.append((each, text))
            tokens += len(text.token_ids)
            if each.begun < len(each.texts):
                going.append(each)
        return turns

    def _end(self, served: Sequence[_Waiting], error: Exception | None) -> None:
        """Answer the requests of a round that have all their rows, or all of them with the error."""
        done = [each for each in dict.fromkeys(served) if error is not None or len(each.rows) == len(each.texts)]
        with self._changed:
            self._waiting = deque(each for each in self._waiting if each not in done)
        for each in done:
            if error is not None:
                _fail(each, error)
            elif each.future.set_running_or_notify_cancel():
                each.future.set_result(each.rows)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if waiting.future.set_running_or_notify_cancel():
        waiting.future.set_exception(error)
