"""Checks of a model folder's config.json: a checkpoint that Headway would compute wrongly is refused before it is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headway.core.contract.errors import ModelError
from headway.core.contract.spec import DTYPES
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.models.checkpoints.tensor_files import TensorFiles
from headway.models.families.families import FAMILIES, TEXT_PARTS, known_architectures

_EMBEDDING_FILES = ("modules.json", "config_sentence_transformers.json")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "num_labels",
    *("n_embd", "n_head", "n_layer", "n_positions", "mamba_n_heads", "attn_layer_period", "expert_layer_period"),
    "block_multiple_of",
)
_MOST = {"num_hidden_layers": 4096, "num_attention_heads": 65536, "num_key_value_heads": 65536, "head_dim": 65536}
"""Maximum value of each size with a tighter bound than int32. Each maximum is far above any model, and small enough to refuse
larger values quickly."""
_SIZE = re.compile(
    r"(^|[._])(n|num|d|sizes?|dims?|length|rank|heads?|layers?|block|experts?|groups?|labels|kernel|conv|expand|inner|count|width"
    r"|channels|state)([._]|$)"
)
"""Pattern for names of config.json integers that count or measure parts of a model."""
_NO_SIZE = re.compile(
    r"(^|[._])(tokens?|positions?|ids?|params?|parameters|seq|sequence|context|ctx|max|window|chunk|batch|samples?|file|data|dataset"
    r"|train|total|steps|eps|epsilon)([._]|$)"
)
"""Pattern for names that `_SIZE` matches although they are not sizes, such as token ids and context lengths."""
_LAYERS = re.compile(r"(^|[._])(?<!per_)(layers?|block)([._]|$)")
_MOST_SIZE = 1 << 25
"""Upper bound of each size if the folder has no tensors to compare sizes with."""
_LEAST_BOUND = 1 << 16
"""Smallest upper bound of sizes derived from tensors: a list of this length is quick to create."""
_PACKED = 8
"""Maximum number of quantized values packed into one element of a tensor."""
_ABOVE_ZERO = {"rms_norm_eps": 1.0, "query_pre_attn_scalar": 1e6, "attn_logit_softcapping": 1e6, "final_logit_softcapping": 1e6}
"""Maximum value of each optional config.json number; the minimum is above 0."""
_UNUSED_WITHOUT = {"vocab_size_per_layer_input": "hidden_size_per_layer_input"}
"""Size -> size without which a model does not use it, and has no tensor of that size."""
_MAY_BE_NULL = ("num_key_value_heads", "head_dim", "sliding_window", "num_labels")


def check_folder(folder: Path, generates: bool = True) -> Mapping[str, Any]:
    """Read and check config.json and the files next to it, and return config.json.

    generates: True if the model is to generate text; False for a pooling model, whose architecture is checked elsewhere.

    :raises ModelError: if the folder is not a complete model, the model is not a causal language model, or a size is impossible.
    """
    if (folder / "adapter_config.json").is_file():
        base = _read(folder / "adapter_config.json").get("base_model_name_or_path") or "its base model"
        raise ModelError(
            f"model {folder}: needs a whole model, got an adapter (LoRA) for {base} by its adapter_config.json; load that "
            "model with enable_lora=True, and name the adapter in lora_request; or merge the two with peft's merge_and_unload()"
        )
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        hint = f"; a .gguf file is named itself, such as {files[0]}" if files else ""
        raise ModelError(f"model {folder}: needs a config.json in the folder, got none{hint}")
    config = _read(folder / "config.json")
    _check_kind(folder, config)
    if generates:
        _check_architecture(folder, config)
    text = config.get("text_config") if config.get("model_type") in TEXT_PARTS else None
    check_sizes(folder, text if isinstance(text, Mapping) else config)
    check_bounds(folder, config, _shapes(folder))
    return config


def _shapes(folder: Path) -> dict[str, list[int]] | None:
    """Return the shapes of a folder's tensors by name. None if the files cannot be read; loading the tensors then fails with an
    error."""
    try:
        files = TensorFiles(folder, torch.device("cpu"))
    except ModelError:
        return None
    return {name: files.shape(name) for name in files.left}


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """Return the class names under `architectures` in config.json."""
    named = config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def needed() -> str:
    """Return the text after "needs" in an error message about an architecture."""
    return f"needs one of {known_architectures()}, or another decoder that transformers has"


def unknown(config: Mapping[str, Any]) -> str:
    """Return the error text for an architecture that neither Headway nor transformers supports."""
    named = ", ".join(architectures_of(config)) or config["model_type"]
    own = " (auto_map in its config.json names code of its own, which Headway never runs)" if config.get("auto_map") else ""
    return f"model architecture: {needed()}, got {named}{own}"


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise _unusable(folder, "config.json", "model_type", "a text", shown(kind))
    for name in ("dtype", "torch_dtype"):
        given = config.get(name)
        if not isinstance(given, (str, type(None))):
            raise _unusable(folder, "config.json", name, "a text", shown(given))
        if given is not None and given.removeprefix("torch.") not in ("auto", "float64", *DTYPES):
            raise _unusable(folder, "config.json", name, " or ".join(DTYPES), shown(given))
    if kind is None:
        raise ModelError(f"model {folder}: config.json cannot be used: it names no model_type")


def _check_architecture(folder: Path, config: Mapping[str, Any]) -> None:
    kind, listed = config["model_type"], architectures_of(config)
    family = FAMILIES.get(kind)
    purpose = _purpose(listed)
    if family is not None and listed and family.architecture not in listed:
        raise ModelError(
            f"model architecture: needs {family.architecture} for model_type {kind}, got {', '.join(listed)}{purpose}"
        )
    if purpose:
        raise ModelError(f"model architecture: {needed()}, got {', '.join(listed)}{purpose}")
    embedding = next((name for name in _EMBEDDING_FILES if (folder / name).is_file()), None)
    if embedding is not None:
        raise ModelError(
            f"model {folder}: needs a model that generates text, got an embedding model by its {embedding}; "
            "LLM.embed and headway serve run it"
        )
    for key, causal in (("is_causal", True), ("use_bidirectional_attention", False), ("is_encoder_decoder", False)):
        # `vision` makes only images bidirectional (Gemma 4)
        if key in config and config[key] not in (None, "vision") and bool(config[key]) is not causal:
            raise ModelError(
                f"model {folder}: needs causal attention, got {key}={str(config[key]).lower()} in config.json; Headway computes "
                "decoders that generate text"
            )


def _purpose(architectures: list[str]) -> str:
    """Return the reason why an architecture cannot generate text, judged by its name; empty if the name shows no reason."""
    name = architectures[0] if len(architectures) == 1 else ""
    if "Bidirectional" in name or "Encoder" in name:
        return " (its attention is bidirectional: it embeds or classifies texts and generates none)"
    if "Reward" in name or "Classification" in name:
        return " (it scores texts and generates none)"
    if name.endswith("Model") and not name.endswith("LMHeadModel"):
        return " (a model without a language-model head, as embedding models are: it generates no text)"
    return ""


def check_sizes(folder: Path, config: Mapping[str, Any], file: str = "config.json") -> None:
    """Check that each size is possible, and that sizes divide one another if this is required. file: name of the file with the
    sizes, for errors.

    :raises ModelError: if a size is impossible; the error names the first such size.
    """
    for name in _SIZES:
        if name not in config or (config[name] is None and name in _MAY_BE_NULL):
            continue
        value = config[name]
        if name == "sliding_window" and value == 0 and config.get("use_sliding_window") is False:
            continue  # Qwen2-MoE writes 0 for no window
        most = _MOST.get(name, 2**31 - 1)
        of_layers = isinstance(value, list) and config.get("model_type") not in FAMILIES  # as Gemma 3n has a size for each layer
        for each in value if of_layers else [value]:
            if isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= most:
                continue
            need = "of at least 1" if not isinstance(each, int) or each < 1 else f"of at most {most}"
            raise _unusable(folder, file, name, f"a whole number {need}", shown(value))
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    hidden, head_dim = config.get("hidden_size"), config.get("head_dim")
    if heads and kv_heads and heads % kv_heads:
        raise _unusable(folder, file, "num_attention_heads", f"a multiple of num_key_value_heads={kv_heads}", heads)
    if heads and hidden and not head_dim and hidden % heads:
        need = f"a multiple of num_attention_heads={heads} where no head_dim is named"
        raise _unusable(folder, file, "hidden_size", need, hidden)
    _check_numbers(folder, config, file)
    size = head_dim or (hidden // heads if hidden and heads else None)
    if size and size % 2:
        raise _unusable(folder, file, "head_dim", "an even number for RoPE", size)
    _check_rope(folder, config, size, file)


def check_bounds(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None = None, file: str = "config.json"
) -> None:
    """Compare counts and sizes with the shapes of the tensors, before lists of these lengths are made.

    The bound is coarse: the exact shapes are compared when the tensors are read. shapes: shape of each tensor by name; None if
    there are no tensors. file: name of the file with the sizes, for the error.

    :raises ModelError: if a size is impossible for these tensors; the error names the first such size.
    """
    longest, name = max(((max(shape, default=0), name) for name, shape in (shapes or {}).items()), default=(0, ""))
    bound = _MOST_SIZE if shapes is None else max(_PACKED * longest, len(shapes), _LEAST_BOUND)
    why = "" if shapes is None else f" for tensors whose longest axis is {longest} ({name})"
    for key, value in _sizes(config):
        most = min(bound, _MOST["num_hidden_layers"]) if _LAYERS.search(key) else bound
        if isinstance(value, str) or value > most:
            raise _unusable(folder, file, key, f"a whole number of at most {most}{why}", shown(value))


def _sizes(config: Mapping[str, Any]) -> Iterator[tuple[str, int | str]]:
    """Yield the name and value of each size, including sizes stored as text and sizes in nested mappings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(value)
        elif key in _UNUSED_WITHOUT and not config.get(_UNUSED_WITHOUT[key]):
            continue
        elif _SIZE.search(key) and not _NO_SIZE.search(key) and (type(value) is int or str(value).isdigit()):
            yield key, value


def _check_numbers(folder: Path, config: Mapping[str, Any], file: str) -> None:
    """Check the numbers that multiply or divide activations, because a wrong number gives meaningless output."""
    for name, most in _ABOVE_ZERO.items():
        value = config.get(name)
        if value is None or (isinstance(value, float | int) and not isinstance(value, bool) and 0 < value <= most):
            continue
        raise _unusable(folder, file, name, f"a number above 0, at most {most:g}", shown(value))


def _check_rope(folder: Path, config: Mapping[str, Any], head_dim: int | None, file: str) -> None:
    """Check the RoPE scaling settings that Headway passes to transformers because its own decoder does not compute them."""
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name)
        if not isinstance(given, Mapping):
            continue
        nested = bool(given) and all(isinstance(value, Mapping) for value in given.values())  # one for each kind of layer
        for parameters in given.values() if nested else [given]:
            kind = parameters.get("rope_type", parameters.get("type"))
            if not isinstance(kind, str | None):
                raise _unusable(folder, file, f"{name}.rope_type", "a text", shown(kind))
            odd = next((key for key, value in parameters.items() if isinstance(value, float) and not math.isfinite(value)), None)
            if odd is not None:
                raise _unusable(folder, file, f"{name}.{odd}", "a finite number", parameters[odd])
            trained = parameters.get("original_max_position_embeddings")
            if trained is not None and not _is_factor(trained):
                raise _unusable(folder, file, f"{name}.original_max_position_embeddings", "a number above 0", shown(trained))
            share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
            rotated = head_dim and int(head_dim * (share if isinstance(share, float | int) else 1)) // 2
            for key in ("short_factor", "long_factor") if kind == "longrope" else ():
                value = parameters.get(key)
                if not isinstance(value, list) or (rotated and len(value) != rotated) or not all(map(_is_factor, value)):
                    need = f"a list of {rotated or 'head_dim / 2'} numbers above 0"
                    raise _unusable(folder, file, f"{name}.{key}", need, shown(value))


def _unusable(folder: Path, file: str, what: str, need: str, got: object) -> ModelError:
    return ModelError(f"model {folder}: {file} cannot be used: {what} needs {need}, got {got}")


def _is_factor(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and 0 < value < math.inf


def _read(path: Path) -> dict[str, Any]:
    try:
        read = parse_json(read_text(path), path.name, any_number=True)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {path.parent}: {path.name} cannot be used: it is not a valid JSON file ({error})") from error
    if not isinstance(read, dict):
        raise ModelError(f"model {path.parent}: {path.name} cannot be used: it needs a JSON object, got {type(read).__name__}")
    return read
