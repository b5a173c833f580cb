"""The part of `headway backends explain` that tells of products over quantised weights: which way serves how many rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal

if TYPE_CHECKING:
    import torch

    from headway.kernels.linear.linear import Linear


def tell_products(model: str | None, quantization: str | None, dtype: str, device: str | None, as_json: bool) -> None:
    """Print what serves a model's products, as a list or as JSON. Nothing is measured, and no weights are read.

    :raises HeadwayError: no model, one that Headway's decoder does not compute, or options that it does not take.
    """
    from headway.models.layers.decoder import Decoder
    from headway.models.loader import load_model
    from headway.tuning.measure.device import resolve_device

    if model is None:
        raise ConfigError("--linear", "a model whose products are meant", "none", "--model NAME")
    place = resolve_device(device)
    shapes = load_model(
        model,
        "float32" if dtype == "auto" and place.type == "cpu" else dtype,
        "meta",
        "dummy",
        skip_tokenizer_init=True,
        model_impl="headway",
        quantization=quantization,
    )
    assert isinstance(shapes.decoder, Decoder)
    found = explain_products(shapes.decoder.products, place)
    if as_json:
        print(json.dumps({"model": shapes.name, "device": str(place), "products": found}, indent=2))
    else:
        print_products(found, Terminal())


def explain_products(products: Sequence[tuple[Linear, bool]], device: torch.device) -> list[dict[str, Any]]:
    """Say what would serve a model's products on a device, as plain data: kept times choose, or where there are none the rule.

    products: whose weights need no elements; and whether each is gated.
    """
    return _on_cpu(products) if device.type == "cpu" else _on_gpu(products, device)


def _on_cpu(products: Sequence[tuple[Linear, bool]]) -> list[dict[str, Any]]:
    """Nothing is chosen: torch packs a form or does not."""
    from torch import Tensor

    from headway.kernels.linear.forms import form_name
    from headway.kernels.linear.linear import packs

    kinds: Counter[tuple[str, str]] = Counter()
    for linear, _ in products:
        weight = linear.weight
        if not isinstance(weight, Tensor):
            way = "torch's product over packed weights" if packs(weight, linear.dtype) else "expanded on loading"
            kinds[f"{form_name(weight)} {linear.out_features}x{linear.in_features}", way] += 1
    return [
        {"product": name, "layers": count, "ways": {1: way}, "by": "the form, nothing is measured"}
        for (name, way), count in kinds.items()
    ]


def _on_gpu(products: Sequence[tuple[Linear, bool]], device: torch.device) -> list[dict[str, Any]]:
    """Kept times choose, or the rule."""
    from headway.kernels.linear.quantized_ways import QuantizedWays
    from headway.tuning.measure.device import identify_device
    from headway.tuning.measure.products import obey_kept, obey_shipped

    ways = QuantizedWays(device)
    kinds = Counter(kind for linear, gated in products if (kind := ways.kind(linear, linear.dtype, gated)) is not None)
    identity = identify_device(device)
    for kind in kinds:
        if not obey_kept(kind, identity):
            obey_shipped(kind, identity)
    return [
        {
            "product": kind.name,
            "layers": count,
            "ways": kind.changes(),
            "by": kind.source,
            "refused": {way: support.brief for way, support in kind.refused.items()},
        }
        for kind, count in kinds.items()
    ]


def print_products(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print what `explain_products` found."""
    if not found:
        console.print("no product over a quantised weight: --quantization rounds plain ones", soft_wrap=True)
    for row in found:
        console.print(Text(row["product"], "bold").append(f", {row['layers']} layers", "default"))
        ways = ", ".join(f"{way} from {rows}" for rows, way in row["ways"].items())
        console.print(Text(f"  {ways} rows on", "green"))
        console.print(Text(f"  by: {row['by']}", "dim"))
        for why, names in _by_reason(row.get("refused", {})).items():
            console.print(Text(f"  {', '.join(names)}: {why}", "dim"), soft_wrap=True)


def _by_reason(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of the ways that share a reason."""
    found: dict[str, list[str]] = {}
    for name, why in refused.items():
        found.setdefault(why, []).append(name)
    return found
