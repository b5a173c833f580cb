"""The source of expert_rows.cu beside float64, run by the host: forms, slices that are not whole, lots, orders of threads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from expert_layers import CONFIGS, FORMS, Layer
from headway.models.experts.config import ExpertsConfig
from headway.models.experts.router import Routed
from headway.models.experts.routing import Routing
from headway.models.quantization.forms import merged
from host_kernels import add_experts
from quantized_weights import float8

BF16 = torch.bfloat16
CLAMPED = dataclasses.replace(CONFIGS["gpt_oss"], num_experts=6, top_k=3, intermediate_size=96)
PLAIN = ExpertsConfig(9, 3, 96)
BLOCKS = {**FORMS, "fp8 blocks": lambda weight, rows: merged([float8(part, (128, 128)) for part in weight.split(rows)])}


def check(
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    config: ExpertsConfig,
    hidden: int,
    tokens: int,
    lot: int = 8,
    alike: bool = False,
    order: int = 0,
    dtype: torch.dtype = BF16,
) -> None:
    """Compute one layer. alike: all tokens go to the same experts."""
    monkeypatch.setitem(FORMS, "fp8 blocks", BLOCKS["fp8 blocks"])
    layer = Layer(config, dtype, hidden=hidden)
    weights, x = layer.quantized(form), layer.draw(tokens, hidden)
    routing = layer.routing(x)
    experts = torch.arange(config.num_slots).expand(tokens, -1) if alike else routing.experts
    routed = Routed(
        layer.normed(x).to(dtype), experts.int().contiguous(), routing.weights.float().contiguous(), counts=None, block_t=0
    )
    found = x.to(dtype)
    add_experts(found, routed, weights, config, lot, blocks=3, order=order)
    expected = layer.reference(x, Routing(routed.experts, routed.weights.double()))
    assert (found.double() - expected).norm() < (4e-3 if dtype == BF16 else 1e-3) * expected.norm()


def test_clamped_experts_with_biases_and_a_slice_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "mxfp4", CLAMPED, 160, tokens=11)


SHAPES = {
    "fp8 blocks": (dataclasses.replace(PLAIN, intermediate_size=128), 256),
    "fp8 rows": (PLAIN, 336),
    "mxfp4": (CLAMPED, 160),
    "int4": (PLAIN, 160),
    "int4, zeros": (PLAIN, 160),
    "int8": (PLAIN, 336),
}


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "lot"), [(1, 8), (3, 8), (20, 8), (20, 16)])
@pytest.mark.parametrize("form", SHAPES)
def test_every_form(monkeypatch: pytest.MonkeyPatch, form: str, tokens: int, lot: int) -> None:
    check(monkeypatch, form, *SHAPES[form], tokens, lot)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "lot"), [(17, 8), (33, 16), (64, 8), (64, 16)])
def test_experts_of_several_lots_and_of_no_tokens(monkeypatch: pytest.MonkeyPatch, tokens: int, lot: int) -> None:
    check(monkeypatch, "mxfp4", CLAMPED, 160, tokens, lot, alike=True)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("form", ["fp8 rows", "mxfp4"])
def test_threads_in_another_order(monkeypatch: pytest.MonkeyPatch, form: str, order: int) -> None:
    check(monkeypatch, form, *SHAPES[form], 12, 8, order=order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "config"),
    [
        ("fp8 rows", dataclasses.replace(PLAIN, gated=False)),
        ("int8", dataclasses.replace(PLAIN, shared_intermediate_size=192)),
    ],
)
def test_experts_without_a_gate_and_shared_ones_in_float16(
    monkeypatch: pytest.MonkeyPatch, form: str, config: ExpertsConfig
) -> None:
    check(monkeypatch, form, config, 176, 9, dtype=torch.float16)
