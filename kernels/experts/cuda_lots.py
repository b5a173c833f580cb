"""Experts of several tokens over quantised weights by wgmma (compute capability 9.0): the launches of csrc/expert_lots.cu.

Warps lie side by side along the rows of a weight and share the rows of x, of which they can take more than those of cuda_rows.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.core.contract.support import YES, Support
from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.cuda_variant import ExpertCutRule
from headway.kernels.experts.lots_variant import MOST_TOKENS, LotsVariant, expert_lots_cut, lots_variant
from headway.kernels.experts.methods import most_blocks
from headway.kernels.experts.router import Routed, Router
from headway.kernels.experts.weights import ExpertWeights
from headway.kernels.linear.cuda_arranged import ArrangedWeight, Arrangements
from headway.kernels.linear.cuda_cuts import SLICE_BYTES
from headway.kernels.linear.cuda_launchers import POINTERS
from headway.kernels.linear.forms import QuantizedWeight
from headway.kernels.runtime.nvrtc.arguments import Arguments
from headway.kernels.runtime.nvrtc.compiler import architecture
from headway.kernels.runtime.nvrtc.launch import Kernel, Launch
from headway.kernels.runtime.nvrtc.store import load
from headway.kernels.runtime.nvrtc.tensor_map import MAP_BYTES, tensor_map
from headway.kernels.step.operations import Norm

LOTS = 8, 16, 32, 64
"""Most rows of one expert that are multiplied together."""
_ARRANGING = 256
"""Threads of a block that arranges a row, or adds to 4 columns each."""
_MOST_SLOTS = 24
"""Slots with which what arrange_lots counts by finds room in 48 KiB."""


class _Launcher:
    """One compiled product with its arguments, and the launch that stands before the first or behind the second."""

    def __init__(self, variant: LotsVariant, device: torch.device, multiprocessors: int) -> None:
        specific = architecture(device, specific=True)
        self.variant = variant
        self._kernel: Kernel = load(variant.source, "expert_lots", device, specific)
        self._kernel.allow_shared(variant.shared_bytes)
        self._beside: Kernel = load(variant.source, "arrange_lots" if variant.of.first else "add_slots", device, specific)
        blocks = multiprocessors * variant.of.each.cut.per_multiprocessor
        self._launch = Launch((blocks, 1, 1), variant.threads, variant.shared_bytes, overlaps=True)
        self._arguments = Arguments(*[bytes(MAP_BYTES)] * 3, bytes(POINTERS.size), 0)
        self._beside_arguments = Arguments(*[0] * (5 if variant.of.first else 4))
        self._beside_launches: dict[tuple[int, int, int], Launch] = {}

    def multiply(self, x: Tensor, weight: ArrangedWeight, bias: Tensor | None, y: Tensor, table: Tensor) -> None:
        """Launch the product."""
        variant, blank = self.variant, bytes(MAP_BYTES)
        boxes = (variant.box, SLICE_BYTES), (max(1, variant.groups), variant.outputs)
        scales = tensor_map(weight.scales, boxes[1], 0) if variant.groups else blank
        zeros = blank if weight.zeros is None else tensor_map(weight.zeros, boxes[1], 0)
        read = x, weight.codes, weight.scales, weight.zeros, None, bias, y
        pointers = POINTERS.pack(*[0 if tensor is None else tensor.data_ptr() for tensor in read], *[0] * 5)
        self._arguments.set(tensor_map(weight.codes, boxes[0], 0), scales, zeros, pointers, table.data_ptr())
        self._kernel(self._launch, self._arguments)

    def beside(self, grid: tuple[int, int, int], *tensors: Tensor) -> None:
        """Launch what stands before or behind it."""
        launch = self._beside_launches.get(grid)
        if launch is None:
            launch = self._beside_launches[grid] = Launch(grid, _ARRANGING, overlaps=True)
        self._beside_arguments.set(*[tensor.data_ptr() for tensor in tensors])
        self._beside(launch, self._beside_arguments)


class CudaLots:
    """Lots of rows of one expert whose x is arranged before: five launches a layer, for up to MOST_TOKENS tokens.

    What experts give a token is added in the order of its slots, in float32: its bits are the same in every run, whatever the
    other tokens are. One thread at a time.
    """

    def __init__(
        self,
        lot: int,
        config: ExpertsConfig,
        router: Router,
        device: torch.device,
        arranged: Arrangements,
        cut: ExpertCutRule = expert_lots_cut,
    ) -> None:
        """lot: of LOTS. arranged: what several of these share."""
        self.name = f"cuda.lots{lot}"
        self._lot = lot
        self._config = config
        self._router = router
        self._device = device
        self._arranged = arranged
        self._cut = cut
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._launchers: dict[LotsVariant, _Launcher] = {}

    def cut_by(self, cut: ExpertCutRule, name: str) -> CudaLots:
        """The same by another rule, for whoever compares cuts."""
        other = CudaLots(self._lot, self._config, self._router, self._device, self._arranged, cut)
        other.name = name
        return other

    def takes(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """See Method."""
        return suits(self._lot, num_tokens, self._config)

    def route(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """See Method."""
        return self._router.rows(x, norm, weights)

    def add(self, residual: Tensor, routed: Routed, weights: ExpertWeights) -> None:
        """See Method."""
        (num_tokens, hidden), pairs = residual.shape, routed.experts.numel()
        up, down = self._products(weights, residual.dtype)
        rows = most_blocks(pairs, self._config.num_all, self._lot) * self._lot
        x = residual.new_empty(rows * up.variant.row_columns)  # rows that are missing are never read
        between = residual.new_empty(rows * down.variant.row_columns)
        table = torch.empty(up.variant.table_words, dtype=torch.int32, device=residual.device)
        parts = torch.empty((pairs, hidden), dtype=torch.float32, device=residual.device)
        up.beside((pairs, 1, 1), routed.x, routed.experts, table, x, between)
        up.multiply(x, self._arranged(weights.gate_up), weights.gate_up_bias, between, table)
        down.multiply(between, self._arranged(weights.down), weights.down_bias, parts, table)
        columns = 4 * _ARRANGING
        down.beside((num_tokens, -(-hidden // columns), 1), parts, table, routed.weights, residual)

    def prepare(self, weights: ExpertWeights) -> int:
        """Arrange a layer's weights and compile what multiplies them; bytes that the arrangement takes beside the weights."""
        self._products(weights, weights.router.dtype)
        return self._arranged.num_bytes(weights.gate_up) + self._arranged.num_bytes(weights.down)

    def _products(self, weights: ExpertWeights, dtype: torch.dtype) -> tuple[_Launcher, _Launcher]:
        up = self._launcher(weights.gate_up, weights.gate_up_bias, dtype, weights.down)
        return up, self._launcher(weights.down, weights.down_bias, dtype, None)

    def _launcher(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        dtype: torch.dtype,
        following: Tensor | QuantizedWeight | None,
    ) -> _Launcher:
        after = None if following is None else self._arranged(following).described
        given = self._config, self._arranged(weight), dtype, self._lot, after, bias is not None
        variant = lots_variant(*given, self._multiprocessors, self._cut)
        launcher = self._launchers.get(variant)
        if launcher is None:
            launcher = self._launchers[variant] = _Launcher(variant, self._device, self._multiprocessors)
        return launcher


def suits(lot: int, num_tokens: int, config: ExpertsConfig) -> bool:
    """Whether lots of up to so many rows may be the best for so many tokens.

    Those that hardly an expert fills by half are left to smaller ones, and experts of more than four to larger ones.
    """
    pairs = num_tokens * config.num_slots / config.num_all
    filled = lot == LOTS[0] or (num_tokens > lot // 2 and pairs >= lot / 8)
    return num_tokens <= MOST_TOKENS and filled and (lot == LOTS[-1] or pairs <= 4 * lot)


def computes_lots(config: ExpertsConfig, device: torch.device) -> Support:
    """Whether a device has the kernel for layers that cuda_rows.py computes, and why not."""
    support = YES
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        support &= Support.no("device", "a GPU of compute capability 9.0", device)
    if config.num_slots > _MOST_SLOTS:
        support &= Support.no("experts of a token", f"up to {_MOST_SLOTS}", config.num_slots)
    return support
