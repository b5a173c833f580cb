"""Load a model: its decoder, its tokenizer, and the token ids that end a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.core.errors import ConfigError, ModelError
from headway.core.spec import DTYPES
from headway.models.config import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.locate import locate
from headway.models.weights import Weights


@dataclass(frozen=True)
class LoadedModel:
    """Everything a folder gives."""

    name: str
    folder: Path
    decoder: Decoder
    tokenizer: Any
    """transformers' tokenizer."""
    eos_token_ids: frozenset[int]
    """Tokens that end a text unless ignore_eos."""


def load_model(name: str, dtype: str = "auto", device: torch.device | str = "cpu") -> LoadedModel:
    """Find and load a model.

    dtype: auto, float32, bfloat16 or float16; auto is float32 on a CPU (which computes bfloat16 slower), else the checkpoint's.

    :raises ModelError: unknown, unreadable or unsupported model.
    :raises ConfigError: unknown dtype.
    """
    folder, device = locate(name), torch.device(device)
    config = _read_config(folder)
    decoder_config = DecoderConfig.from_transformers(config)
    weights = Weights(folder, _dtype(dtype, config, device), device)
    with torch.inference_mode():
        decoder = Decoder(decoder_config, weights)
    return LoadedModel(name, folder, decoder, _read_tokenizer(folder), _eos(folder, config))


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(f"model {folder}: needs a config.json in the folder, got none")
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:
        line = str(error).strip().splitlines()[0]
        raise ModelError(f"model {folder}: config.json cannot be used ({type(error).__name__}: {line})") from error


def _read_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        line = str(error).strip().splitlines()[0]
        raise ModelError(f"model {folder}: the tokenizer cannot be read ({type(error).__name__}: {line})") from error


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype or torch.bfloat16
    if name not in DTYPES:
        raise ConfigError("dtype", f"auto, {', '.join(DTYPES)}", repr(name))
    return DTYPES[name]


def _eos(folder: Path, config: Any) -> frozenset[int]:
    """The generation config's tokens where it names any (chat models end turns with more than one), else the model's."""
    ids = config.eos_token_id
    path = folder / "generation_config.json"
    if path.is_file():
        try:
            ids = json.loads(path.read_text()).get("eos_token_id", ids)
        except ValueError as error:
            raise ModelError(f"model {folder}: generation_config.json is not JSON ({error})") from error
    return frozenset([ids] if isinstance(ids, int) else ids or ())
