"""Header and tensors of a .gguf file. Settings that transformers ignores are added to the configuration or refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.system.text import shown
from headway.models.families.rope import read_rope


class Header:
    """Keys and dequantized tensors of a .gguf file, read on request. :raises ModelError: if the file names no architecture."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        reader = GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.general("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError(f"model {path}: general.architecture needs a text, got {shown(architecture)}")
        self.architecture = architecture

    def general(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`. key: the full name."""
        return self._fields[key].contents() if key in self._fields else default

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key of the architecture, or `default`. key: the name without the architecture's prefix."""
        return self.general(f"{self.architecture}.{key}", default)

    def keys_below(self, key: str) -> list[str]:
        """Return the suffixes of all full key names that begin with `key.`, without that prefix."""
        return [name.removeprefix(f"{key}.") for name in self._fields if name.startswith(f"{key}.")]

    @property
    def sizes(self) -> dict[str, int]:
        """Integer values of the architecture's keys, keyed by full name."""
        values = {name: self.general(name) for name in self._fields if name.startswith(f"{self.architecture}.")}
        return {name: value for name, value in values.items() if type(value) is int}

    def size(self, key: str, default: int | None = None, least: int = 0) -> int:
        """Return an integer, or the maximum of a per-layer list. :raises ModelError: if the key is missing without a default."""
        value = self.get(key, default)
        if isinstance(value, list) and value and all(type(item) is int for item in value):
            value = max(value)
        if type(value) is not int or value < least:
            need = f"a whole number of at least {least}" if least else "a whole number"
            raise self.refuse(f"{self.architecture}.{key}", need, "no such key" if value is None else shown(value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number as a float. :raises ModelError: if the key is missing without a default, or not a number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{self.architecture}.{key}", "a number", "no such key" if value is None else shown(value))
        return float(value)

    def per_layer(self, key: str) -> list[int]:
        """Return one integer per layer; a single integer is repeated. :raises ModelError: if the key is missing or the list is
        too short."""
        value, layers = self.get(key), self.num_layers
        if type(value) is int:
            value = [value] * layers
        if not isinstance(value, list) or len(value) < layers or not all(type(item) is int for item in value):
            got = "no such key" if value is None else shown(value)
            raise self.refuse(f"{self.architecture}.{key}", f"a whole number for each of the {layers} layers", got)
        return value[:layers]

    @property
    def num_layers(self) -> int:
        """Number of layers without the draft (MTP) layers at the end. :raises ModelError: if the number is 0 or above the tensor
        count."""
        count, most = self.size("block_count") - self.size("nextn_predict_layers", 0), len(self._tensors)
        if not 1 <= count <= most:
            raise self.refuse(f"{self.architecture}.block_count", f"1 to {most} layers (the file's tensors)", str(count))
        return count

    def refuse(self, what: str, need: str, got: str) -> ModelError:
        """Return an error about a key or tensor of the file."""
        return ModelError(f"model {self.path}: {what} needs {need}, got {got}")

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return self.stored(name) in self._tensors

    def has_in_a_layer(self, name: str) -> bool:
        """Return whether any layer has a tensor with this name after the `blk.N.` prefix."""
        return any(stored.endswith(f".{name}") for stored in self._tensors)

    def stored(self, name: str) -> str:
        """Return a tensor's name in the file. Some converters omit `.weight` after `norm`."""
        return name if name in self._tensors else name.removesuffix(".weight")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape in PyTorch's order, with the contiguous axis last."""
        return tuple(int(size) for size in reversed(self._tensors[self.stored(name)].shape))

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, dequantized to float32."""
        from gguf import dequantize

        stored = self._tensors[self.stored(name)]
        return (
            torch.from_numpy(dequantize(stored.data, stored.tensor_type)).to(torch.float32, copy=True).reshape(self.shape(name))
        )


_ROPE_KEYS = frozenset(("type", "factor", "original_context_length", "finetuned"))  # Supported keys below `rope.scaling`
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of every published Llama 3. A file stores only the frequency divisors that result from these settings and `factor`."""
_READS_ITS_OWN = ("gpt-oss", "gemma4")  # Architectures whose scaling transformers handles


def refuse_part(header: Header) -> None:
    """Refuse a file that is one part of a split model. :raises ModelError: if the file is such a part."""
    if (parts := header.general("split.count", 1)) > 1:
        raise header.refuse("split.count", "one file (llama-gguf-split --merge makes it)", f"one of {parts}")


def require_keys(header: Header) -> None:
    """Check for the keys that transformers would replace with arbitrary defaults. :raises ModelError: if a key is missing."""
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
    """Copy the file's RoPE scaling into transformers' configuration. :raises ModelError: if the scaling is unsupported."""
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
    # Sliding-window layers of a model with separate RoPE settings per layer type (Gemma 3) are not scaled.
    changed = {"full_attention": {**parameters["full_attention"], **scaling}} if nested else scaling
    config.rope_parameters = {**parameters, **changed}


def _scaling(header: Header, config: Any, nested: bool) -> dict[str, Any]:
    """Return the `rope_parameters` for RoPE scaling; empty without scaling. nested: True if each layer type has separate
    parameters."""
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
    """Return Llama 3's scaling parameters; empty if `factor` is 1. :raises ModelError: if the file's divisors do not match the
    parameters."""
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
    """Check that transformers reads every tensor. Experts, which transformers merges, are skipped. state: the model's tensors by
    name.

    :raises ModelError: if a tensor is not read; the error names the first such tensor.
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
    """Return variants of a module's name with 0, 1, 2, ... leading components removed, because some converters omit the outermost
    components."""
    parts = module.split(".")
    return (".".join(parts[first:]) for first in range(len(parts)))


def _refused(header: Header, first: str, *more: str) -> ModelError:
    others = f" and {len(more)} more" if more else ""
    return ModelError(
        f"model {header.path}: needs keys and tensors that transformers or Headway reads of {header.architecture}, got {first}"
        f"{others}, without which it would be another model; use the model's safetensors folder"
    )
