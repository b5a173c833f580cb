"""How the kernels of layers with a state are cut: numbers that change speed and no result."""

from __future__ import annotations

from dataclasses import dataclass


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
