"""A process in which forms are compiled first: one that overflows the stack, hangs or takes too much memory ends that process."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final

from headway.core.sampling.grammar_text import GrammarError
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.child import Child, ChildDied, message_of, python_command

TRIAL_SECONDS: Final = 10
"""Seconds of processor time that a form may take; a schema of 500 KB takes one or two."""
TRIAL_MEMORY: Final = 2 * 2**30
"""Bytes that the process may take beside what it begins with."""
TRIAL_STACK: Final = 16 * 2**20
"""Bytes of stack; a chain of 1,000 references takes four million."""
_START_SECONDS: Final = 60.0
"""Seconds for the process to start and to read the tokenizer."""
_LONGEST_TRIAL: Final = 60.0
"""Seconds for a trial on a machine that others keep busy."""


class GrammarTrial:
    """Tries forms, one at a time, in a process that is started when it is needed and again where one has died.

    One thread calls `run`; any thread may call `end`.
    """

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        """tokenizer: the arguments of llguidance's, as `grammar_child` reads them."""
        self._start = {**tokenizer, "seconds": TRIAL_SECONDS, "memory": TRIAL_MEMORY, "stack": TRIAL_STACK}
        self._child: Child | None = None
        self._trying: StructuredOutputsParams | None = None
        self._guard = Lock()

    def run(self, form: StructuredOutputsParams) -> str:
        """Compile a form in the process; returns the form in llguidance's notation.

        :raises GrammarError: llguidance refuses it, or the process has died of it or was ended.
        """
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
        """End the process if it tries this form now; `run` then raises."""
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
    """How the process ended, in terms of the form."""
    if died.timed_out or "SIGXCPU" in died.how:
        return "this one takes longer: make it smaller"
    if "SIGSEGV" in died.how or "overflowed its stack" in died.last_line:
        return "the stack was not enough for this one: shorten its chains of references or rules"
    if "SIGABRT" in died.how or "MemoryError" in died.last_line:
        return "the memory was not enough for this one: make it smaller"
    return f"in the trial {died}"
