"""What kind of value each option takes, as its annotation says: anything else is refused by name before it is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from os import PathLike
from typing import Any, Final

from headway.core.contract.errors import ConfigError
from headway.core.system.text import shown

_KINDS: Final[dict[str, tuple[tuple[type, ...], str]]] = {
    "bool": ((bool,), "True or False"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a text"),
    "None": ((type(None),), "None"),
    "Iterable[object]": ((Iterable,), "a list"),
}
_WORD: Final = 2**63
"""No count or size is as large, on any machine."""


def check_kinds(options: Any) -> None:
    """Check the fields of a dataclass whose annotations are texts such as 'Annotated[int | None, "..."]'. Paths become texts.

    :raises ConfigError: a value of another kind, a number that is none, or one beyond 64 bits.
    """
    for field in fields(options):
        kinds = str(field.type).removeprefix("Annotated[").split(",")[0].split(" | ")
        if not set(kinds) <= set(_KINDS) or {"int", "str"} <= set(kinds):  # sizes; checked by whoever reads them
            continue
        value = getattr(options, field.name)
        if "str" in kinds and isinstance(value, PathLike):
            value = str(value)
            object.__setattr__(options, field.name, value)
        types = tuple(kind for name in kinds for kind in _KINDS[name][0])
        wanted = isinstance(value, types) and (not isinstance(value, bool) or "bool" in kinds)
        if not wanted or (isinstance(value, float) and math.isnan(value)):
            raise ConfigError(field.name, " or ".join(_KINDS[name][1] for name in kinds), shown(value))
        if isinstance(value, int) and not -_WORD <= value < _WORD:
            raise ConfigError(field.name, "a whole number of at most 64 bits", shown(value))


def check_attn_options(options: object) -> None:
    """:raises ConfigError: they are no mapping from names of backends to mappings."""
    if not isinstance(options, Mapping) or not all(isinstance(own, Mapping) for own in options.values()):
        raise ConfigError("attn_options", 'a mapping such as {"BACKEND": {"option": "value"}}', shown(options))
