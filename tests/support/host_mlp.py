"""The MLP of a few rows in one launch, by its own source on the host; and faults that can be planted in that source."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.backends.nvrtc.compiler import Variant
from headway.models.config import Activation
from headway.models.fused.mlp_rows import THREADS, MlpVariant, pointers
from headway.models.operations import Norm
from host_kernels import SAID, compiled, places


@dataclass(frozen=True)
class HostMlp:
    """One MLP, as MlpRows launches it."""

    x: Tensor
    up: Tensor
    down: Tensor
    y: Tensor
    """Added to; may be x."""
    norm: Norm | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gated: bool = True
    activation: Activation | None = "silu"
    multiprocessors: int = 5
    order: int = 0
    """In which threads run; see host.h."""

    @property
    def variant(self) -> MlpVariant:
        """What the kernel is compiled for."""
        norm = self.norm
        weight = None if norm is None or norm.absorbed else norm.weight.dtype
        sizes = self.x.shape[1], self.down.shape[1], self.down.shape[0], self.gated, self.activation
        biased = self.up_bias is not None, self.down_bias is not None
        return MlpVariant(self.x.dtype, *sizes, norm is not None, weight, *biased, self.multiprocessors)

    def run(self, arrivals: Tensor, source: Variant | None = None) -> int:
        """Compute y; returns how many faults were seen. arrivals: the counter; source: in place of the variant's own."""
        variant, norm = self.variant, None if self.norm is None else self.norm.weight
        inner = self.x.new_full((len(self.x), variant.inner), torch.nan)
        tensors = self.x, norm, self.up, self.up_bias, inner, self.down, self.down_bias, self.y, arrivals
        eps = ctypes.c_float(0.0 if self.norm is None else self.norm.eps)
        sizes = len(self.x), variant.blocks, THREADS, variant.shared_bytes, self.order
        return int(compiled(source or variant.source).run(pointers(tensors), eps, *sizes, *places(tensors)))


def add_mlp(mlp: HostMlp, arrivals: Tensor) -> None:
    """Compute y without a fault."""
    assert not mlp.run(arrivals), SAID


def with_fault(source: Variant, folder: Path, changes: Mapping[str, str]) -> Variant:
    """A variant of a copy of the sources, under a folder, in which each text, found once, is replaced."""
    copied = folder / source.owner / "csrc"
    shutil.copytree(source.folder, copied)
    file = copied / source.source
    text = file.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    file.write_text(text)
    return Variant(copied, source.source, source.constants)
