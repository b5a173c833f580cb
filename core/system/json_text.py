"""Reader of untrusted JSON in files, requests and options, with limits on nesting and numbers."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic_core import from_json

from headway.core.contract.errors import ConfigError
from headway.core.system.text import harmless, shown

if TYPE_CHECKING:
    from pydantic import BaseModel

Model = TypeVar("Model", bound="BaseModel")
_LEAST: Final = -(2**63)
_MOST: Final = 2**64 - 1
_LEVELS: Final = 200  # Maximum nesting of objects and arrays in pydantic's reader
_LONG_LIST: Final = 16  # Minimum length of a list of numbers that is checked as a whole
_LONGEST_PATH: Final = 200
_NAMES: Final = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
"""Python type -> the type's name in JSON."""


BODY: Final = "the body"
"""Name of a request's body in errors."""


class JsonError(ConfigError):
    """Error for a text that is not JSON, or is JSON of a type other than the required one."""


def parse_json(text: str | bytes, source: str, kind: type | None = None, *, any_number: bool = False) -> Any:
    """Return the value of UTF-8 JSON, with an optional byte order mark. If an object repeats a name, the last value counts.

    source: file or field that holds the text, for the error. kind: required type, dict or list; None accepts any value.
    any_number: True to accept NaN, Infinity and integers of more than 64 bits, which Python's json writes and model
    configurations contain.

    :raises JsonError: if the text is not JSON, has more than 200 levels, is not of `kind`, or has a number that other JSON
    readers cannot represent. The message contains the position in the text, or the path of the value.
    """
    needed = f"a JSON {_NAMES[kind]}" if kind else "JSON"
    try:
        found = from_json((text.encode() if isinstance(text, str) else text).removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        what, _, place = str(error).partition(" at line ")
        where = f"line {place.replace(' column', ', column')}: " if place else ""
        if what.startswith("recursion"):
            what = f"more than {_LEVELS} levels of objects and arrays"
        raise JsonError(source or BODY, needed, f"a text that is not JSON ({where}{what})") from None
    if kind is not None and not isinstance(found, kind):
        raise JsonError(source or BODY, needed, "null" if found is None else f"a JSON {_NAMES[type(found)]}: {shown(found, 60)}")
    if not any_number:
        _check_numbers(found, f"{source}: " if source else "")
    return found


def parse_model(text: str | bytes, kind: type[Model], source: str = "", *, any_number: bool = False) -> Model:
    """Return JSON as a pydantic model. source: see `parse_json`; empty for a request's body.
    :raises JsonError: see `parse_json`. :raises pydantic.ValidationError: if a field has the wrong type."""
    return kind.model_validate(parse_json(text, source, dict, any_number=any_number))


def _check_numbers(value: object, before: str) -> None:
    """Check the numbers in a value. before: prefix of the path in errors.

    :raises JsonError: if a number is not finite or has more than 64 bits.
    """
    if not _all_fit(value):
        path, number = next(_unfit(value, ""))
        place = f"{before}{harmless(path[:_LONGEST_PATH])}".removesuffix(": ")
        raise JsonError(place, "a number of at most 64 bits", shown(number, 60))


def _all_fit(value: object) -> bool:
    """Return whether every number in a value is finite and has at most 64 bits. Optimized for speed, because every request is
    checked."""
    rest: list[Any] = [[value]]
    add, least, most, infinity = rest.append, _LEAST, _MOST, math.inf
    for each in rest:
        kind = type(each)
        if kind is dict:
            values: Iterable[Any] = each.values()
        else:
            if len(each) > _LONG_LIST and type(each[0]) is int and _are_small(each):
                continue
            values = each
        for item in values:
            kind = type(item)
            if kind is str:
                continue
            if kind is dict or kind is list:
                add(item)
            elif kind is int:
                if not least <= item <= most:
                    return False
            elif kind is float and not -infinity < item < infinity:
                return False
    return True


def _are_small(values: list[Any]) -> bool:
    """Return whether all values, such as the token ids of a prompt, are numbers of less than 64 bits. The loop over the values
    runs in C."""
    try:
        return math.hypot(*values) < -_LEAST  # at least as large as the largest value
    except (TypeError, OverflowError):
        return False


def _fits(number: float) -> bool:
    return _LEAST <= number <= _MOST if type(number) is int else math.isfinite(number)


def _unfit(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """Yield the path and the value of each number that is not finite or has more than 64 bits."""
    if isinstance(value, int | float):
        if not _fits(value):
            yield path, value
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list):
        parts = enumerate(value)
    elif isinstance(value, dict):
        parts = value.items()
    for name, item in parts:
        yield from _unfit(item, f"{path}.{name}" if path else str(name))
