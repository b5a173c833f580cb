"""Linear layers over quantised weights on a CPU: torch's packed products where there are any, else the weight expanded once."""

from __future__ import annotations

import pytest
import torch

from headway.kernels.linear.linear import Linear
from headway.kernels.step.invariant import invariant_operations
from headway.kernels.step.operations import TorchOperations
from operation_inputs import ropes
from quantized_weights import FORMS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_dequantised_weight(form: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = FORMS[form](torch.randn(80, 384, generator=generator))
    bias, x, residual = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((80,), (5, 384), (5, 80)))
    exact = x.double() @ weight.dequantized(torch.float64).t()
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3
    for linear, expected in ((Linear(weight, dtype=dtype), exact), (Linear(weight, bias), exact + bias.double())):
        assert (linear(x) - expected).norm() < tolerance * expected.norm()
        out = torch.empty(5, 80, dtype=dtype)
        assert linear(x, out) is out
        assert torch.equal(out, linear(x))
        whole = residual.double() + expected
        assert (linear.add_to(residual.clone(), x) - whole).norm() < tolerance * whole.norm()


def test_a_layer_tells_what_it_expanded() -> None:
    drawn = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    assert Linear(FORMS["fp8 rows"](drawn)).expanded_bytes == 4 * 64 * 256
    assert Linear(FORMS["int4 of 128"](drawn), dtype=torch.bfloat16).expanded_bytes == 0
    assert Linear(FORMS["int4 of 128"](drawn[:40]), dtype=torch.bfloat16).expanded_bytes == 2 * 40 * 256  # torch wants 16 rows
    assert Linear(FORMS["int4 of 128"](drawn), dtype=torch.float32).expanded_bytes == 4 * 64 * 256  # torch's is slower there
    assert Linear(FORMS["int8"](drawn), dtype=torch.bfloat16).expanded_bytes == 2 * 64 * 256
    assert Linear(drawn).expanded_bytes == 0


@pytest.mark.parametrize("form", ["fp8 rows", "int8", "int4 of 128"])
def test_rows_keep_their_bits_in_invariant_products(form: str) -> None:
    linear = Linear(FORMS[form](torch.randn(64, 256, generator=torch.Generator().manual_seed(3))))
    operations = invariant_operations(TorchOperations(*ropes(16)), [linear], torch.device("cpu"))
    x = torch.randn(19, 256, generator=torch.Generator().manual_seed(4))
    assert torch.equal(operations.product(x, linear)[:3], operations.product(x[:3], linear))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_plain_layer_is_right_whether_its_weight_is_packed_or_not(dtype: torch.dtype) -> None:
    """Large enough to be packed, where the CPU packs the type."""
    generator = torch.Generator().manual_seed(5)
    weight, x, bias, residual = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((520, 400), (7, 400), (520,), (7, 520))
    )
    exact, tolerance = x.double() @ weight.double().t(), 1e-6 if dtype == torch.float32 else 4e-3
    for linear, expected in ((Linear(weight), exact), (Linear(weight, bias), exact + bias.double())):
        out = torch.empty(7, 520, dtype=dtype)
        assert linear(x, out) is out
        assert (out - expected).norm() < tolerance * expected.norm()
        whole = residual.double() + expected
        assert (linear.add_to(residual.clone(), x) - whole).norm() < tolerance * whole.norm()
