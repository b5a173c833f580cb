"""A model's sizes, out of its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from headway.core.contract.errors import ModelError
from headway.models.checkpoints.checkpoint import check_folder
from headway.models.checkpoints.locate import locate
from headway.models.config import DecoderConfig
from headway.models.families.families import TEXT_PARTS
from headway.models.loader import decoder_config, read_config

_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": (),
    "num_hidden_layers": ("hybrid_override_pattern", "layers_block_type", "layer_types"),
    "num_attention_heads": (),
    "vocab_size": (),
}
"""Sizes by transformers' names -> what may stand in their place. A missing one would be a default of transformers', which is the
size of another model."""


class PlannedModel(NamedTuple):
    """What a plan must know of a model."""

    config: DecoderConfig
    dtype: torch.dtype
    """Element type of its weights, activations and, unless another is asked for, its cache."""


def read_planned_model(model: str) -> PlannedModel:
    """Read a model's configuration: a folder, a hub id, or the name of a shape.

    :raises ModelError: there is no such model, its config.json lacks sizes, or Headway's own decoder does not compute it.
    """
    folder = locate(model, weights=False)
    missing = _missing(folder)
    if missing:
        raise ModelError(f"model {model}: config.json needs {', '.join(missing)}, got none; a plan is made of sizes alone")
    read = read_config(folder)
    config = decoder_config(read, required=True)
    assert config is not None
    return PlannedModel(config, read.dtype or torch.bfloat16)


def _missing(folder: Path) -> list[str]:
    stated: Any = check_folder(folder)
    kind = stated["model_type"]
    stated = stated.get("text_config", stated) if kind in TEXT_PARTS else stated
    lacking = {name for name, others in _SIZES.items() if not {name, *others} & set(stated)}
    if not lacking:
        return []
    from transformers import CONFIG_MAPPING

    own = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    return sorted(name for name in lacking if own.get(name) not in stated)
