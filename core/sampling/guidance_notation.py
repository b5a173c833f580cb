"""JSON schemas and Lark grammars as llguidance reads them: with patterns in Rust's notation and options of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from headway.core.sampling.ecma_regex import rust_regex
from headway.core.system.json_text import parse_json

_SCHEMAS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose value is an object of schemas."""
_VALUES: Final = frozenset(("const", "enum", "default", "examples", "x-guidance"))
"""Keywords whose value is not a schema."""
_TOKEN: Final = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*) | (?P<json>%json\s*(?=[\[{tf])) | (?P<text>"(?:\\.|[^"\\])*")(?P<ignore_case>i?)
    | /(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[a-z]*)""",
    re.VERBOSE | re.DOTALL,
)
"""A part of a Lark grammar that is read as a whole."""


def guidance_schema(schema: Any, closed: bool = False) -> Any:
    """Return a JSON schema for llguidance.

    closed: forbid additional properties wherever the schema names properties and does not mention others.

    :raises ValueError: a pattern that is no regular expression of ECMA's, or that no grammar can follow.
    """
    if isinstance(schema, list):
        return [guidance_schema(each, closed) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS and isinstance(value, Mapping):
            made[key] = {}
            for name, each in value.items():
                name = rust_regex(name) if key == "patternProperties" else name
                while name in made[key]:  # llguidance says so of patterns that agree on a name
                    name = f"(?:{name})"
                made[key][name] = guidance_schema(each, closed)
        elif key == "pattern" and isinstance(value, str):
            made[key] = rust_regex(value)
        else:
            made[key] = value if key in _VALUES else guidance_schema(value, closed)
    if closed and ("properties" in schema or "patternProperties" in schema):
        made.setdefault("additionalProperties", False)
    return made


def guidance_json(schema: Any, options: Mapping[str, Any], closed: bool = False) -> str:
    """Return a schema as the text that follows %json in a grammar.

    options: llguidance's options of JSON, for schemas that do not give them. closed: see `guidance_schema`, which also raises.
    """
    made = {} if schema is True else guidance_schema(schema, closed)
    if isinstance(made, dict):
        own = made.get("x-guidance")
        made = {**made, "x-guidance": {**options, **(own if isinstance(own, Mapping) else {})}}
    return json.dumps(made, default=dict)


def guidance_lark(grammar: str, options: Mapping[str, Any]) -> str:
    """Return a Lark grammar for llguidance. options: of JSON, see `guidance_json`.

    :raises ValueError: as `guidance_schema`.
    """
    parts, at = [], 0
    while found := _TOKEN.search(grammar, at):
        parts.append(grammar[at : found.start()])
        at = found.end()
        if found["json"] is not None:
            try:
                _, end = json.JSONDecoder().raw_decode(grammar, at)
            except (ValueError, RecursionError):  # llguidance says what is wrong with it
                parts.append(found[0])
            else:
                schema, at = parse_json(grammar[at:end], "%json"), end
                parts.append(f"%json {guidance_json(schema, options)}")
        elif found["regex"] is not None:
            parts.append(lark_regex(found["regex"], found["flags"]))
        elif found["ignore_case"]:
            parts.append(lark_regex(re.escape(parse_json(found["text"], "grammar")), "i") if found["text"] != '""' else '""')
        else:
            parts.append(found[0])
    return "".join([*parts, grammar[at:]])


def lark_regex(pattern: str, flags: str = "") -> str:
    """Return a regular expression as a terminal of a Lark grammar. Arguments and errors: see `rust_regex`."""
    return f"/{rust_regex(pattern, flags) or '(?:)'}/"
