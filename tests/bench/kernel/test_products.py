"""`headway bench kernel --linear`: every way of a product is right before it is timed, beside a floor that the numbers give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.bench.kernel import products
from headway.bench.kernel.product_ways import FORMS, ProductLayers, ProductWays, TimedProduct
from headway.bench.kernel.products import FORM_NAMES, ProductOptions, ProductTime, run_products_bench
from headway.kernels.linear.linear import Linear
from tiny_bench import CPU, QUICK

SHAPE = (64, 256)


def run(**changes: object) -> dict[tuple[str, int, str], ProductTime]:
    options = {"shapes": [SHAPE], "rows": (1, 3), "device": CPU, "timer": QUICK, "peak_gbps": 100.0, "peak_tflops": 1.0}
    options |= changes
    return {(cell.form, cell.rows, cell.way): cell for cell in run_products_bench(ProductOptions(**options)).cells}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_gets_the_ways_that_a_cpu_has(dtype: torch.dtype) -> None:
    cells = run(dtype=dtype)
    assert {form for form, _, _ in cells} == set(FORM_NAMES)
    for (form, _, way), cell in cells.items():
        assert cell.status == "ok", cell.reason
        assert 0 < cell.p20_us <= cell.median_us <= cell.p80_us
        assert cell.relative_error < (1e-5 if dtype == torch.float32 else 1e-2)
        assert cell.chosen or (form, way) == ("int4", "expanded") or form == "plain"
    ways = {way for form, _, way in cells if form == "int4"}
    packed = ProductLayers.drawn(SHAPE, "int4", CPU, dtype).linears[0].reads_quantized
    assert ways == ({"packed", "expanded"} if packed else {"expanded"})
    assert cells["int4", 1, "expanded"].chosen == ("packed" not in ways)


def test_floors_are_of_the_stored_bytes_or_of_the_operations() -> None:
    cells = run(forms=["fp8", "plain"], rows=(1, 50))
    out_features, in_features = SHAPE
    stored = out_features * in_features + 4 * out_features  # and a scale a row
    one, many = cells["fp8", 1, "expanded"], cells["fp8", 50, "expanded"]
    assert one.floor_us == pytest.approx((stored + 4 * (out_features + in_features)) / 100e3)
    assert many.floor_us == pytest.approx(2 * 50 * out_features * in_features / 1e6)
    assert (one.bound, many.bound) == ("bytes", "operations")
    plain = next(cell for (form, rows, _), cell in cells.items() if (form, rows) == ("plain", 1))
    assert plain.floor_us == pytest.approx(4 * (out_features * in_features + out_features + in_features) / 100e3)


def wrong(x: Tensor, linear: Linear) -> Tensor:
    return linear(x) * 1.02


def raises(x: Tensor, linear: Linear) -> Tensor:
    raise RuntimeError("it\nfell over")


def test_a_wrong_answer_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(layers: ProductLayers, dtype: torch.dtype, device: torch.device) -> ProductWays:
        steps = {"wrong": wrong, "raises": raises, "right": lambda x, linear: linear(x)}
        return ProductWays(lambda x: [TimedProduct(name, step, layers.linears) for name, step in steps.items()])

    monkeypatch.setattr(products, "ways_of", spoilt)
    cells = run(forms=["fp8"], rows=(3,))
    assert {way: cell.status for (_, _, way), cell in cells.items()} == {"wrong": "incorrect", "raises": "error", "right": "ok"}
    assert [cell.median_us is None for cell in cells.values()] == [True, True, False]
    assert "relative error 0.02" in cells["fp8", 3, "wrong"].reason
    assert cells["fp8", 3, "raises"].reason == "RuntimeError: it fell over"


def test_layers_are_larger_together_than_a_cache_or_sixteen() -> None:
    assert [len(ProductLayers.drawn(SHAPE, form, CPU).linears) for form in FORMS] == [16] * len(FORMS)
    large = ProductLayers.drawn((2048, 8192), "bf16", CPU, torch.bfloat16)
    assert len(large.linears) * large.num_bytes == 2 * 32 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4", "fp8", "fp8-blocks", "mxfp4", "plain"])
def test_the_engines_ways_are_right_on_a_gpu(form: str) -> None:
    device = torch.device("cuda", 0)
    report = run_products_bench(ProductOptions([(256, 512)], [form], (1, 40, 300), device=device, timer=QUICK))
    assert {cell.status for cell in report.cells} == {"ok"}, [cell.reason for cell in report.cells]
    chosen = [cell.rows for cell in report.cells if cell.chosen]
    assert chosen == ([] if form == "plain" else [1, 40, 300])
