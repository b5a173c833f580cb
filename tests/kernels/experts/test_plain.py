"""Experts by torch's operations: what a CPU runs, beside the definition; and what a configuration may not say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from expert_layers import CONFIGS, HIDDEN, SMALL, Layer, plain_experts
from headway.core.contract.errors import ModelError
from headway.core.contract.experts import ExpertsConfig
from headway.core.select.costs import AxisTimes
from headway.kernels.experts.builtin import TOKEN_COUNTS, TOKENS, rules
from headway.kernels.experts.plain import route, sort_by_expert
from headway.kernels.experts.weights import ExpertsShard
from headway.models.checkpoints.expert_weights import take_experts
from headway.models.checkpoints.weights import Weights
from headway.models.config import ExpertNames
from headway.models.families.experts import deepseek_experts
from transformers_release import needs


@pytest.mark.parametrize("name", CONFIGS)
def test_a_token_gets_the_weighted_sum_of_its_experts(name: str) -> None:
    config = CONFIGS[name]
    layer = Layer(config, torch.float64)
    weights, x = layer.weights(torch.float64), layer.draw(7, HIDDEN)
    routing = route(linear(x, weights.router, weights.router_bias), config, weights.correction_bias)
    expected = torch.zeros_like(x)
    for token, (experts, shares) in enumerate(zip(routing.experts.tolist(), routing.weights.tolist(), strict=True)):
        assert len(set(experts)) == config.num_slots
        for expert, share in zip(experts, shares, strict=True):
            both = weights.gate_up[expert] @ x[token]
            gate, up = (both if weights.gate_up_bias is None else both + weights.gate_up_bias[expert]).chunk(2)
            if config.swiglu_limit is not None:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
            inner = gate * torch.sigmoid(config.swiglu_alpha * gate) * up
            out = weights.down[expert] @ inner
            expected[token] += share * (out if weights.down_bias is None else out + weights.down_bias[expert])
    found = plain_experts(config, weights, x)
    torch.testing.assert_close(found, expected)


def test_the_clamp_of_gpt_oss_is_reached_in_these_tests() -> None:
    layer = Layer(CONFIGS["gpt_oss"], torch.float64)
    both = linear(layer.draw(7, HIDDEN), layer.weights(torch.float64).gate_up[0])
    assert both.abs().max() > 7


def test_a_shared_expert_is_the_same_in_pieces() -> None:
    config = dataclasses.replace(SMALL, shared_intermediate_size=70)
    assert (config.num_shared, config.num_all, config.num_slots) == (2, 10, 4)
    layer = Layer(config, torch.float64)
    weights, x = layer.weights(torch.float64), layer.draw(3, HIDDEN)
    few = dataclasses.replace(weights, gate_up=weights.gate_up[:8], down=weights.down[:8])
    gate, up = (weights.gate_up[8:, part].flatten(0, 1) for part in (slice(40), slice(40, 80)))
    shared = linear(silu(linear(x, gate)) * linear(x, up), weights.down[8:].transpose(0, 1).flatten(1))
    torch.testing.assert_close(plain_experts(config, weights, x), plain_experts(SMALL, few, x) + shared)


def test_node_limited_routing_stays_in_the_best_groups() -> None:
    config = CONFIGS["deepseek_v3"]
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-1, 1, 16)
    routing = route(logits, config, bias)
    ranked = (logits.sigmoid() + bias).view(50, 4, 4)
    best = ranked.topk(2, dim=2).values.sum(2).topk(2, dim=1).indices
    for row, groups in zip(routing.experts[:, :4].tolist(), best.tolist(), strict=True):
        assert {expert // 4 for expert in row} <= set(groups)
    torch.testing.assert_close(routing.weights[:, :4].sum(1), torch.full((50,), config.scale))
    chosen = logits.sigmoid().gather(1, routing.experts[:, :4].long())
    torch.testing.assert_close(routing.weights[:, :4], config.scale * chosen / chosen.sum(1, keepdim=True))


def test_equal_scores_go_to_the_lower_expert() -> None:
    assert route(torch.zeros(2, 8), SMALL).experts.tolist() == [[0, 1], [0, 1]]


def test_pairs_stand_in_the_order_of_experts_and_of_tokens() -> None:
    order = sort_by_expert(torch.tensor([[3, 0], [0, 2], [3, 2]], dtype=torch.int32), 5)
    assert order.pairs.tolist() == [1, 2, 3, 5, 0, 4]
    assert order.places[order.pairs.long()].tolist() == list(range(6))
    assert order.ends.tolist() == [2, 2, 4, 6, 6]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 0}, "num_experts: needs a whole number of at least 1, got 0"),
        ({"top_k": 9}, "num_experts_per_tok: needs a whole number from 1 to 8, the number of experts, got 9"),
        ({"top_k": 2.0}, "num_experts_per_tok: needs a whole number"),
        ({"intermediate_size": 0}, "moe_intermediate_size"),
        ({"scoring": "relu"}, "scoring_func: needs softmax or sigmoid, got 'relu'"),
        ({"num_groups": 3}, "n_group: needs a divisor of 8, the number of experts, got 3"),
        ({"num_groups": None}, "n_group: needs a whole number from 1 to 8, the number of experts, got None"),
        ({"num_groups": 4, "top_k_groups": 5}, "topk_group: needs a whole number from 1 to 4, n_group, got 5"),
        (
            {"num_groups": 4, "top_k": 3},
            "num_experts_per_tok: needs a whole number from 1 to 2, the experts of topk_group groups",
        ),
        ({"num_groups": 8, "top_k": 1, "group_score": "top2"}, "n_group: needs groups of 2 experts or more, got groups of 1"),
        ({"shared_intermediate_size": -1}, "shared experts' size"),
    ],
)
def test_numbers_that_contradict_each_other_are_told_by_their_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as raised:
        dataclasses.replace(SMALL, **changes)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_choice_takes_the_nearest_count_by_ratio() -> None:
    assert [TOKEN_COUNTS[TOKENS.cell(count)] for count in (0, 1, 2, 3, 5, 6, 11, 12, 8192, 10**6)] == [
        1,
        1,
        2,
        4,
        4,
        8,
        8,
        16,
        8192,
        8192,
    ]
    us = {"a": [2.0, 1.0, None], "b": [1.0, 3.0, 5.0]}
    times = AxisTimes(TOKENS, us, "a test")
    assert [times.fastest(count, "ab") for count in (1, 2, 4, 8)] == ["b", "a", "b", None]
    assert times.fastest(1, "a") == "a", "b does not take so many tokens"
    assert times.fastest(1, "c") is None


def test_the_rule_grows_with_the_pairs_of_an_expert() -> None:
    config = ExpertsConfig(128, 8, 768)
    assert [rules(count, config)[-1] for count in (1, 2, 16, 1024, 8192)] == [
        "triton.rows", "triton.rows", "triton.tiles16", "triton.tiles64", "triton.tiles128"
    ]  # fmt: skip
    assert [rules(count, config)[0] for count in (1, 64, 128, 1024)] == [
        "cuda.rows8", "cuda.rows8", "cuda.rows16", "triton.tiles64"
    ]  # fmt: skip


WIDTH = 32
SIZES = {
    "hidden_size": WIDTH,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
MODULES = {
    "v2": (DeepseekV2Moe, DeepseekV2Config(**SIZES, n_routed_experts=10, topk_method="greedy")),
    "v2, groups": (
        DeepseekV2Moe,
        DeepseekV2Config(**SIZES, n_routed_experts=12, topk_method="group_limited_greedy", n_group=4, topk_group=2),
    ),
    "v3": (DeepseekV3MoE, DeepseekV3Config(**SIZES, n_routed_experts=16, n_group=4, topk_group=2, norm_topk_prob=True)),
    "v3, not divided": (
        DeepseekV3MoE,
        DeepseekV3Config(**SIZES, n_routed_experts=8, n_group=1, topk_group=1, norm_topk_prob=False),
    ),
}


def as_checkpoint(module: nn.Module) -> dict[str, Tensor]:
    """Names as DeepSeek's checkpoints have them: each expert by itself."""
    state = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    found = {}
    for number, (both, down) in enumerate(zip(state.pop("experts.gate_up_proj"), state.pop("experts.down_proj"), strict=True)):
        gate, up = both.chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        found |= {f"experts.{number}.{name}.weight": part.clone() for name, part in parts.items()}
    return {f"layer.mlp.{name}": tensor.contiguous() for name, tensor in {**found, **state}.items()}


@pytest.mark.parametrize("name", MODULES)
def test_experts_equal_transformers(tmp_path: Path, name: str) -> None:
    make, config = MODULES[name]
    if make is DeepseekV2Moe:
        needs("DeepseekV2ForCausalLM")
    torch.manual_seed(0)
    module = make(config).float().eval()
    with torch.no_grad():
        for parameter in [*module.parameters(), *module.buffers()]:
            parameter.normal_(0, 0.4)
    save_file(as_checkpoint(module), tmp_path / "model.safetensors")
    weights = Weights(tmp_path, torch.float32, torch.device("cpu"))
    read = deepseek_experts(config)
    assert [*read["dense_layers"]] == [0]
    taken = take_experts(ExpertsShard(read["experts"]), ExpertNames(), WIDTH, weights, "layer.")
    weights.finish()
    x = torch.randn(29, WIDTH)
    with torch.inference_mode():
        torch.testing.assert_close(plain_experts(read["experts"], taken, x), module(x[None])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_group": 3}, "n_group: needs a divisor of 16, the number of experts, got 3"),
        ({"topk_group": 5}, "topk_group: needs a whole number from 1 to 4, n_group, got 5"),
        ({"num_experts_per_tok": 20}, "num_experts_per_tok: needs a whole number from 1 to 16"),
        ({"scoring_func": "softmax"}, "scoring_func: needs sigmoid for deepseek_v3, got 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: needs 1, got 2"),
    ],
)
def test_what_cannot_be_names_its_key(changes: dict[str, object], said: str) -> None:
    config = DeepseekV3Config(**SIZES, n_routed_experts=16, n_group=4, topk_group=2)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelError) as raised:
        deepseek_experts(config)
    assert said in str(raised.value)
