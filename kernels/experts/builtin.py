"""Registrations of Headway's MoE kernels and variants, and the rule that selects a kernel without measurements. Imports no
Triton."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any

from headway.core.contract.backend import API_VERSION
from headway.core.contract.experts import ExpertsConfig, ExpertsKernel, ExpertsKernelInfo
from headway.core.select.costs import CountAxis

TOKEN_COUNTS = tuple(2**n for n in range(14))
"""Numbers of tokens to measure. For any other number, the choice for the measured number with the closest ratio is used."""
TOKENS = CountAxis("tokens", TOKEN_COUNTS, nearest=True)


def rules(num_tokens: int, config: ExpertsConfig) -> list[str]:
    """Return name prefixes of the kernels to use without measurements, best first. They depend on the average number of pairs per
    expert.

    The caller uses the first prefix that matches a kernel for this number of tokens.
    """
    num_tokens = TOKEN_COUNTS[TOKENS.cell(num_tokens)]
    pairs = num_tokens * config.num_slots / config.num_all
    rows_kernel = "cuda.rows8" if pairs <= 4 else "cuda.rows16"
    if num_tokens <= 2:
        return [rows_kernel, "triton.rows"]
    tiles = "triton.tiles16" if pairs <= 8 else "triton.tiles64" if pairs <= 64 else "triton.tiles128"
    return [rows_kernel, tiles] if pairs <= 16 else [tiles]


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Tile sizes of a grouped GEMM."""

    block_m: int
    block_n: int
    """Output features per tile. If block_m is larger than 64, a tile of the gate/up projection has half as many, because it needs
    two sums."""
    block_k: int
    warps: int
    stages: int
    swapped: bool = False
    whole: bool = False
    """True if each expert has one tile that covers all tokens of a step, so that pairs need no sorting. The step then has at most
    block_m tokens."""
    group_m: int = 8

    @property
    def name(self) -> str:
        """Name of the kernel with these tiles."""
        sizes = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"triton.tiles{sizes}{'.swapped' if self.swapped else ''}{'.whole' if self.whole else ''}"


_swapped = partial(ExpertTiling, swapped=True)
_PLAIN = (
    ExpertTiling(16, 64, 128, 4, 4),
    ExpertTiling(16, 32, 128, 4, 5),
    _swapped(16, 64, 128, 4, 3, whole=True),
    ExpertTiling(32, 64, 128, 4, 4, whole=True),
    _swapped(32, 64, 128, 4, 3, whole=True),
    ExpertTiling(64, 64, 128, 4, 4, whole=True),
    _swapped(64, 64, 128, 4, 3, whole=True),
    _swapped(16, 64, 128, 4, 3),
    _swapped(16, 128, 64, 4, 3),
    ExpertTiling(32, 64, 128, 4, 4),
    ExpertTiling(64, 128, 64, 4, 4),
    ExpertTiling(128, 128, 64, 8, 4),
    ExpertTiling(128, 256, 64, 8, 3),
)
_QUANTIZED = (
    _swapped(16, 64, 128, 4, 4, whole=True),
    _swapped(16, 64, 256, 4, 3, whole=True),
    _swapped(16, 32, 256, 4, 3, whole=True),
    _swapped(32, 64, 128, 4, 4, whole=True),
    _swapped(64, 64, 128, 4, 4, whole=True),
    _swapped(16, 64, 128, 4, 4),
    _swapped(16, 128, 128, 4, 3),
    _swapped(32, 64, 128, 4, 4),
    _swapped(64, 64, 128, 4, 3),
    _swapped(64, 128, 64, 4, 4),
    _swapped(64, 128, 128, 8, 3),
    _swapped(128, 128, 64, 8, 4),
    _swapped(128, 128, 128, 8, 3),
    _swapped(128, 64, 128, 4, 3),
)
PLAIN_TILINGS = {tiling.name: tiling for tiling in _PLAIN}
"""Tilings over dense weights, by name. Without measurements, the first one with a given number of rows is the default."""
QUANTIZED_TILINGS = {tiling.name: tiling for tiling in _QUANTIZED}
"""Tilings over quantized weights, by name. `block_k` is in columns, not bytes."""
INVARIANT, QUANTIZED_INVARIANT = ExpertTiling(64, 128, 64, 4, 4), _swapped(64, 64, 128, 4, 3)
"""Tilings for any number of tokens in deterministic mode (batch-invariant), over dense and over quantized weights."""
ROW_WARPS = {"triton.rows": 1, "triton.rows.4warps": 4}
"""Name of each GEMV kernel over quantized weights -> warps per program. The first kernel also supports dense weights."""
EXPANDED = ("triton.tiles128x128x64", "triton.tiles128x256x64", "torch.grouped_mm")
"""Names of kernels over dense weights that can also run on quantized weights after these have been dequantized."""
SKINNY_TILE_ROWS, GROUPED_TILE_ROWS = (8, 16), (8, 16, 32, 64)
"""Maximum rows of one expert per tile, for each variant of the skinny and of the grouped GEMM in CUDA C++. With larger tiles, a
weight is read fewer times, but the ring has less shared memory."""

_GPUS = () if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",)
"""Device types of GPU kernels. Empty means any device, because Triton's interpreter runs the kernels on any device."""
_TRITON, _CUDA = "headway[triton]", "headway[cuda]"


def builtin_kernels() -> Iterator[ExpertsKernelInfo]:
    """Yield the registrations of Headway's kernels, in the order of preference."""

    def info(name: str, summary: str, place: str, extra: str = "", *arguments: object) -> ExpertsKernelInfo:
        devices = _GPUS if extra else ("cpu", "meta")
        return ExpertsKernelInfo(name, summary, partial(_load, place, arguments), extra, devices=devices, api_version=API_VERSION)

    yield info("torch", "one expert after the other by torch's GEMM, on a CPU", "plain:TorchExperts")
    for rows in SKINNY_TILE_ROWS:
        name, summary = f"cuda.rows{rows}", f"skinny GEMM over up to {rows} rows of an expert, quantised weights, CUDA C++"
        yield info(name, summary, "cuda_rows:cuda_rows", _CUDA, rows)
    for name in ROW_WARPS:
        yield info(name, "GEMV in Triton, each token separately, for few tokens", "row_kernels:row_kernel", _TRITON, name)
    for name in dict.fromkeys([*PLAIN_TILINGS, *QUANTIZED_TILINGS]):
        yield info(name, "grouped GEMM in Triton over pairs sorted by expert", "tiles:tile_kernel", _TRITON, name)
    yield info("torch.grouped_mm", "torch's grouped GEMM over sorted pairs, bfloat16", "tiles:GroupedMM", _TRITON)
    for name in EXPANDED:
        yield info(f"dequantize+{name}", f"weights dequantised for {name}", "tiles:dequantizing", _TRITON, name)
    for rows in GROUPED_TILE_ROWS:
        summary = f"grouped GEMM over tiles of {rows} rows of an expert, quantised weights, wgmma (H100)"
        yield info(f"cuda.lots{rows}", summary, "cuda_grouped_gemm:cuda_grouped_gemm", _CUDA, rows)


def _load(place: str, arguments: tuple[object, ...]) -> Any:
    """Return a class, or the result of a function that makes a class. place: module below this folder, a colon, and the name of
    the class or function."""
    found = resolve_name(f"headway.kernels.experts.{place}")
    return found(*arguments) if arguments else found


@cache
def builtin_classes(device_type: str) -> list[type[ExpertsKernel]]:
    """Return the classes of Headway's kernels that are available on a type of device, for a model that is loaded without a
    registry."""
    found = [info.load() for info in builtin_kernels() if device_type in (info.devices or (device_type,))]
    return [each for each in found if each.available()]


def most_blocks(num_pairs: int, num_all: int, block_m: int) -> int:
    """Return the maximum number of tiles, over all distributions of pairs to experts. Each tile has up to block_m rows of one
    expert."""
    touched = min(num_pairs, num_all)
    return (num_pairs + touched * (block_m - 1)) // block_m
