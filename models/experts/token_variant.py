"""What models/fused/csrc/expert_token.cu is compiled for, and how the second product of a token's experts is cut there."""

from __future__ import annotations

from dataclasses import dataclass

from headway.models.experts.cuda_variant import ExpertProduct, ExpertVariant
from headway.models.fused.cuda_cuts import PART_ROWS, SHARED_BYTES, SLICE_BYTES, CudaCut, warps_bytes

MOST_SLOTS = 31
"""Experts of the token, which the lanes of a warp hold."""
_MOST_TILES = 4
"""Parts of 16 rows of a tile."""
_MOST_WARPS = 16
"""Warps that share a tile of 16 rows. Those of larger tiles are fewer, since their sums take more registers."""
_LEAST_WARPS = 2
"""Warps of a block whose threads finish a row each of the largest tile."""
_HALF_BYTES = 74 * 1024
"""Shared memory of a block that has half a tile: three have room, or two beside one of the first product."""


def expert_token_cut(product: ExpertProduct, multiprocessors: int) -> CudaCut:
    """Cut the product: tiles of 16 rows, of more where two on each multiprocessor would not be all.

    Two blocks of threads share a tile where the busiest multiprocessor then has less to do: one of 132 has 2 of 180 tiles
    (gpt-oss-20b), and 3 of their 360 halves. A ring has room for all slices of a warp, if the block then leaves room for one of
    the first product.
    """
    parts = product.out_features // PART_ROWS
    tiles = next((count for count in (1, 2) if -(-parts // count) <= 2 * multiprocessors), _MOST_TILES)
    blocks = -(-parts // tiles)
    shared = -(-2 * blocks // multiprocessors) < 2 * -(-blocks // multiprocessors)
    units = product.slots * -(-product.weight.row // SLICE_BYTES)
    sharing, room = (2, _HALF_BYTES) if shared else (1, SHARED_BYTES)
    own = -(-units // sharing)
    warps = min(_MOST_WARPS // (min(tiles, 2) * sharing), max(own, _LEAST_WARPS))
    cuts = [CudaCut(tiles, warps, stages, sharing=sharing) for stages in range(1, -(-own // warps) + 1)]
    fit = [cut for cut in cuts if warps_bytes(product.weight, 1, cut, product.scale_bytes) <= room]
    return fit[-1] if fit else cuts[0]


@dataclass(frozen=True, slots=True)
class TokenVariant(ExpertVariant):
    """All that the kernel is compiled for."""

    @property
    def name(self) -> str:
        """The kernel's name, and its file's."""
        return "expert_token"

    @property
    def threads(self) -> int:
        """Threads of a block: of the warps that multiply."""
        return 32 * self.each.cut.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: of rings, and of two sums for each warp, the second of which are what a cluster adds."""
        return warps_bytes(self.each.weight, 1, self.each.cut, self.each.scale_dtype.itemsize)

    @property
    def resident(self) -> int:
        """Blocks of threads for which a multiprocessor has registers, at least."""
        return 2 * self.each.cut.sharing

    @property
    def cluster(self) -> tuple[int, int, int]:
        """Blocks of threads that share a tile."""
        return 1, self.each.cut.sharing, 1

    def grid(self, multiprocessors: int) -> tuple[int, int, int]:
        """Blocks of threads of a launch: for each tile those that share it."""
        return self.tiles, self.each.cut.sharing, 1
