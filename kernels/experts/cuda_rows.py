"""Experts of few tokens over quantised weights by CUDA C++ of our own: which layers it computes, and its launches.

A decode step's time is that of reading the weights of the experts touched, once each where an expert's tokens fill one lot.
"""

from __future__ import annotations

from struct import Struct

import numpy
import torch
from torch import Tensor

from headway.core.contract.support import Support
from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.cuda_variant import MOST_TOKENS, ExpertCutRule, ExpertVariant, expert_rows_cut, expert_variant
from headway.kernels.experts.router import Routed, Router
from headway.kernels.experts.weights import ExpertWeights
from headway.kernels.linear.cuda_arranged import Arrangements, computes
from headway.kernels.linear.cuda_launchers import POINTERS
from headway.kernels.linear.forms import QuantizedWeight
from headway.kernels.runtime.nvrtc.arguments import Arguments
from headway.kernels.runtime.nvrtc.compiler import architecture, find_compiler
from headway.kernels.runtime.nvrtc.launch import Kernel, Launch
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.step.operations import Norm

LOTS = 8, 16
"""Most rows of one expert that are multiplied together; larger ones read a weight fewer times, and have less room for it."""
_ROUTED = Struct("=2Q")
"""struct Routed of lots.cuh."""


class _Launcher:
    """One compiled kernel with its arguments, which a launch copies."""

    def __init__(self, variant: ExpertVariant, device: torch.device, multiprocessors: int) -> None:
        cut = variant.each.cut
        self.kernel: Kernel = load(variant.source, "expert_rows", device, architecture(device))
        self.kernel.allow_shared(variant.shared_bytes)
        blocks = multiprocessors * cut.per_multiprocessor
        early = torch.cuda.get_device_capability(device) >= (9, 0)
        grid = blocks if variant.first else min(variant.tiles, blocks)
        self.launch = Launch((grid, 1, 1), variant.each.threads, variant.shared_bytes, overlaps=early)
        self.arguments = Arguments(bytes(POINTERS.size), bytes(_ROUTED.size), numpy.int32(0))


class CudaRows:
    """Lots of rows of one expert, in the order of experts: three launches a layer, for up to MOST_TOKENS tokens.

    A token's bits depend on neither the other tokens nor their number. One thread at a time.
    """

    def __init__(
        self,
        lot: int,
        config: ExpertsConfig,
        router: Router,
        device: torch.device,
        arranged: Arrangements,
        cut: ExpertCutRule = expert_rows_cut,
    ) -> None:
        """lot: of LOTS. arranged: what several of these share."""
        self.name = f"cuda.rows{lot}"
        self._lot = lot
        self._config = config
        self._router = router
        self._device = device
        self._arranged = arranged
        self._cut = cut
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._launchers: dict[ExpertVariant, _Launcher] = {}

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """See Method. Lots larger than the next smaller are left to that one where they cannot be filled."""
        return num_tokens <= MOST_TOKENS and (self._lot == LOTS[0] or num_tokens > self._lot // 2)

    def route(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """See Method."""
        return self._router.rows(x, norm, weights)

    def add(self, residual: Tensor, routed: Routed, weights: ExpertWeights) -> None:
        """See Method."""
        between = residual.new_empty((routed.experts.numel(), self._config.intermediate_size))
        self._multiply(routed, routed.x, weights.gate_up, weights.gate_up_bias, between, first=True)
        self._multiply(routed, between, weights.down, weights.down_bias, residual, first=False)

    def _multiply(
        self, routed: Routed, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None, y: Tensor, first: bool
    ) -> None:
        num_tokens, arranged = len(routed.experts), self._arranged(weight)
        launcher = self._launcher(weight, bias, x.dtype, 1 if num_tokens == 1 else self._lot, first)
        read = x, arranged.codes, arranged.scales, arranged.zeros, None, bias, y
        pointers = POINTERS.pack(*[0 if tensor is None else tensor.data_ptr() for tensor in read], *[0] * 5)
        routing = _ROUTED.pack(routed.experts.data_ptr(), routed.weights.data_ptr())
        launcher.arguments.set(pointers, routing, numpy.int32(num_tokens))
        launcher.kernel(launcher.launch, launcher.arguments)

    def prepare(self, weights: ExpertWeights) -> int:
        """Arrange a layer's weights and compile what multiplies them; bytes that the arrangement takes beside the weights."""
        products = (weights.gate_up, weights.gate_up_bias, True), (weights.down, weights.down_bias, False)
        for weight, bias, first in products:
            for lot in {1, self._lot} if self.takes(1, weights.router.dtype) else {self._lot}:
                self._launcher(weight, bias, weights.router.dtype, lot, first)
        return sum(self._arranged.num_bytes(weight) for weight, _, _ in products)

    def _launcher(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, lot: int, first: bool
    ) -> _Launcher:
        arranged = self._arranged(weight)
        variant = expert_variant(self._config, arranged, dtype, lot, first, bias is not None, self._multiprocessors, self._cut)
        launcher = self._launchers.get(variant)
        if launcher is None:
            launcher = self._launchers[variant] = _Launcher(variant, self._device, self._multiprocessors)
        return launcher


def computes_experts(config: ExpertsConfig, weights: ExpertWeights, device: torch.device) -> Support:
    """Whether the kernel computes layers of such weights on a device, and why not."""
    support = find_compiler()[1]
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        support &= Support.no("device", "a GPU of compute capability 8.0 or newer", device)
    for weight, gated in ((weights.gate_up, config.gated), (weights.down, False)):
        if isinstance(weight, Tensor):
            support &= Support.no("weights", "quantised ones", "plain ones")
        else:
            rows = weight.shape[0] // config.num_all
            support &= computes(weights.router.dtype, weight, rows // 2 if gated else rows)
    return support
