"""JSON schemas, Lark grammars and structural tags in llguidance's notation, with Rust regexes and JSON options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headway.core.sampling.ecma_regex import rust_regex
from headway.core.system.json_text import parse_json

_SCHEMAS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""JSON schema keywords whose value is an object of schemas."""
_VALUES: Final = frozenset(("const", "enum", "default", "examples", "x-guidance"))  # Keywords whose value is not a schema
_TOKEN: Final = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*) | (?P<json>%json\s*(?=[\[{tf])) | (?P<text>"(?:\\.|[^"\\])*")(?P<ignore_case>i?)
    | /(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[a-z]*)""",
    re.VERBOSE | re.DOTALL,
)
"""Regular expression that matches a comment, a %json directive, a text or a regex of a Lark grammar."""


def guidance_schema(schema: Any, closed: bool = False) -> Any:
    """Return a schema for llguidance. closed: True to forbid properties that an object's schema does not name.
    :raises ValueError: if a pattern is not an ECMA regular expression, or grammars do not support it."""
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
                while name in made[key]:  # keep both: llguidance reports patterns that match the same name
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
    """Return the text that follows %json in a grammar. options: default options for llguidance. closed, errors: see
    `guidance_schema`."""
    made = {} if schema is True else guidance_schema(schema, closed)
    if isinstance(made, dict):
        own = made.get("x-guidance")
        made = {**made, "x-guidance": {**options, **(own if isinstance(own, Mapping) else {})}}
    return json.dumps(made, default=dict)


def guidance_lark(grammar: str, options: Mapping[str, Any]) -> str:
    """Return a Lark grammar in llguidance's notation. options: see `guidance_json`. Raises the same errors as
    `guidance_schema`."""
    parts, at = [], 0
    while found := _TOKEN.search(grammar, at):
        parts.append(grammar[at : found.start()])
        at = found.end()
        if found["json"] is not None:
            try:
                _, end = json.JSONDecoder().raw_decode(grammar, at)
            except (ValueError, RecursionError):  # llguidance reports the error
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


_TEXT: Final = r"/(.|\n)+/"
_LAZY: Final = r"/(.|\n)*/"


def structural_tag_text(tag: Mapping[str, Any], options: Mapping[str, Any], closed: bool = False) -> str:
    """Return a structural tag as a grammar in llguidance's notation.

    tag: {"format": {...}}, or the older {"structures": [...], "triggers": [...]}. options, closed: see `guidance_json`.
    :raises ValueError: if a part has an unknown type, lacks a field, or contains an invalid regular expression."""
    return _TagGrammar(options, closed).text(format_of(tag))


def format_of(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the format of a structural tag in either notation. :raises ValueError: if the tag has neither notation."""
    if isinstance(found := tag.get("format"), Mapping):
        return found
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise ValueError("a structural tag needs a format, or structures and triggers")
    tags = [
        {
            "begin": _field(each, "begin", str),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": _field(each, "end", str),
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _field(part: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    value = part.get(name) if isinstance(part, Mapping) else None
    if not isinstance(value, kind):
        what = part.get("type", "a part") if isinstance(part, Mapping) else "a part"
        raise ValueError(f"{what} of a structural tag needs {name}")
    return value


class _TagGrammar:
    def __init__(self, options: Mapping[str, Any], closed: bool) -> None:
        self._options = options
        self._closed = closed
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # Format as JSON -> its existing rule
        self._others: list[dict[str, Any]] = []

    def text(self, form: Mapping[str, Any]) -> str:
        """Return the grammar of the texts that have this format."""
        start = self._rule(form)
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._others]})

    def _rule(self, form: Any) -> str:
        """Return the name of the grammar rule for a format."""
        if isinstance(form, str):
            form = {"type": "const_string", "value": form}
        kind = _field(form, "type", str)
        write = getattr(self, f"_write_{kind}", None)
        if write is None:
            known = sorted(name.removeprefix("_write_") for name in dir(self) if name.startswith("_write_"))
            raise ValueError(f"a structural tag has no format {kind!r}; there are {', '.join(known)}")
        key = json.dumps(form, default=dict)
        if key not in self._names:
            body = write(form)
            self._names[key] = self._add(body)
        return self._names[key]

    def _add(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _write_const_string(self, form: Mapping[str, Any]) -> str:
        return json.dumps(_field(form, "value", str))

    def _write_token(self, form: Mapping[str, Any]) -> str:
        token = _field(form, "token", (str, int))
        return f"<[{token}]>" if isinstance(token, int) else f"<{token.strip('<>')}>"

    def _write_any_text(self, form: Mapping[str, Any]) -> str:
        return f"{_TEXT}?"

    def _write_free_tokens(self, form: Mapping[str, Any]) -> str:
        return f"<[^{','.join(map(str, _field(form, 'except', list)))}]>*"

    def _write_json_schema(self, form: Mapping[str, Any]) -> str:
        closed = form.get("closed", self._closed)
        return f"%json {guidance_json(_field(form, 'json_schema', (Mapping, bool)), self._options, closed)}"

    def _write_regex(self, form: Mapping[str, Any]) -> str:
        return self._other({"lark_grammar": f"start: {lark_regex(_field(form, 'pattern', str))}"})

    def _write_grammar(self, form: Mapping[str, Any]) -> str:
        from llguidance import grammar_from

        lark = guidance_lark(grammar_from("grammar", _field(form, "grammar", str)), self._options)
        return self._other({"lark_grammar": lark})

    def _other(self, grammar: Mapping[str, Any]) -> str:
        name = f"g{len(self._others)}"
        self._others.append({**grammar, "name": name})
        return f"@{name}"

    def _write_sequence(self, form: Mapping[str, Any]) -> str:
        return " ".join(map(self._rule, _field(form, "elements", list))) or '""'

    def _write_or(self, form: Mapping[str, Any]) -> str:
        return " | ".join(map(self._rule, _field(form, "elements", list))) or '""'

    def _write_optional(self, form: Mapping[str, Any]) -> str:
        return f"{self._rule(_field(form, 'element', Mapping))}?"

    def _write_tag(self, form: Mapping[str, Any]) -> str:
        return f"{self._rule(_field(form, 'begin', (str, Mapping)))} {self._after_begin(form)}"

    def _after_begin(self, form: Mapping[str, Any]) -> str:
        """Return the grammar of a tag after its beginning. Free text in the tag continues until the tag's end."""
        content, end = _field(form, "content", Mapping), _field(form, "end", (str, Mapping))
        if content.get("type") != "any_text":
            return f"{self._rule(content)} {self._rule(end)}"
        if isinstance(end, str):
            return self._add(f"{_LAZY} {json.dumps(end)}", "[lazy]") if end else self._rule(content)
        return f"{self._rule(content)} {self._rule(end)}"

    def _write_tags_with_separator(self, form: Mapping[str, Any]) -> str:
        tags = " | ".join(map(self._write_tag, _field(form, "tags", list)))
        one = self._add(tags)
        several = one if form.get("stop_after_first") else f"{one} ({self._rule(form.get('separator', ''))} {one})*"
        return several if form.get("at_least_one") else f"({several})?"

    def _write_triggered_tags(self, form: Mapping[str, Any]) -> str:
        """Return a rule for free text in which each trigger must continue as a tag whose beginning starts with the trigger."""
        triggers = _field(form, "triggers", list)
        if "" in triggers:
            raise ValueError("a structural tag needs triggers that are not empty")
        tags: list[Mapping[str, Any]] = list(_field(form, "tags", list))
        ids = [_field(each, "token", (str, int)) for each in triggers if isinstance(each, Mapping)]
        free = self._rule({"type": "free_tokens", "except": ids}) if ids else self._rule({"type": "any_text"})
        bodies = []
        for trigger in triggers:
            rests = [rest for each in tags if (rest := _without(each, trigger)) is not None]
            if not rests:
                continue
            head = f"{free} {self._rule(trigger)}" if ids else self._add(f"{_LAZY} {json.dumps(trigger)}", "[lazy]")
            bodies += [f"{head} {self._rule(begin)} {self._after_begin(each)}" for begin, each in rests]
        if not bodies:
            raise ValueError("a structural tag needs tags that begin with its triggers")
        one = self._add(" | ".join(bodies))
        if form.get("stop_after_first"):
            return f"{one}" if form.get("at_least_one") else f"{one} | {free}"
        return f"{one}{'+' if form.get('at_least_one') else '*'} {free}"


def _without(tag: Mapping[str, Any], trigger: str | Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]] | None:
    """Return the rest of a tag's beginning after the trigger, and the tag. None if the tag's beginning does not start with the
    trigger."""
    begin = _field(tag, "begin", (str, Mapping))
    if isinstance(trigger, str):
        if isinstance(begin, str) and begin.startswith(trigger):
            return begin[len(trigger) :], tag
        return None
    elements: Sequence[Any] = begin.get("elements", [begin]) if isinstance(begin, Mapping) else []
    return ({"type": "sequence", "elements": list(elements[1:])}, tag) if elements and elements[0] == trigger else None
