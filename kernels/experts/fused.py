"""Layers of experts of one kind on a GPU: all methods of computing them, and the one for each number of tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.select.costs import AxisTimes
from headway.kernels.experts import cuda_lots
from headway.kernels.experts.choice import TOKEN_COUNTS, TOKENS, rules
from headway.kernels.experts.cuda_lots import CudaLots, computes_lots
from headway.kernels.experts.cuda_rows import LOTS, CudaRows, computes_experts
from headway.kernels.experts.methods import (
    INVARIANT,
    QUANTIZED_INVARIANT,
    QUANTIZED_ROW_CUTS,
    QUANTIZED_TILINGS,
    TILINGS,
    GroupedMM,
    Method,
    RowMethod,
    TileMethod,
)
from headway.kernels.experts.route_kernels import Routed, Router
from headway.kernels.experts.weights import ExpertWeights
from headway.kernels.linear.cuda_products import Arrangements
from headway.kernels.linear.forms import QuantizedWeight
from headway.kernels.linear.quantized_ways import QuantizedWays
from headway.kernels.step.operations import Norm


class Dequantized:
    """Two launches that write the weights of all experts in half precision, and then a method over plain weights.

    Memory for them, `scratch_bytes`, is torch's for the length of the layer, so that all layers have the same in turn; the
    engine's trial step counts it among activations.
    """

    def __init__(self, inner: Method, config: ExpertsConfig, ways: QuantizedWays) -> None:
        self.name = f"dequantize+{inner.name}"
        self._inner = inner
        self._config = config
        self._ways = ways

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """See Method. For experts of some pairs each: with fewer, expanding takes longer than all the rest."""
        pairs = num_tokens * self._config.num_slots / self._config.num_all
        return pairs >= _LEAST_PAIRS and self._inner.takes(num_tokens, dtype)

    def route(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """See Method."""
        return self._inner.route(x, norm, weights)

    def add(self, residual: Tensor, routed: Routed, weights: ExpertWeights) -> None:
        """See Method."""
        config, dtype = self._config, residual.dtype
        gate_up = self._plain(weights.gate_up, config.up_size, dtype)
        down = self._plain(weights.down, residual.shape[1], dtype)
        self._inner.add(residual, routed, replace(weights, gate_up=gate_up, down=down))

    def _plain(self, weight: Tensor | QuantizedWeight, rows: int, dtype: torch.dtype) -> Tensor:
        if isinstance(weight, Tensor):
            return weight
        return self._ways.dequantize.dequantized(weight, dtype).view(-1, rows, weight.shape[1])


def scratch_bytes(weights: ExpertWeights) -> int:
    """Bytes that the expanded weights of a layer take."""
    forms = [each for each in (weights.gate_up, weights.down) if not isinstance(each, Tensor)]
    return sum(each.shape[0] * each.shape[1] for each in forms) * weights.router.itemsize


_LEAST_PAIRS = 16


class FusedExperts:
    """The experts of one kind of layer. No call synchronises or looks at values, so a CUDA graph can capture every call."""

    def __init__(
        self,
        config: ExpertsConfig,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool = False,
        forms: tuple[str, str] = ("", ""),
    ) -> None:
        """batch_invariant: always the same tiles, so that a token's bits do not depend on the other tokens or their number.

        forms: of the layers' two weights (`forms_of`).
        """
        assert config.held is None, "the kernels read the weights of every expert"
        self.config = config
        self.dtype = dtype
        self.device = device
        self.forms = forms
        router, quantized = Router(config, device, batch_invariant), forms != ("", "")
        self._router = router
        self._batch_invariant = batch_invariant
        if batch_invariant:
            tiling = QUANTIZED_INVARIANT if quantized else INVARIANT
            ways: list[Method] = [TileMethod(tiling, config, router, device, always=True)]
        else:
            tilings, cuts = (QUANTIZED_TILINGS, QUANTIZED_ROW_CUTS) if quantized else (TILINGS, QUANTIZED_ROW_CUTS[:1])
            ways = [RowMethod(config, router, device, quantized_cut=cut) for cut in cuts]
            ways += [TileMethod(tiling, config, router, device) for tiling in tilings]
            ways += _by_expanding(config, router, device) if quantized else [GroupedMM(config, router, device)]
        self.methods = {way.name: way for way in ways if any(way.takes(count, dtype) for count in TOKEN_COUNTS)}
        self.example: ExpertWeights | None = None
        """The weights of one layer of this kind, to measure with."""
        self._layers: list[ExpertWeights] = []
        self._times: AxisTimes | None = None
        self._chosen: dict[int, Method] = {}

    def layer(self, weights: ExpertWeights, norm: Norm) -> FusedLayer:
        """One layer of this kind. The first tells whether kernels in CUDA C++ compute them, too."""
        if self.example is None:
            self.example = weights
            quantised = self.forms != ("", "") and not self._batch_invariant
            if quantised and computes_experts(self.config, weights, self.device):
                arranged = Arrangements()
                ways = [CudaRows(lot, self.config, self._router, self.device, arranged) for lot in LOTS]
                self.methods = {**{way.name: way for way in ways}, **self.methods}
                if computes_lots(self.config, self.device):
                    lots = [CudaLots(lot, self.config, self._router, self.device, arranged) for lot in cuda_lots.LOTS]
                    self.methods |= {way.name: way for way in lots}
        self._layers.append(weights)
        return FusedLayer(self, weights, norm)

    def prepare(self) -> int:
        """Arrange all layers' weights for the methods that serve and read an arrangement; bytes that it takes besides."""
        ways = {way for way in map(self.method_for, TOKEN_COUNTS) if isinstance(way, CudaRows | CudaLots)}
        return max((sum(way.prepare(weights) for weights in self._layers) for way in ways), default=0)  # they share it

    def obey(self, times: AxisTimes) -> None:
        """Choose by measured times from now on."""
        self._times = times
        self._chosen.clear()

    def describe(self) -> str:
        """Which method serves how many tokens, and by whose word."""
        source = "not measured" if self._times is None else self._times.source
        told = TOKENS.describe(TOKENS.changes(lambda count: self.method_for(count).name), source)
        if self.forms == ("", ""):
            return told
        first, second = (form or DTYPE_NAMES[self.dtype] for form in self.forms)
        told = f"{first if first == second else f'{first}, down {second}'}: {told}"
        if self.example is not None and any(isinstance(self.method_for(count), Dequantized) for count in TOKEN_COUNTS):
            told += f"; expanding a layer takes {scratch_bytes(self.example) / 1e9:.1f} GB, for its length"
        return told

    def method_for(self, num_tokens: int) -> Method:
        """What computes so many tokens."""
        method = self._chosen.get(num_tokens)
        if method is None:
            able = {each.name: each for each in self.methods.values() if each.takes(num_tokens, self.dtype)}
            name = None if self._times is None else self._times.fastest(num_tokens, able)
            likely = [each for ruled in rules(num_tokens, self.config) for each in able.values() if each.name.startswith(ruled)]
            method = self._chosen[num_tokens] = able[name] if name else next(iter(likely or able.values()))
        return method

    def __call__(self, x: Tensor, norm: Norm, weights: ExpertWeights, onto: Tensor) -> Tensor:
        """Add to `onto` [num_tokens, hidden_size], in place, what the experts of x's normed rows give. x: as large."""
        if len(x):
            method = self.method_for(len(x))
            method.add(onto, method.route(x, norm, weights), weights)
        return onto


def _by_expanding(config: ExpertsConfig, router: Router, device: torch.device) -> list[Method]:
    """Methods over plain weights that quantised ones may be expanded for."""
    ways = QuantizedWays(device)
    inner: list[Method] = [TileMethod(tiling, config, router, device) for tiling in TILINGS if tiling.block_m == 128]
    return [Dequantized(method, config, ways) for method in (*inner, GroupedMM(config, router, device))]


class FusedLayer:
    """One layer: its tensors, and its kind."""

    def __init__(self, kind: FusedExperts, weights: ExpertWeights, norm: Norm) -> None:
        self.kind = kind
        self._weights = weights
        self._norm = norm

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream; onto: what is added to in its place; either in place."""
        return self.kind(x, self._norm, self._weights, x if onto is None else onto)
