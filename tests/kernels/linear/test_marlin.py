"""Marlin over a stand-in for vLLM's library, which reads weights as Marlin's layout says, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from fake_vllm_library import RELEASES, FakeVllmLibrary
from headway.core.contract.weights import QuantizedWeight
from headway.kernels.linear.choice import spec_of
from headway.kernels.linear.gpu_kernels import Marlin
from headway.kernels.runtime import vllm_library
from headway.kernels.runtime.vllm_library import FLOAT4, FLOAT8, INT4, INT4_LESS_8
from quantized_weights import float8, int4, int8, mxfp4

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FORMS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    **{f"int4 of {group}": partial(int4, group=group) for group in (32, 64, 128)},
    "int4 of a row": partial(int4, group=256),
    "int4 of 64 with zeros": partial(int4, group=64, zeros=True),
    "int4 of a row with zeros": partial(int4, group=256, zeros=True),
    "int4 of 32 in another order": partial(int4, group=32, zeros=True, order=True),
    "fp8 rows": float8,
    "fp8 blocks": partial(float8, block=(128, 128)),
    "fp8 columns of 128": partial(float8, block=(1, 128)),
    "fp8 whole": lambda weight: float8(weight, (192, 256)),
    "mxfp4": mxfp4,
}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    vllm_library.find_library.cache_clear()
    yield
    vllm_library.find_library.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, release: str = "0.24") -> FakeVllmLibrary:
    fake = FakeVllmLibrary(release)
    monkeypatch.setattr(vllm_library, "NAMESPACE", fake.namespace)
    return fake


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("form", "dtype"), [(form, torch.float16 if form != "mxfp4" else torch.bfloat16) for form in FORMS])
def test_forms_are_arranged_as_marlin_reads(monkeypatch: pytest.MonkeyPatch, release: str, form: str, dtype: torch.dtype) -> None:
    fake = install(monkeypatch, release)
    generator = torch.Generator().manual_seed(len(form))
    weight = FORMS[form](torch.randn(192, 256, generator=generator))
    bias = torch.randn(192, generator=generator).to(dtype)
    spec = spec_of(weight, dtype, GPU)
    assert Marlin.available()
    assert Marlin.supports(spec), Marlin.supports(spec)
    marlin = Marlin(spec_of(weight, dtype, CPU))
    x = torch.randn(5, 256, generator=generator).to(dtype)
    expected = x.double() @ weight.dequantized(torch.float64).t() + bias.double()
    read = marlin.prepare(weight, bias)
    y = marlin.compute(x, read)
    assert y.dtype == dtype
    assert (y - expected).norm() < (1e-3 if dtype == torch.float16 else 4e-3) * expected.norm()
    out = torch.zeros(5, 192, dtype=dtype)
    assert marlin.compute(x, read, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, y)
    assert fake.namespace  # the operators live as long as it does


def test_scales_of_bfloat16_hold_the_exponents_of_floats_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch)
    weight = float8(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)))
    marlin = Marlin(spec_of(weight, torch.bfloat16, CPU))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = x.double() @ weight.dequantized(torch.float64).t()
    assert (marlin.compute(x, marlin.prepare(weight)) - expected).norm() < 4e-3 * expected.norm()
    weight.scales.mul_(1e6)
    with pytest.raises(ArithmeticError, match="no place in torch.bfloat16"):
        marlin.prepare(weight)
    assert fake.namespace


def test_element_types_have_the_numbers_that_vllm_gives_them() -> None:
    """As `vllm.scalar_type.scalar_types` prints them."""
    assert (INT4, INT4_LESS_8) == (1125899906843648, 1125899907892224)
    assert (FLOAT8, FLOAT4) == (2814749767172868, 562949953487106)


@pytest.mark.parametrize(
    ("weight", "dtype", "what"),
    [
        (int4(torch.randn(64, 64), 32), torch.bfloat16, "shape: needs multiples of 64 x 128 or 128 x 64, got 64 x 64"),
        (int4(torch.randn(128, 256), 16), torch.bfloat16, "group size: needs 32, 64, 128 or a whole row, got 16"),
        (float8(torch.randn(128, 128), (1, 64)), torch.bfloat16, "scales: needs one a row, or of 128 columns, got 1 x 64"),
        (mxfp4(torch.randn(128, 128)), torch.float16, "dtype: needs bfloat16 for MXFP4, got torch.float16"),
        (int8(torch.randn(128, 128)), torch.float16, "weight format: needs fp8 or int4 or mxfp4, got int8"),
        (int4(torch.randn(128, 128), 32), torch.float32, "dtype: needs bfloat16 or float16, got float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_marlin_lacks_is_refused(weight: QuantizedWeight, dtype: torch.dtype, what: str) -> None:
    assert str(Marlin.supports(spec_of(weight, dtype, GPU))) == f"no: {what}"


def test_an_argument_that_is_not_known_is_a_reason_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "of the future")
    refused = Marlin.available()
    assert "marlin_gemm wants swizzle, which Headway does not know" in str(refused)
    assert "int swizzle" in refused.reasons[0].got, "the schema is told"
    assert fake.namespace


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_the_library_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_library, "NAMESPACE", "nowhere")
    assert str(Marlin.available()) == "no: device: needs a CUDA GPU, got none"
