"""The options of `EngineArgs` as flags of a command, and as the table of docs/options.md."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args

import typer

from headway.cli.options import PLUGIN_HELP, in_place_of, parse_attn_options, parse_block_size, sizes_of
from headway.engine_args import EngineArgs, help_texts, option_types

Command = Callable[..., None]

PANEL = "Model and engine"
"""The panel in which the help of a command lists these options."""
SWITCHES = "Switches"
"""The panel of options that are turned on and off: their two long names would leave the other texts little room."""
_PYTHON_ONLY = ("backends", "hf_overrides", "logits_processors", "registry", "worker_extension_cls")
"""Options whose values are Python objects."""
_USES: Mapping[str, Sequence[str]] = {
    "The model": (
        "model",
        "tokenizer",
        "revision",
        "download_dir",
        "hf_overrides",
        "dtype",
        "device",
        "load_format",
        "quantization",
        "model_impl",
        "torch_compile",
        "runner",
        "task",
        "skip_tokenizer_init",
        "num_threads",
        "tensor_parallel_size",
    ),
    "Which backend serves": ("attn_backend", "attn_options", "state_backend", "workload", "crossover_table", "autotune_budget"),
    "The cache and its memory": (
        "kv_cache_memory",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_layout",
        "block_size",
        "enable_prefix_caching",
        "free_window_blocks",
        "preemption_mode",
        "kv_offload_size",
        "kv_offload_dir",
        "kv_offload_dir_size",
    ),
    "Lengths, batches and their order": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "enable_prompt_embeds",
        "scheduling_policy",
    ),
    "How steps run": (
        "enforce_eager",
        "cudagraph_capture_sizes",
        "async_scheduling",
        "speculate",
        "speculative_model",
        "num_speculative_tokens",
    ),
    "Adapters": ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),
    "What tokens come": ("seed", "deterministic", "max_logprobs", "generation_config", "logits_processors"),
    "Plugins and the log": ("plugins", "backends", "plugin_policy", "registry", "worker_extension_cls", "log_stats_interval"),
}
"""What options are for -> the options; the page lists those that stand here nowhere at its end."""


class _Flag(NamedTuple):
    """An option in the form of a command line's flag."""

    name: str
    kind: Any
    """The type that typer reads its value as."""
    default: Any
    value: Callable[[Any], Any]
    """Makes the option's value from what typer read."""
    help: str
    switch: bool = False
    """A flag without a value, which has no --no-... beside it."""


def takes_engine_options(*names: str, **defaults: object) -> Callable[[Command], Command]:
    """Give a command the flags of these options in the place of its parameter `engine`, a dict of their values.

    names: options of EngineArgs; none means all that a command line can give. defaults: where the command's differ.
    """

    def decorate(command: Command) -> Command:
        flags = {name: _flag(name, defaults) for name in names or help_texts() if name not in _PYTHON_ONLY}
        added = [*flags.values(), *([_NO_AUTOTUNE] if "autotune_budget" in flags else [])]
        parameters = in_place_of("engine", command, [_parameter(flag) for flag in added])

        def run(**values: Any) -> None:
            engine = {name: flag.value(values.pop(_word(flag))) for name, flag in flags.items()}
            if values.pop(_word(_NO_AUTOTUNE), False):
                engine["autotune_budget"] = 0.0
            command(**values, engine=engine)

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__module__ = command.__module__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _same(value: Any) -> Any:
    return value


_NO_AUTOTUNE = _Flag("--no-autotune", bool, False, _same, "Let auto measure nothing at the first start.", switch=True)


def _flag(name: str, defaults: dict[str, object] | None = None) -> _Flag:
    text = help_texts()[name]
    default = {**_defaults(), **(defaults or {})}[name]
    flag = "--" + name.replace("_", "-")
    if name == "attn_options":
        options = "An option of a backend, as NAME.key=value. Repeatable."
        return _Flag("--attn-opt", list[str] | None, None, lambda texts: parse_attn_options(texts or []), options)
    if name == "plugin_policy":
        return _Flag("--plugins", str | None, None, _same, text)
    if name == "plugins":
        return _Flag("--plugin", list[str] | None, None, lambda files: files or [], PLUGIN_HELP)
    if name == "crossover_table":
        one_each = "File of measured times that auto obeys. Repeatable, for models of several kinds of layers."
        return _Flag(flag, list[str] | None, None, lambda files: files or None, one_each)
    if name == "block_size":
        return _Flag(flag, str, "auto" if default is None else str(default), parse_block_size, text.partition(" Default")[0])
    if name == "cudagraph_capture_sizes":
        return _Flag(flag, str | None, default, lambda sizes: sizes_of(flag, sizes), text)
    kind = get_args(option_types()[name])[0]
    if {int, str} <= set(get_args(kind)):  # a size, as a number or as a text such as 4GiB
        kind = str | None if NoneType in get_args(kind) else str
    return _Flag(flag, kind, default, _same, text, switch=default is False)


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(EngineArgs)}


def _word(flag: _Flag) -> str:
    return flag.name.lstrip("-").replace("-", "_")


def _parameter(flag: _Flag) -> inspect.Parameter:
    declared = (flag.name,) if flag.switch else ()
    paired = not flag.switch and flag.kind in (bool, bool | None)
    option = typer.Option(*declared, help=flag.help, rich_help_panel=SWITCHES if paired else PANEL)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(_word(flag), kind, default=flag.default, annotation=Annotated[flag.kind, option])


def options_page() -> str:
    """The text of docs/options.md."""
    lines = [
        "# Options",
        "",
        "Each option is a keyword of `LLM(...)` and a flag of `headway generate`; other commands take those that concern them.",
        "They are written in `headway/engine_args.py` and `core/engine/data/config.py`;",
        "`python -m headway.cli.engine_options` prints this page. Those of the server alone are in [server.md](server.md).",
        "",
    ]
    listed = {name for names in _USES.values() for name in names}
    for use, names in {**_USES, "Others": [name for name in help_texts() if name not in listed]}.items():
        if rows := [_row(name) for name in names if name in help_texts()]:
            head = ["| `LLM(...)` | command line | type | default | what it says |", "|---|---|---|---|---|"]
            lines += [f"## {use}", "", *head, *rows, ""]
    lines += ["`--no-autotune` is `--autotune-budget 0`. An unknown option is refused with the nearest of these.", ""]
    return "\n".join(lines)


def _row(name: str) -> str:
    """An option's line in its table."""
    hint, default = get_args(option_types()[name])[0], _defaults()[name]
    flag = "" if name in _PYTHON_ONLY else f"`{_flag(name).name}`"
    shown = "" if default is dataclasses.MISSING or default == () else f"`{default!r}`"
    kind = " or ".join(_kind(each) for each in get_args(hint) or (hint,) if each is not NoneType)
    if name in ("attn_options", "hf_overrides", "plugins", "backends", "logits_processors"):
        kind = "mapping" if name in ("attn_options", "hf_overrides") else "iterable"
    return f"| `{name}` | {flag} | {kind} | {shown} | {help_texts()[name]} |"


def _kind(hint: Any) -> str:
    """The plain name of a type: "sequence of int" for Sequence[int]."""
    inner = get_args(hint)
    name = str(getattr(hint, "__name__", hint))
    return f"{name.lower()} of {_kind(inner[0])}" if len(inner) == 1 else name


if __name__ == "__main__":
    print(options_page(), end="")
