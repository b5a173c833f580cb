"""Options that commands share: `--config FILE`, lists of names and sizes, element types and backend options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
import yaml
from rich.text import Text

from headway.compat.vllm_words import FLAGS
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from rich.console import Console

_SCALARS = (str, bool, int, float)


def _take(context: typer.Context, path: Path | None) -> Path | None:
    """Use the values in the file as the command's defaults. :raises ConfigError: if an option or a value is invalid."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **defaults_of(path, _names(context))}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_take,
        is_eager=True,
        help="YAML file of option values, keyed by option names without leading dashes. Command-line options take precedence.",
    ),
]
"""Type of a command's parameter for the option --config."""


class _Named(NamedTuple):
    """Parameter of a command that a name in a configuration file sets."""

    parameter: str
    is_opposite: bool  # True if the name is the negated form of an option (--no-...)
    takes_many: bool


def _names(context: typer.Context) -> dict[str, _Named]:
    """Return a mapping: name in a configuration file -> parameter that the name sets."""
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
    """Return a mapping from parameters to their values in a file. names: see `_names`. :raises ConfigError: if an option is
    unknown."""
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


PLUGIN_HELP = (
    "Plugin file: FILE.py, or FILE.py:CLASS for a backend class without a hook; or a hub kernel: hub:FOLDER or "
    "hub:OWNER/NAME[@VERSION]. Repeatable."
)
PluginFiles = Annotated[list[str] | None, typer.Option("--plugin", help=PLUGIN_HELP)]
"""The option --plugin, of every command that lists or uses backends and layouts."""
AdapterModules = Annotated[
    list[str] | None,
    typer.Option(
        help='LoRA adapter that requests select as model: NAME=FOLDER, or {"name": ..., "path": ...}. Repeatable.',
        rich_help_panel="Adapters",
    ),
]
"""The option --lora-modules, for commands whose requests name a model or an adapter."""
AdapterFolder = Annotated[
    str | None,
    typer.Option(help="Folder of a LoRA adapter to generate with. Implies --enable-lora.", rich_help_panel="Adapters"),
]
"""The option --lora, for commands that generate with one adapter."""


Command = Callable[..., None]


def with_flags(
    command: Command, place: str, flags: Sequence[inspect.Parameter], take: Callable[[dict[str, Any]], object]
) -> Command:
    """Replace a command's parameter `place` by options, in the order in which the help lists them. take: function that makes the
    argument from the options' values."""
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command, eval_str=True).parameters.values():
        parameters += flags if each.name == place else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]

    @wraps(command)
    def run(**values: Any) -> None:
        taken = take({flag.name: values.pop(flag.name, flag.default) for flag in flags})
        command(**{**values, place: taken})

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def names_of(text: str | None) -> list[str] | None:
    """Return the names in a comma-separated text, or None if it is empty."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    return names or None


def requests_of(text: str | None) -> list[str] | None:
    """Return the backend requests in a text, or None. Consecutive parts such as prefill=NAME,decode=NAME are one request until a
    key repeats."""
    requests: list[str] = []
    for name in names_of(text) or []:
        key = name.partition("=")[0]
        before = requests[-1] if requests else ""
        joins = "=" in name and "=" in before and key not in {part.partition("=")[0] for part in before.split(",")}
        requests[-1:] = [f"{before},{name}"] if joins else [*requests[-1:], name]
    return requests or None


def adapters_of(texts: Sequence[str], enabled: bool) -> list[LoRARequest]:
    """Return the adapters of --lora-modules, in either of vLLM's two formats, numbered from 1. enabled: the engine's enable_lora.
    :raises ConfigError: if a text has a different format, a name repeats, or LoRA is disabled.
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
    """Return the adapter of --lora and set enable_lora in the engine's options; None if `folder` is None."""
    if folder is None:
        return None
    engine["enable_lora"] = True
    return LoRARequest(folder, 1, folder)


def on_command_line(context: typer.Context, name: str) -> bool:
    """Return whether a parameter's value was given on the command line, not by a default or a configuration file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def sizes_of(option: str, text: str | None, least: int = 1) -> Sequence[int] | None:
    """Return the numbers in a comma-separated text, or None if it is empty. least: minimum of each number. :raises ConfigError:
    if the text is not such a list."""
    names = names_of(text)
    if names is None:
        return None
    if not all(name.isascii() and name.isdigit() and len(name) < 19 and int(name) >= least for name in names):
        need = "positive numbers" if least else "numbers"
        raise ConfigError(option, f"{need}, comma-separated, such as 16,256", repr(text))
    return [int(name) for name in names]


def block_sizes_of(text: str | None) -> Sequence[int] | None:
    """Return the block sizes in a comma-separated text, or None. :raises ConfigError: if the KV cache does not support a size."""
    from headway.core.engine.data.config import check_block_size

    sizes = sizes_of("--block-sizes", text)
    for size in sizes or ():
        check_block_size(size, "--block-sizes")
    return sizes


def dtype_of(option: str, name: str, known: dict[str, torch.dtype]) -> torch.dtype | None:
    """Return the element type that has this name, or None for auto. :raises ConfigError: if the name is unknown."""
    if name == "auto":
        return None
    if name not in known:
        raise ConfigError(option, f"auto or one of {', '.join(known)}", repr(name))
    return known[name]


def parse_attn_options(texts: list[str]) -> dict[str, dict[str, str]]:
    """Return backend -> option -> value, from texts NAME.key=value (NAME may have dots). :raises ConfigError: if a text is
    malformed."""
    options: dict[str, dict[str, str]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        name, dot, key = target.rpartition(".")
        if not (equals and dot and name and key):
            raise ConfigError("--attn-opt", "NAME.key=value", repr(text))
        options.setdefault(name, {})[key] = value
    return options


def parse_attention_rules(texts: list[str]) -> dict[str, str]:
    """Return key of layers -> rule, from texts RULE or KEY=RULE. :raises ConfigError: if a text is malformed."""
    rules: dict[str, str] = {}
    for text in texts:
        key, equals, rule = text.partition("=") if not text.partition("=")[0].endswith(".py") else (text, "", "")
        if not key or (equals and not rule):
            raise ConfigError("--attention-rule", "FILE.py:CLASS, NAME, or KEY=RULE", repr(text))
        rules[key if equals else "all"] = rule or key
    return rules


def parse_block_size(text: str) -> int | None:
    """Return the block size of a text, or None for auto. :raises ConfigError: if the text is neither a number nor auto."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError("block_size", "auto or a multiple of 8", repr(text)) from None


def report_written(path: Path | None, console: Console) -> None:
    """Print that a file was written, if `path` is not None."""
    if path is not None:
        console.print(Text(f"written to {path}"), soft_wrap=True)


def write_result(result: BaseModel, path: Path | None, console: Console) -> None:
    """Write a result as JSON and print the path, if `path` is not None."""
    from headway.core.system.json_files import write_json

    if path is not None:
        write_json(result, path)
        report_written(path, console)
