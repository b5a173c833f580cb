"""CUDA C++ kernels on the host: their sources compiled by a C++ compiler with stand-ins for GPU instructions.

Races between SMs and timings cannot be seen here; indices, rings, barriers and numbers can.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.core.contract.experts import ExpertsConfig
from headway.core.contract.weights import QuantizedWeight
from headway.core.system.files import cache_folder
from headway.kernels.experts.builtin import most_blocks
from headway.kernels.experts.cuda_grouped_gemm import GroupedVariant, expert_grouped_tiling, grouped_variant
from headway.kernels.experts.cuda_rows import ExpertTilingRule, ExpertVariant, expert_variant
from headway.kernels.experts.plain import Routed
from headway.kernels.experts.weights import RoutedWeights
from headway.kernels.linear import cuda_products
from headway.kernels.linear.cuda_products import POINTERS, ArrangedWeight, arranged
from headway.kernels.linear.cuda_variant import CudaTilingRule, CudaVariant, Float8Variant, most_rows_of
from headway.kernels.runtime.nvrtc.compiler import Variant
from headway.kernels.runtime.nvrtc.launch import Arguments, Launch
from headway.kernels.step.config import Activation
from headway.kernels.step.operations import Norm

HOST = Path(__file__).parent / "host_cuda"
MULTIPROCESSORS = 4
"""Number of SMs of the GPU for which work is split."""
_OPTIONS = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-gnu-unique", "-Wl,-Bsymbolic")
_MONTH = 30 * 24 * 3600
_SHARED_ARRAY = re.compile(r"extern __shared__ __align__\(\d+\) char dynamic\[\];")
Tensors = Sequence[Tensor | None]
SAID = "see what the kernel wrote to stderr"


@cache
def compiled(source: Variant) -> ctypes.CDLL:
    """Return the compiled host version of a kernel: a file of HOST and a folder named as the kernel's owner.

    Built once per content, for all processes: in the folder `host-kernels` of the cache, under a hash of its inputs.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    stand_ins = *HOST.glob("*.h"), *(HOST / source.owner).iterdir()  # they replace the real
    files = {file.name: file.read_text() for file in (*source.folder.glob("*.cuh"), *stand_ins)}
    files["kernel.cu"], found = _SHARED_ARRAY.subn("", (source.folder / source.source).read_text())
    assert found == 1
    macros = [f"-D{name}={value}" for name, value in source.constants]
    command = [compiler, *_OPTIONS, *macros, Path(source.source).with_suffix(".cpp").name]
    made_of = repr((sorted(files.items()), command, _version(compiler)))
    library = cache_folder() / "host-kernels" / f"{hashlib.sha256(made_of.encode()).hexdigest()}.so"
    if library.exists():
        library.touch()
    else:
        _build(library, files, command)
    return ctypes.CDLL(str(library))


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout


def _build(library: Path, files: Mapping[str, str], command: Sequence[str]) -> None:
    """Compile the last word of a command, a file among these, to a library. Those that no test took for a month are removed."""
    library.parent.mkdir(parents=True, exist_ok=True)
    for old in library.parent.glob("*.so"):
        if time.time() - old.stat().st_mtime > _MONTH:
            old.unlink(missing_ok=True)
    with TemporaryDirectory(prefix="building-", dir=library.parent) as name:
        for file, text in files.items():
            (Path(name) / file).write_text(text)
        subprocess.run([*command, "-o", "kernel.so"], cwd=name, check=True)
        (Path(name) / "kernel.so").replace(library)


def places(tensors: Tensors) -> tuple[object, object, int]:
    """Return addresses and lengths of tensors: a kernel that reads elsewhere fails."""
    given = [each for each in tensors if each is not None]
    starts = (ctypes.c_void_p * len(given))(*[each.data_ptr() for each in given])
    return starts, (ctypes.c_long * len(given))(*[each.nbytes for each in given]), len(given)


def _pointers(tensors: Tensors) -> bytes:
    return POINTERS.pack(*[0 if each is None else each.data_ptr() for each in [*tensors, *[None] * (12 - len(tensors))]])


@dataclass(frozen=True)
class HostRotation:
    """Operations after a QKV projection: QK-norm of the heads, and RoPE (rotary)."""

    heads: tuple[int, int, int]
    """num_heads, num_kv_heads and head_dim."""
    cos: Tensor
    """float32 [rows, head_dim / 2], as sin."""
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    arrivals: Tensor
    """int32, zero."""


@dataclass(frozen=True)
class HostProduct:
    """One GEMM, as CudaKernel launches it."""

    x: Tensor
    weight: QuantizedWeight
    rule: CudaTilingRule
    y: Tensor
    """Written, or added to."""
    norm: Norm | None = None
    bias: Tensor | None = None
    gated: bool = False
    activation: Activation | None = None
    add: bool = False
    order: int = 0
    """In which threads run; see host.h."""
    rotation: HostRotation | None = None

    @property
    def eps(self) -> ctypes.c_float:
        return ctypes.c_float(0.0 if self.norm is None else self.norm.eps)

    def variant(self, of: type[CudaVariant], read: ArrangedWeight) -> CudaVariant:
        (rows, columns), out = self.x.shape, self.y.shape[1]
        tiling = self.rule(read.described, rows, out, self.gated, MULTIPROCESSORS)
        shape = (
            read.described,
            read.scales.dtype,
            read.wide,
            tiling,
            max(most_rows_of(rows), 8 if tiling.splits else 1),
            columns,
            out,
        )
        before = None if self.norm is None else self.norm.weight.dtype
        turned = self.rotation
        heads = None if turned is None else turned.heads
        head_norm = None if turned is None or turned.q_norm is None else turned.q_norm.dtype
        return of(self.x.dtype, *shape, before, self.gated, self.activation, self.add, self.bias is not None, heads, head_norm)

    def tensors(self, read: ArrangedWeight, x: Tensor) -> list[Tensor | None]:
        turned = self.rotation
        rotation = [] if turned is None else [turned.cos, turned.sin, turned.q_norm, turned.k_norm, turned.arrivals]
        return [x, read.codes, read.scales, read.zeros, self.norm_weight, self.bias, self.y, *rotation]

    @property
    def norm_weight(self) -> Tensor | None:
        return None if self.norm is None else self.norm.weight


def multiply(product: HostProduct) -> None:
    """Compute a GEMM with few_rows.cu (GEMV) or shared_rows.cu (split-K)."""
    read, (rows, columns) = arranged(product.weight), product.x.shape
    variant = product.variant(CudaVariant, read)
    library, tiles, blocks, x = compiled(variant.source), -(-variant.out_features // variant.tile_rows), 1, product.x
    if variant.tiling.splits:
        blocks = -(-rows // variant.most_rows)
        x = torch.full((blocks * variant.most_rows * columns,), torch.nan, dtype=x.dtype)
        _launch_rows(library.arrange, [product.x, product.norm_weight, x], product)
        given = ctypes.c_void_p(read.codes.data_ptr()), ctypes.c_long(len(read.codes)), rows, tiles * blocks
    else:
        head_eps = ctypes.c_float(0.0 if product.rotation is None else product.rotation.eps)
        given = product.eps, head_eps, rows, tiles, min(tiles, MULTIPROCESSORS)
    tensors = product.tensors(read, x)
    sizes = variant.threads, variant.shared_bytes, product.order
    assert not library.run(_pointers(tensors), *given, *sizes, *places(tensors)), SAID


def multiply_float8(product: HostProduct) -> tuple[Tensor, Tensor]:
    """Compute a GEMM with w8a8.cu. Returns x as it was rounded, [rows, K], and its scales, [groups, rows]."""
    read, (rows, columns) = arranged(product.weight), product.x.shape
    variant = product.variant(Float8Variant, read)
    assert isinstance(variant, Float8Variant)
    library, most = compiled(variant.source), variant.most_rows
    blocks = -(-rows // most)
    x = torch.full((blocks, columns // 128, most, 8, 16), 255, dtype=torch.uint8)  # NaN
    scales = torch.full((variant.groups, blocks * most), torch.nan)
    _launch_rows(library.round_x, [product.x, product.norm_weight, x, scales], product)
    tensors = [*product.tensors(read, x), scales]
    sizes = len(read.codes), rows, -(-variant.out_features // variant.tile_rows) * blocks
    how = variant.threads, variant.shared_bytes, product.order
    given = ctypes.c_void_p(scales.data_ptr()), ctypes.c_long(sizes[0]), *sizes[1:], *how
    assert not library.run(_pointers(tensors[:-1]), *given, *places(tensors)), SAID
    row, chunk = torch.arange(most)[:, None], torch.arange(8)
    plain = x[:, :, row, chunk ^ (row & 7)].permute(0, 2, 1, 3, 4).reshape(-1, columns)
    return plain[:rows].view(torch.float8_e4m3fn), scales[:, :rows]


def _launch_rows(kernel: Callable[..., int], tensors: Tensors, product: HostProduct) -> None:
    """Launch the kernel that quantizes rows of x for a GEMM."""
    pointers = [ctypes.c_void_p(0 if each is None else each.data_ptr()) for each in tensors]
    assert not kernel(*pointers, product.eps, len(product.x), *places(tensors)), SAID


def add_experts(
    residual: Tensor, routed: Routed, weights: RoutedWeights, config: ExpertsConfig, lot: int, blocks: int, order: int
) -> None:
    """Run CudaRows with this many thread blocks. order: order in which their threads run; see host.h."""
    pairs, lot = routed.experts.numel(), 1 if len(residual) == 1 else lot
    between = residual.new_full((pairs, config.intermediate_size), torch.nan)
    for first, x, weight, bias, y in (
        (True, routed.x, weights.gate_up, weights.gate_up_bias, between),
        (False, between, weights.down, weights.down_bias, residual),
    ):
        assert not isinstance(weight, Tensor)
        read = arranged(weight)
        variant = expert_variant(config, read, residual.dtype, lot, first, bias is not None, multiprocessors=MULTIPROCESSORS)
        _launch(variant, [x, read.codes, read.scales, read.zeros, None, bias, y], routed, blocks, order)


def _launch(variant: ExpertVariant, tensors: Tensors, routed: Routed, blocks: int, order: int) -> None:
    routing = (ctypes.c_uint64 * 2)(routed.experts.data_ptr(), routed.weights.data_ptr())
    sizes = len(routed.experts), blocks, variant.each.threads, variant.shared_bytes, order
    where = places([*tensors, routed.experts, routed.weights])
    assert not compiled(variant.source).run(_pointers(tensors), routing, *sizes, *where), SAID


def add_lots(
    residual: Tensor,
    routed: Routed,
    weights: RoutedWeights,
    config: ExpertsConfig,
    lot: int,
    blocks: int,
    order: int,
    rule: ExpertTilingRule = expert_grouped_tiling,
) -> None:
    """Run CudaLots with this many thread blocks. order: order in which their threads run; see host.h."""
    assert not isinstance(weights.gate_up, Tensor)
    assert not isinstance(weights.down, Tensor)
    up, down, (tokens, hidden) = arranged(weights.gate_up), arranged(weights.down), residual.shape
    biased, pairs = weights.gate_up_bias is not None, routed.experts.numel()
    first = grouped_variant(config, up, residual.dtype, lot, down.described, biased, MULTIPROCESSORS, rule)
    second = grouped_variant(config, down, residual.dtype, lot, None, biased, MULTIPROCESSORS, rule)
    rows = most_blocks(pairs, config.num_all, lot) * lot
    x, between = [residual.new_full((rows * each.row_columns,), torch.nan) for each in (first, second)]
    parts, table = torch.full((pairs, hidden), torch.nan), torch.full((first.table_words,), -1, dtype=torch.int32)
    _launch_beside(first, [routed.x, routed.experts, table, x, between], pairs)
    _launch_lots(first, [x, up.codes, up.scales, up.zeros, None, weights.gate_up_bias, between], table, blocks, order)
    _launch_lots(second, [between, down.codes, down.scales, down.zeros, None, weights.down_bias, parts], table, blocks, order)
    _launch_beside(second, [parts, table, routed.weights, residual], tokens)


def _launch_beside(variant: GroupedVariant, tensors: Sequence[Tensor], blocks: int) -> None:
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in tensors]
    pointers += [ctypes.c_void_p(0)] * (5 - len(pointers))
    assert not compiled(variant.source).beside(*pointers, blocks, 0, *places(tensors)), SAID


def _launch_lots(variant: GroupedVariant, tensors: Tensors, table: Tensor, blocks: int, order: int) -> None:
    sizes = len(table), blocks, variant.threads, variant.shared_bytes, order
    where = ctypes.c_void_p(table.data_ptr())
    assert not compiled(variant.source).run(_pointers(tensors), where, *sizes, *places([*tensors, table])), SAID


_MAP = Struct("=QQ3q88x")
"""Address, rows, rows and bytes of a box, and the swizzle, instead of the driver's format of a tensor map."""
_ARRANGING = {"arrange_rows": "arrange", "round_rows": "round_x"}


def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the launchers of linear layers created from now on launch on the host."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(cuda_products, "load", lambda source, name, *_: HostKernel(source, name))
    monkeypatch.setattr(cuda_products, "tensor_map", _tensor_map)


def _tensor_map(tensor: Tensor, box: tuple[int, int], swizzle: int) -> bytes:
    return _MAP.pack(tensor.data_ptr(), len(tensor), *box, swizzle)


class HostKernel:
    """In place of `CompiledKernel`."""

    def __init__(self, source: Variant, name: str) -> None:
        self._library, self._name, self._allowed = compiled(source), name, 48 * 1024
        self._constants = dict(source.constants)

    def allow_shared(self, shared_bytes: int) -> None:
        self._allowed = max(self._allowed, shared_bytes)

    def __call__(self, launch: Launch, arguments: Arguments) -> None:
        """Launch the kernel. Reads are not checked against tensors here, unlike the kernels above."""
        assert launch.shared_bytes <= self._allowed
        everywhere = (ctypes.c_void_p * 1)(0), (ctypes.c_long * 1)(2**62), 1
        if self._name in _ARRANGING:
            *pointers, eps = arguments.values
            kernel = getattr(self._library, _ARRANGING[self._name])
            assert launch.block == (256, 1, 1)
            assert not kernel(*map(ctypes.c_void_p, pointers), ctypes.c_float(eps), launch.grid[0], *everywhere), SAID
            return
        assert launch.cluster[1] == launch.grid[1] == max(1, int(self._constants.get("SPLITS", 0)))
        how = launch.grid[0], launch.block[0], launch.shared_bytes, 0
        assert not self._library.run(*self._given(arguments.values), *how, *everywhere), SAID

    def _given(self, values: tuple[Any, ...]) -> list[Any]:
        if self._name == "few_rows":
            pointers, eps, head_eps, rows, tiles = values
            return [pointers, ctypes.c_float(eps), ctypes.c_float(head_eps), int(rows), int(tiles)]
        codes, pointers, *scales, rows = values
        address, codes_rows, box_rows, box_bytes, swizzle = _MAP.unpack(codes)
        outputs = 16 * int(self._constants["TILES"]) * int(self._constants["WARPS"]) // (1 + int(self._constants["GATED"]))
        assert (box_rows, box_bytes, swizzle) == (outputs, 128 if scales else 64, 128 if scales else 0)
        first = ctypes.c_void_p(scales[0] if scales else address)
        return [pointers, first, ctypes.c_long(codes_rows), int(rows)]
