"""Grammars of llguidance, kept for equal forms and followed per row: the tokens that may come next in a completion."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy
from numpy.typing import NDArray

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.sampling.ecma_regex import rust_regex
from headway.core.sampling.guidance_notation import guidance_json, guidance_lark, structural_tag_text
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.text import harmless

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_LONGEST_REASON: Final = 240  # Characters of a reason; llguidance's quotes the whole of a regular expression that it refuses
_SPACE: Final = r"[ \t\n\r]?"  # Space between the parts of JSON by default: a small model may write spaces without end


class GrammarError(HeadwayError):
    """A form that cannot be compiled, or a grammar that cannot go on; it ends the request alone."""


def grammar_text(form: StructuredOutputsParams) -> str:
    """Return the form in llguidance's notation. :raises ValueError: an invalid grammar, schema or ECMA regular expression."""
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(rust_regex(form.regex))
    if form.choice is not None:  # one terminal: as alternatives of a rule, 2,000 are llguidance's limit for the first token
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
    """Return llguidance's reason in one line: the line that begins with "error:", else the first; a long one loses its middle."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["llguidance gives no reason"]
    reason = next((line for line in lines if line.startswith("error:")), "") if lines[0].endswith(":") else ""
    line = harmless(f"{lines[0]} {reason}".strip())
    half = _LONGEST_REASON // 2
    return line if len(line) <= _LONGEST_REASON else f"{line[:half]}...{line[-half:]}"


_MOST_COMPILED = 256  # Grammars that are kept; the one used longest ago goes first
_MOST_COMPILED_BYTES = 2**26  # Bytes of their forms. A compiled form takes up to 50 times the bytes of its text.


class Grammar:
    """The state of one completion: what has come so far, and hence what may come next."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos = eos_token_ids
        self.ended = False
        """Whether an end-of-text token has come after a complete text; then any token may come, for the form holds."""

    @property
    def fault(self) -> str:
        """Why the grammar cannot go on, in one line; empty where it can."""
        return brief_reason(self.matcher.get_error()) if self.matcher.is_error() else ""

    def accept(self, token: int) -> None:
        """Take the token that came. :raises GrammarError: it may not stand here, or the grammar exceeds llguidance's limits."""
        if self.ended:
            return
        if token in self._eos and self.matcher.is_accepting():
            self.ended = True
        elif not self.matcher.consume_token(token):
            raise GrammarError(f"structured_outputs: {self.fault}")

    def ahead(self, tokens: Sequence[int]) -> Grammar | None:
        """The state after these tokens, were they to come; None where they may not."""
        copied = Grammar(self.matcher.deep_copy(), self._eos)
        copied.ended = self.ended
        try:
            for token in tokens:
                copied.accept(token)
        except GrammarError:
            return None
        return copied


class GrammarCompiler:
    """Compiles forms for one tokenizer. Several threads may call it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """tokenizer: one of the tokenizers library. vocab_size: of the model; tokens that the tokenizer lacks never come."""
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
        """Check that grammars can be compiled. :raises ConfigError: llguidance is not installed, or the tokenizer is not fast."""
        what = "structured_outputs"
        if find_spec("llguidance") is None:
            raise ConfigError(what, "the package llguidance", "none", "pip install 'headway[structured]'")
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(what, "a fast tokenizer", f"a {type(self.tokenizer).__name__}")
        if not self._eos:
            raise ConfigError(what, "a model with an end-of-text token", "none")

    def has(self, form: StructuredOutputsParams) -> bool:
        """Whether the form is compiled already; it then counts as used."""
        with self._lock:
            found = form.key in self._compiled
            if found:
                self._compiled.move_to_end(form.key)
            return found

    def find(self, form: StructuredOutputsParams) -> Grammar | None:
        """The grammar at its beginning, where the form is compiled already."""
        with self._lock:
            found = self._compiled.get(form.key)
            if found is None:
                return None
            self._compiled.move_to_end(form.key)
            return Grammar(found.deep_copy(), self._eos)

    def compile(self, form: StructuredOutputsParams, text: str | None = None) -> None:
        """Compile a form, once for equal forms, which takes a millisecond to seconds; `find` then has the grammar.

        text: the form in llguidance's notation, where it is known. A form that is not known to be harmless may take the process
        along, unless it was tried: see `GrammarQueue`, which calls this method in threads with large stacks.

        :raises GrammarError: llguidance cannot compile it, or has no first token for it.
        """
        if self.has(form):
            return
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._load(), grammar_text(form) if text is None else text, log_level=0)
        except ValueError as error:
            raise GrammarError(f"structured_outputs: {brief_reason(str(error))}") from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # llguidance meets some of its limits here; and what it finds, the first step need not
        if matcher.is_error():
            raise GrammarError(f"structured_outputs cannot be compiled: {brief_reason(matcher.get_error())}")
        with self._lock:
            if form.key not in self._compiled:  # another thread may have compiled it meanwhile
                self._bytes += len(form.key)
            self._compiled[form.key] = matcher
            while len(self._compiled) > _MOST_COMPILED or self._bytes > _MOST_COMPILED_BYTES:
                self._bytes -= len(self._compiled.popitem(last=False)[0])

    def tokenizer_arguments(self) -> dict[str, Any]:
        """The arguments of llguidance's tokenizer, as another process needs them."""
        with self._loading:
            return {"tokenizer": self._serialized(), "vocab_size": self._size, "eos_token_ids": sorted(self._eos)}

    def masks(self, grammars: Sequence[Grammar], endless: Sequence[int] = ()) -> NDArray[numpy.int32]:
        """Return masks of the next tokens, int32 [len(grammars), words], bit t % 32 of word t / 32, by several threads.
        endless: indices of grammars whose text ends only where nothing else may come (ignore_eos)."""
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
        """Return the tokenizer as the JSON of the tokenizers library, without padding and truncation."""
        backend = copy(self.tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    @property
    def _size(self) -> int:
        return max(self._vocab_size, len(self.tokenizer))
