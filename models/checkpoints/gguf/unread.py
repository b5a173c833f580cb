"""What transformers leaves unread of a .gguf file and changes what the model computes: put into the configuration, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.models.checkpoints.gguf.hybrids.header import Header
from headway.models.families.rope import read_rope

_ROPE_KEYS = frozenset(("type", "factor", "original_context_length", "finetuned"))
"""Keys below `rope.scaling` that are read; others change the frequencies or the scores as well."""
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of every published Llama 3; a file has but the divisors that follow from them and from `factor`."""
_READS_ITS_OWN = ("gpt-oss", "gemma4")
"""Architectures whose scaling transformers reads or has in its code."""


def refuse_part(header: Header) -> None:
    """:raises ModelError: the file is one part of several."""
    if (parts := header.general("split.count", 1)) > 1:
        raise header.refuse("split.count", "one file (llama-gguf-split --merge makes it)", f"one of {parts}")


def require_keys(header: Header) -> None:
    """Check that a file has what every converter writes, for which transformers would take another model's numbers.

    :raises ModelError: naming the first key that is missing.
    """
    _ = header.num_layers
    for key in ("context_length", "embedding_length", "attention.head_count"):
        header.size(key, least=1)
    tokens = header.general("tokenizer.ggml.tokens") or []
    for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"):
        if (token := header.general(key)) is not None and not 0 <= token < len(tokens):
            raise header.refuse(key, f"one of the {len(tokens)} tokens of tokenizer.ggml.tokens", str(token))
    names = [f"attention.layer_norm_{kind}epsilon" for kind in ("rms_", "")]
    if all(header.get(name) is None for name in names):
        raise header.refuse(f"{header.architecture}.{names[0]}", "a number", "no such key")


def take_rope_scaling(header: Header, config: Any) -> None:
    """Put the file's scaling of rotary embeddings into transformers' configuration, which has none of it.

    :raises ModelError: a scaling that cannot be told from what the file has.
    """
    if header.architecture in _READS_ITS_OWN:
        return
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in header:
            raise _refused(header, name)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = bool(parameters) and all(isinstance(value, Mapping) for value in parameters.values())
    scaling = _scaling(header, config, nested)
    if not scaling:
        return
    # Windowed layers of a model with an embedding for each type of layers (Gemma 3) are not scaled.
    changed = {"full_attention": {**parameters["full_attention"], **scaling}} if nested else scaling
    config.rope_parameters = {**parameters, **changed}


def _scaling(header: Header, config: Any, nested: bool) -> dict[str, Any]:
    """Entries of `rope_parameters`; none: positions are not scaled. nested: each type of layers has its own."""
    kind, key = header.get("rope.scaling.type", "none"), f"{header.architecture}.rope.scaling"
    if kind == "none":
        return _by_divisors(header, config, nested) if "rope_freqs.weight" in header else {}
    if kind not in ("linear", "yarn") or (kind == "yarn" and nested):
        raise header.refuse(f"{key}.type", "none, linear, or yarn in a model with one rotary embedding", str(kind))
    more = next((name for name in header.keys_below(key) if name not in _ROPE_KEYS), None)
    if more is not None or "rope_freqs.weight" in header:
        raise _refused(header, "rope_freqs.weight" if more is None else f"{key}.{more}")
    scaling = {"rope_type": kind, "factor": header.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.size("rope.scaling.original_context_length")
    return scaling


def _by_divisors(header: Header, config: Any, nested: bool) -> dict[str, Any]:
    """Llama 3's scaling, where the divisors of the frequencies, float32 [rotated elements / 2], are those that follow from it."""
    divisors = header.tensor("rope_freqs.weight").flatten()
    factor = float(divisors.max())
    scaling = {**_LLAMA3, "factor": factor}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if nested or not math.isfinite(factor):
        raise _refused(header, "rope_freqs.weight")
    plain = torch.tensor(read_rope(config, head_dim).inv_freq)
    given = config.rope_parameters
    config.rope_parameters = {**config.rope_parameters, **scaling}
    expected = plain / torch.tensor(read_rope(config, head_dim).inv_freq)
    config.rope_parameters = given
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise _refused(header, "rope_freqs.weight")
    return scaling if factor != 1 else {}


def refuse_unread_tensors(header: Header, state: Mapping[str, Tensor]) -> None:
    """Check that each tensor of a file is one of the model's. state: transformers' model, by name.

    Files with experts are not checked: transformers merges and stacks theirs.

    :raises ModelError: naming the first that is none.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if header.architecture not in known or header.get("expert_count") or header.get("nextn_predict_layers"):
        return
    names = get_tensor_name_map(known[header.architecture], header.num_layers)
    read = {"rope_freqs.weight"}
    for name in state:
        module, dot, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        read |= {f"{found}{dot}{suffix}" for each in _ends(module) if (found := names.get_name(each)) is not None}
    unread = [name for name in header.names if name not in read]
    if unread:
        raise _refused(header, *unread)


def _ends(module: str) -> Iterable[str]:
    """A module's name in the model, and in each module around it: some converters leave the outermost names out."""
    parts = module.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _refused(header: Header, first: str, *more: str) -> ModelError:
    others = f" and {len(more)} more" if more else ""
    return ModelError(
        f"model {header.path}: needs keys and tensors that transformers or Headway reads of {header.architecture}, got {first}"
        f"{others}, without which it would be another model; use the model's safetensors folder"
    )
