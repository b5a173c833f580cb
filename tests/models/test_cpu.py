"""Tests of linear layers and steps in C on a CPU against float64 and torch's operations, and of CPUs without a compiler."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gguf_block_models import blocks_of
from headway.kernels.linear import cpu_kernels
from headway.kernels.linear import linear as linear_module
from headway.kernels.linear.choice import builtin_kernels
from headway.kernels.linear.forms import BLOCK_TYPES, GgufWeight
from headway.kernels.linear.linear import Linear
from headway.kernels.runtime.native import library
from headway.kernels.runtime.native.library import HugePages, functions, multiply, pack_dense, pack_quantized
from headway.kernels.step.native import NativeOperations
from headway.kernels.step.operations import Heads, Norm
from headway.kernels.step.torch_operations import TorchOperations
from operation_inputs import ropes

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
pytestmark = pytest.mark.skipif(functions() is None, reason=f"our C is not built here: {library.library()[1]}")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found.double() - expected).norm() <= tolerance * expected.norm())


def as_read(x: Tensor) -> Tensor:
    """x as the kernels for quantized weights read it: float64, rounded in groups of 32 if the CPU multiplies integers."""
    found = functions()
    if not found.x_bits:
        return x.double()
    groups = x.float().unflatten(1, (-1, 32))
    most = groups.abs().amax(-1, keepdim=True)
    largest = torch.full_like(most, 2 ** (found.x_bits - 1) - 1)  # (torch multiplies a number by the reciprocal)
    codes = (groups * torch.where(most > 0, largest / most, 0)).round()
    return (codes.double() * (most / largest).double()).flatten(1)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(50, 96), (64, 70), (160, 576)])
def test_products_are_right_at_any_number_of_rows(dtype: torch.dtype, rows: int, columns: int) -> None:
    weight, bias = drawn(rows, columns, dtype=dtype), drawn(rows, seed=1, dtype=dtype)
    panels = pack_dense(weight, bias)
    assert panels is not None
    for count in (0, 1, 2, 3, 5, 8, 9, 13, 16, 25, 100):
        x = drawn(count, columns + 3, seed=2, dtype=dtype)[:, :columns]  # rows that are not side by side
        expected = x.double() @ weight.double().t() + bias.double()
        assert close(multiply(panels, x), expected, TOLERANCES[dtype]), count


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_are_what_the_gguf_package_makes_of_them_and_are_multiplied_so(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    blocks = blocks_of(name, 40, 512, seed=3)
    expected = gguf.dequantize(blocks.flatten(1).numpy(), getattr(gguf.GGMLQuantizationType, name))
    weight = GgufWeight((name,), (blocks,))
    assert torch.equal(weight.dequantized(torch.float32), torch.from_numpy(expected).float())
    linear, bias = Linear(weight, dtype=torch.float32), drawn(40)
    assert builtin_kernels(CPU).reads(weight, torch.float32)
    assert linear.reads_quantized
    assert linear.expanded_bytes == 0
    for count in (1, 2, 3, 7, 16, 30):
        x = drawn(count, 512, seed=4)
        exact = as_read(x) @ weight.dequantized(torch.float64).t()
        assert close(linear(x), exact, 1e-6)
        assert close(Linear(weight, bias)(x), exact + bias.double(), 1e-6)
        half = x.bfloat16()
        exact = as_read(half) @ weight.dequantized(torch.float64).t()
        assert close(Linear(weight, dtype=torch.bfloat16)(half), exact, 4e-3)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_rounding_of_x_is_far_below_that_of_the_blocks(name: str) -> None:
    """Beside exact activations: of ordinary size, with outliers, tiny, zero, and at the largest codes of either sign."""
    bound = {0: 3e-6, 8: 3e-2, 16: 1e-4}[functions().x_bits]
    weight = GgufWeight((name,), (blocks_of(name, 48, 768, seed=6),))
    linear, plain = Linear(weight, dtype=torch.float32), weight.dequantized(torch.float64).t()
    outliers = drawn(20, 768, seed=7)
    outliers[:, ::97] *= 100
    signs = drawn(20, 768, seed=8).sign()
    for x in (drawn(20, 768, seed=9), outliers, 1e-20 * drawn(20, 768, seed=10), signs, 3.0 * signs.abs(), -signs.abs()):
        for count in (1, 4, 12, 20):
            assert close(linear(x[:count]), x[:count].double() @ plain, bound), count
    x = drawn(3, 768, seed=11)
    x[1] = 0
    assert torch.equal(linear(x)[1], torch.zeros(48))
    assert torch.equal(linear(x)[[0, 2]], linear(x[[0, 2]])), "a row's result is its own"
    x[1, 5] = torch.nan
    assert linear(x)[1].isnan().all()
    assert torch.equal(linear(x)[[0, 2]], linear(x[[0, 2]]))


def test_rows_of_several_types_are_one_product() -> None:
    parts = [(name, blocks_of(name, rows, 512, seed=rows)) for name, rows in (("Q4_K", 64), ("Q4_K", 24), ("Q6_K", 40))]
    weight = GgufWeight.of_parts(parts)
    assert weight.types == ("Q4_K", "Q6_K")
    bias = drawn(128)
    for count in (1, 20):
        x = drawn(count, 512, seed=5)
        exact = as_read(x) @ weight.dequantized(torch.float64).t() + bias.double()
        assert close(Linear(weight, bias)(x), exact, 1e-6)
    assert torch.equal(weight.rows(range(80, 100)).dequantized(torch.float32), weight.dequantized(torch.float32)[80:100])
    assert weight.columns(range(32, 512)) is None
    order = torch.arange(127, -1, -1)
    assert torch.equal(weight.rows(order).dequantized(torch.float32), weight.dequantized(torch.float32)[order])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("count", [1, 3, 17])
def test_steps_are_those_of_torch(dtype: torch.dtype, head_norms: bool, count: int) -> None:
    """The weights are large enough to be stored as packed blocks; the reference is torch's operations in float32."""
    found, dim, hidden = functions(), 64, 512
    assert found is not None
    native, plain = NativeOperations(*ropes(dim), found), TorchOperations(*ropes(dim))
    norm = Norm(1 + 0.1 * drawn(hidden, dtype=dtype), 1e-5)
    of_heads = Norm(1 + 0.1 * drawn(dim, seed=1, dtype=dtype), 1e-6) if head_norms else None
    heads = Heads(6, 2, dim, of_heads, of_heads)
    positions = torch.arange(count) + 5
    angles = (positions[:, None, None] * ropes(dim)[0][0]).double()
    rope = tuple(torch.cat(both, dim=-1).to(dtype) for both in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
    x, residual = drawn(count, hidden, seed=2, dtype=dtype), drawn(count, hidden, seed=3, dtype=dtype)
    qkv, gate_up, down = (drawn(rows, hidden, seed=4 + rows, dtype=dtype) / 20 for rows in (640, 1024, 512))
    layers = [(Linear(weight), Linear(weight.float())) for weight in (qkv, gate_up, down)]
    assert all(ours.packed is not None for ours, _ in layers)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    wide = Norm(norm.weight.float(), norm.eps)
    wide_heads = Heads(6, 2, dim, *([Norm(of_heads.weight.float(), 1e-6)] * 2 if of_heads else [None, None]))
    for turn in (rope, None):
        own = native.norm_qkv(x, norm, layers[0][0], heads, turn)
        whole = plain.norm_qkv(x.float(), wide, layers[0][1], wide_heads, turn and (turn[0].float(), turn[1].float()))
        for mine, expected in zip(own, whole, strict=True):
            assert mine.dtype == dtype
            assert close(mine, expected.double(), tolerance)
    for activation in ("silu", "gelu_tanh", "relu2", "gelu"):
        gated = plain.norm_gated_product(x.float(), wide, layers[1][1], activation)
        assert close(native.norm_gated_product(x, norm, layers[1][0], activation), gated.double(), tolerance)
        simple = plain.norm_product(x.float(), wide, layers[1][1], activation)
        assert close(native.norm_product(x, norm, layers[1][0], activation), simple.double(), tolerance)
    added = plain.add_product(residual.float(), x.float(), layers[2][1])
    assert close(native.add_product(residual.clone(), x, layers[2][0]), added.double(), tolerance)
    normed = plain.norm(x.float(), wide).double()
    assert close(native.norm(x, norm), normed, tolerance)
    assert close(native.add_norm(residual.clone(), x, norm), residual.double() + normed, tolerance)


def test_small_weights_share_an_array_that_is_freed_with_the_last_of_them() -> None:
    tracemalloc.start()
    pages, given = HugePages(), [drawn(999, 3), drawn(50, 7).to(torch.int8), drawn(4000, 6000), drawn(9, 9).half()]
    held = [pages.hold(tensor) for tensor in given]
    assert all(torch.equal(one, other) for one, other in zip(held, given, strict=True))
    assert [each.data_ptr() % 16 for each in held] == [0] * 4
    first, small, large, last = (each.data_ptr() for each in held)
    assert first < small < last < first + 2**14
    assert not first <= large < first + 2**26
    full = tracemalloc.get_traced_memory()[0]
    del held[:3]
    assert 4000 * 6000 * 4 <= full - tracemalloc.get_traced_memory()[0] < 2**26 + 4000 * 6000 * 4
    held.clear()
    assert full - tracemalloc.get_traced_memory()[0] >= 2**26 + 4000 * 6000 * 4
    tracemalloc.stop()


def test_without_a_compiler_torch_serves_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "none")
    found, support = library.find_compiler.__wrapped__()
    assert found is None
    assert "install gcc" in str(support)
    for module in (library, cpu_kernels):
        monkeypatch.setattr(module, "functions", lambda: None)
    monkeypatch.setattr(linear_module, "usual_kernels", lambda: builtin_kernels(CPU))
    weight, x = drawn(520, 400), drawn(7, 400, seed=1)
    linear = Linear(weight)
    assert linear.packed is None
    assert close(linear(x), x.double() @ weight.double().t(), 1e-6)
    blocks = GgufWeight(("Q4_0",), (blocks_of("Q4_0", 32, 64, seed=1),))
    assert not builtin_kernels(CPU).reads(blocks, torch.float32)
    assert pack_quantized(blocks.coded()) is None
    assert Linear(blocks).expanded_bytes == 4 * 32 * 64


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the options are those of compilers for x86")
@pytest.mark.parametrize(
    ("without", "rounds"),
    [("", "0"), ("", "1"), ("avx512vnni", "1"), ("avx512vnni", ""), ("avx512bf16", ""), ("avx512f", ""), ("avx", "")],
)
def test_other_instructions_of_the_cpu_are_right_too(without: str, rounds: str, tmp_path: Path) -> None:
    """The linear layers above with C that rounds x to 8 bits or not at all, and for CPUs without some instructions."""
    found, _ = library.find_compiler()
    script = tmp_path / "cc"
    script.write_text(f'#!/bin/sh\nexec {found.path} "$@"{without and f" -mno-{without}"}\n')
    script.chmod(0o755)
    models = Path(__file__).parent / "formats" / "test_gguf_blocks.py"  # what a start says is rounded, and float32 is not
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", __file__, str(models), "-k"]
    chosen = "products or blocks or types or steps or float32"
    environment = {**os.environ, library.VARIABLE: str(script), library.ROUNDS: rounds}
    ran = subprocess.run([*command, chosen], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout
    assert "skipped" not in ran.stdout


def test_c_that_does_not_compile_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo broken 1.0\necho "error: no such thing" >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv(library.VARIABLE, str(broken))
    library.find_compiler.cache_clear()
    try:
        built, support = library.build_library.__wrapped__()
    finally:
        library.find_compiler.cache_clear()
    assert built is None
    assert "does not compile our C: error: no such thing" in str(support)
