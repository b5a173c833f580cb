"""The weights of a comparison's two sides: one model for both, or A's with weights of fewer bits than B's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.spec import DTYPE_NAMES
from headway.models.checkpoints.checkpoint import check_folder
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.formats.rounding import ON_LOADING
from headway.models.checkpoints.locate import locate
from headway.models.layers.decoder import Decoder
from headway.models.loader import LoadedModel, load_model
from headway.tuning.measure.products import choose_products

AS_STORED = "checkpoint"
"""What `--quantization` calls a checkpoint's own format, beside those that weights are rounded to on loading."""
_OPTION = "--quantization"


@dataclass(frozen=True, slots=True)
class DiffModels:
    """The models of both sides, and what their weights are, in words; no words where they are the same."""

    a: LoadedModel
    b: LoadedModel
    weights_a: str = ""
    weights_b: str = ""
    products: tuple[str, ...] = ()
    """What multiplies over A's quantised weights, where that is chosen."""


def load_models(
    name: str, dtype: str, device: torch.device, load_format: str, model_impl: str, quantization: str | None
) -> DiffModels:
    """Load the sides' models.

    quantization: None: one model for both. Of ON_LOADING: A's weights are rounded, B's are the checkpoint's plain ones.
    "checkpoint": A's products read the checkpoint's quantised weights as they are, B's the same weights expanded.

    :raises ConfigError: weights that do not suit `quantization`. ModelError: as `load_model`.
    """
    load = partial(load_model, name, dtype, device, load_format, model_impl=model_impl)
    if quantization is None:
        both = load()
        return DiffModels(both, both)
    stored = _checked(name, load_format, quantization)
    a = load(quantization=None if quantization == AS_STORED else quantization)
    assert isinstance(a.decoder, Decoder)
    read, count = sum(linear.reads_quantized for linear, _ in a.decoder.products), len(a.decoder.products)
    plain = DTYPE_NAMES[a.decoder.dtype]
    if quantization == AS_STORED and not read:
        got = f"{stored}, which is expanded to {plain} on a {device.type}: both sides would be the same"
        hint = "a GPU, or on a CPU 4 bits in groups of 32 to 256 with --dtype bfloat16"
        raise ConfigError(_OPTION, "weights that products read as they are on this device", got, hint)
    choose_products(a.decoder.product_kinds, 0)
    where = f"read as they are by {read} of {count} products" if read else f"expanded to {plain} again"
    weights_a = f"{stored}, {where}" if quantization == AS_STORED else f"rounded to {quantization}, {where}"
    weights_b = f"{stored}, expanded to {plain}" if quantization == AS_STORED else f"the checkpoint's, in {plain}"
    products = tuple(f"{kind.name}: {kind.describe()}" for kind in a.decoder.product_kinds)
    return DiffModels(a, load(keep_quantized=False), weights_a, weights_b, products)


def _checked(name: str, load_format: str, quantization: str) -> str:
    """The format of a checkpoint's weights, in words; "" where they are plain. Nothing large is read."""
    if quantization not in (known := (*ON_LOADING, AS_STORED)):
        raise ConfigError(_OPTION, " or ".join(known), repr(quantization))
    if load_format == "dummy":
        hint = "leave --load-format out"
        raise ConfigError(_OPTION, "a checkpoint's weights, whose next tokens say something", "--load-format dummy", hint)
    folder = locate(name)
    stored = read_quantization(folder, check_folder(folder))
    if stored is None and quantization == AS_STORED:
        hint = " or ".join(f"{_OPTION} {each}" for each in ON_LOADING) + " rounds them"
        raise ConfigError(f"{_OPTION} {AS_STORED}", "a checkpoint whose weights are quantised", f"plain ones in {name}", hint)
    if stored is not None and quantization != AS_STORED:
        got, hint = f"weights in {stored.label} ({stored.place})", f"{_OPTION} {AS_STORED} compares them with the expanded ones"
        raise ConfigError(f"{_OPTION} {quantization}", "plain weights", got, hint)
    return "" if stored is None else stored.label
