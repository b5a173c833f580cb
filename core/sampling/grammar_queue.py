"""The queues in which forms wait to be compiled: small ones at once, others after a trial in a process of their own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Final

from headway.core.sampling.grammar import Grammar, GrammarCompiler
from headway.core.sampling.grammar_text import GrammarError, brief_reason
from headway.core.sampling.grammar_trial import TRIAL_STACK, GrammarTrial
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.threads import stack_size

SMALL_FORM_BYTES: Final = 4096
"""Bytes of a form that is compiled without a trial. Of 4,096 bytes the worst that was found takes 2 MiB of stack and 0.2 s."""
_COMPILERS: Final = 2
"""Threads that compile small forms; each holds the interpreter for a part of its time."""
_TRIERS: Final = 2
"""Threads that have larger forms tried, each by a process of its own, and then compile them."""
_STACK: Final = 2 * TRIAL_STACK
"""Bytes of a compiling thread's stack: what a trial has survived is compiled here with room to spare."""
_MOST_TRIED: Final = 4096
"""Forms whose trial is remembered."""


class GrammarQueue:
    """Compiles forms before their requests' first steps. A form whose future is cancelled is not compiled, or no longer tried."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._small = ThreadPoolExecutor(_COMPILERS, "headway-grammar")
        self._large = ThreadPoolExecutor(_TRIERS, "headway-grammar-trial")
        self._trials = threading.local()
        """The trial of each thread of `_large`."""
        self._tried: dict[bytes, None] = {}
        """Hashes of forms that have survived a trial, the oldest first."""
        self._guard = threading.Lock()
        """Protects `_tried`."""

    def add(self, form: StructuredOutputsParams) -> Future[None]:
        """Have a form compiled; the future fails with a GrammarError, and may be cancelled until the form is compiled."""
        ready: Future[None] = Future()
        if self._is_harmless(form):
            self._submit(self._small, self._compile, form, ready)
        else:
            self._submit(self._large, self._try_and_compile, form, ready)
        return ready

    def grammar(self, form: StructuredOutputsParams) -> Grammar:
        """The grammar of a form that was added, at its beginning. One that is no longer kept is compiled again, and waited for.

        :raises GrammarError: see `add`.
        """
        while (found := self._compiler.find(form)) is None:
            self.add(form).result()
        return found

    def _submit(
        self,
        threads: ThreadPoolExecutor,
        work: Callable[[StructuredOutputsParams, Future[None]], None],
        form: StructuredOutputsParams,
        ready: Future[None],
    ) -> None:
        with stack_size(_STACK):  # of the thread that this call may start
            threads.submit(_finish, work, form, ready)

    def _compile(self, form: StructuredOutputsParams, _: Future[None]) -> None:
        self._compiler.compile(form)

    def _try_and_compile(self, form: StructuredOutputsParams, ready: Future[None]) -> None:
        if self._compiler.has(form):
            return
        trial: GrammarTrial | None = getattr(self._trials, "own", None)
        if trial is None:
            trial = self._trials.own = GrammarTrial(self._compiler.tokenizer_arguments())
        ready.add_done_callback(lambda _: trial.end(form))  # which does nothing after the trial
        text = trial.run(form)
        if ready.cancelled():
            return
        with self._guard:
            self._tried[_hash(form)] = None
            if len(self._tried) > _MOST_TRIED:
                del self._tried[next(iter(self._tried))]
        self._compiler.compile(form, text)

    def _is_harmless(self, form: StructuredOutputsParams) -> bool:
        """Whether a form may be compiled in this process: it is small, or has survived a trial."""
        if len(form.key) <= SMALL_FORM_BYTES or sys.platform == "win32":  # which has no limits for a process
            return True
        return self._compiler.has(form) or _hash(form) in self._tried


def _finish(
    work: Callable[[StructuredOutputsParams, Future[None]], None], form: StructuredOutputsParams, ready: Future[None]
) -> None:
    """Do the work for a future, unless it is cancelled before its end."""
    if ready.cancelled():
        return
    error: Exception | None = None
    try:
        work(form, ready)
    except Exception as raised:
        error = raised
    except BaseException as panic:  # of a library written in Rust; somebody waits for the future all the same
        error = GrammarError(f"structured_outputs cannot be compiled: {brief_reason(str(panic))}")
    if not ready.set_running_or_notify_cancel():
        return
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)


def _hash(form: StructuredOutputsParams) -> bytes:
    return sha256(form.key.encode()).digest()
