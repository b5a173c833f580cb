"""Backends `hopper_decode` and `hopper_mla` with their kernels run on the host; Triton's interpreter splits and merges."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from struct import Struct
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from backend_cases import spec
from headway.backends.hopper import backend, decode, latent
from headway.backends.hopper.backend import HopperAttention
from headway.backends.hopper.decode import HopperDecoding
from headway.backends.hopper.latent import HopperLatent
from headway.backends.triton.decode import DecodePlan
from headway.core.contract.layout import LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import MAP_BYTES, Arguments, Launch
from host_kernels import MULTIPROCESSORS, SAID, compiled, places

_MAP = Struct("=4Q10I")
"""struct TensorMap of host_cuda/hopper/ptx.cuh."""


def host_tensor_map(tensor: Tensor, box: tuple[int, ...], swizzle: int = 128) -> bytes:
    """Fields that `tensor_map` encodes, as the host's stand-in reads them: four axes from the innermost."""
    size = tensor.element_size()
    strides = [stride * size for stride in reversed(tensor.stride()[:-1])]
    assert tensor.stride(3) == 1
    assert not any(place % 16 for place in (tensor.data_ptr(), *strides))
    return _MAP.pack(tensor.data_ptr(), *strides, *reversed(tensor.shape), *reversed(box), size, swizzle).ljust(MAP_BYTES, b"\0")


class HostKernel:
    """Host kernel that replaces one launched by the driver; order: order in which threads run, see host.h."""

    known: Sequence[Tensor] = ()
    """Tensors that the kernel may read by its own instructions."""

    def __init__(self, variant: Variant, order: int) -> None:
        self._variant, self._order = variant, order
        self.launches: list[tuple[int, int, int]] = []
        """Grids so far."""

    def allow_shared(self, shared_bytes: int) -> None:
        """Check the requested bytes against the shared memory of a thread block."""
        assert shared_bytes <= 227 * 1024


class LatentKernel(HostKernel):
    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        """Run all thread blocks, cluster by cluster."""
        *maps, packed = arguments.values
        clusters, blocks, _ = launch.grid
        assert launch.cluster == (1, blocks, 1)
        self.launches.append(launch.grid)
        sizes = clusters, blocks, launch.block[0], launch.shared_bytes, self._order
        assert not compiled(self._variant).run(*(ctypes.c_char_p(each) for each in (*maps, packed)), *sizes), SAID


class HostLatent(HopperLatent):
    """As on a GPU of so few multiprocessors that a small step fills it."""

    capabilities = replace(HopperLatent.capabilities, devices=("cpu",))
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # noqa: RUF012 -- as the base declares it


def latent_by_the_host(monkeypatch: pytest.MonkeyPatch, order: int, multiprocessors: int = MULTIPROCESSORS) -> list[HostKernel]:
    """Make `HostLatent` find a 9.0 GPU and host kernels; return a list that collects the kernels made from now on."""
    monkeypatch.setattr(latent, "tensor_map", host_tensor_map)
    return _by_the_host(monkeypatch, latent, LatentKernel, order, multiprocessors)


class HostAttention(HopperAttention):
    """Prompts with heads of 512 elements, on the host."""

    capabilities = replace(HopperAttention.capabilities, devices=("cpu",))
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # noqa: RUF012 -- as the base declares it


def attention_by_the_host(
    monkeypatch: pytest.MonkeyPatch, order: int, multiprocessors: int = MULTIPROCESSORS
) -> list[HostKernel]:
    """Run `HostAttention` on the host, as `latent_by_the_host` does for latent attention."""
    monkeypatch.setattr(backend, "tensor_map", host_tensor_map)
    return _by_the_host(monkeypatch, backend, LatentKernel, order, multiprocessors)


def find_hopper(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    """Have the backends of this generation find a GPU of 9.0."""
    properties = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(backend, "capability", lambda device: (9, 0))


class DecodeKernel(HostKernel):
    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        """Run all thread blocks, one after the other."""
        (packed,) = arguments.values
        assert isinstance(packed, bytes)
        self.launches.append(launch.grid)
        sizes = launch.grid[0], launch.block[0], launch.shared_bytes, self._order
        assert not compiled(self._variant).run(ctypes.c_char_p(packed), *sizes, *places(self.known)), SAID


class HostDecode(HopperDecoding):
    """As on a GPU of so few multiprocessors that a small step fills it."""

    capabilities = replace(HopperDecoding.capabilities, devices=("cpu",))
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 6e-4}  # noqa: RUF012 -- as the base declares it
    made: Sequence[HostKernel] = ()

    def decode(self, q: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor, lse: Tensor | None = None) -> None:
        """Run decode on the host, after declaring all tensors that the kernel may read."""
        self._tell(cache, plan)
        super().decode(q, cache, plan, out, lse)

    def write_and_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: DecodePlan, out: Tensor) -> None:
        self._tell(cache, plan)
        super().write_and_decode(q, k, v, cache, plan, out)

    def _tell(self, cache: LayerCache, plan: DecodePlan) -> None:
        for kernel in self.made:
            kernel.known = *cache.tensors.values(), plan.partial, plan.arrivals


def decode_by_the_host(monkeypatch: pytest.MonkeyPatch, order: int, multiprocessors: int = MULTIPROCESSORS) -> list[HostKernel]:
    """Run `HostDecode` on the host, as `latent_by_the_host` does for latent attention."""
    made = _by_the_host(monkeypatch, decode, DecodeKernel, order, multiprocessors)
    monkeypatch.setattr(HostDecode, "made", made)
    return made


def _by_the_host(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel: type[HostKernel], order: int, multiprocessors: int
) -> list[HostKernel]:
    made: list[HostKernel] = []
    find_hopper(monkeypatch, multiprocessors)
    monkeypatch.setattr(module, "load", lambda variant, *_: made.append(kernel(variant, order)) or made[-1])
    return made


def heads_of(heads: str = "16/8/128", dtype: torch.dtype = torch.bfloat16, **changes: object) -> AttentionSpec:
    """A layer by its numbers of heads and of kv heads and its head_dim."""
    num_heads, num_kv_heads, head_dim = map(int, heads.split("/"))
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    return spec(**{**sizes, "dtype": dtype, **changes})
