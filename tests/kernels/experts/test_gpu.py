"""Every way of computing experts on a GPU: beside float64, in a CUDA graph, and whatever the other tokens are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dense_attention import DenseAttention
from expert_layers import CONFIGS, FORMS, HIDDEN, Layer, fused_layer
from headway.core.contract.experts import ExpertsConfig, ExpertsKernel
from headway.core.contract.weights import merged
from headway.kernels.experts.bound import BoundExperts
from headway.kernels.experts.plain import Routed, Routing
from headway.models.loader import load_model
from quantized_models import FORMATS as STORED
from quantized_models import GPT_OSS, QWEN3_MOE, save_both, save_mxfp4
from quantized_weights import float8

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
LARGE = ExpertsConfig(64, 6, 352, shared_intermediate_size=704)
DEVICE = torch.device("cuda")


def run(bound: BoundExperts, kernel: ExpertsKernel, x: Tensor) -> Tensor:
    """The residual stream after the layer by a kernel."""
    y = x.clone()
    bound.add(kernel, bound.routed(y, kernel), y)
    return y


def bound_of(layer: Layer, dtype: torch.dtype, invariant: bool = False) -> BoundExperts:
    return fused_layer(layer.config, layer.weights(dtype, "cuda"), layer.norm_of(dtype, "cuda"), invariant)


def check_rows(bound: BoundExperts, kernel: ExpertsKernel, layer: Layer, x: Tensor, routed: Routed | None = None) -> Tensor:
    """Hold a kernel's rows to the reference over the experts that the router chose. routed: None: as it routes them."""
    given = x.to(DEVICE, layer.dtype)
    routed, found = routed or bound.routed(given, kernel), given.clone()
    bound.add(kernel, routed, found)
    expected = layer.reference(x, Routing(routed.experts.cpu(), routed.weights.double().cpu()))
    errors = (found.double().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < TOLERANCE[layer.dtype], (kernel.name, errors)
    return found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 100, 300, 2500])
@pytest.mark.parametrize("name", [*CONFIGS, "large"])
def test_every_method_is_right(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    config = CONFIGS.get(name, LARGE)
    layer = Layer(config, dtype, seed=num_tokens, hidden=HIDDEN if name in CONFIGS else 1024)
    x = layer.draw(num_tokens, layer.norm.shape[0])
    chosen, bound = layer.routing(x), bound_of(layer, dtype)
    able = bound.kind.serving(num_tokens)
    assert len(able) >= 3
    for kernel in able:
        routed = bound.routed(x.to(DEVICE, dtype), kernel)
        experts, slot_weights = routed.experts.cpu(), routed.weights.double().cpu()
        # Of two experts of nearly equal scores either may be chosen, where scores are rounded to half precision.
        alike = (experts.sort(1).values == chosen.experts.sort(1).values).all(1)
        assert (~alike).sum() <= (0 if dtype == torch.float32 else max(2, num_tokens // 5)), kernel.name
        torch.testing.assert_close(slot_weights[alike].sum(1), chosen.weights[alike].sum(1), rtol=TOLERANCE[dtype], atol=1e-3)
        check_rows(bound, kernel, layer, x, routed)


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 700])
def test_a_graph_gives_the_same_bits(num_tokens: int) -> None:
    layer = Layer(LARGE, torch.bfloat16, hidden=1024)
    bound, x = bound_of(layer, torch.bfloat16), layer.draw(num_tokens, 1024).to(DEVICE, torch.bfloat16)
    for kernel in bound.kind.serving(num_tokens):
        captured, eager = x.clone(), run(bound, kernel, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bound.add(kernel, bound.routed(captured, kernel), captured)
        for _ in range(3):
            captured.copy_(x)
            graph.replay()
            assert torch.equal(captured, eager), kernel.name


@pytest.mark.parametrize("kind", ["triton.rows", "triton.tiles"])
def test_a_nan_stays_in_its_row(kind: str) -> None:
    config = dataclasses.replace(CONFIGS["deepseek_v3"], top_k=6)
    layer = Layer(config, torch.bfloat16)
    x = layer.draw(9, HIDDEN)
    x[4] = torch.nan
    bound = bound_of(layer, torch.bfloat16)
    for name, kernel in [(name, kernel) for name, kernel in bound.kind.kernels.items() if name.startswith(kind)]:
        found = run(bound, kernel, x.to(DEVICE, torch.bfloat16))
        assert found.isnan().any(1).tolist() == [row == 4 for row in range(9)], name


QUANTIZED = {
    "qwen3": ExpertsConfig(16, 4, 384),
    "gpt_oss": dataclasses.replace(CONFIGS["gpt_oss"], intermediate_size=352),
    "shared": ExpertsConfig(16, 6, 256, shared_intermediate_size=512),
}


def quantized_layer(layer: Layer, form: str, invariant: bool = False) -> BoundExperts:
    weights = layer.quantized(form, "cuda")
    return fused_layer(layer.config, weights, layer.norm_of(layer.dtype, "cuda"), invariant)


@pytest.mark.parametrize("form", ["", "fp8 blocks", "mxfp4"])
def test_a_tokens_bits_do_not_depend_on_the_others_where_that_is_promised(form: str) -> None:
    config, hidden = (QUANTIZED["qwen3"], 672) if form else (LARGE, 1024)
    layer = Layer(config, torch.bfloat16, hidden=hidden)
    bound = quantized_layer(layer, form, invariant=True) if form else bound_of(layer, torch.bfloat16, invariant=True)
    x = layer.draw(300 if form else 600, hidden).to(DEVICE, torch.bfloat16)
    (kernel,) = bound.kind.kernels.values()
    whole = run(bound, kernel, x)
    for first, last in ((0, 1), (3, 20), (100, 290)) if form else ((0, 1), (3, 20), (100, 364), (17, 600)):
        assert torch.equal(run(bound, kernel, x[first:last]), whole[first:last])


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 50, 300, 1500])
@pytest.mark.parametrize("config", QUANTIZED)
@pytest.mark.parametrize("form", FORMS)
def test_every_method_over_every_form_is_right(form: str, config: str, num_tokens: int) -> None:
    """Also in a graph, whose bits are those of the same call outside of one."""
    layer = Layer(QUANTIZED[config], torch.bfloat16, seed=num_tokens, hidden=672)
    bound, x = quantized_layer(layer, form), layer.draw(num_tokens, 672)
    given, able = x.to(DEVICE, torch.bfloat16), bound.kind.serving(num_tokens)
    assert len(able) >= 3
    for kernel in able:
        found = check_rows(bound, kernel, layer, x)
        captured, graph = given.clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            bound.add(kernel, bound.routed(captured, kernel), captured)
        captured.copy_(given)
        graph.replay()
        assert torch.equal(captured, found), kernel.name


@pytest.mark.parametrize("form", ["fp8 blocks", "int4, zeros"])
def test_float16_multiplies_forms_that_it_has_place_for(form: str) -> None:
    for count in (2, 40):
        layer = Layer(QUANTIZED["qwen3"], torch.float16, hidden=672)
        bound, x = quantized_layer(layer, form), layer.draw(count, 672)
        for kernel in bound.kind.serving(count):
            check_rows(bound, kernel, layer, x)


@pytest.mark.parametrize("name", ["fp8 blocks", "mxfp4"])
def test_a_model_keeps_its_experts_and_gives_the_plain_ones_logits(tmp_path: Path, name: str) -> None:
    """Both models have the weights rounded to bfloat16 but for what is kept, so that they differ by rounding alone."""
    if name == "mxfp4":
        folders = save_mxfp4(tmp_path, GPT_OSS)
    else:
        folders = save_both(tmp_path, STORED[name], QWEN3_MOE, plain=lambda module: module.endswith("mlp.gate"))
    logits = []
    for folder, kept in zip(folders, (True, False), strict=True):
        with torch.inference_mode():
            model: Any = load_model(str(folder), "bfloat16", skip_tokenizer_init=True, device=DEVICE).decoder
            (kind,) = model.expert_kinds
            assert (kind.forms != ("", "")) is kept
            attention = DenseAttention(model)
            attention.begin([(0, 9)])
            ids = torch.randint(0, model.vocab_size, (9,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
            logits.append(model.compute_logits(model(ids, torch.arange(9, device=DEVICE), attention)).float())
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[1].norm()


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


class Given:
    """A layer of a form on the GPU, and the kernels in question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, form: str, shape: str, dtype: torch.dtype = BF16) -> None:
        monkeypatch.setitem(FORMS, "fp8 blocks", WIDE["fp8 blocks"])
        config, self.hidden = SHAPES[shape]
        self.layer, self.dtype = Layer(config, dtype, hidden=self.hidden), dtype
        self.bound = quantized_layer(self.layer, form)
        self.kernels = [each for name, each in self.bound.kind.kernels.items() if name.startswith("cuda.")]

    def check(self, x: Tensor, experts: Tensor | None = None) -> None:
        """Hold each kernel that serves so many tokens to the reference. experts: in place of those that the router chooses."""
        able = [each for each in self.kernels if each.runs(len(x))]
        assert able
        for kernel in able:
            routed = self.bound.routed(x.to(DEVICE, self.dtype), kernel)
            if experts is not None:
                routed = dataclasses.replace(routed, experts=experts.to(DEVICE, torch.int32))
            check_rows(self.bound, kernel, self.layer, x, routed)


def read(form: str, shape: str) -> bool:
    """Whether the kernel reads it: scales of 128 columns fill no row of 672 or 2,880."""
    return form != "fp8 blocks" or SHAPES[shape][1] % 128 == 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_products_of_every_form_are_right(monkeypatch: pytest.MonkeyPatch, form: str, shape: str) -> None:
    given = Given(monkeypatch, form, shape)
    assert bool(given.kernels) == read(form, shape)
    for count in (1, 2, 7, 17, 64) if given.kernels else ():
        given.check(given.layer.draw(count, given.hidden))


@pytest.mark.parametrize("form", ["fp8 rows", "mxfp4"])
def test_lots_take_more_tokens_and_keep_their_bits(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    given = Given(monkeypatch, form, "gpt_oss")
    lots = [way for way in given.kernels if way.name.startswith("cuda.lots")]
    if not lots:
        pytest.skip("needs compute capability 9.0")
    given.kernels = lots
    given.check(given.layer.draw(200, given.hidden))
    x = given.layer.draw(90, given.hidden).to(DEVICE, BF16)
    for kernel in [each for each in lots if each.runs(90) and each.runs(60)]:
        assert torch.equal(run(given.bound, kernel, x[20:80]), run(given.bound, kernel, x)[20:80]), kernel.name


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

    small, large = given.kernels[:2]
    whole = run(given.bound, large, x)
    assert torch.equal(run(given.bound, small, x[3:20]), whole[3:20])
    assert torch.equal(run(given.bound, small, x[5:6]), whole[5:6])


def test_a_graph_gives_the_same_bits_for_other_tokens_than_it_was_captured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    given = Given(monkeypatch, "fp8 blocks", "qwen3")
    for kernel in [each for each in given.kernels if each.runs(12)]:
        replay(given, kernel)


def replay(given: Given, kernel: ExpertsKernel) -> None:
    """Capture two layers, one after the other, and replay them for other tokens."""
    x = given.layer.draw(12, given.hidden).to(DEVICE, BF16)
    y, eager = x.flip(0).contiguous(), run(given.bound, kernel, run(given.bound, kernel, x))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(2):  # the second starts while the first ends
            given.bound.add(kernel, given.bound.routed(y, kernel), y)
    for _ in range(3):
        y.copy_(x)
        graph.replay()
        assert torch.equal(y, eager), kernel.name
