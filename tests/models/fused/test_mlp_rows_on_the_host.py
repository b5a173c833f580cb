"""The source of mlp_rows.cu beside float64, run by the host with all blocks of its grid side by side."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

pytest.importorskip("triton")

from headway.models.config import Activation
from headway.models.operations import ACTIVATE, Norm
from host_mlp import HostMlp, add_mlp, with_fault

BF16, FP16 = torch.bfloat16, torch.float16
TOLERANCE = {BF16: 6e-3, FP16: 1.5e-3}
UNEVEN = (192, 320, 72)
"""Columns of x, of the product between, and of y: 6 slices and 40 tiles, 5 and 9, for 16 warps and 5 blocks of threads."""
BEGUN = [0, 2**31 - 2**32]
"""The counter before a launch, as an even and an odd number of launches leave it."""


def drawn(
    shape: tuple[int, int, int],
    rows: int,
    dtype: torch.dtype = BF16,
    norm: torch.dtype | None = None,
    bias: bool = False,
    **how: Any,
) -> HostMlp:
    """Fresh random tensors. norm: the type of its weight."""
    columns, inner, out = shape
    width = 2 * inner if how.get("gated", True) else inner
    x, y, up, down, up_bias, down_bias = (
        torch.randn(size).to(dtype) * (size[-1] ** -0.5 if size[0] > 8 and len(size) > 1 else 1.0)
        for size in ((rows, columns), (rows, out), (width, columns), (out, inner), (width,), (out,))
    )
    before = None if norm is None else Norm(torch.randn(columns).to(norm), 1e-5)
    biases = (up_bias, down_bias) if bias else (None, None)
    return HostMlp(x, up, down, y, before, *biases, **how)


def expected(mlp: HostMlp) -> Tensor:
    """In float64."""

    def wide(tensor: Tensor | None) -> Tensor:
        return torch.zeros((), dtype=torch.float64) if tensor is None else tensor.double()

    x = mlp.x.double()
    if mlp.norm is not None:
        x = rms_norm(x, x.shape[1:], mlp.norm.weight.double(), mlp.norm.eps)
    inner = x @ wide(mlp.up).t() + wide(mlp.up_bias)
    gate, up = inner.chunk(2, dim=1) if mlp.gated else (inner, 1.0)
    active = gate if mlp.activation is None else ACTIVATE[mlp.activation](gate)
    return wide(mlp.y) + (active * up) @ wide(mlp.down).t() + wide(mlp.down_bias)


def error(mlp: HostMlp, right: Tensor) -> float:
    return float((mlp.y.double() - right).norm() / right.norm())


def check(shape: tuple[int, int, int], rows: int, dtype: torch.dtype = BF16, begun: int = 0, **how: Any) -> None:
    seed = torch.seed()
    mlp, arrivals = drawn(shape, rows, dtype, **how), torch.tensor([begun], dtype=torch.int32)
    right = expected(mlp)
    add_mlp(mlp, arrivals)
    assert error(mlp, right) < TOLERANCE[dtype], f"seed {seed}"
    assert int(arrivals) % 2**32 == (begun + 2**31) % 2**32


@pytest.mark.parametrize(("rows", "dtype", "order"), [(1, BF16, 0), (8, FP16, 1), (3, BF16, 2)])
def test_uneven_sizes(rows: int, dtype: torch.dtype, order: int) -> None:
    check(UNEVEN, rows, dtype, norm=dtype, bias=True, order=order, begun=BEGUN[order % 2])


@pytest.mark.parametrize(("rows", "order"), [(2, 1), (7, 2)])
def test_without_a_gate(rows: int, order: int) -> None:
    check(UNEVEN, rows, gated=False, activation="gelu", norm=torch.float32, bias=True, order=order)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_launches_one_after_the_other_share_a_counter_and_the_residual(order: int) -> None:
    """As layers of a model: y is x, and the numbers of blocks of threads differ."""
    seed = torch.seed()
    arrivals = torch.zeros(1, dtype=torch.int32)
    x = torch.randn(5, 128).to(BF16)
    for layer, multiprocessors in enumerate((5, 2, 5)):
        mlp = drawn((128, 192, 128), 5, norm=BF16, order=order, multiprocessors=multiprocessors)
        mlp = replace(mlp, x=x, y=x)
        right = expected(mlp)
        add_mlp(mlp, arrivals)
        assert error(mlp, right) < TOLERANCE[BF16], f"seed {seed}, layer {layer}"


def test_a_ring_of_fewer_steps_than_a_block_of_threads_has() -> None:
    mlp = drawn(UNEVEN, 4, multiprocessors=2)
    assert mlp.variant.steps > 2 * mlp.variant.stages
    check(UNEVEN, 4, norm=BF16, order=2, multiprocessors=2)


def test_a_norm_whose_weight_is_part_of_the_product() -> None:
    mlp = drawn(UNEVEN, 6, norm=BF16)
    assert mlp.norm is not None
    absorbed = Norm(torch.ones_like(mlp.norm.weight), mlp.norm.eps, absorbed=True)
    mlp = replace(mlp, norm=absorbed)
    right = expected(mlp)
    add_mlp(mlp, torch.zeros(1, dtype=torch.int32))
    assert error(mlp, right) < TOLERANCE[BF16]


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    mlp = drawn(UNEVEN, 8, norm=BF16)
    before, arrivals = mlp.y.clone(), torch.zeros(1, dtype=torch.int32)
    add_mlp(mlp, arrivals)
    for row in (0, 5):
        alone = replace(mlp, x=mlp.x[row : row + 1].clone(), y=before[row : row + 1].clone())
        add_mlp(alone, arrivals)
        assert torch.equal(alone.y[0], mlp.y[row])


def test_what_is_no_number_stays_in_its_row() -> None:
    mlp = drawn(UNEVEN, 4, norm=BF16)
    mlp.x[2, 5] = torch.inf
    add_mlp(mlp, torch.zeros(1, dtype=torch.int32))
    assert not mlp.y[2].isfinite().any()
    assert mlp.y[[0, 1, 3]].isfinite().all()


FAULTS = {
    "blocks that do not meet": {"    meet_grid(p.arrivals);\n": ""},
    "arrival before all is stored": {
        "  named_sync(1, FINISHING);  // all of the block's a is stored; the next line releases it\n": ""
    },
    "copies that are not waited for": {"copies_wait<STAGES - 1>();": "copies_wait<STAGES>();"},
    "sums that are overwritten before they are read": {
        "    if (count >= 2) barrier_wait(shared.empty + 8 * buffer, (count / 2 - 1) % 2);\n": ""
    },
    "a count that leaves one block out": {"0x80000000u - (BLOCKS - 1)": "0x80000000u - BLOCKS"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    mlp = drawn(UNEVEN, 8, norm=BF16)
    right, source, y = expected(mlp), with_fault(mlp.variant.source, tmp_path, FAULTS[fault]), mlp.y.clone()
    for order in (0, 1, 2, 2, 2, 2):  # the last of which differ from launch to launch
        mlp.y.copy_(y)
        if replace(mlp, order=order).run(torch.zeros(1, dtype=torch.int32), source) or not error(mlp, right) < TOLERANCE[BF16]:
            return
    raise AssertionError("no order of threads shows it")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", range(1, 9))
def test_every_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    check(UNEVEN, rows, dtype, norm=torch.float32, order=rows % 3)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "gated"), [*product(ACTIVATE, (True, False)), (None, False)])
def test_every_activation(activation: Activation | None, gated: bool) -> None:
    check(UNEVEN, 5, FP16, gated=gated, activation=activation, order=2)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "bias", "gated"), list(product((None, BF16, torch.float32), (False, True), (False, True))))
def test_all_that_may_stand_around_the_products(norm: torch.dtype | None, bias: bool, gated: bool) -> None:
    for shape in ((64, 128, 64), (1024, 64, 128)):
        check(shape, 8, norm=norm, bias=bias, gated=gated, order=1)
