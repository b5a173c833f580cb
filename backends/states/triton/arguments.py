"""Arguments of the Triton kernels for layers with a state: constants from the spec and state layout, and tuning parameters."""

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
    """Tile sizes and numbers of warps of each kernel. None means that the value depends on the size of the step."""

    step_value: int | None = None
    """Number of elements of a head's value per program of `step`."""
    step_warps: int | None = None
    channels: int = 128
    """Number of channels per program of a convolution or `mamba1`."""
    channel_warps: int = 4
    rows: int = 32
    """Number of tokens per program of a prompt's convolution: 16, 32 or 64."""
    run: int = 16
    """Number of tokens of a prompt's convolution that one thread processes in sequence."""
    row_warps: int = 2
    chunk_warps: int | None = None
    """Number of warps of the kernel that computes within chunks."""
    walk_turned: bool | None = None
    """True if value elements are the rows of the state's tile in the scan, so that the MMAs read the state from registers."""
    walk_value: int | None = None
    """Number of elements of a head's value per program of the scan over chunks."""
    walk_warps: int | None = None
    walk_stages: int | None = None
    """Number of chunks that the scan loads ahead from memory."""
    token_channels: int = 32
    """Number of channels of `mamba1` per program of the scan over tokens."""


def convolution_constants(spec: StateSpec, cache: StateCache, parameters: StateParameters) -> Mapping[str, Any]:
    """Return the compile-time constants of a layer's convolution. WIDTH is 0 if there is none."""
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
    """Return the compile-time constants of a recurrence with heads, that is, of every kind except `mamba1`."""
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
    """Return the compile-time constants of a layer with independent channels: `mamba1`, or only a convolution."""
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
    """Return a layer's five parameter tensors in the kernels' order. instead: placeholder for a tensor that the layer does not
    have."""
    listed = (parameters.conv_weight, parameters.conv_bias, parameters.A_log, parameters.dt_bias, parameters.D)
    return tuple(instead if each is None else each for each in listed)


def states(cache: StateCache, instead: Tensor) -> tuple[Tensor, Tensor]:
    """Return the recurrent states and the convolution states. instead: placeholder for a tensor that the cache does not have."""
    return cache.tensors.get("recurrent", instead), cache.tensors.get("conv", instead)


def launch(
    launcher: Launcher, grid: tuple[int, int, int], tensors: Sequence[Tensor], numbers: Sequence[float],
    constants: Mapping[str, Any], num_warps: int, num_stages: int = 3, spills: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel whose parameters are tensors, followed by numbers.

    spills: True if the kernel needs more registers than a thread has. Without an explicit limit, ptxas then uses 32 registers and
    spills 10 to 34 KB per thread; the driver reserves that memory for every resident thread, which takes several gigabytes.
    """
    key = (
        *constants.values(), num_warps, num_stages, *(each.dtype for each in tensors),
        aligned(*(each.data_ptr() for each in tensors)), specialised(*(each for each in numbers if isinstance(each, int))),
    )  # fmt: skip
    limit = {"maxnreg": min(255, 65_536 // (32 * num_warps))} if spills else {}
    launcher(key, grid, (*tensors, *numbers), constants, num_warps=num_warps, num_stages=num_stages, **limit)
