"""Structured output of a request: a JSON schema, a regular expression, one of several texts, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from headway.core.contract.errors import ConfigError, refuse_unknown, refuses_unknown_fields
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

MOST_FORM_BYTES: Final = 2**20
"""Maximum size in bytes of a structured output, written as ASCII JSON."""
_ELSEWHERE: Final = {"json_schema": "it is called json"}
MOST_SCHEMA_LEVELS: Final = 120
"""Maximum number of nested levels of objects and arrays in a JSON schema. llguidance's JSON parser supports 124 levels."""


def _without_backend(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keywords of a call without vLLM's keywords that select a backend. The choice of backend does not change the
    result."""
    return {name: value for name, value in given.items() if name not in ("backend", "disable_fallback")}


@refuses_unknown_fields(_ELSEWHERE, "docs/sampling.md", _without_backend)
@dataclass(frozen=True)
class StructuredOutputsParams:
    """Structured output of a completion. Exactly one of the first six fields is given. Names and meanings are vLLM's."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a dict or as text."""
    regex: str | None = None
    """An ECMA-262 regular expression that the whole text matches. Classes are ASCII unless the flag u is set."""
    choice: Sequence[str] | None = None
    """Texts, one of which must be the completion."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, or in llama.cpp's (GBNF)."""
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with structured parts, in xgrammar's format, as a dict or as text: {"format": {...}}."""
    disable_any_whitespace: bool = False
    """True for JSON without whitespace between its parts."""
    disable_additional_properties: bool = False
    """True to forbid properties that a JSON schema does not name, unless the schema itself allows or forbids them."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace within JSON. None means at most one space, tab or line break."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> StructuredOutputsParams:
        """Return the structured output for a request's fields. :raises ConfigError: if a field is unknown or a value is bad."""
        try:
            refuse_unknown(cls.__name__, fields, cls.__dataclass_fields__, _ELSEWHERE, "docs/sampling.md")
        except ConfigError as error:
            name = next(name for name in fields if name not in cls.__dataclass_fields__)
            raise ConfigError("structured_outputs", error.reason.need, shown(name), error.reason.hint) from None
        return cls(**fields)

    def __post_init__(self) -> None:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ConfigError("structured_outputs", f"exactly one of {', '.join(_KINDS)}", ", ".join(given) or "none of them")
        self._read("json")
        self._read("structural_tag")
        if self.structural_tag is not None and not isinstance(self.structural_tag, Mapping):
            self._refuse("structural_tag", "a structural tag, as a dict or a text")
        if self.json is not None and not isinstance(self.json, (Mapping, bool)):
            self._refuse("json", "a JSON schema, as a dict or a text")
        if self.choice is not None:
            texts = tuple(self.choice) if isinstance(self.choice, (list, tuple)) else ()
            if not texts or not all(isinstance(text, str) and text for text in texts):
                self._refuse("choice", "a list of texts that are not empty")
            if any(_has_halves(text) for text in texts):
                self._refuse("choice", "Unicode texts")
            object.__setattr__(self, "choice", texts)
        for kind in ("regex", "grammar"):
            value = getattr(self, kind)
            if value is not None and not (isinstance(value, str) and value):
                self._refuse(kind, "a text that is not empty")
            if value is not None and _has_halves(value):
                self._refuse(kind, "a Unicode text")
        if self.json_object not in (None, True):
            self._refuse("json_object", "True, or None for another form")
        if self.whitespace_pattern is not None and not isinstance(self.whitespace_pattern, str):
            self._refuse("whitespace_pattern", "a regular expression")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            self._refuse("whitespace_pattern", "none with disable_any_whitespace")
        self._check_size(given[0])

    def _read(self, field: str) -> None:
        given = getattr(self, field)
        if isinstance(given, str):
            object.__setattr__(self, field, parse_json(given, f"structured_outputs.{field}"))

    def _check_size(self, kind: str) -> None:
        """Check that the structured output is small enough for another process, and not nested too deeply for llguidance's
        recursive JSON parser."""
        if _deeper(self.json if self.structural_tag is None else self.structural_tag, MOST_SCHEMA_LEVELS):
            raise ConfigError(f"structured_outputs.{kind}", f"at most {MOST_SCHEMA_LEVELS} levels of objects and arrays", "more")
        try:
            size = len(self.key)
        except (TypeError, ValueError) as error:
            need = "a JSON schema" if kind == "json" else "a form"
            raise ConfigError(f"structured_outputs.{kind}", need, f"values that are not JSON ({error})") from None
        if size > MOST_FORM_BYTES:
            raise ConfigError(f"structured_outputs.{kind}", f"at most {MOST_FORM_BYTES} bytes", f"{size} bytes")

    def _refuse(self, field: str, need: str) -> None:
        raise ConfigError(f"structured_outputs.{field}", need, shown(getattr(self, field)))

    @cached_property
    def key(self) -> str:
        """The structured output as JSON, identical for equal structured outputs. The order of a schema's properties matters."""
        return json.dumps([getattr(self, field) for field in self.__dataclass_fields__], default=dict)


def may_be_closed(schema: Any) -> bool:
    """Return whether a JSON schema's unnamed properties can be forbidden. They cannot if several parts of the schema name
    properties."""
    return not any(word in json.dumps(schema, default=dict) for word in ('"allOf"', '"dependentSchemas"', '"if"'))


def _deeper(value: Any, most: int) -> bool:
    """Return whether objects and arrays are nested in more than `most` levels, or contain themselves."""
    level = [value]
    for _ in range(most + 1):
        level = list({id(item): item for each in level for item in _parts(each)}.values())
        if not level:
            return False
    return True


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _has_halves(text: str) -> bool:
    """Return whether a text contains an unpaired surrogate. Python decodes command-line bytes that are not UTF-8 to such
    surrogates."""
    return any("\ud800" <= sign <= "\udfff" for sign in text)
