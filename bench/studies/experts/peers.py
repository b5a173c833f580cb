"""Other libraries' layers of experts, called bare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.plain import activate
from headway.kernels.experts.route_kernels import Routed
from headway.kernels.experts.weights import ExpertWeights

Layer = Callable[[Routed], Tensor]
"""The weighted sum of what the experts give, [num_tokens, hidden_size]."""
MakeLayer = Callable[[ExpertsConfig, ExpertWeights], Layer]


@dataclass(frozen=True)
class ExpertsPeer:
    """A library that is installed."""

    name: str
    version: str
    make: MakeLayer
    plain_gate: bool = False
    """Whether its call, as it is made here, takes neither biases nor a clamped gate (gpt-oss's)."""

    def refusal(self, config: ExpertsConfig) -> str:
        """Why a layer is not timed; empty if it is."""
        clamped = config.biases or config.swiglu_limit is not None
        return "its plain call takes neither biases nor a clamped gate" if self.plain_gate and clamped else ""


def grouped_mm() -> ExpertsPeer:
    """torch's grouped product with torch's operations around it, none fused."""
    if not hasattr(torch, "_grouped_mm"):
        raise ImportError("torch has no _grouped_mm: needs 2.9 or newer")

    def make(config: ExpertsConfig, weights: ExpertWeights) -> Layer:
        numbers = torch.arange(config.num_all, device=weights.router.device)
        gate_up, down = _plain(weights)

        def layer(routed: Routed) -> Tensor:
            ordered, pairs = routed.experts.flatten().sort(stable=True)
            ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
            tokens = pairs // config.num_slots
            both = torch._grouped_mm(routed.x[tokens], gate_up.mT, offs=ends)
            if weights.gate_up_bias is not None:
                both = both + weights.gate_up_bias[ordered]
            parts = torch._grouped_mm(activate(both, config), down.mT, offs=ends)
            if weights.down_bias is not None:
                parts = parts + weights.down_bias[ordered]
            weighted = parts * routed.weights.flatten()[pairs, None]
            return torch.zeros_like(weighted[: len(routed.x)]).index_add_(0, tokens, weighted)

        return layer

    return ExpertsPeer("torch.grouped_mm, composed", torch.__version__, make)


def _plain(weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """The experts' weights, which are given to peers plain alone."""
    assert isinstance(weights.gate_up, Tensor)
    assert isinstance(weights.down, Tensor)
    return weights.gate_up, weights.down


def vllm() -> ExpertsPeer:
    """vLLM's Triton experts."""
    library: Any = import_module("vllm.model_executor.layers.fused_moe.fused_moe")

    def make(config: ExpertsConfig, weights: ExpertWeights) -> Layer:
        def layer(routed: Routed) -> Tensor:
            found: Tensor = library.fused_experts(routed.x, weights.gate_up, weights.down, routed.weights, routed.experts)
            return found

        return layer

    return ExpertsPeer("vllm.fused_experts", metadata.version("vllm"), make, plain_gate=True)


def flashinfer() -> ExpertsPeer:
    """FlashInfer's CUTLASS experts, which it compiles at the first call (minutes)."""
    library: Any = import_module("flashinfer.fused_moe")

    def make(config: ExpertsConfig, weights: ExpertWeights) -> Layer:
        gate_up, down = _plain(weights)
        gate, up = gate_up.chunk(2, dim=1)
        up_gate = torch.cat([up, gate], dim=1)

        def layer(routed: Routed) -> Tensor:
            dtype = routed.x.dtype
            out: Any = library.cutlass_fused_moe(routed.x, routed.experts, routed.weights, up_gate, down, dtype, quant_scales=[])
            found: Tensor = out[0] if isinstance(out, (list, tuple)) else out
            return found

        return layer

    return ExpertsPeer("flashinfer.cutlass_fused_moe", metadata.version("flashinfer-python"), make, plain_gate=True)


PEERS: dict[str, Callable[[], ExpertsPeer]] = {"torch": grouped_mm, "vllm": vllm, "flashinfer": flashinfer}
"""Each raises where the library is not installed."""


def installed() -> tuple[list[ExpertsPeer], dict[str, str]]:
    """The peers that are here; and for each its version, or why it is not."""
    found, versions = [], {}
    for name, load in PEERS.items():
        try:
            peer = load()
        except Exception as error:  # whatever an import raises
            versions[name] = f"not here: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
        else:
            found.append(peer)
            versions[name] = peer.version
    return found, versions
