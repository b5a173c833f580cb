"""The fused operations over quantised weights against torch's in float64 over the dequantised ones, interpreted."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from fake_vllm_library import FakeVllmLibrary
from headway.kernels.linear.choice import spec_of
from headway.kernels.linear.gpu_kernels import Cutlass, dequantize, round_rows
from headway.kernels.linear.linear import Linear
from headway.kernels.linear.quantized import QuantizedTiling, TritonKernel
from headway.kernels.runtime import vllm_library
from headway.kernels.runtime.triton_launch import Launchers
from headway.kernels.step.fused import Fused
from headway.kernels.step.invariant import invariant_operations
from headway.kernels.step.operations import Norm
from headway.kernels.step.torch_operations import TorchOperations
from operation_inputs import Inputs, Sizes, ropes
from quantized_weights import FORMS, float8, int4

BF16 = torch.bfloat16
MODELS = {
    "llama": {"hidden": 128, "inner": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    "qwen3": {"hidden": 128, "inner": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "qk_norm": True, "bias": True},
    "wide": {"hidden": 1280, "inner": 80, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "qk_norm": True},
}
EVERYDAY = [
    ("fp8 blocks", "qwen3", 1),
    ("int4 of 128", "llama", 3),
    ("int4 of 32 in another order", "llama", 1),
    ("mxfp4", "llama", 1),
]
CASES = [(form, "llama", rows) for form in FORMS for rows in (1, 12, 40, 200)]
CASES += [(form, name, rows) for form in ("fp8 blocks", "int4 of 128") for name in ("qwen3", "wide") for rows in (1, 3, 20)]
CASES += [case for case in EVERYDAY if case not in CASES]


@pytest.mark.parametrize(
    ("form", "name", "rows"), [pytest.param(*each, marks=[] if each in EVERYDAY else pytest.mark.slow) for each in CASES]
)
def test_every_step_equals_the_plain_one(form: str, name: str, rows: int) -> None:
    sizes = Sizes(rows, **MODELS[name])
    inputs, tables = Inputs(sizes, BF16, quantize=FORMS[form]), ropes(sizes.head_dim)
    fused = dict(inputs.results(Fused(*tables), BF16, "cpu"))
    plain = dict(inputs.results(TorchOperations(*tables), torch.float64, "cpu"))
    assert fused.keys() == plain.keys()
    for step, expected in plain.items():
        error = (fused[step] - expected).norm() / expected.norm()
        # The interpreter cuts bfloat16 off, and weights are rounded where the kernel does not serve.
        assert error < (1.2e-2 if rows <= 128 else 2e-2), (step, float(error))


@pytest.mark.parametrize(
    "tiling",
    [
        QuantizedTiling(32, 8, 64, 4, 2, 2),
        pytest.param(QuantizedTiling(16, 16, 32, 2, 5, 3), marks=pytest.mark.slow),
        QuantizedTiling(64, 64, 64, 1, 3, 3),
    ],
    ids=str,
)
def test_any_cut_gives_the_product_and_rows_do_not_know_each_other(tiling: QuantizedTiling) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = int4(torch.randn(72, 1408, generator=generator), 128, zeros=True)
    x = torch.randn(21, 1408, generator=generator).to(BF16)
    kernel = TritonKernel(spec_of(weight, BF16, x.device), tiling=lambda *_: tiling)
    read = kernel.prepare(weight)
    y, expected = kernel.compute(x, read), x.double() @ weight.dequantized(torch.float64).t()
    assert (y - expected).norm() < 1e-2 * expected.norm()
    assert torch.equal(kernel.compute(x[:5].contiguous(), read), y[:5])


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_dequantised_as_its_form_says(form: str) -> None:
    weight = FORMS[form](torch.randn(40, 384, generator=torch.Generator().manual_seed(4)))
    dense = dequantize(Launchers(torch.device("cpu")), weight, torch.float16).float()
    expected, order = weight.dequantized(torch.float32), getattr(weight, "order", None)
    expected = expected if order is None else expected[:, order.long()]
    torch.testing.assert_close(dense, expected.half().float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("group", [128, 384])
def test_x_gets_eight_bits_under_scales_of_its_own(group: int) -> None:
    """Of numbers that eight bits hold: the interpreter's rounding is not the GPU's."""
    drawn = torch.randn(5, 384, generator=torch.Generator().manual_seed(5)).to(torch.float8_e4m3fn).float()
    drawn[:, ::128] = 448
    factors = 2.0 ** -torch.arange(5 * 384 // group).view(5, -1)
    y, scales = round_rows(Launchers(torch.device("cpu")), (drawn * factors.repeat_interleave(group, 1)).to(BF16), group, None)
    assert y.shape == (8, 384)
    assert scales.stride() == (1, 8)
    assert torch.equal(scales[:5], factors)
    assert torch.equal(y[:5].float(), drawn)


def test_what_the_kernel_cannot_read_is_expanded_for_each_product() -> None:
    weight = float8(torch.randn(32, 136, generator=torch.Generator().manual_seed(6)), (1, 8))
    x, ops = torch.randn(2, 136, generator=torch.Generator().manual_seed(7)).to(BF16), Fused(*ropes(64))
    linear = Linear(weight, dtype=BF16, kept=True)
    (choice,) = ops.linear_choices([(linear, False)])
    assert choice.kernel_for(2) == "dequantize"
    expected = x.double() @ weight.dequantized(torch.float64).t()
    assert (ops.product(x, linear) - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("rows", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_every_way_of_a_gated_product_gives_it(rows: int) -> None:
    generator = torch.Generator().manual_seed(8)
    weight, x = int4(torch.randn(192, 1024, generator=generator), 128), torch.randn(rows, 1024, generator=generator).to(BF16)
    linear, ops = Linear(weight, dtype=BF16, kept=True), Fused(*ropes(64))
    (kind,) = ops.linear_choices([(linear, True), (Linear(torch.zeros(8, 8)), False)])
    assert set(kind.able(rows)) > {"kernel", "kernel splits x2", "dequantize"}
    gate, up = (rms_norm(x.double(), (1024,), eps=1e-6) @ weight.dequantized(torch.float64).t()).chunk(2, dim=1)
    expected = silu(gate) * up
    for name in kind.able(rows):
        assert (kind.compute(name, x, linear) - expected).norm() < 2e-2 * expected.norm(), name


@pytest.mark.parametrize(("form", "rows"), [("fp8 rows", 3), ("fp8 blocks", 5)])
def test_cutlass_is_given_rounded_rows_and_the_weight_as_it_is(monkeypatch: pytest.MonkeyPatch, form: str, rows: int) -> None:
    fake = FakeVllmLibrary()
    monkeypatch.setattr(vllm_library, "NAMESPACE", fake.namespace)
    vllm_library.find_library.cache_clear()
    weight = FORMS[form](torch.randn(256, 384, generator=torch.Generator().manual_seed(9)))
    bias = torch.randn(256, generator=torch.Generator().manual_seed(10)).to(BF16)
    x = torch.randn(rows, 384, generator=torch.Generator().manual_seed(11)).to(BF16)
    linear = Linear(weight, bias, dtype=BF16, kept=True)
    (kind,) = Fused(*ropes(64)).linear_choices([(linear, False)])
    assert {"cutlass", "marlin", "kernel"} < set(kind.kernels)
    assert str(kind.refused["scaled_mm"]).startswith("no: device: needs ")
    assert kind.kernel_for(rows) == "kernel", "a library serves where times say so"
    expected = 2 * rms_norm(x.double(), (384,), eps=1e-6) @ weight.dequantized(torch.float64).t() + bias.double()
    out, norm = torch.empty(rows, 256, dtype=BF16), Norm(torch.full((384,), 2.0).to(BF16), 1e-6)
    kernel = kind.kernels["cutlass"]
    assert isinstance(kernel, Cutlass)
    y = kernel.compute(x, linear.prepared_for(kernel), norm, out)
    assert (y - expected).norm() < 6e-2 * expected.norm()
    assert y.data_ptr() == out.data_ptr()
    vllm_library.find_library.cache_clear()


def test_batch_invariant_products_have_one_way_which_the_log_names(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(9)
    weight, x = float8(torch.randn(48, 256, generator=generator)), torch.randn(18, 256, generator=generator).to(BF16)
    linear = Linear(weight, dtype=BF16, kept=True)
    with caplog.at_level(logging.INFO, "headway"):
        ops = invariant_operations(Fused(*ropes(64)), [linear], torch.device("cpu"))
    assert "deterministic: linear fp8 rows 48x256 bfloat16 uses kernel for every tile of 16 rows" in caplog.text
    assert ops.linear_choices([(linear, False)]) == [], "no measured times choose another"
    together, expected = ops.product(x, linear), x.double() @ weight.dequantized(torch.float64).t()
    assert (together - expected).norm() < 1.2e-2 * expected.norm()
    for row in (0, 17):
        assert torch.equal(ops.product(x[row : row + 1], linear)[0], together[row])
