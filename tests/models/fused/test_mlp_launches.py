"""The MLP of a few rows in one launch, as far as no GPU is needed: what is taken, its launch with the kernel run by the host, and
that its source compiles without spilling registers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

pytest.importorskip("triton")

from cubin_registers import most_local_bytes, most_registers
from headway.backends.nvrtc.compiler import find_compiler
from headway.backends.probe import UNTRIED
from headway.models.fused.mlp_rows import MOST_BYTES, THREADS, MlpRows, MlpVariant, takes_sizes, takes_weights
from headway.models.fused.operations import Fused
from headway.models.linear import Linear
from headway.models.operations import Norm
from host_launches import mlps_on_the_host
from operation_inputs import ropes

BF16 = torch.bfloat16
SHARED_BYTES, REGISTERS, MULTIPROCESSORS = 227 * 1024, 65536, 132
"""Of a block of threads, of a multiprocessor, and of an H200."""


def layers(bias: bool = False, dtype: torch.dtype = BF16) -> tuple[Norm, Linear, Linear]:
    """Of 128 columns, gated."""
    up, down = (Linear((torch.randn(size) * 0.1).to(dtype), torch.randn(size[0]).to(dtype) if bias else None) for size in
                ((384, 128), (128, 192)))  # fmt: skip
    return Norm(torch.randn(128).to(dtype), 1e-6), up, down


def expected(x: Tensor, norm: Norm, up: Linear, down: Linear) -> Tensor:
    """In float64."""

    def product(x: Tensor, linear: Linear) -> Tensor:
        assert isinstance(linear.weight, Tensor)
        return x @ linear.weight.double().t() + (0 if linear.bias is None else linear.bias.double())

    gate, other = product(rms_norm(x.double(), (128,), norm.weight.double(), norm.eps), up).chunk(2, 1)
    return x.double() + product(silu(gate) * other, down)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_one_after_the_other_are_a_launch_each(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mlps_on_the_host(monkeypatch)
    seed, fused, x = torch.seed(), Fused(*ropes(16)), torch.randn(3, 128).to(BF16)
    for name in ("norm_gated_product", "norm_product", "add_product"):
        monkeypatch.setattr(fused, name, None)
    for _ in range(3):
        norm, up, down = layers(bias)
        right = expected(x, norm, up, down)
        assert fused.add_mlp(x, norm, up, down, "silu", gated=True) is x
        assert (x.double() - right).norm() < 6e-3 * right.norm(), f"seed {seed}"


@pytest.mark.parametrize(
    ("rows", "dtype", "leave"), [(9, BF16, "1"), (3, torch.float32, "1"), (3, BF16, None), (0, BF16, "1")], ids=str
)
def test_others_are_two_products(rows: int, dtype: torch.dtype, leave: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    mlps_on_the_host(monkeypatch)
    if leave is None:
        monkeypatch.delenv(UNTRIED)
    fused, (norm, up, down), x = Fused(*ropes(16)), layers(dtype=dtype), torch.randn(rows, 128).to(dtype)
    called = []
    monkeypatch.setattr(fused, "norm_gated_product", lambda *given: called.append(given) or "between")
    monkeypatch.setattr(fused, "add_product", lambda *given: called.append(given) or "sum")
    assert fused.add_mlp(x, norm, up, down, "silu", gated=True) == "sum"
    assert called == [(x, norm, up, "silu"), (x, "between", down)]


def test_leave_is_asked_for_when_operations_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    mlps_on_the_host(monkeypatch)
    mlps, (_, up, down), x = MlpRows(torch.device("cpu")), layers(), torch.randn(1, 128).to(BF16)
    monkeypatch.delenv(UNTRIED)
    assert mlps.takes(x, up, down, gated=True)
    assert "to have run on a GPU" in str(MlpRows(torch.device("cpu")).takes(x, up, down, gated=True))


def test_a_gpu_of_another_generation_is_refused() -> None:
    assert "compute capability: needs 9.0, for whose memory it is cut, got none" in str(MlpRows(torch.device("cpu")).support)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: takes_sizes(1000, 3072, 1000, True, 132),
            "shape: needs multiples of 64, 64 and 8 columns, got 1000, 3072 and 1000",
        ),
        (lambda: takes_sizes(4096, 14336, 4096, True, 132), "columns of x: needs at most 12 pieces for a thread"),
        (lambda: takes_sizes(2048, 6144, 2048, True, 132), f"weights: needs at most {MOST_BYTES} bytes for a multiprocessor"),
        (lambda: takes_weights(torch.float32, *layers()[1:], True, 132), "weights: needs plain ones of x's type"),
        (lambda: takes_weights(torch.float16, *layers()[1:], True, 132), "weights: needs plain ones of x's type"),
    ],
)
def test_a_refusal_says_what_was_needed(make: Callable[[], object], reason: str) -> None:
    assert reason in str(make())


@pytest.mark.parametrize(
    ("hidden", "inner", "kilobytes"), [(1024, 3072, 144), (896, 4864, 240), (576, 1536, 96), (1024, 4096, 192), (1536, 2560, 240)]
)
def test_sizes_that_gain(hidden: int, inner: int, kilobytes: int) -> None:
    """As Qwen3-0.6B's, whose weights lie in the ring as a whole, and others of less than 0.7 B parameters."""
    assert takes_sizes(hidden, inner, hidden, True, MULTIPROCESSORS)
    variant = MlpVariant(BF16, hidden, inner, hidden, True, "silu", True, BF16, False, False, MULTIPROCESSORS)
    assert variant.weight_bytes == kilobytes * 1024
    assert variant.shared_bytes <= SHARED_BYTES
    assert (variant.stages == variant.steps) == (kilobytes <= 160)


@pytest.mark.parametrize(
    "norm", [BF16, pytest.param(None, marks=pytest.mark.slow), pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("hidden", "inner", "most"), [(1024, 3072, 64), (2048, 6144, 96), (896, 4864, 96)])
def test_the_source_compiles(hidden: int, inner: int, most: int, gated: bool, norm: torch.dtype | None) -> None:
    """most: registers."""
    compiler, support = find_compiler()
    assert compiler is not None, str(support)
    activation = "silu" if gated else "gelu"
    variant = MlpVariant(BF16, hidden, inner, hidden, gated, activation, True, norm, True, True, MULTIPROCESSORS)
    cubin = variant.source.compile("sm_90a", compiler)
    assert most_local_bytes(cubin) == 0
    assert most_registers(cubin) <= most <= REGISTERS // THREADS
    assert variant.shared_bytes <= SHARED_BYTES
