"""DeepSeek's experts beside transformers' modules: groups, correction bias, scaling and shared experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from headway.core.contract.errors import ModelError
from headway.kernels.experts.plain import PlainExperts
from headway.kernels.experts.weights import ExpertsCut
from headway.models.checkpoints.expert_weights import take_experts
from headway.models.checkpoints.weights import Weights
from headway.models.config import ExpertNames
from headway.models.families.experts import deepseek_experts
from transformers_release import needs

HIDDEN = 32
SIZES = {
    "hidden_size": HIDDEN,
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
    experts = PlainExperts(read["experts"], take_experts(ExpertsCut(read["experts"]), ExpertNames(), HIDDEN, weights, "layer."))
    weights.finish()
    x = torch.randn(29, HIDDEN)
    with torch.inference_mode():
        torch.testing.assert_close(experts(x, lambda rows, linear: linear(rows)), module(x[None])[0], atol=1e-4, rtol=1e-4)


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
