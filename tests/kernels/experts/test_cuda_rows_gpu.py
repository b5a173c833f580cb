"""Quantised experts in CUDA C++ beside float64: forms, shapes, and experts with no, one and many tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from expert_layers import CONFIGS, FORMS, Layer
from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.experts.plain import Routing
from headway.kernels.experts.weights import ExpertWeights, forms_of
from headway.kernels.linear.forms import merged
from headway.kernels.step.operations import Norm
from quantized_weights import float8

if TYPE_CHECKING:
    from headway.kernels.experts.methods import Method

pytestmark = pytest.mark.gpu
DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
WIDE = {**FORMS, "fp8 blocks": lambda weight, rows: merged([float8(part, (128, 128)) for part in weight.split(rows)])}
"""Blocks as published ones are, which hold whole slices."""
CLAMPED = dataclasses.replace(CONFIGS["gpt_oss"], num_experts=6, top_k=3)
SHAPES = {
    "qwen3": (ExpertsConfig(16, 4, 384), 512),
    "shared": (ExpertsConfig(12, 3, 256, shared_intermediate_size=512), 256),
    "gpt_oss": (dataclasses.replace(CLAMPED, intermediate_size=352), 672),
    "gpt-oss-20b": (dataclasses.replace(CLAMPED, intermediate_size=2880), 2880),
    "ungated": (ExpertsConfig(16, 4, 384, gated=False), 512),
}
"""Experts and hidden size. Rows of 672, 352 and 2,880 columns end within a slice in most forms."""
TOLERANCE = {BF16: 2.5e-2, torch.float16: 4e-3}


class Given:
    """A layer of a form on the GPU, and the methods in question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, form: str, shape: str, dtype: torch.dtype = BF16) -> None:
        from headway.kernels.experts.fused import FusedExperts

        monkeypatch.setitem(FORMS, "fp8 blocks", WIDE["fp8 blocks"])
        config, self.hidden = SHAPES[shape]
        self.layer, self.dtype = Layer(config, dtype, hidden=self.hidden), dtype
        self.weights: ExpertWeights = self.layer.quantized(form, "cuda")
        self.norm: Norm = self.layer.norm_of(dtype, "cuda")
        self.kind = FusedExperts(config, dtype, DEVICE, forms=forms_of(self.weights))
        self.kind.layer(self.weights, self.norm)
        self.methods = [way for way in self.kind.methods.values() if way.name.startswith(("cuda.rows", "cuda.lots"))]

    def check(self, x: Tensor, experts: Tensor | None = None) -> None:
        """Hold each method that takes so many tokens to the reference. experts: in place of those that the router chooses."""
        given, able = x.to(DEVICE, self.dtype), [way for way in self.methods if way.takes(len(x), self.dtype)]
        assert able
        for method in able:
            routed, found = method.route(given, self.norm, self.weights), given.clone()
            if experts is not None:
                routed = dataclasses.replace(routed, experts=experts.to(DEVICE, torch.int32))
            method.add(found, routed, self.weights)
            expected = self.layer.reference(x, Routing(routed.experts.cpu(), routed.weights.double().cpu()))
            errors = (found.double().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
            assert errors.max() < TOLERANCE[self.dtype], (method.name, errors)


def read(form: str, shape: str) -> bool:
    """Whether the kernel reads it: scales of 128 columns fill no row of 672 or 2,880."""
    return form != "fp8 blocks" or SHAPES[shape][1] % 128 == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_products_of_every_form_are_right(monkeypatch: pytest.MonkeyPatch, form: str, shape: str) -> None:
    given = Given(monkeypatch, form, shape)
    assert bool(given.methods) == read(form, shape)
    for count in (1, 2, 7, 17, 64) if given.methods else ():
        given.check(given.layer.draw(count, given.hidden))


@pytest.mark.parametrize("form", ["fp8 rows", "mxfp4"])
def test_lots_take_more_tokens_and_keep_their_bits(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    given = Given(monkeypatch, form, "gpt_oss")
    lots = [way for way in given.methods if way.name.startswith("cuda.lots")]
    if not lots:
        pytest.skip("needs compute capability 9.0")
    given.methods = lots
    given.check(given.layer.draw(200, given.hidden))
    x = given.layer.draw(90, given.hidden).to(DEVICE, BF16)
    for method in lots:
        if method.takes(90, BF16) and method.takes(60, BF16):
            found = []
            for rows in (x, x[20:80]):
                y = rows.clone()
                method.add(y, method.route(y, given.norm, given.weights), given.weights)
                found.append(y)
            assert torch.equal(found[1], found[0][20:80]), method.name


@pytest.mark.parametrize("form", ["fp8 blocks", "int4, zeros"])
def test_float16_multiplies_forms_that_it_has_place_for(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    given = Given(monkeypatch, form, "qwen3", torch.float16)
    for count in (1, 20):
        given.check(given.layer.draw(count, given.hidden))


@pytest.mark.parametrize("form", ["fp8 blocks", "mxfp4"])
@pytest.mark.parametrize("shape", ["qwen3", "gpt_oss"])
def test_experts_may_have_no_one_and_many_tokens(monkeypatch: pytest.MonkeyPatch, form: str, shape: str) -> None:
    if not read(form, shape):
        return
    given = Given(monkeypatch, form, shape)
    slots, count = given.layer.config.top_k, 17
    others = [[2 * slot - 1 + (token % 2 if slot == 1 else 0) for slot in range(1, slots)] for token in range(count)]
    experts = torch.cat([torch.zeros(count, 1, dtype=torch.int64), torch.tensor(others)], 1)  # 17 rows of the first
    experts[0, -1] = given.layer.config.num_experts - 1  # one row of the last; some have none
    given.check(given.layer.draw(count, given.hidden), experts)
    alike = torch.arange(slots).expand(64, slots)  # as rows that fill up a captured graph
    given.check(given.layer.draw(64, given.hidden), alike)


def test_a_tokens_bits_depend_on_neither_the_others_nor_the_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(monkeypatch, "mxfp4", "gpt_oss")
    x = given.layer.draw(40, given.hidden).to(DEVICE, BF16)

    def computed(rows: Tensor, number: int) -> Tensor:
        y = rows.clone()
        method = given.methods[number]
        method.add(y, method.route(y, given.norm, given.weights), given.weights)
        return y

    whole = computed(x, 1)
    assert torch.equal(computed(x[3:20], 0), whole[3:20])
    assert torch.equal(computed(x[5:6], 0), whole[5:6])


def test_a_graph_gives_the_same_bits_for_other_tokens_than_it_was_captured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(monkeypatch, "fp8 blocks", "qwen3")
    for method in [way for way in given.methods if way.takes(12, BF16)]:
        replay(given, method)


def replay(given: Given, method: Method) -> None:
    """Capture two layers, one after the other, and replay them for other tokens."""
    x = given.layer.draw(12, given.hidden).to(DEVICE, BF16)
    y, eager = x.flip(0).contiguous(), x.clone()
    method.add(eager, method.route(eager, given.norm, given.weights), given.weights)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(2):  # the second starts while the first ends
            method.add(y, method.route(y, given.norm, given.weights), given.weights)
    method.add(eager, method.route(eager, given.norm, given.weights), given.weights)
    for _ in range(3):
        y.copy_(x)
        graph.replay()
        assert torch.equal(y, eager)
