"""`--config FILE`: options of a command from a YAML file, which those on the command line go before."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from headway.compat.vllm.options import FLAGS
from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.core.system.text import shown

_SCALARS = (str, bool, int, float)


def _take(context: typer.Context, path: Path | None) -> Path | None:
    """Make what the file says the defaults of the command's options.

    :raises ConfigError: an option that the command does not have, or a value that no option can have.
    """
    if path is not None:
        context.default_map = {**(context.default_map or {}), **defaults_of(path, _names(context))}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_take,
        is_eager=True,
        help="A YAML file of options, by their names without dashes before them. The command line goes before it.",
    ),
]
"""The option --config."""


class _Named(NamedTuple):
    """What a name in a file means."""

    parameter: str
    is_opposite: bool
    """Whether it is the name of what turns the option off."""
    takes_many: bool


def _names(context: typer.Context) -> dict[str, _Named]:
    """Name in a file -> what it means."""
    names: dict[str, _Named] = {}
    for parameter in context.command.params:
        name, many = str(parameter.name), bool(getattr(parameter, "multiple", False))
        names[name] = _Named(name, False, many)
        for option in parameter.opts:
            names[_word(option)] = _Named(name, False, many)
        for option in getattr(parameter, "secondary_opts", ()):
            names[_word(option)] = _Named(name, True, many)
    return names


def _word(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def defaults_of(path: Path, names: dict[str, _Named]) -> dict[str, Any]:
    """Parameter -> value from a file. names: see `_names`.

    :raises ConfigError: no mapping, an unknown name, or a value that is a mapping.
    """
    try:
        found = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise ConfigError("--config", "a YAML file", f"{path}: {shown(line, 200)}") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError("--config", "a YAML file of names and values", f"{path}, which holds a {type(found).__name__}")
    return dict(_default(path, names, str(name), value) for name, value in found.items() if value is not None)


def _default(path: Path, names: dict[str, _Named], given: str, value: Any) -> tuple[str, Any]:
    word = _word(given)
    if word not in names or word == "config":
        near = difflib.get_close_matches(word, names, 1)
        hint = FLAGS.get(word, "") or (f"did you mean {near[0].replace('_', '-')}?" if near else "--help lists them")
        raise ConfigError(f"--config {path}", "options of the command", shown(given, 60), hint)
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(each, _SCALARS) for each in listed):
        raise ConfigError(f"--config {path}", f"a text, a number, true, false or a list of these for {given}", shown(value, 60))
    named = names[word]
    if isinstance(value, list) and not named.takes_many:
        raise ConfigError(f"--config {path}", f"one value for {given}", shown(value, 60))
    if named.is_opposite and not isinstance(value, bool):
        raise ConfigError(f"--config {path}", f"true or false for {given}", shown(value, 60))
    return named.parameter, listed if named.takes_many else (not value) if named.is_opposite else value
