"""Reader of one layer's tensors: merges, transposes and scales linear layers, and builds norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.ranks import Ranks
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.choice import LinearKernels
from headway.kernels.linear.linear import Linear, ProductOrigin
from headway.kernels.step.operations import Norm
from headway.models.checkpoints.weights import WeightSource
from headway.models.config import DecoderConfig
from headway.models.shard import ModelShard


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """Reader of the tensors under a name prefix, by the conventions of a model family."""

    config: DecoderConfig
    """The family's conventions."""
    weights: WeightSource
    shard: ModelShard
    ranks: Ranks
    prefix: str = ""
    """Prefix of every name, such as `model.layers.0.`."""
    kernels: LinearKernels | None = None
    """Kernels for linear layers. None means Headway's own."""

    def of_layer(self, index: int, config: DecoderConfig) -> LayerTensors:
        """Return a reader for the tensors of the layer at `index`, by the conventions of `config`."""
        shard, prefix = self.shard.of_layer(index), config.names.layer.format(index)
        return LayerTensors(config, self.weights, shard, self.ranks, prefix, self.kernels)

    def take(self, name: str, *shape: int | Axis) -> Tensor:
        """Return one tensor of this shape in the model's dtype."""
        return self.weights.take(self.prefix + name, shape)

    def take_float(self, name: str, *shape: int | Axis) -> Tensor:
        """Return one tensor of this shape in float32, regardless of the model's dtype."""
        return self.weights.take_as(torch.float32, self.prefix + name, shape)

    def take_conv(self, sizes: Mapping[str, Axis], width: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        """Return weight [channels, width] and bias [channels] of depthwise convolutions, concatenated.

        sizes: module name -> number of channels.
        """
        rows = {f"{self.prefix}{module}.weight": size for module, size in sizes.items()}
        weight = self.weights.take_merged(rows, 1, width)[:, 0]
        of_rows = {f"{self.prefix}{module}.bias": size for module, size in sizes.items()}
        return weight, self.weights.take_merged(of_rows) if bias else None

    def norm(self, module: str, size: int | Axis) -> Norm:
        """Return a norm of the kind that the model uses, over `size` elements."""
        config = self.config
        weight = self.take(f"{module}.weight", size)
        if config.norm == "rms_plus_one":
            weight = weight.float() + 1.0  # in half precision the sum would lose bits of the weight
        return Norm(weight, config.norm_eps, self.take(f"{module}.bias", size) if config.norm == "layer" else None)

    def norm_if_any(self, module: str | None, size: int) -> Norm | None:
        """Return a norm, or None if `module` is None because the family has no such norm."""
        return None if module is None else self.norm(module, size)

    def linear(
        self,
        sizes: Mapping[str, int | Axis],
        in_features: int | Axis,
        bias: bool,
        order: Sequence[int] | None = None,
        scale: float | Sequence[float] = 1.0,
    ) -> Linear:
        """Return linear layers with the same input, merged into one. If the input is sharded, the ranks' results must be summed,
        and only rank 0 has the bias.

        sizes: module -> out_features.
        order: row order of the result, as indices into this rank's rows.
        scale: factor of weights and biases, either one for all rows or one for each row of the result.
        """
        summed = not Axis.of(in_features).is_whole
        rows_of = {self.prefix + module: Axis.of(size) for module, size in sizes.items()}
        origin = ProductOrigin(rows_of, Axis.of(in_features), order, scale)
        if self.config.names.transposed:
            parts = [self.take(f"{module}.weight", in_features, size).t() for module, size in sizes.items()]
            weight = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        else:
            names = {f"{self.prefix}{module}.weight": size for module, size in sizes.items()}
            if order is None and scale == 1.0:
                stored = self.weights.take_product(names, in_features)
                biases = self._biases(sizes, bias, summed)
                return Linear(stored, biases, summed, dtype=self.weights.dtype, origin=origin, kernels=self.kernels)
            weight = self.weights.take_merged(names, in_features)
        biases = self._biases(sizes, bias, summed)
        if order is not None:
            rows = torch.tensor(order, device=weight.device)
            weight, biases = weight[rows], None if biases is None else biases[rows]
        if not isinstance(scale, float):
            factors = torch.tensor(scale, device=weight.device)
            weight = (weight * factors[:, None]).to(weight.dtype)
            biases = None if biases is None else (biases * factors).to(weight.dtype)
        elif scale != 1.0:
            weight, biases = weight * scale, None if biases is None else biases * scale
        return Linear(weight, biases, summed, origin=origin, kernels=self.kernels)

    def _biases(self, sizes: Mapping[str, int | Axis], bias: bool, summed: bool) -> Tensor | None:
        """Return the merged biases of linear layers with the same input; only rank 0 has biases if results are summed."""
        of_rows = {f"{self.prefix}{module}.bias": size for module, size in sizes.items()}
        biases = self.weights.take_merged(of_rows) if bias else None
        return self.shard.once(biases) if summed else biases

    def sections(
        self,
        inputs: Sequence[tuple[str, Sequence[str]]],
        sizes: Mapping[str, Axis],
        in_features: int,
        bias: bool,
        groups: int = 1,
        scales: Mapping[str, float] | None = None,
    ) -> Linear:
        """Return linear layers with the same input, merged into one whose rows are ordered by section.

        inputs: modules, each with its sections in order.
        sizes: section -> number of rows, in the order of the result.
        groups: number of groups, for checkpoints whose modules store all sections of the first group, then all sections of the
        second group, and so on.
        scales: section -> factor.
        """
        modules: dict[str, int | Axis] = {}
        rows: dict[str, list[int]] = {section: [] for section in sizes}
        row = 0
        for module, held in inputs:
            pieces = [(section, sizes[section].piece(number, groups)) for number in range(groups) for section in held]
            modules[module] = functools.reduce(Axis.__add__, (piece for _, piece in pieces))
            for section, piece in pieces:
                rows[section] += range(row, row + piece.size)
                row += piece.size
        order = [row for section in sizes for row in rows[section]]
        factors = [(scales or {}).get(section, 1.0) for section in sizes for _ in rows[section]]
        order_if_any = None if order == [*range(len(order))] else order
        return self.linear(modules, in_features, bias, order_if_any, factors if scales else 1.0)


_SUFFIXES = {
    "k": ("self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale"),
    "v": ("self_attn.v_scale", "self_attn.v_proj.v_scale", "self_attn.kv_scale"),
}
"""Scale names of compressed-tensors, ModelOpt and AutoFP8; the last name is a single scale for k and v."""


def read_kv_scales(tensors: LayerTensors) -> tuple[float, float]:
    """Return k_scale and v_scale of a layer: key = cached key * k_scale. Both are 1 if the checkpoint has no scales.

    :raises ModelError: if only one of the two exists, or a scale is not a number above 0.
    """
    k_scale, v_scale = _scale(tensors, "k"), _scale(tensors, "v")
    if (k_scale is None) != (v_scale is None):
        there, missing = ("k", "v") if v_scale is None else ("v", "k")
        raise ModelError(f"weights: {tensors.prefix} has a {there}_scale for its cache, but no {missing}_scale")
    return k_scale or 1.0, v_scale or 1.0


def _scale(tensors: LayerTensors, which: str) -> float | None:
    names = [tensors.prefix + suffix for suffix in _SUFFIXES[which]]
    name = next((name for name in names if name in tensors.weights), None)
    if name is None:
        return None
    scale = tensors.weights.take_number(name)
    if not math.isfinite(scale) or scale <= 0:
        raise ModelError(f"weights: {name} needs a number above 0, got {scale}")
    return scale
