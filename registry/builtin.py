"""Built-in plugin: Headway's own kernels and layouts, registered through the public hooks. The plugin imports no kernel
library."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch

from headway.core.chat import builtin as chat_parsers
from headway.core.contract.backend import API_VERSION, BackendInfo
from headway.core.contract.kernel import KernelInfo
from headway.core.contract.layout import HND, LATENT, NHD, NHD_INT8, VLLM_5D, CacheWriter, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.ranks import AllReduceKernelInfo
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import KEY_VALUE, VALUE_KEY, StateBackendInfo, StateLayout, StateSpec
from headway.core.contract.text_plugins import ChatParserInfo, ProposerInfo
from headway.core.speculation.proposers import BUILTIN
from headway.kernels.experts.builtin import builtin_kernels as experts_kernels
from headway.kernels.linear.choice import BUILTIN as LINEAR_KERNELS
from headway.registry.hookspecs import hookimpl

log = logging.getLogger("headway")

_GPUS = () if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
"""Device types of GPU kernels. Empty with Triton's interpreter, which runs these kernels on any device."""


def _writer(device: torch.device) -> CacheWriter:
    if device.type == "cuda":
        try:
            from headway.backends.triton.write_kernel import Writer
        except ImportError as error:
            hint = "pip install 'headway[triton]'"
            log.warning("KV cache: writes use torch, which waits for the GPU in every layer: %s (%s)", error, hint)
        else:
            return Writer()
    from headway.core.contract.layout import write_rows

    return write_rows


def _class(place: str) -> Callable[[], Any]:
    """Return a function that loads a backend's class. place: MODULE:CLASS, relative to headway.backends."""
    return partial(resolve_name, f"headway.backends.{place}")


_CLASSES = {
    "triton": "triton.backend:TritonAttention",
    "vllm_paged": "vllm_paged.backend:VllmPagedAttention",
    "hopper": "hopper.backend:HopperAttention",
    "hopper_mla": "hopper.latent:HopperLatent",
    "hopper_decode": "hopper.decode:HopperDecoding",
    "flash_attn": "flash_attn:FlashAttention2",
    "flash_attn_3": "flash_attn_3:FlashAttention3",
    "flash_attn_4": "flash_attn_4:FlashAttention4",
    "torch_varlen": "varlen:TorchVarlen",
    "xformers": "xformers:XFormersAttention",
    "native": "native:NativeAttention",
    "sdpa": "sdpa:SDPA",
    "flex": "flex:FlexAttention",
    "sdpa.math": "sdpa:SDPAMath",
}


def _info(name: str, summary: str, extra: str = "") -> BackendInfo:
    """Return a backend's registration. extra: library to install; a backend that needs a library also requires a GPU."""
    return BackendInfo(name, summary, _class(_CLASSES[name]), extra, devices=_GPUS if extra else (), api_version=API_VERSION)


@hookimpl
def headway_register_layouts() -> list[LayoutInfo]:
    """Register the built-in layouts."""
    return [LayoutInfo(layout, _writer) for layout in (NHD, HND, VLLM_5D, LATENT, NHD_INT8)]


@hookimpl
def headway_register_backends() -> list[BackendInfo]:
    """Register the built-in backends."""
    return [
        _info("triton", "our paged split-KV decode and varlen prefill in Triton, every layout", "headway[triton]"),
        _info("vllm_paged", "our paged attention in CUDA C++, compiled at first use; vLLM's layout", "headway[cuda]"),
        _info("hopper", "our prefill and extend in CUDA C++ for H100 and H200, compiled at first use", "headway[cuda]"),
        _info(
            "hopper_mla", "our decode and extend of latents in CUDA C++ for H100 and H200, compiled at first use", "headway[cuda]"
        ),
        _info("hopper_decode", "our decode in CUDA C++ for H100 and H200, compiled at first use", "headway[cuda]"),
        _info("flash_attn", "FlashAttention 2 (package flash-attn): varlen, paged split-KV", "headway[flash-attn]"),
        _info("flash_attn_3", "FlashAttention 3, Hopper: upstream's, or the one inside vLLM or SGLang", "flash-attn-3"),
        _info("flash_attn_4", "FlashAttention 4 (CuTe DSL), Hopper and Blackwell", "headway[flash-attn-4]"),
        _info("torch_varlen", "torch's own FlashAttention 2, paged (torch.nn.attention.varlen)", "torch>=2.13"),
        _info("xformers", "CUTLASS or flash prefill, Triton split-K paged decode", "headway[xformers]"),
        _info("native", "our paged decode in C on a CPU, compiled at first use"),
        _info("sdpa", "torch's scaled_dot_product_attention, the kernel torch picks"),
        _info("flex", "torch's FlexAttention, for layers with an attention rule"),
        _info("sdpa.math", "the baseline: torch's MATH kernel over gathered rows"),
    ]


@hookimpl
def headway_register_state_layouts() -> list[StateLayout]:
    """Register the built-in layouts of states."""
    return [KEY_VALUE, VALUE_KEY]


@hookimpl
def headway_register_state_backends() -> list[StateBackendInfo]:
    """Register the built-in backends for state layers, best first."""
    return [
        StateBackendInfo(
            "triton",
            "our steps in one launch and chunked scans in Triton, every layout",
            _class("states.triton.backend:TritonStates"),
            "headway[triton]",
            devices=_GPUS,
            api_version=API_VERSION,
        ),
        StateBackendInfo(
            "torch",
            "the baseline: batched products of torch, every kind",
            _class("states.torch_states:TorchStates"),
            api_version=API_VERSION,
        ),
    ]


def _sum(name: str, summary: str, place: str, extra: str = "", device: str = "cuda") -> AllReduceKernelInfo:
    load = partial(resolve_name, f"headway.{place}")
    return AllReduceKernelInfo(name, summary, load, extra, devices=(device,), api_version=API_VERSION)


_SUMS = (
    _sum("one_shot", "one launch in Triton", "kernels.all_reduce.one_shot_kernels:OneShotAllReduce", "headway[triton]"),
    _sum("two_shot", "large tensors, in Triton", "kernels.all_reduce.two_shot_kernels:TwoShotAllReduce", "headway[triton]"),
    _sum(
        "copies",
        "overlaps with other kernels",
        "kernels.all_reduce.copy_kernels:CopyAllReduce",
        "headway[triton]",
    ),
    _sum("nccl", "NCCL, tensors of any size", "core.engine.ranks.torch_ranks:Nccl"),
    _sum("gloo", "gloo, ranks on a CPU", "core.engine.ranks.torch_ranks:Gloo", device="cpu"),
)
"""All-reduce kernels in order of preference. Without measured times, the first kernel that supports a tensor runs. The last
kernel for each device type supports every tensor."""


@hookimpl
def headway_register_kernels() -> list[KernelInfo]:
    """Register the built-in kernels of linear layers, layers of experts and all-reduce."""
    linear = [replace(each, devices=_GPUS) if each.devices == ("cuda",) else each for each in LINEAR_KERNELS]
    return [*linear, *experts_kernels(), *_SUMS]


@hookimpl
def headway_rank_state_backends(spec: StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
    """Return the candidates in the order for a start without measured times: registration order, with the baseline last."""
    return sorted(candidates, key=lambda name: name == "torch")


_PROMPTS = (
    "hopper",
    "flash_attn_3",
    "flash_attn_4",
    "flash_attn",
    "torch_varlen",
    "triton",
    "hopper_mla",
    "xformers",
    "sdpa",
    "sdpa.math",
)
RANK: dict[str, dict[Phase, tuple[str, ...]]] = {
    "cuda": {
        Phase.PREFILL: _PROMPTS,
        Phase.EXTEND: _PROMPTS,
        Phase.DECODE: (
            "triton",
            "hopper_decode",
            "hopper_mla",
            "flash_attn_3",
            "vllm_paged",
            "flash_attn",
            "torch_varlen",
            "xformers",
            "flash_attn_4",
            "sdpa",
            "sdpa.math",
        ),
    },
}
"""Order of backends by device type and phase, best first, used without measured times.

Measured on one H200 (bf16, head_dim 128, 32 query heads, 8 KV heads). hopper is faster than flash_attn_3, the fastest library,
for most prompts and extends, and needs no library. Prefill speed of the other backends in TFLOP/s at 1x512, 1x2048, 1x8192,
1x32768 and 8x2048 tokens: flash_attn_4 34, 211, 686, 652, 527; flash_attn 87, 222, 344, 374, 317. xformers reaches 6 to 177 with
CUTLASS; with flash, it differs from flash_attn only in host time. Compared with flash_attn, flash_attn_4 loses 40 us on a short
prompt but halves the time of a long prompt, which matters more. sdpa with torch's flash kernel reaches 57 to 351, but needs one
call per length in a mixed step, and gathers the context first.

In decode, triton was faster than flash_attn in nearly every cell, and both were faster than the rest. xformers spends at least
190 us per call. flash_attn_4 has no split-KV on Hopper, so one long context occupies only a few SMs. torch_varlen is flash_attn's
kernel with more overhead.
"""


@hookimpl
def headway_rank_backends(spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
    """Return the candidates in the order for a start without measured times. The order is RANK if it has the device type, else
    registration order; the baseline is last."""
    order = RANK.get(spec.device.type, {}).get(phase, ("sdpa.math",))
    last = len(order) - 1  # unknown names come before the baseline
    return sorted(candidates, key=lambda name: order.index(name) if name in order else last - 0.5)


@hookimpl
def headway_register_proposers() -> Sequence[ProposerInfo]:
    """Register the built-in proposers."""
    return BUILTIN


@hookimpl
def headway_register_chat_parsers() -> Sequence[ChatParserInfo]:
    """Register the built-in parsers of model families' formats."""
    return chat_parsers.BUILTIN
