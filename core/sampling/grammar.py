"""Grammars of llguidance for structured outputs, cached by content, and queues for compiling them.

Each completion has a separate state object. Small structured outputs are compiled at once, larger ones after a trial in a
separate process.
"""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from hashlib import sha256
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy
from numpy.typing import NDArray

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.sampling.ecma_regex import rust_regex
from headway.core.sampling.guidance_notation import guidance_json, guidance_lark, structural_tag_text
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.child import Child, ChildDied, message_of, python_command, stack_size
from headway.core.system.text import harmless

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_LONGEST_REASON: Final = 240  # Maximum characters of a reason; llguidance quotes the whole regular expression that it rejects
_SPACE: Final = r"[ \t\n\r]?"  # Default whitespace between the parts of JSON: a small model may write whitespace without end


class GrammarError(HeadwayError):
    """Error of a structured output that cannot be compiled, or of a grammar that cannot continue. It ends only the request with
    this structured output."""


def grammar_text(form: StructuredOutputsParams) -> str:
    """Return a structured output in llguidance's notation. :raises ValueError: if the grammar, schema or regex is invalid."""
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(rust_regex(form.regex))
    if form.choice is not None:  # one terminal: as alternatives of a rule, llguidance limits the first token to 2,000
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, form.choice))}")
    spaces: dict[str, Any] = {"whitespace_flexible": False}
    if not form.disable_any_whitespace:
        spaces = {"whitespace_pattern": rust_regex(_SPACE if form.whitespace_pattern is None else form.whitespace_pattern)}
    if form.grammar is not None:
        return guidance_lark(grammar_from("grammar", form.grammar), spaces)
    closed = form.disable_additional_properties
    if form.structural_tag is not None:
        return structural_tag_text(form.structural_tag, spaces, closed)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_json_schema(
        guidance_json({"type": "object"} if form.json is None else form.json, spaces, closed)
    )


def brief_reason(text: str) -> str:
    """Return llguidance's reason in one line: the line that begins with "error:", otherwise the first line. A long line is
    shortened in the middle."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["llguidance gives no reason"]
    reason = next((line for line in lines if line.startswith("error:")), "") if lines[0].endswith(":") else ""
    line = harmless(f"{lines[0]} {reason}".strip())
    half = _LONGEST_REASON // 2
    return line if len(line) <= _LONGEST_REASON else f"{line[:half]}...{line[-half:]}"


_MOST_COMPILED = 256  # Grammars in the cache; the least recently used is evicted
_MOST_COMPILED_BYTES = 2**26  # Bytes of their source texts. A compiled grammar takes up to 50 times as much.


class Grammar:
    """Grammar state of one completion, which determines the allowed next tokens."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos = eos_token_ids
        self.ended = False
        """True if an end-of-text token has followed a complete text. From then on, any token is allowed."""

    @property
    def fault(self) -> str:
        """Reason why the grammar cannot continue, in one line. Empty if it can continue."""
        return brief_reason(self.matcher.get_error()) if self.matcher.is_error() else ""

    def accept(self, token: int) -> None:
        """Advance the grammar by a sampled token. :raises GrammarError: if the token is not allowed, or the grammar exceeds
        llguidance's limits."""
        if self.ended:
            return
        if token in self._eos and self.matcher.is_accepting():
            self.ended = True
        elif not self.matcher.consume_token(token):
            raise GrammarError(f"structured_outputs: {self.fault}")

    def ahead(self, tokens: Sequence[int]) -> Grammar | None:
        """Return the state after these hypothetical tokens, or None if they are not allowed."""
        copied = Grammar(self.matcher.deep_copy(), self._eos)
        copied.ended = self.ended
        try:
            for token in tokens:
                copied.accept(token)
        except GrammarError:
            return None
        return copied


class GrammarCompiler:
    """Compiler of structured outputs for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """tokenizer: a tokenizer of the tokenizers library. vocab_size: size of the model's vocabulary. Tokens unknown to the
        tokenizer are never allowed."""
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._loaded: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._bytes = 0  # Bytes of the compiled forms
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    def check(self) -> None:
        """Check that grammars can be compiled. :raises ConfigError: if llguidance, a fast tokenizer or an end-of-text
        token is missing."""
        what = "structured_outputs"
        if find_spec("llguidance") is None:
            raise ConfigError(what, "the package llguidance", "none", "pip install 'headway[structured]'")
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(what, "a fast tokenizer", f"a {type(self.tokenizer).__name__}")
        if not self._eos:
            raise ConfigError(what, "a model with an end-of-text token", "none")

    def has(self, form: StructuredOutputsParams) -> bool:
        """Return whether a structured output is already compiled, and mark it as recently used."""
        with self._lock:
            found = form.key in self._compiled
            if found:
                self._compiled.move_to_end(form.key)
            return found

    def find(self, form: StructuredOutputsParams) -> Grammar | None:
        """Return the initial grammar state, or None if the structured output is not compiled yet."""
        with self._lock:
            found = self._compiled.get(form.key)
            if found is None:
                return None
            self._compiled.move_to_end(form.key)
            return Grammar(found.deep_copy(), self._eos)

    def compile(self, form: StructuredOutputsParams, text: str | None = None) -> None:
        """Compile a structured output for `find`. Equal structured outputs are compiled once. Takes from a millisecond to
        seconds.

        text: the structured output in llguidance's notation, if known. A structured output that is neither small nor tried before
        may crash the process; see `GrammarQueue`, which calls this method in threads with large stacks.
        :raises GrammarError: if llguidance cannot compile the structured output, or finds no allowed first token.
        """
        if self.has(form):
            return
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._load(), grammar_text(form) if text is None else text, log_level=0)
        except ValueError as error:
            raise GrammarError(f"structured_outputs: {brief_reason(str(error))}") from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # llguidance checks some limits only here; the result is cached for the first step
        if matcher.is_error():
            raise GrammarError(f"structured_outputs cannot be compiled: {brief_reason(matcher.get_error())}")
        with self._lock:
            if form.key not in self._compiled:  # another thread may have compiled it meanwhile
                self._bytes += len(form.key)
            self._compiled[form.key] = matcher
            while len(self._compiled) > _MOST_COMPILED or self._bytes > _MOST_COMPILED_BYTES:
                self._bytes -= len(self._compiled.popitem(last=False)[0])

    def tokenizer_arguments(self) -> dict[str, Any]:
        """Return the arguments of llguidance's tokenizer, for use in a different process."""
        with self._loading:
            return {"tokenizer": self._serialized(), "vocab_size": self._size, "eos_token_ids": sorted(self._eos)}

    def masks(self, grammars: Sequence[Grammar], endless: Sequence[int] = ()) -> NDArray[numpy.int32]:
        """Return masks of the next tokens, int32 [len(grammars), words]. Token t is bit t % 32 of word t // 32. Uses several
        threads.

        endless: indices of grammars whose text ends only if no other token is allowed (ignore_eos).
        """
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        masks: NDArray[numpy.int32] = numpy.full((len(grammars), -(-self._load().vocab_size // 32)), -1, dtype=numpy.int32)
        running = [(grammar.matcher, number) for number, grammar in enumerate(grammars) if not grammar.ended]
        if running:
            fill_next_token_bitmask_par(self._executor, running, masks)
        for number in endless:
            others = masks[number].view(numpy.uint32).copy()
            for token in self._eos:
                others[token // 32] &= numpy.uint32(~(1 << token % 32) % 2**32)
            if others.any():
                masks[number] = others.view(numpy.int32)
        return masks

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._loaded is None:
                from llguidance import LLTokenizer

                self._loaded = LLTokenizer(self._serialized(), n_vocab=self._size, eos_token=sorted(self._eos))
            return self._loaded

    def _serialized(self) -> str:
        """Return the tokenizer as JSON in the format of the tokenizers library, without padding and truncation."""
        backend = copy(self.tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    @property
    def _size(self) -> int:
        return max(self._vocab_size, len(self.tokenizer))


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
