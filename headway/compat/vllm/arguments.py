"""Options as flags of a parser of Python's own, as vLLM's programs have them, and vLLM's parser."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin

from headway.core.system.json_text import parse_json

_SHORT: Final = {"tensor_parallel_size": ("-tp",), "quantization": ("-q",)}
"""Option -> flags of one letter or two that vLLM has for it."""


class Flag(NamedTuple):
    """An option in the form that a parser is told."""

    name: str
    hint: Any
    """The annotation of the option, Annotated[type, help]."""
    default: Any
    help: str


class FlexibleArgumentParser(ArgumentParser):
    """A parser whose flags may be written with underscores in place of hyphens."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See ArgumentParser; `parse_args` comes here too."""
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_hyphened(each) for each in given], namespace)


def _hyphened(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def add_flags(parser: ArgumentParser, flags: Iterable[Flag]) -> None:
    """Give a parser flags of these options, with their defaults; a flag that it has already is left alone."""
    group = parser.add_argument_group("model and engine")
    for flag in flags:
        option = "--" + flag.name.replace("_", "-")
        if option in parser._option_string_actions:
            continue
        default = {} if flag.default is MISSING else flag.default
        group.add_argument(
            option, *_SHORT.get(flag.name, ()), default=default, help=flag.help.replace("%", "%%"), **_reading(flag)
        )


def add_foreign_flags(parser: ArgumentParser, names: Iterable[str]) -> None:
    """Give a parser flags of options that are vLLM's alone; not given they are None."""
    for name in names:
        option = "--" + name.replace("_", "-")
        if option not in parser._option_string_actions:
            parser.add_argument(option, nargs="?", const=True, default=None, type=_value, help=argparse.SUPPRESS)


def _reading(flag: Flag) -> dict[str, Any]:
    """How a parser reads an option's value."""
    hint = get_args(flag.hint)[0]
    kinds = [each for each in (get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)) if each is not NoneType]
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if any(get_origin(each) in (Sequence, Mapping, Iterable) for each in kinds) and str not in kinds:
        return {"type": _value}
    numbers = [each for each in kinds if each in (int, float)]
    return {"type": numbers[0] if numbers and str not in kinds else str}


def _value(text: str) -> Any:
    """A flag's value: JSON where the text is any, such as true, 16 or {"method": "ngram"}, else the text."""
    try:
        return parse_json(text, "option")
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)
