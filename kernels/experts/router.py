"""Routing by our kernels: their launch, and what of a layer's configuration they are compiled for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.route_kernels import order_few_pairs, order_pairs, route_rows, route_tiles
from headway.kernels.experts.routing import ExpertOrder
from headway.kernels.experts.weights import ExpertWeights
from headway.kernels.runtime.triton_launch import INTERPRETED, FixedLauncher
from headway.kernels.step.operations import Norm

DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What the matrix units multiply, by the tensors' type."""
_ROW_LOGITS = 4
"""Logits a program of one token: few, so that many programs read the router."""
_FEW = 64
"""Tokens up to which a router row for each is read faster than tiles of tokens are chosen for."""
_ORDERED = 16
"""Pairs, or experts, that a program of few tokens finds the places of."""
_SCORES = 16384
"""Most scores, of tokens times experts, that one program chooses from."""
_NORMED = 8192
"""Elements of the rows that a program norms: they are held in registers."""
_COUNTERS = 8192
"""Tiles of tokens that a step may have."""


def dot_type(dtype: torch.dtype) -> Any:
    """The type to multiply in; the interpreter multiplies the raw bits of bfloat16, and so takes float32."""
    return tl.float32 if INTERPRETED else DOT[dtype]


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens with their experts, ready for the products."""

    x: Tensor
    """[num_tokens, hidden_size], normed"""
    experts: Tensor
    """int32 [num_tokens, num_slots]"""
    weights: Tensor
    """float32 [num_tokens, num_slots]"""
    counts: Tensor | None
    """int32 [tiles, num_all], pairs of each expert in each tile of `block_t` tokens; None: of few tokens, not counted"""
    block_t: int


class Router:
    """Norm, router's product and choice in one launch; nothing synchronises."""

    def __init__(self, config: ExpertsConfig, device: torch.device, batch_invariant: bool = False) -> None:
        """batch_invariant: one size of tile for any number of tokens."""
        self._config = config
        self._device = device
        self._one_size = batch_invariant
        self._launchers: dict[Hashable, FixedLauncher] = {}
        self._arrivals = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)

    def rows(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """For few tokens, each by itself. x: [num_tokens, hidden_size], the residual stream."""
        num_logits = self._config.num_logits
        tensors, routed = self._tensors(x, norm, weights, 16, counted=False)
        key = "rows", x.dtype, *_biases(weights)
        if key not in self._launchers:
            block_k = triton.next_power_of_2(x.shape[1])
            sizes = {"BLOCK_K": min(block_k, 2048), "BLOCK_L": _ROW_LOGITS}
            self._launchers[key] = FixedLauncher(route_rows, 4, self._device, **sizes, **self._constants(weights))
        self._launchers[key]((triton.cdiv(num_logits, _ROW_LOGITS), len(x), 1), *tensors, norm.eps)
        return routed

    def tiles(self, x: Tensor, norm: Norm, weights: ExpertWeights) -> Routed:
        """For many tokens, counted for `order`. x: [num_tokens, hidden_size], the residual stream."""
        if len(x) <= _FEW and not self._one_size:
            return self.rows(x, norm, weights)
        num_logits, num_tokens = self._config.num_logits, len(x)
        block_t, block_l = self._tile(num_tokens)
        logit_tiles = triton.cdiv(num_logits, block_l)
        rows = min(block_t, max(1, _NORMED // triton.next_power_of_2(x.shape[1])))
        tensors, routed = self._tensors(x, norm, weights, block_t, counted=True)
        key = "tiles", block_t, block_l, x.dtype, *_biases(weights)
        if key not in self._launchers:
            block_h = triton.next_power_of_2(x.shape[1])
            sizes = {"BLOCK_T": block_t, "BLOCK_L": block_l, "BLOCK_K": 256 // x.itemsize, "LOGIT_TILES": logit_tiles}
            sizes |= {"BLOCK_H": block_h, "BLOCK_R": rows}
            how = {"STAGES": 4, "DOT": dot_type(x.dtype)}
            warps = 8 if block_t == 64 else 4
            self._launchers[key] = FixedLauncher(route_tiles, warps, self._device, **sizes, **how, **self._constants(weights))
        grid = logit_tiles + block_t // rows, triton.cdiv(num_tokens, block_t), 1
        self._launchers[key](grid, *tensors, norm.eps, num_tokens)
        return routed

    def order(self, routed: Routed) -> ExpertOrder:
        """Sort pairs by expert."""
        config, num_tokens = self._config, len(routed.x)
        pairs, places = torch.empty((2, routed.experts.numel()), dtype=torch.int32, device=self._device).unbind()
        ends = torch.empty(config.num_all, dtype=torch.int32, device=self._device)
        if routed.counts is None:
            launch = self._launchers.get("order")
            if launch is None:
                sizes = {"NUM_ALL": config.num_all, "BLOCK_P": _ORDERED, "BLOCK_N": 1024}
                launch = self._launchers["order"] = FixedLauncher(order_few_pairs, 4, self._device, **sizes)
            num_programs = triton.cdiv(len(pairs), _ORDERED) + triton.cdiv(config.num_all, _ORDERED)
            launch((num_programs, 1, 1), routed.experts, pairs, places, ends, len(pairs))
            return ExpertOrder(pairs, places, ends)
        key = "order", routed.block_t
        if key not in self._launchers:
            sizes = {"NUM_ALL": config.num_all, "SLOTS": config.num_slots, "BLOCK_E": self._block_e}
            sizes |= {"BLOCK_T": routed.block_t, "BLOCK_C": 16}
            self._launchers[key] = FixedLauncher(order_pairs, 4, self._device, **sizes)
        grid = triton.cdiv(num_tokens, routed.block_t), 1, 1
        self._launchers[key](grid, routed.experts, routed.counts, pairs, places, ends, num_tokens)
        return ExpertOrder(pairs, places, ends)

    @property
    def _block_e(self) -> int:
        block: int = triton.next_power_of_2(max(self._config.num_logits, self._config.num_all))
        return block

    def _tile(self, num_tokens: int) -> tuple[int, int]:
        """Tokens and logits of a program: small tiles until they are enough to keep the GPU busy.

        The last program of a tile holds the scores of all its tokens, and Triton takes minutes over more than these at once.
        """
        most = max(16, _SCORES // self._block_e)
        if num_tokens <= 256 or self._one_size:
            return min(16, most), 16
        block_t, block_l = (32, min(64, self._block_e)) if num_tokens <= 2048 else (64, min(128, self._block_e))
        return min(block_t, most), block_l

    def _tensors(
        self, x: Tensor, norm: Norm, weights: ExpertWeights, block_t: int, counted: bool
    ) -> tuple[tuple[Tensor, ...], Routed]:
        """The kernels' tensors in their order, and those among them that are the result."""
        config, num_tokens = self._config, len(x)
        logits = torch.empty((num_tokens, config.num_logits), dtype=torch.float32, device=self._device)
        experts = torch.empty((num_tokens, config.num_slots), dtype=torch.int32, device=self._device)
        slot_weights = torch.empty((num_tokens, config.num_slots), dtype=torch.float32, device=self._device)
        counts = None
        if counted:
            counts = torch.empty((triton.cdiv(num_tokens, block_t), config.num_all), dtype=torch.int32, device=self._device)
        normed = torch.empty_like(x)
        router_bias = logits if weights.router_bias is None else weights.router_bias
        correction = logits if weights.correction_bias is None else weights.correction_bias
        given = x, norm.weight, weights.router, router_bias, correction
        written = normed, logits, self._arrivals, experts, slot_weights, experts if counts is None else counts
        return (*given, *written), Routed(normed, experts, slot_weights, counts, block_t)

    def _constants(self, weights: ExpertWeights) -> dict[str, Any]:
        config = self._config
        return {
            "HIDDEN": weights.router.shape[1],
            "NUM_LOGITS": config.num_logits,
            "NUM_EXPERTS": config.num_experts,
            "NUM_ALL": config.num_all,
            "BLOCK_E": self._block_e,
            "TOP_K": config.top_k,
            "SLOTS": config.num_slots,
            "BLOCK_S": triton.next_power_of_2(config.num_slots),
            "SIGMOID": config.scoring == "sigmoid",
            "RENORMALIZE": config.renormalize,
            "SCALE": config.scale,
            "GROUPS": config.num_groups,
            "BLOCK_G": triton.next_power_of_2(config.num_groups),
            "TOP_GROUPS": config.top_k_groups,
            "GROUP_SCORE": config.scores_a_group,
            "ROUTER_BIAS": weights.router_bias is not None,
            "CORRECTION": weights.correction_bias is not None,
            "SHARED_GATE": config.shared_gate,
        }


def _biases(weights: ExpertWeights) -> tuple[bool, bool]:
    return weights.router_bias is not None, weights.correction_bias is not None
