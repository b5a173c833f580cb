"""Reader of LoRA adapter folders written by peft. Error messages name every adapter feature that Headway's decoders do not
support."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
"""Prefix of module names that peft adds."""
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
_OTHERS: Final = {
    "lora_magnitude_vector": "a plain adapter, got a DoRA (use_dora)",
    "lora_embedding_": "adapters of products alone, got one of an embedding",
    "modules_to_save": "adapters alone, got a module that was trained whole (modules_to_save)",
    ".bias": "products without biases of their own, got one that was trained (bias or lora_bias)",
}
"""Part of an unsupported tensor's name -> texts for the error message: the supported adapters, and the unsupported feature that
was found."""
_REFUSED: Final = {
    "use_dora": "DoRA, whose magnitudes depend on the merged weights",
    "lora_bias": "biases beside the products of low rank",
    "modules_to_save": "modules that were trained whole",
    "layer_replication": "layers of the base that are used twice",
    "target_parameters": "adapters of parameters that are no products of one input, such as experts",
    "trainable_token_indices": "rows of the embedding that were trained",
    "alora_invocation_tokens": "an adapter that begins at certain tokens (activated LoRA)",
    "use_qalora": "an adapter of pooled inputs (QALoRA)",
    "use_bdlora": "an adapter of blocks (BD-LoRA)",
    "arrow_config": "a router over adapters (Arrow)",
    "kasa_config": "singular values beside the products of low rank (KaSA)",
}
"""peft option that makes an adapter unsupported if it is enabled -> meaning of the option, for error messages."""
_CHANGED_BASES: Final = ("pissa", "olora", "corda", "lora_ga")
"""Prefixes of values of init_lora_weights with which peft changes the base model's weights too."""
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*")
_MAX_RANK: Final = 4096
_MAX_ALPHA: Final = 1e9


@dataclass(frozen=True)
class LowRank:
    """LoRA update of one module: x A^T B^T times scale."""

    a: Tensor
    """[rank, in_features], float32 or half precision, on the CPU."""
    b: Tensor
    """[out_features, rank], float32 or half precision, on the CPU."""
    scale: float


@dataclass(frozen=True)
class AdapterFolder:
    """Contents of an adapter folder, validated as far as possible without the model."""

    name: str
    low_ranks: Mapping[str, LowRank]
    """Module name in the base model's checkpoint -> update of the module."""
    targets: Sequence[str]
    """Suffixes of the module names that the adapter declares as targets. Empty if the adapter declares none."""
    all_layers: bool
    """True if the adapter covers every layer."""
    digest: bytes
    """Hash of the bytes of the adapter's configuration and weights files."""

    @property
    def rank(self) -> int:
        """Largest rank among the adapter's modules."""
        return max(len(each.a) for each in self.low_ranks.values())


def read_folder(request: LoRARequest) -> AdapterFolder:
    """Read an adapter.

    :raises ConfigError: if the folder is not a peft adapter, or the kind of adapter is not supported. The message gives the
    reason.
    """
    name, folder = f"adapter {request.lora_name}", _found(request)
    config = _config(name, folder)
    _check_config(name, config)
    tensors = _tensors(name, folder)
    halves: dict[str, dict[str, Tensor]] = {}
    for stored, tensor in tensors.items():
        module, half = _module_of(name, stored)
        halves.setdefault(module, {})[half] = tensor
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ConfigError(name, f"a matrix of floating-point numbers as {stored}", f"{list(tensor.shape)} of {tensor.dtype}")
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(name, f"finite numbers in {stored}", "NaN or infinite ones", "the training has failed")
    low_ranks = {module: _low_rank(name, module, both, config) for module, both in halves.items()}
    if not low_ranks:
        raise ConfigError(name, f"tensors of an adapter in {TENSORS}", "none")
    targets = config.get("target_modules")
    listed = targets if isinstance(targets, list) else []
    whole = not any(config.get(option) for option in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    return AdapterFolder(name, low_ranks, [str(each) for each in listed], whole, _digest(folder))


def _found(request: LoRARequest) -> Path:
    """Return the folder of a requested adapter. The request gives a path or a hub ID."""
    name = f"adapter {request.lora_name}"
    try:
        path = Path(request.lora_path).expanduser()
        if path.is_dir():
            return path
        if path.exists():
            raise ConfigError(name, f"a folder with {CONFIG} and {TENSORS}", f"the file {path}")
        return _fetched(request.lora_path)
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError):  # not a valid path on this system, and not a hub id
        hint = "or the id of one on a Hugging Face hub that can be reached"
        raise ConfigError(
            name, "a folder that peft has written", f"{shown(request.lora_path)}, which is none here", hint
        ) from None


def _fetched(hub_id: str) -> Path:
    """Download an adapter from a hub.

    :raises OSError, ValueError: if `hub_id` is not a valid ID, or the hub does not provide the adapter.
    """
    if not _HUB_ID.fullmatch(hub_id):
        raise ValueError(hub_id)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(hub_id, allow_patterns=[CONFIG, TENSORS]))


def _config(name: str, folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(name, f"a folder with {CONFIG}", f"{folder}, which has none")
    try:
        config = parse_json(read_text(path), CONFIG, any_number=True)
    except (OSError, ValueError) as error:
        raise ConfigError(name, f"a JSON object in {CONFIG}", str(error)) from None
    if not isinstance(config, dict):
        raise ConfigError(name, f"a JSON object in {CONFIG}", f"a {type(config).__name__}")
    return config


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Check an adapter's configuration.

    :raises ConfigError: if the kind of adapter is not supported, or a number is invalid.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ConfigError(name, "peft_type LORA", shown(kind))
    for option, means in _REFUSED.items():
        if config.get(option):
            raise ConfigError(name, f"no {option}", f"{shown(config[option])}: {means}", "not supported")
    if config.get("bias", "none") != "none":
        raise ConfigError(name, "bias none", shown(config["bias"]), "biases that were trained are not supported")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        hint = "save it with peft's path_initial_model_for_weight_conversion"
        raise ConfigError(name, "the base's own weights under it", f"init_lora_weights {start}, which has changed them", hint)
    _check_number(name, "r", config.get("r"), whole=True)
    _check_number(name, "lora_alpha", config.get("lora_alpha"), whole=False)
    for option, whole in (("rank_pattern", True), ("alpha_pattern", False)):
        given = config.get(option) or {}
        if not isinstance(given, dict):
            raise ConfigError(name, f"an object as {option}", shown(given))
        for module, number in given.items():
            _check_number(name, f"{option}.{module}", number, whole=whole)


def _check_number(name: str, option: str, number: object, whole: bool) -> None:
    known = isinstance(number, int if whole else int | float) and not isinstance(number, bool)
    if not known or not (1 <= number <= _MAX_RANK if whole else abs(number) <= _MAX_ALPHA):  # type: ignore[operator,arg-type]
        need = f"a whole number from 1 to {_MAX_RANK}" if whole else f"a number of at most {_MAX_ALPHA:g}"
        raise ConfigError(name, f"{need} as {option}", shown(number))


def _tensors(name: str, folder: Path) -> Mapping[str, Tensor]:
    path = folder / TENSORS
    if (folder / f"{TENSORS}.index.json").exists():
        hint = "peft writes one file; a copy that the index does not name could win"
        raise ConfigError(name, f"all tensors in one file {TENSORS}", f"an index of several, {TENSORS}.index.json", hint)
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        got = "adapter_model.bin, a pickle, which may run any code" if pickled else f"{folder}, which has none"
        raise ConfigError(name, f"a file {TENSORS}", got, "peft's save_pretrained() writes one")
    try:
        with safe_open(path, framework="pt") as file:
            return {stored: file.get_tensor(stored) for stored in file.keys()}  # noqa: SIM118  (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise ConfigError(name, f"a whole file {TENSORS}", str(error).splitlines()[0]) from None


def _module_of(name: str, stored: str) -> tuple[str, str]:
    """Return the module name of a stored tensor, and the half of the LoRA update (A or B) that the tensor contains.

    :raises ConfigError: if the tensor is neither an A nor a B matrix of a LoRA update.
    """
    found = _HALF.fullmatch(stored)
    if found is not None and "modules_to_save" not in stored:
        return found["module"].removeprefix(_PREFIX), found["half"]
    need = next((text for part, text in _OTHERS.items() if part in stored), "lora_A.weight and lora_B.weight, got another tensor")
    needed, _, got = need.partition(", got ")
    raise ConfigError(name, needed, f"{got}: {stored}", "not supported")


def _low_rank(name: str, module: str, both: Mapping[str, Tensor], config: Mapping[str, Any]) -> LowRank:
    for half in "AB":
        if half not in both:
            raise ConfigError(name, f"lora_A and lora_B of {module}", f"no lora_{half}", "the file is not whole")
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    a, b = both["A"], both["B"]
    if a.shape[0] != rank or b.shape[1] != rank:
        got = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
        raise ConfigError(name, f"rank {rank} of {module}, as {CONFIG} says", got)
    return LowRank(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, usual: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as peft does, else the default `usual`."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        except re.error:
            continue
    return usual


def _digest(folder: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for file in (CONFIG, TENSORS):
        with (folder / file).open("rb") as opened:
            while part := opened.read(2**22):
                digest.update(part)
    return digest.digest()


def check_targets(folder: AdapterFolder, modules: Iterable[str]) -> None:
    """Check an adapter's modules against a model.

    modules: names of the modules in the model's linear layers.
    :raises ConfigError: if the model lacks one of the adapter's modules, or the adapter lacks a tensor that it declares.
    """
    known = set(modules)
    kinds = sorted({module.rpartition(".")[2] for module in known})
    for module in folder.low_ranks:
        if module not in known:
            raise ConfigError(folder.name, f"modules of this model's layers: {', '.join(kinds)}", _unsupported(module))
    for target in folder.targets:
        matching = [each for each in known if each == target or each.endswith(f".{target}")]
        if not matching:
            raise ConfigError(folder.name, f"target_modules among {', '.join(kinds)}", _unsupported(target))
        missing = [each for each in sorted(matching) if each not in folder.low_ranks]
        if missing and folder.all_layers:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(
                folder.name,
                f"tensors of every {target}",
                f"none of {missing[0]}{more}",
                "the file is not whole, or another base's",
            )


def _unsupported(module: str) -> str:
    """Return a description of an unsupported module, with the reason if it is known."""
    end = module.rpartition(".")[2]
    if end in ("lm_head", "embed_tokens", "wte", "embed_out"):
        return f"{module}: adapters of the embedding and of the output head are not supported"
    if "expert" in module:
        return f"{module}: adapters of experts are not supported"
    if end == "kv_b_proj":
        return f"{module}: adapters of the product that expands latents are not supported"
    return f"{module}, which it has not: the adapter is another base's"
