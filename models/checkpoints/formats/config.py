"""Quantization settings of a checkpoint, and the storage formats that the settings imply for its modules.

A module is unquantized if its tensors are a plain `weight` without scales. The lists that name such modules
(modules_to_not_convert, ignore, ignored_layers) are not needed, and every reader matches them differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from headway.core.contract.errors import ModelError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.models.checkpoints.formats.stored import (
    Awq,
    ExpertsMxfp4,
    Float8Format,
    FormatRule,
    Gptq,
    Int8Format,
    Nvfp4,
    PackQuantized,
    Quantization,
    StoredFormat,
)

_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Files with quantization settings outside of config.json (AutoGPTQ, AWQ, ModelOpt), each with its default method."""
Item = TypeVar("Item")
_GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)


def read_quantization(folder: Path, stated: Mapping[str, Any]) -> Quantization | None:
    """Return the quantization of the weights, or None if they are unquantized. stated: config.json.

    :raises ModelError: if Headway does not support the method, or the KV cache has scales other than one per layer.
    """
    text = stated.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    found = stated.get("quantization_config") or stated.get("compression_config") or inner.get("quantization_config")
    place, usual = "quantization_config in config.json", ""
    if not found:
        place = next((name for name in _FILES if (folder / name).is_file()), "")
        if not place:
            return None
        found, usual = _read(folder / place), _FILES[place]
    if not isinstance(found, Mapping):
        raise ModelError(f"model {folder}: {place} needs an object, got {shown(found)}")
    nested = found.get("quantization")  # ModelOpt's own file
    settings = _Settings(folder, place, nested if isinstance(nested, Mapping) else found)
    of_modelopt = {"quant_algo", "kv_cache_quant_algo"} & set(settings.values)
    method = str(settings.get("quant_method") or ("modelopt" if of_modelopt else usual)).lower()
    if method not in METHODS:
        settings.refuse_method(method)
    _check_cache(settings)
    rules = METHODS[method](settings)
    return Quantization(place, rules, method) if rules else None


@dataclass(frozen=True, slots=True)
class _Settings:
    """Quantization settings of one file, or a mapping nested in these settings."""

    folder: Path
    place: str
    values: Mapping[str, Any]

    def get(self, *keys: str) -> Any:
        """Return the value of the first key that is present, or None if no key is present."""
        return next((self.values[key] for key in keys if self.values.get(key) is not None), None)

    def part(self, key: str) -> _Settings:
        value = self.values.get(key)
        if not isinstance(value, Mapping):
            self.refuse(key, "an object", value)
        return _Settings(self.folder, f"{self.place}, {key}", value)

    def refuse(self, key: str, need: str, got: object) -> NoReturn:
        raise ModelError(f"model {self.folder}: {self.place}: {key} needs {need}, got {shown(got)}")

    def expect(self, key: str, *allowed: object, absent: object = None) -> Any:
        """Return the value of a key after checking that it is one of `allowed`. absent: default value."""
        value = self.values.get(key)
        value = absent if value is None else value
        if not any(value == each and type(value) is type(each) for each in allowed):
            self.refuse(key, " or ".join(json.dumps(each) for each in allowed), value)
        return value

    def one_of(self, key: str, value: object, known: Mapping[str, Item]) -> Item:
        """Return the entry of `known` for a setting's value. key: name of the setting, for the error."""
        if not isinstance(value, str) or value not in known:
            self.refuse(key, " or ".join(known), value)
        return known[value]

    def refuse_method(self, method: str) -> NoReturn:
        """Raise the error for a method that Headway does not support."""
        bits = 4 if self.get("load_in_4bit") else 8 if self.get("load_in_8bit") else self.get("bits", "w_bit")
        named = method or ("bitsandbytes" if bits else "an unnamed method")
        raise ModelError(
            f"model {self.folder}: needs weights in one of {', '.join(METHODS)}, or plain ones, got weights quantised with "
            f"{shown(named)[1:-1]}{f', {bits} bits' if bits else ''} ({self.place}); use the unquantised checkpoint that this "
            "one was made from, or a .gguf file"
        )


def _check_cache(settings: _Settings) -> None:
    """Check that the KV cache, if quantized, is FP8 with one scale per layer stored in the checkpoint.

    :raises ModelError: if the cache is quantized in a different way.
    """
    scheme = settings.get("kv_cache_quant_algo", "kv_cache_scheme")
    usual = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    known = (
        all(scheme.get(key, value) == value for key, value in usual.items())
        if isinstance(scheme, Mapping)
        else scheme in (None, "FP8")
    )
    if not known:
        raise ModelError(
            f"model {settings.folder}: needs an fp8 cache with a scale for each layer, got {shown(scheme)} for its cache"
        )


def _fp8(settings: _Settings) -> tuple[FormatRule, ...]:
    settings.expect("fmt", "e4m3", absent="e4m3")
    settings.expect("expert_dtype", "fp8", absent="fp8")
    blocks = settings.get("weight_block_size")
    scales: Literal["tensor"] | tuple[int, int] = "tensor" if blocks is None else _block(settings, "weight_block_size", blocks)
    return (FormatRule((), Float8Format(scales, inverse_name=blocks is not None)),)


def _awq(settings: _Settings) -> tuple[FormatRule, ...]:
    bits = settings.get("bits", "w_bit")
    if bits != 4:
        settings.refuse("bits", "4", bits)
    version = str(settings.get("version") or "gemm")
    if version.lower() != "gemm":
        settings.refuse("version", '"gemm"', version)
    settings.expect("zero_point", True, absent=True)
    return (FormatRule((), Awq(4, _group_size(settings, settings.get("group_size", "q_group_size")))),)


def _gptq(settings: _Settings) -> tuple[FormatRule, ...]:
    bits = settings.expect("bits", 4, 8)
    version = settings.expect("checkpoint_format", "gptq", "gptq_v2", absent="gptq")
    changed = settings.get("dynamic") or {}
    if not isinstance(changed, Mapping):
        settings.refuse("dynamic", "an object", changed)
    odd = next((name for name, values in changed.items() if not name.startswith("-:") and values), None)
    if odd is not None:
        settings.refuse("dynamic", "modules that are left out alone (-:), since all others have one form", {odd: changed[odd]})
    return (FormatRule((), Gptq(bits, _group_size(settings, settings.get("group_size")), version == "gptq")),)


def _modelopt(settings: _Settings) -> tuple[FormatRule, ...]:
    scheme = settings.get("quant_algo")
    if scheme is None and settings.get("kv_cache_quant_algo", "kv_cache_scheme"):
        return ()
    return (FormatRule((), settings.one_of("quant_algo", scheme, _MODELOPT)),)


_MODELOPT: Mapping[str, StoredFormat] = {
    "FP8": Float8Format("tensor"),
    "NVFP4": Nvfp4(".weight", ".weight_scale_2", divides=False),
}


def _compressed_tensors(settings: _Settings) -> tuple[FormatRule, ...]:
    for key in ("transform_config", "sparsity_config"):
        value = settings.get(key)
        if value and (not isinstance(value, Mapping) or value.get("format", "") != "dense"):
            settings.refuse(key, "nothing", value)
    if not settings.get("config_groups"):
        return ()
    groups, rules = settings.part("config_groups"), []
    for name in groups.values:
        group = groups.part(name)
        kind = group.get("format") or settings.get("format")
        read = settings.one_of("format", kind, _COMPRESSED)
        targets = group.get("targets") or []
        if not isinstance(targets, list):
            group.refuse("targets", "a list", targets)
        rules.append(FormatRule(tuple(map(str, targets)), read(group.part("weights"))))
    return tuple(rules)


def _compressed_float8(settings: _Settings) -> StoredFormat:
    settings.expect("num_bits", 8)
    settings.expect("type", "float")
    strategy = settings.expect("strategy", "channel", "tensor", "block")
    return Float8Format(_block(settings, "block_structure", settings.get("block_structure")) if strategy == "block" else strategy)


def _compressed_int8(settings: _Settings) -> StoredFormat:
    settings.expect("num_bits", 8)
    settings.expect("type", "int")
    return Int8Format(settings.expect("strategy", "channel", "tensor"))


def _compressed_packed(settings: _Settings) -> StoredFormat:
    bits = settings.expect("num_bits", 4, 8)
    settings.expect("type", "int")
    strategy = settings.expect("strategy", "group", "channel")
    size = _group_size(settings, settings.get("group_size")) if strategy == "group" else -1
    return PackQuantized(bits, size, settings.expect("symmetric", True, False, absent=True))


def _compressed_nvfp4(settings: _Settings) -> StoredFormat:
    settings.expect("num_bits", 4)
    settings.expect("type", "float")
    settings.expect("group_size", 16, absent=16)
    return Nvfp4(".weight_packed", ".weight_global_scale", divides=True)


_COMPRESSED: Mapping[str, Callable[[_Settings], StoredFormat]] = {
    "float-quantized": _compressed_float8,
    "int-quantized": _compressed_int8,
    "naive-quantized": lambda of: _compressed_float8(of) if of.get("type") == "float" else _compressed_int8(of),
    "pack-quantized": _compressed_packed,
    "nvfp4-pack-quantized": _compressed_nvfp4,
}

METHODS: Mapping[str, Callable[[_Settings], tuple[FormatRule, ...]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": lambda settings: (FormatRule((), ExpertsMxfp4()),),
    "modelopt": _modelopt,
}
"""Functions that convert a method's settings to format rules, keyed by the method's name."""


def _group_size(settings: _Settings, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size not in _GROUP_SIZES:
        settings.refuse("group_size", " or ".join(map(str, _GROUP_SIZES)), size)
    return size


def _block(settings: _Settings, key: str, sizes: object) -> tuple[int, int]:
    match sizes:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    settings.refuse(key, "two numbers above 0", sizes)


def _read(path: Path) -> object:
    try:
        return parse_json(read_text(path), path.name, any_number=True)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {path.parent}: {path.name} cannot be used: it is not a valid JSON file ({error})") from error
