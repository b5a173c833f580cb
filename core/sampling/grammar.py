"""Grammars of llguidance, compiled once and followed per row: the tokens that may come next in a completion of a given form."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.sampling.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MOST_COMPILED = 256
"""Grammars that are kept; the one used longest ago goes first."""


class GrammarError(HeadwayError):
    """A form that cannot be compiled, or a grammar that cannot go on; it ends the request alone."""


class Grammar:
    """The state of one completion: what has come so far, and hence what may come next."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.matcher, self._eos = matcher, eos_token_ids
        self.ended = False
        """Whether an end-of-text token has come after a complete text; then any token may come, for the form holds."""

    @property
    def fault(self) -> str:
        """Why the grammar cannot go on, in one line; empty where it can."""
        return _brief(self.matcher.get_error()) if self.matcher.is_error() else ""

    def accept(self, token: int) -> None:
        """Take the token that came.

        :raises GrammarError: it may not stand here, or the grammar exceeds llguidance's limits.
        """
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
        """tokenizer: transformers' fast tokenizer. vocab_size: of the model; tokens that the tokenizer lacks never come."""
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, frozenset(eos_token_ids)
        self._loaded: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Check that forms can be compiled at all.

        :raises ConfigError: llguidance is not installed, or the tokenizer is not a fast one.
        """
        what = "structured_outputs"
        if find_spec("llguidance") is None:
            raise ConfigError(what, "the package llguidance", "none", "pip install 'headway[structured]'")
        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError(what, "a fast tokenizer", f"a {type(self._tokenizer).__name__}")
        if not self._eos:
            raise ConfigError(what, "a model with an end-of-text token", "none")

    def compile(self, form: StructuredOutputsParams) -> Grammar:
        """The grammar at its beginning; compiled once for equal forms, which takes a millisecond to a second.

        :raises GrammarError: llguidance cannot compile it.
        """
        key = form.key
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return Grammar(self._compiled[key].deep_copy(), self._eos)
            tokenizer = self._load()
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(tokenizer, _grammar_text(form), log_level=0)
        except ValueError as error:
            raise GrammarError(f"structured_outputs: {_brief(str(error))}") from None
        if matcher.is_error():
            raise GrammarError(f"structured_outputs cannot be compiled: {_brief(matcher.get_error())}")
        with self._lock:
            self._compiled[key] = matcher
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            return Grammar(self._compiled[key].deep_copy(), self._eos)

    def warm(self, form: StructuredOutputsParams) -> None:
        """Compile a form ahead of time.

        :raises GrammarError: see `compile`.
        """
        self.compile(form)

    def masks(self, grammars: Sequence[Grammar]) -> NDArray[numpy.int32]:
        """Masks of the tokens that may come next in each: int32 [len(grammars), words], token t being bit t % 32 of word t / 32.

        Computed by several threads.
        """
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        masks: NDArray[numpy.int32] = numpy.full((len(grammars), -(-self._load().vocab_size // 32)), -1, dtype=numpy.int32)
        running = [(grammar.matcher, number) for number, grammar in enumerate(grammars) if not grammar.ended]
        if running:
            fill_next_token_bitmask_par(self._executor, running, masks)
        return masks

    def _load(self) -> LLTokenizer:
        if self._loaded is None:
            from llguidance.hf import from_tokenizer

            size = max(self._vocab_size, len(self._tokenizer))
            self._loaded = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=sorted(self._eos))
        return self._loaded


def _grammar_text(form: StructuredOutputsParams) -> str:
    """The form in llguidance's own notation."""
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        return grammar_from("choice", json.dumps(list(form.choice)))
    if form.grammar is not None:
        return grammar_from("grammar", form.grammar)
    schema: Any = {"type": "object"} if form.json is None else form.json
    if form.disable_additional_properties:
        schema = _closed(schema)
    spaces: Any = {"whitespace_flexible": not form.disable_any_whitespace}
    if form.whitespace_pattern is not None:
        spaces = {"whitespace_pattern": form.whitespace_pattern}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=spaces)


def _closed(schema: Any) -> Any:
    """Forbid additional properties wherever a schema names properties and says nothing of others."""
    if isinstance(schema, Mapping):
        closed = {key: _closed(value) for key, value in schema.items()}
        if "properties" in schema or "patternProperties" in schema:
            closed.setdefault("additionalProperties", False)
        return closed
    return [_closed(item) for item in schema] if isinstance(schema, list) else schema


def _brief(text: str) -> str:
    """llguidance's reason in one line: its first, and where that only announces it the one that begins with "error:"."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["llguidance gives no reason"]
    reason = next((line for line in lines if line.startswith("error:")), "") if lines[0].endswith(":") else ""
    return f"{lines[0]} {reason}".strip()
