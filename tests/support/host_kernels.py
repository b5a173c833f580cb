"""expert_rows.cu on the host: its own source by a C++ compiler, over stand-ins for the instructions that it names.

What a GPU alone can show, races between multiprocessors and the time, is not seen here; indices, rings, barriers and numbers are.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torch import Tensor

from headway.models.experts.config import ExpertsConfig
from headway.models.experts.cuda_variant import ExpertVariant, expert_variant
from headway.models.experts.router import Routed
from headway.models.experts.weights import ExpertWeights
from headway.models.fused.cuda_products import CSRC, POINTERS, arranged

HOST = Path(__file__).parent / "host_cuda"
_SHARED_ARRAY = "extern __shared__ __align__(128) char dynamic[];"


@cache
def compiled(variant: ExpertVariant) -> ctypes.CDLL:
    """Build the function `run` of expert_rows.cpp for a variant."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = Path(mkdtemp(prefix="host-cuda-"))
    for source in (*CSRC.glob("*.cuh"), *HOST.iterdir()):  # the stand-ins in place of what they stand for
        shutil.copy(source, folder)
    text = (CSRC / "expert_rows.cu").read_text()
    assert _SHARED_ARRAY in text
    (folder / "kernel.cu").write_text(text.replace(_SHARED_ARRAY, ""))
    macros = [f"-D{name}={value}" for name, value in variant.source.constants]
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique", "-Wl,-Bsymbolic"]
    library = folder / "kernel.so"
    subprocess.run([compiler, *options, *macros, str(folder / "expert_rows.cpp"), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(folder)
    return loaded


def add_experts(
    residual: Tensor, routed: Routed, weights: ExpertWeights, config: ExpertsConfig, lot: int, blocks: int, order: int
) -> None:
    """Do what CudaRows does, with so many blocks of threads. order: in which their threads run; see host.h."""
    pairs, lot = routed.experts.numel(), 1 if len(residual) == 1 else lot
    between = residual.new_full((pairs, config.intermediate_size), torch.nan)
    for first, x, weight, bias, y in (
        (True, routed.x, weights.gate_up, weights.gate_up_bias, between),
        (False, between, weights.down, weights.down_bias, residual),
    ):
        assert not isinstance(weight, Tensor)
        read = arranged(weight)
        variant = expert_variant(config, read, residual.dtype, lot, first, bias is not None, multiprocessors=4)
        _launch(variant, [x, read.codes, read.scales, read.zeros, None, bias, y], routed, blocks, order)


def _launch(variant: ExpertVariant, tensors: Sequence[Tensor | None], routed: Routed, blocks: int, order: int) -> None:
    pointers = POINTERS.pack(*[0 if each is None else each.data_ptr() for each in tensors], *[0] * 5)
    given = [each for each in (*tensors, routed.experts, routed.weights) if each is not None]
    starts = (ctypes.c_void_p * len(given))(*[each.data_ptr() for each in given])
    sizes = (ctypes.c_long * len(given))(*[each.nbytes for each in given])
    threads = 32 * (variant.each.cut.warps + (1 if variant.each.most_rows == 1 else 4))
    routing = (ctypes.c_uint64 * 2)(routed.experts.data_ptr(), routed.weights.data_ptr())
    sizes_of_launch = len(routed.experts), blocks, threads, variant.shared_bytes, order
    failures = compiled(variant).run(pointers, routing, *sizes_of_launch, starts, sizes, len(given))
    assert not failures, "see what the kernel wrote to stderr"
