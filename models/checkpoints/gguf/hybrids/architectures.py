"""The architectures of .gguf files that Headway reads by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headway.models.checkpoints.gguf.hybrids import convolutions, delta, mamba
from headway.models.checkpoints.gguf.hybrids.header import Header
from headway.models.checkpoints.gguf.hybrids.rules import Rule, as_it_is, without_one


@dataclass(frozen=True)
class GgufArchitecture:
    """What becomes of a file: transformers' configuration, and the checkpoint's tensors."""

    model_type: str
    """transformers'."""
    config: Callable[[Header], dict[str, Any]]
    """What a configuration has beside what all have."""
    rules: Callable[[Header], list[Rule]]
    """Rules of the tensors of layers."""
    norm: str = "output_norm"
    """The last norm in the file."""
    make_norm: Callable[[Tensor], Tensor] = as_it_is
    scoring: int = 1
    """How experts are scored, if there are any, as `expert_gating_func` has it: 1 by a softmax, 2 by a sigmoid."""


_GRANITE = GgufArchitecture("granitemoehybrid", mamba.granite_config, mamba.granite_rules)
_BAMBA = GgufArchitecture("bamba", mamba.bamba_config, mamba.bamba_rules)
_NEMOTRON = GgufArchitecture("nemotron_h", mamba.nemotron_h_config, mamba.nemotron_h_rules, scoring=2)
_SCALES = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
"""What every Granite states and no Bamba."""

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "falcon-h1": GgufArchitecture("falcon_h1", mamba.falcon_h1_config, mamba.falcon_h1_rules),
    "granitehybrid": _GRANITE,
    "jamba": GgufArchitecture("jamba", mamba.jamba_config, mamba.jamba_rules),
    "kimi-linear": GgufArchitecture("kimi_linear", delta.kimi_config, delta.kimi_rules, scoring=2),
    "lfm2": GgufArchitecture("lfm2", convolutions.lfm2_config, convolutions.lfm2_rules, norm="token_embd_norm"),
    "lfm2moe": GgufArchitecture(
        "lfm2_moe", convolutions.lfm2_moe_config, convolutions.lfm2_rules, norm="token_embd_norm", scoring=2
    ),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": GgufArchitecture("qwen3_5_text", delta.qwen3_5_config, delta.qwen3_5_rules, make_norm=without_one),
    "qwen35moe": GgufArchitecture("qwen3_5_moe_text", delta.qwen3_5_moe_config, delta.qwen3_5_rules, make_norm=without_one),
    "qwen3next": GgufArchitecture("qwen3_next", delta.qwen3_next_config, delta.qwen3_next_rules, make_norm=without_one),
}
"""What general.architecture may be -> what becomes of it."""


def architecture_of(header: Header) -> GgufArchitecture | None:
    """The file's architecture; None where it is not one of these."""
    found = ARCHITECTURES.get(header.architecture)
    if found is _GRANITE and all(header.get(key) is None for key in _SCALES):
        return _BAMBA
    return found
