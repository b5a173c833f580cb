"""Options that commands share: lists of names and sizes, element types, and the options of backends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown

if TYPE_CHECKING:
    import torch

PLUGIN_HELP = "A plugin in a file: FILE.py, or FILE.py:CLASS for a backend class without a hook. Repeatable."
PluginFiles = Annotated[list[str] | None, typer.Option("--plugin", help=PLUGIN_HELP)]
"""The option --plugin, of every command that lists or uses backends and layouts."""
AdapterModules = Annotated[
    list[str] | None,
    typer.Option(
        help='Adapter that requests call as their model: NAME=FOLDER, or {"name": ..., "path": ...}. Repeatable.',
        rich_help_panel="Adapters",
    ),
]
"""The option --lora-modules, of commands whose requests name what answers them."""
AdapterFolder = Annotated[
    str | None,
    typer.Option(help="Folder of an adapter (LoRA) to write with; turns --enable-lora on.", rich_help_panel="Adapters"),
]
"""The option --lora, of commands that write with one adapter."""


def in_place_of(name: str, command: Callable[..., None], flags: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters of a command with flags in the place of the parameter `name`: help lists options in this order."""
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        parameters += flags if each.name == name else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    return parameters


def names_of(text: str | None) -> list[str] | None:
    """Names from a comma-separated text; None where there are none."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    return names or None


def requests_of(text: str | None) -> list[str] | None:
    """Backend requests from a comma-separated text, where prefill=NAME,decode=NAME counts as one; None where there are none.

    A part with = belongs to the request before it, unless that has its key already.
    """
    requests: list[str] = []
    for name in names_of(text) or []:
        key = name.partition("=")[0]
        before = requests[-1] if requests else ""
        joins = "=" in name and "=" in before and key not in {part.partition("=")[0] for part in before.split(",")}
        requests[-1:] = [f"{before},{name}"] if joins else [*requests[-1:], name]
    return requests or None


def adapters_of(texts: Sequence[str], enabled: bool) -> list[LoRARequest]:
    """The adapters that --lora-modules names, in vLLM's two forms, numbered from 1. enabled: whether the engine takes any.

    :raises ConfigError: a text of another form, a name twice, or an engine without slots for adapters.
    """
    found: list[LoRARequest] = []
    for text in texts:
        name, equals, path = text.partition("=")
        given: Any = {"name": name, "path": path}
        if text.lstrip().startswith("{"):
            try:
                given = parse_json(text, "--lora-modules")
            except ValueError as error:
                raise ConfigError("--lora-modules", "NAME=FOLDER or a JSON object", f"{shown(text)} ({error})") from None
        elif not (name and equals and path):
            raise ConfigError("--lora-modules", "NAME=FOLDER or a JSON object with name and path", shown(text))
        unknown = set(given) - {"name", "path", "base_model_name", "is_3d_lora_weight"}
        if unknown or not all(isinstance(given.get(key), str) for key in ("name", "path")):
            raise ConfigError("--lora-modules", "an object with name, path and perhaps base_model_name", shown(text))
        if any(each.lora_name == given["name"] for each in found):
            raise ConfigError("--lora-modules", "a name for each adapter", f"{given['name']} twice")
        found.append(LoRARequest(given["name"], len(found) + 1, given["path"], base_model_name=given.get("base_model_name")))
    if found and not enabled:
        raise ConfigError("--lora-modules", "--enable-lora beside it", "none")
    return found


def adapter_of(folder: str | None, engine: dict[str, Any]) -> LoRARequest | None:
    """The adapter that --lora names, for which the engine's options then make room; None where it names none."""
    if folder is None:
        return None
    engine["enable_lora"] = True
    return LoRARequest(folder, 1, folder)


def on_command_line(context: typer.Context, name: str) -> bool:
    """Whether a parameter of that name was given on the command line, rather than by its default or a file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def sizes_of(option: str, text: str | None, least: int = 1) -> Sequence[int] | None:
    """Numbers of at least `least` from a comma-separated text; None where there are none.

    :raises ConfigError: the text has another form.
    """
    names = names_of(text)
    if names is None:
        return None
    if not all(name.isascii() and name.isdigit() and len(name) < 19 and int(name) >= least for name in names):
        need = "positive numbers" if least else "numbers"
        raise ConfigError(option, f"{need}, comma-separated, such as 16,256", repr(text))
    return [int(name) for name in names]


def block_sizes_of(text: str | None, option: str = "--block-sizes") -> Sequence[int] | None:
    """Block sizes from a comma-separated text; None where there are none.

    :raises ConfigError: a size that no cache can have.
    """
    from headway.core.engine.data.config import check_block_size

    sizes = sizes_of(option, text)
    for size in sizes or ():
        check_block_size(size, option)
    return sizes


def dtype_of(option: str, name: str, known: dict[str, torch.dtype]) -> torch.dtype | None:
    """An element type by name; None for auto.

    :raises ConfigError: an unknown one.
    """
    if name == "auto":
        return None
    if name not in known:
        raise ConfigError(option, f"auto or one of {', '.join(known)}", repr(name))
    return known[name]


def parse_attn_options(texts: list[str]) -> dict[str, dict[str, str]]:
    """Backend name -> option -> value from texts like NAME.key=value (a name may itself have dots).

    :raises ConfigError: a text of another form.
    """
    options: dict[str, dict[str, str]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        name, dot, key = target.rpartition(".")
        if not (equals and dot and name and key):
            raise ConfigError("--attn-opt", "NAME.key=value", repr(text))
        options.setdefault(name, {})[key] = value
    return options


def parse_block_size(text: str) -> int | None:
    """A number, or None for auto.

    :raises ConfigError: neither.
    """
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError("block_size", "auto or a multiple of 8", repr(text)) from None
