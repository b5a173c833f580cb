"""The specs of a model's layers, by the model's name and without any weight of it."""

from __future__ import annotations

from pathlib import Path

import torch

from headway.core.contract.errors import ConfigError
from headway.core.select.layer_specs import LayerSpecs
from headway.models.checkpoints.locate import locate
from headway.models.config import DecoderConfig
from headway.models.families.attention_specs import cached_spec, expanded_spec, state_spec
from headway.models.loader import decoder_config, read_config


def read_layer_specs(model: str, device: torch.device, dtype: torch.dtype | None = None) -> LayerSpecs:
    """The specs of a model's layers in an element type.

    model: the path of a config.json, or whatever `locate` finds; nothing but the configuration is read, so that quantised weights
    are no obstacle. Sinks, which are weights, are 0. dtype: None is what its config.json names (bfloat16 where none is named).

    :raises ConfigError: the path of another file, or of none.
    :raises ModelError: there is no such model, its configuration cannot be read, or it has no attention of Headway's.
    """
    path = Path(model).expanduser()
    if path.suffix == ".json" and (path.name != "config.json" or not path.is_file()):
        raise ConfigError("--model", "a config.json that is there, a folder with one, or a model's name", model)
    folder = locate(str(path.parent) if path.suffix == ".json" else model, weights=False)
    config = read_config(folder)
    dtype = dtype or config.dtype or torch.bfloat16
    decoder = decoder_config(config, required=False)
    if decoder is None:
        from headway.models.transformers_adapter.shapes import adapted_specs

        return LayerSpecs(adapted_specs(read_config(folder, plain=False), dtype, device))
    return decoder_layer_specs(decoder, dtype, device)


def decoder_layer_specs(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> LayerSpecs:
    """The specs of a decoder's layers; of one rank's, where the configuration is what that computes. Sinks, which are weights,
    are 0."""
    sinks = (0.0,) * config.num_heads if config.sinks else None
    cached = [cached_spec(config, layer, dtype, device, sinks=sinks) for layer in config.layers if layer.attention]
    latent = config.latent
    expanded = {} if latent is None else {spec: expanded_spec(config, latent, spec) for spec in cached}
    count = sum(layer.state for layer in config.layers)
    states = [] if config.state is None else [state_spec(config.state, dtype, device)] * count
    return LayerSpecs(cached, expanded, states, device)
