"""The work list of a step whose lengths only the device knows, made there: decode and verification."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy import int32
from torch import Tensor

from headway.backends.hopper.schedule import ITEM_INTS
from headway.backends.hopper.tiles import ARCH, CSRC, Tile
from headway.backends.nvrtc.arguments import Arguments
from headway.backends.nvrtc.launch import Kernel, Launch
from headway.backends.nvrtc.store import load
from headway.backends.nvrtc.variant import Variant
from headway.core.contract.metadata import AttentionMetadata

CUT = Variant(CSRC, "cut.cu")
WAVES = 8
"""Items that each program has about, where keys are many: so that programs end at about the same time."""
_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Cut:
    """How to make the list of one plan again, for the lengths that the metadata's tensors hold at that time."""

    items: Tensor
    """int32 [room * ITEM_INTS + 1]: the items, and how many there are of each kv head."""
    room: int
    """Most items of a kv head."""
    most_shared: int
    """Most query tiles of a kv head whose keys are cut, and ..."""
    most_partials: int
    """... most partial results that they leave: all tiles together hold as many runs of keys as that, and the last of each tile
    may be shorter."""
    tokens: int
    """Of a query tile."""
    kernel: Kernel
    launch: Launch
    arguments: Arguments
    kept: tuple[Tensor, ...]
    """What the arguments point to, besides the items."""

    @classmethod
    def of(cls, metadata: AttentionMetadata, tile: Tile, group: int, heads: int, window: int | None, programs: int) -> Cut:
        """For any lengths of as many sequences, each with at most `max_query_len` tokens. heads: kv heads."""
        tokens = min(tile.rows // group, metadata.max_query_len)
        units_of_seq = -(-metadata.max_query_len // tokens)
        units, runs = metadata.num_seqs * units_of_seq, programs * WAVES // heads + 1
        room = units + runs
        device = metadata.seq_lens.device
        items = torch.empty(room * ITEM_INTS + 1, dtype=torch.int32, device=device)
        numbers = (metadata.num_seqs, units_of_seq, tokens, tile.keys, window or 0, heads, programs, WAVES)
        count = items.data_ptr() + 4 * room * ITEM_INTS
        addresses = (items.data_ptr(), count, metadata.seq_lens.data_ptr(), metadata.query_start_loc.data_ptr())
        return cls(
            items=items,
            room=room,
            most_shared=min(runs, units),
            most_partials=runs + min(runs, units),
            tokens=tokens,
            kernel=load(CUT, "cut", device, ARCH),
            launch=Launch((1, 1, 1), _THREADS),
            arguments=Arguments(*addresses, *map(int32, numbers)),
            kept=(metadata.seq_lens, metadata.query_start_loc),
        )

    @property
    def count_address(self) -> int:
        """Where the device finds how many items there are."""
        return self.items.data_ptr() + 4 * self.room * ITEM_INTS

    def make(self) -> None:
        """Launch the cut."""
        self.kernel(self.launch, self.arguments)
