"""The backend `hopper_decode` with its kernel run by the host; Triton's interpreter cuts the keys."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.backends.hopper import decode
from headway.backends.hopper.decode import HopperDecoding
from headway.backends.triton.decode import DecodePlan
from headway.core.contract.layout import LayerCache
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, Launch
from host_kernels import MULTIPROCESSORS, SAID, compiled, places
from host_latent import find_hopper


class HostKernel:
    """A kernel of the host in place of one that the driver launches; order: in which threads run, see host.h."""

    known: Sequence[Tensor]
    """What the kernel may read by instructions of its own."""

    def __init__(self, variant: Variant, order: int) -> None:
        self._variant, self._order, self.blocks, self.known = variant, order, 0, ()

    def allow_shared(self, shared_bytes: int) -> None:
        """As much as a block of threads may have."""
        assert shared_bytes <= 227 * 1024

    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        """Run all blocks of threads, one after the other."""
        (packed,) = arguments.values
        assert isinstance(packed, bytes)
        blocks, _, _ = launch.grid
        self.blocks = max(self.blocks, blocks)
        sizes = blocks, launch.block[0], launch.shared_bytes, self._order
        assert not compiled(self._variant).run(ctypes.c_char_p(packed), *sizes, *places(self.known)), SAID


class HostDecode(HopperDecoding):
    """As on a GPU of so few multiprocessors that a small step fills it."""

    capabilities = replace(HopperDecoding.capabilities, devices=("cpu",))
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # noqa: RUF012 -- as the base declares it
    made: Sequence[HostKernel] = ()

    def decode(self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None) -> None:
        """The same, with all that the kernel may read told to the host."""
        self._tell(cache, plan)
        super().decode(q, cache, plan, out, lse)

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor) -> None:
        """Likewise."""
        self._tell(cache, plan)
        super().write_and_decode(q, k, v, cache, plan, out)

    def _tell(self, cache: LayerCache, plan: DecodePlan) -> None:
        for kernel in self.made:
            kernel.known = *cache.tensors.values(), plan.partial, plan.arrivals


def run_by_the_host(monkeypatch: pytest.MonkeyPatch, order: int, multiprocessors: int = MULTIPROCESSORS) -> list[HostKernel]:
    """Have `HostDecode` find a GPU of 9.0, and kernels that the host runs; returns those that are made from now on."""
    made: list[HostKernel] = []

    def load(variant: Variant, *_: object) -> HostKernel:
        made.append(HostKernel(variant, order))
        return made[-1]

    find_hopper(monkeypatch, multiprocessors)
    monkeypatch.setattr(decode, "load", load)
    monkeypatch.setattr(HostDecode, "made", made)
    return made
