"""Command-line options from the fields of `EngineArgs` and `SamplingParams`, and the tables of docs/options.md."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, NamedTuple, get_args

import typer

from headway.cli.options import (
    PLUGIN_HELP,
    Command,
    parse_attention_rules,
    parse_attn_options,
    parse_block_size,
    sizes_of,
    with_flags,
)
from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.engine_args import EngineArgs, help_texts, option_types

SAMPLING_PANEL: Final = "Sampling"
"""Help panel of the options of `SamplingParams`."""
PANEL: Final = "Model and engine"
"""Help panel of the options of `EngineArgs`."""
SWITCHES: Final = "Switches"
"""Help panel of on/off options. They have a separate panel because their two long names would narrow the other help texts."""


class _Flag(NamedTuple):
    """A field of `SamplingParams` or `EngineArgs` as an option of a command."""

    field: str
    kind: Any  # The type as which typer reads the value
    help: str
    default: Any = None
    value: Callable[[Any], Any] = lambda value: value  # Converts the value that typer read to the field's value
    spelled: str = ""  # The option's name, if it differs from the field's name
    switch: bool = False  # True for an option without a value and without a --no- form

    @property
    def name(self) -> str:
        return self.spelled or "--" + self.field.replace("_", "-")

    @property
    def word(self) -> str:
        """Name of the command's parameter for this option."""
        return self.name.lstrip("-").replace("-", "_")


def _parameter(flag: _Flag, panel: str) -> inspect.Parameter:
    paired = not flag.switch and flag.kind in (bool, bool | None)
    declared = () if paired else (flag.name,)
    option = typer.Option(*declared, help=flag.help, rich_help_panel=SWITCHES if paired else panel)
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(flag.word, kind, default=flag.default, annotation=Annotated[flag.kind, option])


_FLAGS: Final = (
    _Flag("max_tokens", int, "Maximum number of tokens to generate."),
    _Flag("min_tokens", int, "Minimum number of tokens to generate before the text may end."),
    _Flag("temperature", float, "Sampling temperature. 0 means greedy: always the most likely token."),
    _Flag("top_p", float, "Sample from the smallest set of tokens that reaches this probability."),
    _Flag("top_k", int, "Sample from the N most likely tokens. -1 means all tokens."),
    _Flag("min_p", float, "Exclude tokens with less than this fraction of the most likely token's probability."),
    _Flag("repetition_penalty", float, "Penalty for tokens of the prompt and the output. Above 1 makes them less likely."),
    _Flag("presence_penalty", float, "Value to subtract from the logits of tokens in the output, from -2 to 2."),
    _Flag("frequency_penalty", float, "Value to subtract from a token's logit per occurrence in the output, from -2 to 2."),
    _Flag("seed", int, "Random seed for repeatable sampling."),
    _Flag("n", int, "Number of completions for the prompt; the prompt is computed only once."),
    _Flag("stop", list[str], "Text that ends the completion. Repeatable."),
    _Flag("ignore_eos", bool, "Continue past the model's end-of-text token."),
    _Flag("logprobs", int, "Show log-probabilities of each token and of the N most likely tokens at its position."),
)
_FORMS: Final = (
    _Flag("json", str, "JSON schema for the output: a file, or the schema itself.", spelled="--json-schema"),
    _Flag("regex", str, "Regular expression for the output."),
    _Flag("choice", list[str], "Allowed output. Repeatable; the completion is exactly one of the allowed outputs."),
    _Flag("grammar", str, "Grammar for the output, in Lark or llama.cpp (GBNF) notation: a file, or the grammar itself."),
)


def takes_sampling_options(*without: str, **defaults: object) -> Callable[[Command], Command]:
    """Replace a command's parameter `sampling` by options. without: fields to leave out. defaults: default values for this
    command."""
    flags = [
        flag._replace(default=False, switch=True)
        if flag.kind is bool
        else flag._replace(kind=flag.kind | None, default=defaults.get(flag.field))
        for flag in (*_FLAGS, *_FORMS)
        if flag.field not in without
    ]
    parameters = [_parameter(flag, SAMPLING_PANEL) for flag in flags]
    return lambda command: with_flags(command, "sampling", parameters, lambda words: _sampling(flags, words))


def _sampling(flags: Sequence[_Flag], words: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` from options. :raises ConfigError: if a structured output is invalid."""
    from headway.core.sampling.structured import StructuredOutputsParams

    given = [(flag, words[flag.word]) for flag in flags]
    chosen = {flag.field: (flag.name, value) for flag, value in given if value is not None and value is not False and value != []}
    forms = {field: chosen.pop(field) for field in [flag.field for flag in _FORMS] if field in chosen}
    sampling = {field: value for field, (_, value) in chosen.items()}
    if len(forms) > 1:
        first, second, *_ = (name for name, _ in forms.values())
        raise ConfigError(second, "one form of the text alone", f"{first} as well")
    for field, (name, value) in forms.items():
        form: dict[str, Any] = {field: _text_of(name, value) if field in ("json", "grammar") else value}
        sampling["structured_outputs"] = StructuredOutputsParams(**form)
    return sampling


def _text_of(option: str, given: str) -> str:
    """Return the text of the file `given`, or `given` itself if it is an object or a grammar. :raises ConfigError: if `given` is
    none of these."""
    try:
        return read_text(Path(given))
    except (OSError, ValueError) as error:
        if given.lstrip().startswith("{") or (":" in given and option == "--grammar"):
            return given
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(option, "a file that can be read, or the text itself", f"{given!r} ({reason})") from None


_PYTHON_ONLY = ("backends", "hf_overrides", "logits_processors", "registry", "worker_extension_cls")
"""Options whose values are Python objects, which have no command-line form."""
_USES: Final = {
    "The model": "model tokenizer revision download_dir hf_overrides dtype device load_format quantization model_impl "
    "torch_compile runner task skip_tokenizer_init num_threads tensor_parallel_size",
    "Attention backend": "attn_backend attn_options attention_rules state_backend linear_kernel experts_kernel workload "
    "crossover_table tune tune_share autotune_budget",
    "KV cache and memory": "kv_cache_memory gpu_memory_utilization kv_cache_dtype kv_layout block_size "
    "enable_prefix_caching free_window_blocks preemption_mode kv_offload_size kv_offload_dir kv_offload_dir_size",
    "Lengths, batches and scheduling": "max_model_len max_num_seqs max_num_batched_tokens enable_chunked_prefill "
    "enable_prompt_embeds scheduling_policy",
    "How steps run": "enforce_eager cudagraph_capture_sizes async_scheduling speculate speculative_model num_speculative_tokens",
    "Adapters": "enable_lora max_loras max_lora_rank max_cpu_loras",
    "Sampling": "seed deterministic deterministic_level max_logprobs generation_config logits_processors",
    "Plugins and logging": "plugins backends plugin_policy require_passport registry worker_extension_cls log_stats_interval "
    "check_books",
}
"""Section of docs/options.md -> its options, separated by spaces. Options that are not listed go to the last section."""


def takes_engine_options(*names: str, **defaults: object) -> Callable[[Command], Command]:
    """Replace a command's parameter `engine` by options. names: fields; no names means all fields. defaults: default values."""
    flags = [_flag(name, defaults) for name in names or help_texts() if name not in _PYTHON_ONLY]
    added = [*flags, *([_NO_AUTOTUNE] if any(flag.field == "autotune_budget" for flag in flags) else [])]

    def take(words: dict[str, Any]) -> dict[str, Any]:
        engine = {flag.field: flag.value(words[flag.word]) for flag in flags}
        return {**engine, "autotune_budget": 0.0} if words.get(_NO_AUTOTUNE.word, False) else engine

    return lambda command: with_flags(command, "engine", [_parameter(flag, PANEL) for flag in added], take)


_NO_AUTOTUNE = _Flag("no_autotune", bool, "Do not measure backends at the first start.", False, switch=True)


def _flag(name: str, defaults: dict[str, object] | None = None) -> _Flag:
    text = help_texts()[name]
    default = {**_defaults(), **(defaults or {})}[name]
    if name == "attn_options":
        options = "Option of an attention backend, as NAME.key=value. Repeatable."
        return _Flag(name, list[str] | None, options, None, lambda texts: parse_attn_options(texts or []), "--attn-opt")
    if name == "attention_rules":
        rules = "Attention rule, as FILE.py:CLASS or the name of a plugin's rule; KEY=RULE for some layers (window, layers.3, "
        rules += "layers.4-7). Repeatable."
        return _Flag(name, list[str] | None, rules, None, lambda texts: parse_attention_rules(texts or []), "--attention-rule")
    if name == "plugin_policy":
        return _Flag(name, str | None, text, spelled="--plugins")
    if name == "plugins":
        return _Flag(name, list[str] | None, PLUGIN_HELP, None, lambda files: files or [], "--plugin")
    if name == "crossover_table":
        one_each = "Crossover table for auto to use. Repeat for models with several kinds of layers."
        return _Flag(name, list[str] | None, one_each, None, lambda files: files or None)
    if name == "block_size":
        return _Flag(name, str, text.partition(" Default")[0], "auto" if default is None else str(default), parse_block_size)
    if name == "cudagraph_capture_sizes":
        listed = "Decode batch sizes to capture as CUDA graphs, comma-separated. Default: sizes up to --max-num-seqs."
        return _Flag(name, str | None, listed, default, lambda sizes: sizes_of("--cudagraph-capture-sizes", sizes))
    kind = get_args(option_types()[name])[0]
    if name in ("attn_backend", "kv_cache_dtype"):  # in Python, also mappings
        kind = str
    if {int, str} <= set(get_args(kind)):  # a size, as a number or as a text such as 4GiB
        kind = str | None if NoneType in get_args(kind) else str
    return _Flag(name, kind, text, default, switch=default is False)


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(EngineArgs)}


def options_page() -> str:
    """Return the text of docs/options.md."""
    lines = [
        "# Options",
        "",
        "Each option is a keyword of `LLM(...)` and an option of `headway generate`; other commands have the options that "
        "apply to them.",
        "They are defined in `headway/engine_args.py` and `core/engine/data/config.py`;",
        "`python -m headway.cli.engine_options` prints this page. [server.md](server.md) lists the options of the server.",
        "",
    ]
    uses = {use: names.split() for use, names in _USES.items()}
    listed = {name for names in uses.values() for name in names}
    for use, names in {**uses, "Others": [name for name in help_texts() if name not in listed]}.items():
        if rows := [_row(name) for name in names if name in help_texts()]:
            head = ["| `LLM(...)` | command line | type | default | meaning |", "|---|---|---|---|---|"]
            lines += [f"## {use}", "", *head, *rows, ""]
    lines += ["`--no-autotune` is `--autotune-budget 0`. The error for an unknown option names the nearest valid one.", ""]
    return "\n".join(lines)


def _row(name: str) -> str:
    """Return an option's row of the table."""
    hint, default = get_args(option_types()[name])[0], _defaults()[name]
    flag = "" if name in _PYTHON_ONLY else f"`{_flag(name).name}`"
    shown = "" if default is dataclasses.MISSING or default == () else f"`{default!r}`"
    kind = " or ".join(_kind(each) for each in get_args(hint) or (hint,) if each is not NoneType)
    if name in ("attn_options", "attention_rules", "hf_overrides", "plugins", "backends", "logits_processors"):
        kind = "mapping" if name in ("attn_options", "attention_rules", "hf_overrides") else "iterable"
    return f"| `{name}` | {flag} | {kind} | {shown} | {help_texts()[name]} |"


def _kind(hint: Any) -> str:
    """Return the plain name of a type: "sequence of int" for Sequence[int]."""
    inner = get_args(hint)
    name = str(getattr(hint, "__name__", hint))
    return f"{name.lower()} of {_kind(inner[0])}" if len(inner) == 1 else name


if __name__ == "__main__":
    print(options_page(), end="")
