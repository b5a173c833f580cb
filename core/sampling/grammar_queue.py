"""Queues for compiling structured outputs. Small ones are compiled at once, larger ones after a trial in a separate process."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from threading import Lock
from typing import Any, Final

from headway.core.sampling.grammar import Grammar, GrammarCompiler, GrammarError, brief_reason
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.child import Child, ChildDied, message_of, python_command, stack_size

TRIAL_SECONDS: Final = 10
"""Maximum CPU time for compiling one structured output, in seconds. A schema of 500 KB takes one or two seconds."""
TRIAL_MEMORY: Final = 2 * 2**30
"""Bytes of memory that the trial process may use in addition to its initial memory."""
TRIAL_STACK: Final = 16 * 2**20
"""Stack size of a trial in bytes. A chain of 1,000 references needs about four million bytes."""
_START_SECONDS: Final = 60.0  # Seconds for the process to start and to read the tokenizer
_LONGEST_TRIAL: Final = 60.0  # Seconds for a trial on a busy machine


class GrammarTrial:
    """Trials of structured outputs in a separate process, which is restarted if it dies. One thread calls `run`; any thread may
    call `end`."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        """tokenizer: arguments of llguidance's tokenizer, in the format that `grammar_child` reads."""
        self._start = {**tokenizer, "seconds": TRIAL_SECONDS, "memory": TRIAL_MEMORY, "stack": TRIAL_STACK}
        self._child: Child | None = None
        self._trying: StructuredOutputsParams | None = None
        self._guard = Lock()

    def run(self, form: StructuredOutputsParams) -> str:
        """Return a structured output in llguidance's notation. :raises GrammarError: if llguidance rejects the structured output,
        or the process died or could not be started."""
        with self._guard:
            self._trying = form
        try:
            child = self._started()
            fields = dict(zip(form.__dataclass_fields__, message_of(form.key), strict=True))
            answer = child.ask(fields, _LONGEST_TRIAL)
        except ChildDied as died:
            with self._guard:
                self._child = None
                self._at_exit.detach()
            raise GrammarError(f"structured_outputs: {_limits()}; {_cause(died)}") from None
        except OSError as error:
            raise GrammarError(f"structured_outputs: no process can be started to try a form of this size ({error})") from None
        finally:
            with self._guard:
                self._trying = None
        if "error" in answer:
            raise GrammarError(f"structured_outputs cannot be compiled: {answer['error']}")
        return str(answer["text"])

    def end(self, form: StructuredOutputsParams) -> None:
        """Kill the process if it is trying this structured output now; `run` then raises an error."""
        with self._guard:
            if self._trying is form and self._child is not None:
                self._child.process.kill()

    def _started(self) -> Child:
        with self._guard:
            if self._child is not None:
                return self._child
            child = self._child = Child(python_command("headway.core.sampling.grammar_child"))
            self._at_exit = weakref.finalize(self, child.stop)
        child.ask(self._start, _START_SECONDS)
        return child


def _limits() -> str:
    return (
        f"needs a form that is compiled in {TRIAL_SECONDS} s, {TRIAL_MEMORY // 2**30} GiB of memory and "
        f"{TRIAL_STACK // 2**20} MiB of stack"
    )


def _cause(died: ChildDied) -> str:
    """Return a text on how the process died, worded as a fault of the structured output."""
    if died.timed_out or "SIGXCPU" in died.how:
        return "this one takes longer: make it smaller"
    if "SIGSEGV" in died.how or "overflowed its stack" in died.last_line:
        return "the stack was not enough for this one: shorten its chains of references or rules"
    if "SIGABRT" in died.how or "MemoryError" in died.last_line:
        return "the memory was not enough for this one: make it smaller"
    return f"in the trial {died}"


SMALL_FORM_BYTES: Final = 4096
"""Maximum size in bytes of a structured output that is compiled without a trial. The worst case found needs 2 MiB of stack and
0.2 s."""
_COMPILERS: Final = 2  # Threads that compile small structured outputs; each holds the GIL for part of its time
_TRIERS: Final = 2  # Threads that try larger structured outputs, each in its own process, and then compile them
_STACK: Final = 2 * TRIAL_STACK  # Bytes of a compiling thread's stack, with a margin over a successful trial
_MOST_TRIED: Final = 4096  # Number of successful trials to remember


class GrammarQueue:
    """Compiles structured outputs before their requests' first steps. Cancelling a future cancels its compilation or trial."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._small = ThreadPoolExecutor(_COMPILERS, "headway-grammar")
        self._large = ThreadPoolExecutor(_TRIERS, "headway-grammar-trial")
        self._trials = threading.local()  # The trial of each thread of `_large`
        self._tried: dict[bytes, None] = {}  # Hashes of successfully tried structured outputs, oldest first
        self._guard = threading.Lock()  # Protects `_tried`

    def add(self, form: StructuredOutputsParams) -> Future[None]:
        """Queue a structured output. The returned future fails if compilation fails, usually with a GrammarError. It may be
        cancelled until the compilation ends."""
        ready: Future[None] = Future()
        if self._is_harmless(form):
            self._submit(self._small, self._compile, form, ready)
        else:
            self._submit(self._large, self._try_and_compile, form, ready)
        return ready

    def grammar(self, form: StructuredOutputsParams) -> Grammar:
        """Return the initial grammar state of an added structured output, which is compiled again if it was evicted. :raises
        GrammarError: if this compilation fails."""
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
        with stack_size(_STACK):  # stack of the thread that this call may start
            threads.submit(_finish, work, form, ready)

    def _compile(self, form: StructuredOutputsParams, _: Future[None]) -> None:
        self._compiler.compile(form)

    def _try_and_compile(self, form: StructuredOutputsParams, ready: Future[None]) -> None:
        if self._compiler.has(form):
            return
        trial: GrammarTrial | None = getattr(self._trials, "own", None)
        if trial is None:
            trial = self._trials.own = GrammarTrial(self._compiler.tokenizer_arguments())
        ready.add_done_callback(lambda _: trial.end(form))  # does nothing after the trial
        text = trial.run(form)
        if ready.cancelled():
            return
        with self._guard:
            self._tried[_hash(form)] = None
            if len(self._tried) > _MOST_TRIED:
                del self._tried[next(iter(self._tried))]
        self._compiler.compile(form, text)

    def _is_harmless(self, form: StructuredOutputsParams) -> bool:
        """Return whether a structured output may be compiled in this process, because it is small or its trial succeeded. Always
        True on Windows, which has no process limits."""
        if len(form.key) <= SMALL_FORM_BYTES or sys.platform == "win32":  # Windows has no limits for a process
            return True
        return self._compiler.has(form) or _hash(form) in self._tried


def _finish(
    work: Callable[[StructuredOutputsParams, Future[None]], None], form: StructuredOutputsParams, ready: Future[None]
) -> None:
    """Run the work and set its outcome in the future `ready`, unless the future is cancelled."""
    if ready.cancelled():
        return
    error: Exception | None = None
    try:
        work(form, ready)
    except Exception as raised:
        error = raised
    except BaseException as panic:  # a panic of a Rust library; the future must still be completed
        error = GrammarError(f"structured_outputs cannot be compiled: {brief_reason(str(panic))}")
    if not ready.set_running_or_notify_cancel():
        return
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)


def _hash(form: StructuredOutputsParams) -> bytes:
    return sha256(form.key.encode()).digest()
