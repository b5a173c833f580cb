"""What the Triton kernels take of a layer with a state: constants of its spec and of where its states lie, and their tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor

from headway.core.contract.state import StateCache, StateParameters, StateSpec
from headway.kernels.runtime.triton_launch import Launcher, aligned, specialised


@dataclass(frozen=True, slots=True)
class StateTuning:
    """The cut of each kernel. None: chosen by the step's size."""

    step_value: int | None = None
    """Elements of a head's value that one program of `step` owns."""
    step_warps: int | None = None
    channels: int = 128
    """Channels that one program of a convolution, or of `mamba1`, owns."""
    channel_warps: int = 4
    rows: int = 32
    """Tokens that one program of a prompt's convolution takes: 16, 32 or 64."""
    run: int = 16
    """Tokens of them that a thread takes one after another."""
    row_warps: int = 2
    chunk_warps: int | None = None
    """Warps of the kernel within chunks."""
    walk_turned: bool | None = None
    """Whether the walk keeps values as rows of its state, so that its products take it from registers."""
    walk_value: int | None = None
    """Elements of a head's value that one program takes from chunk to chunk."""
    walk_warps: int | None = None
    walk_stages: int | None = None
    """Chunks on their way from memory at a time."""
    token_channels: int = 32
    """Channels of `mamba1` that one program takes from token to token."""


def convolution_constants(spec: StateSpec, cache: StateCache, parameters: StateParameters) -> Mapping[str, Any]:
    """Constants of a layer's convolution; WIDTH 0: it has none."""
    strides = cache.logical_conv.stride() if spec.conv_channels else (0, 0, 0)
    return {
        "CONV_SLOT": strides[0],
        "CONV_CHANNEL": strides[1],
        "CONV_TIME": strides[2],
        "WIDTH": spec.conv_width,
        "BLOCK_W": triton.next_power_of_2(max(spec.conv_width, 1)),
        "HAS_BIAS": parameters.conv_bias is not None,
        "SILU": spec.activation == "silu",
    }


def head_constants(spec: StateSpec, cache: StateCache) -> Mapping[str, Any]:
    """Constants of a recurrence of heads: every kind but `mamba1`."""
    slot, head, key, value = cache.logical_recurrent.stride()
    return {
        "KIND": spec.kind,
        "HEADS": spec.num_heads,
        "KEY_HEADS": spec.num_key_heads,
        "KEY_DIM": spec.key_dim,
        "VALUE_DIM": spec.value_dim,
        "STATE_SLOT": slot,
        "STATE_HEAD": head,
        "STATE_KEY": key,
        "STATE_VALUE": value,
    }


def channel_constants(spec: StateSpec, cache: StateCache) -> Mapping[str, Any]:
    """Constants of a layer whose channels know nothing of each other: `mamba1`, and a convolution alone."""
    strides = cache.logical_recurrent.stride() if spec.recurrent else (0, 0, 0, 0)
    return {
        "CHANNELS": spec.num_heads if spec.recurrent else spec.conv_channels,
        "KEY_DIM": spec.key_dim,
        "BLOCK_K": triton.next_power_of_2(max(spec.key_dim, 1)),
        "STATE_SLOT": strides[0],
        "STATE_CHANNEL": strides[1],
        "STATE_KEY": strides[2],
    }


def weights(parameters: StateParameters, instead: Tensor) -> tuple[Tensor, ...]:
    """The five tensors of a layer's parameters in the kernels' order; instead: stands for those that there are not."""
    listed = (parameters.conv_weight, parameters.conv_bias, parameters.A_log, parameters.dt_bias, parameters.D)
    return tuple(instead if each is None else each for each in listed)


def states(cache: StateCache, instead: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrent and the convolution's states; instead: stands for those that there are not."""
    return cache.tensors.get("recurrent", instead), cache.tensors.get("conv", instead)


def launch(
    launcher: Launcher, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: Sequence[float],
    constants: Mapping[str, Any], num_warps: int, num_stages: int = 3, spills: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel that takes tensors, then numbers.
    spills: its numbers do not fit into a thread's registers. ptxas then takes 32 registers and spills 10 to 34 KB, unless it is
    told how many there are; the driver reserves that memory for each thread that the GPU can hold, several gigabytes."""
    key = (
        *constants.values(), num_warps, num_stages, *(each.dtype for each in tensors),
        aligned(*(each.data_ptr() for each in tensors)), specialised(*(each for each in numbers if isinstance(each, int))),
    )  # fmt: skip
    limit = {"maxnreg": min(255, 65_536 // (32 * num_warps))} if spills else {}
    launcher(key, grid, (*tensors, *numbers), constants, num_warps=num_warps, num_stages=num_stages, **limit)
