"""Layers of experts of one kind on a GPU: all ways of computing them, and the one that serves each number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.models.experts.choice import TOKEN_COUNTS, ExpertTimes, rule
from headway.models.experts.config import ExpertsConfig
from headway.models.experts.methods import INVARIANT, TILINGS, GroupedMM, Method, RowMethod, TileMethod
from headway.models.experts.router import Router
from headway.models.experts.weights import ExpertWeights
from headway.models.operations import Norm


class FusedExperts:
    """The experts of one kind of layer. No call synchronises or looks at values, so a CUDA graph can capture every call."""

    def __init__(self, config: ExpertsConfig, dtype: torch.dtype, device: torch.device, batch_invariant: bool = False) -> None:
        """batch_invariant: always the same tiles, so that a token's bits do not depend on the other tokens or their number."""
        assert config.held is None, "the kernels read the weights of every expert"
        self.config, self.dtype, self.device = config, dtype, device
        router = Router(config, device, batch_invariant)
        if batch_invariant:
            ways: list[Method] = [TileMethod(INVARIANT, config, router, device, always=True)]
        else:
            ways = [RowMethod(config, router, device), *(TileMethod(tiling, config, router, device) for tiling in TILINGS)]
            ways += [GroupedMM(config, router, device)]
        self.methods = {way.name: way for way in ways if any(way.takes(count, dtype) for count in TOKEN_COUNTS)}
        self.example: ExpertWeights | None = None
        """The weights of one layer of this kind, to measure with."""
        self._times: ExpertTimes | None = None
        self._chosen: dict[int, Method] = {}

    def layer(self, weights: ExpertWeights, norm: Norm) -> FusedLayer:
        """One layer of this kind."""
        self.example = self.example or weights
        return FusedLayer(self, weights, norm)

    def obey(self, times: ExpertTimes) -> None:
        """Choose by measured times from now on."""
        self._times = times
        self._chosen.clear()

    def describe(self) -> str:
        """Which method serves how many tokens, and by whose word."""
        names = [self.method_for(count).name for count in TOKEN_COUNTS]
        changes = [cell for cell, name in enumerate(names) if cell == 0 or name != names[cell - 1]]
        ranges = ", ".join(f"{names[cell]} from {TOKEN_COUNTS[cell]}" for cell in changes)
        return f"{ranges} tokens on ({'not measured' if self._times is None else self._times.source})"

    def method_for(self, num_tokens: int) -> Method:
        """What computes so many tokens."""
        method = self._chosen.get(num_tokens)
        if method is None:
            able = {each.name: each for each in self.methods.values() if each.takes(num_tokens, self.dtype)}
            name = None if self._times is None else self._times.fastest(num_tokens, able)
            ruled = rule(num_tokens, self.config)
            likely = [each for each in able.values() if each.name.startswith(ruled)] or list(able.values())
            method = self._chosen[num_tokens] = able[name] if name else likely[0]
        return method

    def __call__(self, x: Tensor, norm: Norm, weights: ExpertWeights, onto: Tensor) -> Tensor:
        """Add to `onto` [num_tokens, hidden_size], in place, what the experts of x's normed rows give. x: as large."""
        if len(x):
            method = self.method_for(len(x))
            method.add(onto, method.route(x, norm, weights), weights)
        return onto


class FusedLayer:
    """One layer: its tensors, and its kind."""

    def __init__(self, kind: FusedExperts, weights: ExpertWeights, norm: Norm) -> None:
        self.kind, self._weights, self._norm = kind, weights, norm

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream; onto: what is added to in its place; either in place."""
        return self.kind(x, self._norm, self._weights, x if onto is None else onto)
