"""The source of expert_token.cu beside float64, run by the host: forms, ends of rows, slots, cuts, orders of threads."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from expert_layers import FORMS, Layer
from headway.backends.probe import UNTRIED
from headway.models.experts.config import ExpertsConfig
from headway.models.experts.cuda_rows import CudaRows
from headway.models.experts.cuda_variant import ExpertCutRule, ExpertProduct
from headway.models.experts.router import Routed, Router
from headway.models.experts.routing import Routing
from headway.models.experts.token_variant import expert_token_cut
from headway.models.experts.weights import ExpertWeights
from headway.models.fused.cuda_arranged import Arrangements
from headway.models.fused.cuda_cuts import CudaCut
from host_experts import CLAMPED, PLAIN, SHAPES, Add, check, routed_of
from host_kernels import add_experts
from host_launches import experts_on_the_host
from quantized_weights import int4


def by(rule: ExpertCutRule = expert_token_cut, order: int = 0) -> Add:
    return partial(add_experts, lot=8, blocks=3, order=order, token_rule=rule)


def cut(tiles: int, warps: int, stages: int, sharing: int = 1) -> ExpertCutRule:
    def rule(product: ExpertProduct, multiprocessors: int) -> CudaCut:
        return CudaCut(tiles, warps, stages, sharing=sharing)

    return rule


def test_clamped_experts_with_biases_and_a_slice_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, by(), "mxfp4", CLAMPED, 160, tokens=1)


@pytest.mark.parametrize("leave", ["0", "1"])
@pytest.mark.parametrize("tokens", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_method_launches_it_for_a_single_token_where_it_has_leave(
    monkeypatch: pytest.MonkeyPatch, leave: str, tokens: int
) -> None:
    monkeypatch.setenv(UNTRIED, leave)
    launched = experts_on_the_host(monkeypatch)

    def add(residual: Tensor, routed: Routed, weights: ExpertWeights, config: ExpertsConfig) -> None:
        method = CudaRows(8, config, Router(config, torch.device("cpu"), False), torch.device("cuda"), Arrangements())
        method.add(residual, routed, weights)

    check(monkeypatch, add, "mxfp4", CLAMPED, 160, tokens)
    assert launched == ["expert_rows", "expert_token" if leave == "1" and tokens == 1 else "expert_rows"]


def test_blocks_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, by(), "fp8 blocks", *SHAPES["fp8 blocks"], 1)


@pytest.mark.slow
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("form", SHAPES)
def test_every_form(monkeypatch: pytest.MonkeyPatch, form: str, biases: bool) -> None:
    config, hidden = SHAPES[form]
    check(monkeypatch, by(), form, dataclasses.replace(config, biases=biases), hidden, 1)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2, 5, 17, 24])
def test_any_number_of_slots(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    config = ExpertsConfig(26, slots, 160, biases=True)
    check(monkeypatch, by(), "fp8 rows", config, 144, 1)
    check(monkeypatch, by(), "int4, zeros", config, 288, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(cut(1, 5, 1), id="a stage"),
        pytest.param(cut(1, 3, 2), id="rings that are filled again"),
        pytest.param(cut(4, 4, 3), id="a last tile that is not whole"),
        pytest.param(cut(2, 16, 4), id="warps without a slice"),
        pytest.param(cut(1, 3, 2, 2), id="two blocks of threads"),
        pytest.param(cut(2, 4, 3, 4), id="four blocks of threads"),
    ],
)
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 rows", "mxfp4"])
def test_any_cut(monkeypatch: pytest.MonkeyPatch, form: str, rule: ExpertCutRule) -> None:
    config = dataclasses.replace(SHAPES[form][0], biases=True)
    check(monkeypatch, by(rule), form, config, 336 if form == "fp8 rows" else SHAPES[form][1], 1)


@pytest.mark.slow
def test_groups_of_128_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "int4 of 128", lambda weight, rows: int4(weight, 128))
    check(monkeypatch, by(), "int4 of 128", dataclasses.replace(PLAIN, intermediate_size=384, biases=True), 256, 1)


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("form", ["fp8 rows", "mxfp4"])
def test_threads_in_another_order(monkeypatch: pytest.MonkeyPatch, form: str, order: int) -> None:
    check(monkeypatch, by(order=order), form, *SHAPES[form], 1)
    check(monkeypatch, by(cut(1, 3, 2, 2), order), form, *SHAPES[form], 1)


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
    check(monkeypatch, by(), form, config, 176, 1, dtype=torch.float16)


def test_each_slot_counts_once_with_its_own_weight() -> None:
    """All weights but one are zero: what another slot gives, or a second time this one, is seen at its full size."""
    config, seed = dataclasses.replace(PLAIN, top_k=4, biases=True), torch.seed() % 2**32
    layer = Layer(config, torch.bfloat16, seed, hidden=80)
    weights, x = layer.quantized("fp8 rows"), layer.draw(1, 80)
    experts = torch.randperm(config.num_experts, dtype=torch.int32)[None, : config.top_k]
    for slot in range(config.top_k):
        chosen = torch.zeros(1, config.top_k)
        chosen[0, slot] = 1 + slot
        found = x.to(torch.bfloat16)
        by()(found, routed_of(layer, x, experts, chosen), weights, config)
        expected = layer.reference(x, Routing(experts, chosen.double()))
        assert (found.double() - expected).norm() < 4e-3 * expected.norm(), f"seed {seed}, slot {slot}"
