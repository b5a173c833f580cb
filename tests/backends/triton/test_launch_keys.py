"""What a decode is compiled for: the kinds of its strides, and not their values, which grow with dense tensors in each step."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("triton")
from triton.runtime import jit

from headway.backends.triton import decode as module
from headway.backends.triton.configs import architecture
from headway.backends.triton.decode import Decode
from headway.backends.triton.layer import KernelSetup, Layer
from headway.core.contract.layout import NHD, LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.kernels.runtime.triton_launch import INTERPRETED, Compiled, Launcher, Workspace, specialised

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125, dtype=torch.bfloat16)


class Kernel:
    """In place of a kernel of Triton's: notes with what it would be compiled."""

    arg_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.compiled.append(arguments)


def test_a_decode_over_keys_that_grow_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Compiled, "__init__", lambda *_: None)
    monkeypatch.setattr(Compiled, "__call__", lambda _, grid, *arguments: launched.append(arguments))
    monkeypatch.setattr(module, "launches_early", lambda _: True)
    decode = Decode(
        KernelSetup(
            spec=SPEC,
            layer=Layer.of(SPEC),
            layout=NHD,
            block_size=16,
            arch=architecture((9, 0)),
            multiprocessors=132,
            workspace=Workspace(SPEC.device),
        ),
        None,
    )
    kernel, cut = Kernel(), Kernel()
    decode.launch, decode.launch_cut = Launcher(kernel), Launcher(cut)
    q = torch.empty(1, 4, 64, dtype=SPEC.dtype)
    for length in range(1024, 1064):
        row = torch.empty(1, 2, length, 64, dtype=SPEC.dtype)
        blocks = row.as_strided((length - 15, 16, 2, 64), (64, 64, length * 64, 1))
        cache = LayerCache.wrap({"key": blocks, "value": blocks}, NHD, SPEC)
        tables = numpy.arange(0, length, 16, dtype=numpy.int32)[None]
        steps = AttentionMetadata.build_groups([1], [length - 1], [tables], 16, "cpu", 1, [length - 15])  # the last block is open
        plan = decode.plan(steps[0])
        for _ in range(2):
            decode.run(q, cache, plan, torch.empty_like(q))
        if launched:
            assert length * 64 in launched[-1], "the strides of this step"
    assert len(kernel.compiled) == 1
    assert len(launched) > 2 * 39


def test_integers_of_one_kind_are_compiled_for_alike() -> None:
    backend = pytest.importorskip("triton.backends.nvidia.compiler").CUDABackend
    kinds: dict[object, set[object]] = {}
    for number in (0, 1, 2, 8, 15, 16, 17, 64, 131840, 131841, 2**31 - 1, 2**31, 2**31 + 1, 2**35, -16, -1):
        kinds.setdefault(specialised(number), set()).add(jit.native_specialize_impl(backend, number, False, True, True))
    assert all(len(found) == 1 for found in kinds.values()), kinds
