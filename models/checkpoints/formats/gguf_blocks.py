"""How the blocks of a .gguf file lie beside the plain weights that were made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from headway.kernels.linear.gguf_weight import BLOCK_TYPES, GgufWeight
from headway.models.checkpoints.formats.drawn import Octets
from headway.models.checkpoints.formats.module import QuantizedModule

PREFIX = ".gguf_"
"""What stands between a module's name and a type, in the name of the tensor of its blocks."""


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A tensor uint8 [N, blocks, num_bytes] of blocks beside the plain weight that was made of them."""

    suffixes: ClassVar[tuple[str, ...]] = (".weight", *(PREFIX + name for name in BLOCK_TYPES))
    of_experts: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The format in words."""
        return "GGUF blocks"

    def holds(self, module: QuantizedModule) -> bool:
        """See StoredFormat."""
        return any(module.elements(PREFIX + name) for name in BLOCK_TYPES)

    def units(self, module: QuantizedModule) -> tuple[int, ...]:
        """See StoredFormat."""
        return 1, BLOCK_TYPES[self._type(module)].columns

    def read(self, module: QuantizedModule) -> GgufWeight:
        """See StoredFormat."""
        name = self._type(module)
        kind = BLOCK_TYPES[name]
        blocks = module.take(PREFIX + name, ("uint8",), module.rows, module.columns.units(kind.columns), kind.num_bytes)
        return GgufWeight((name,), (blocks,))

    def drawn(self, octets: Octets, rows: int, columns: int, std: float, dtype: torch.dtype) -> None:
        """See StoredFormat: no blocks are drawn."""

    def _type(self, module: QuantizedModule) -> str:
        return next(name for name in BLOCK_TYPES if module.elements(PREFIX + name))
