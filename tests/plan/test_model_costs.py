"""Bytes of a model's parts are those that its decoder takes, and a cut shares them out."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, LlamaConfig, PretrainedConfig, Qwen2MoeConfig

import hybrid_models
import plain_models
from headway.core.contract.errors import ConfigError, ModelError
from headway.core.contract.ranks import ONE_RANK
from headway.core.contract.state import KEY_VALUE
from headway.kernels.linear.axes import Shape, held_sizes, whole_sizes
from headway.models.checkpoints.weights import DummyWeights
from headway.models.layers.decoder import Decoder
from headway.plan.model_costs import WEIGHT_FORMATS, PlannedModel, check_cache_dtype, rank_costs, read_planned_model
from thread_ranks import alone

SIZES: dict[str, Any] = {**hybrid_models.SMALL, "hidden_size": 128, "intermediate_size": 256}
LATENT = {
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ROWS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=32, num_local_experts=6, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(**{**SIZES, "num_key_value_heads": 4}, **LATENT),
    "diffllama": plain_models.ROWS["diffllama"],
    "gemma4": plain_models.ROWS["gemma4, as E2B"],
    **hybrid_models.ROWS,
}


class CountedWeights(DummyWeights):
    """Counts the elements of what is a matrix: norms, biases, convolutions and decays are no part of a plan."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, torch.device("cpu"))
        self.elements = 0

    def take(self, name: str, shape: Shape) -> torch.Tensor:
        if len(shape) > 1 and min(whole_sizes(shape)[-2:]) > 8:
            self.elements += torch.Size(held_sizes(shape)).numel()
        return super().take(name, shape)


def planned(name: str, folder: Path) -> PlannedModel:
    config = ROWS[name]
    config.architectures = [read_architecture(config)]
    config.save_pretrained(folder)
    return read_planned_model(str(folder))


def read_architecture(config: PretrainedConfig) -> str:
    from headway.models.families.families import FAMILIES

    return FAMILIES[config.model_type].architecture


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ROWS)
def test_weights_and_specs_are_those_of_a_rank_of_the_decoder(name: str, size: int, tmp_path: Path) -> None:
    config, dtype = planned(name, tmp_path)
    counted = CountedWeights(dtype)
    decoder = Decoder(config, counted, ranks=ONE_RANK if size == 1 else alone(0, size))
    costs = rank_costs(config, dtype, size)
    assert costs.weight_bytes / costs.itemsize == pytest.approx(counted.elements, rel=0.06), name
    assert [replace(spec, sinks=None) for spec in costs.layers.cached] == [
        replace(spec, sinks=None) for spec in decoder.attention_specs
    ]
    assert costs.state_bytes == sum(KEY_VALUE.bytes_per_slot(layer.spec) for layer in decoder.state_layers)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize("size", [2, 8])
def test_ranks_share_weights_and_caches_out(name: str, size: int) -> None:
    config, dtype = read_planned_model(name)
    one, rank = rank_costs(config, dtype), rank_costs(config, dtype, size)
    assert 1 <= size * rank.weight_bytes / one.weight_bytes < 1.06  # routers, and repeated key-value heads, are on every rank
    assert rank.cache_row_bytes * size == one.cache_row_bytes * max(size / config.num_kv_heads, 1)
    assert size * rank.state_bytes == pytest.approx(one.state_bytes, rel=0.01)
    assert one.num_sums == 0
    assert rank.num_sums == 2 * config.num_layers + 1


def test_formats_and_cache_types_take_their_bytes() -> None:
    model = read_planned_model("llama-3-8b")
    plain = rank_costs(*model)
    int4 = rank_costs(*model, weights=WEIGHT_FORMATS["int4"])
    kept = plain.plain_bytes
    assert int4.weight_bytes - kept == pytest.approx((plain.weight_bytes - kept) * 4.125 / 16)
    assert 2 * rank_costs(*model, kv_cache_dtype="fp8_e4m3").cache_row_bytes == plain.cache_row_bytes


def test_what_a_gpu_does_not_cut_is_refused() -> None:
    """A decoder on a CPU would give each of 16 ranks eight whole experts."""
    config, dtype = read_planned_model("qwen3-30b-a3b")
    uneven = replace(config, experts=replace(config.experts, intermediate_size=776))
    with pytest.raises(ConfigError, match="a divisor of the experts' inner size 776 .on a GPU they are not divided by expert."):
        rank_costs(uneven, dtype, 16)


def test_a_latent_cache_has_no_scales_for_each_token(tmp_path: Path) -> None:
    assert not check_cache_dtype(read_planned_model("qwen3-30b-a3b").config, "int8_per_token_head")
    assert "latent cache" in check_cache_dtype(planned("deepseek_v3", tmp_path).config, "int8_per_token_head")


def test_experts_touched_are_those_of_uneven_draws() -> None:
    """Draw tokens' experts one by one, each expert with its own frequency, as the count assumes, and count them."""
    model = read_planned_model("qwen3-30b-a3b")
    experts = rank_costs(*model).experts
    one = [experts.touched(tokens) for tokens in (1, 16, 64, 4096)]
    assert one[0] == pytest.approx(8, rel=0.01)
    assert one == sorted(one)
    assert one[-1] == pytest.approx(128, rel=0.01)
    draw, chances = random.Random(), experts.chances
    counts = [sum(any(draw.random() < chance for _ in range(16)) for chance in chances) for _ in range(200)]
    assert one[1] == pytest.approx(sum(counts) / len(counts), rel=0.03)
    halves = rank_costs(*model, 2).experts
    assert (halves.touched(16), 2 * halves.params) == (one[1], experts.params)


def test_a_config_without_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}')
    with pytest.raises(ModelError, match="needs num_attention_heads, num_hidden_layers, vocab_size, got none"):
        read_planned_model(str(tmp_path))


def test_experts_have_the_bytes_of_the_format(tmp_path: Path) -> None:
    """Those of fp8 and int4 are everyone's, those of mxfp4 experts' alone."""
    config, dtype = planned("gpt_oss", tmp_path)
    plain = rank_costs(config, dtype)
    params = plain.experts.params * plain.experts.count * plain.experts.config.num_held
    products = sum(each.rows * each.columns * each.count for each in plain.products)
    for name, of_product, of_expert in (("fp8", 1, 1), ("int4", 4.125 / 8, 4.125 / 8), ("mxfp4", dtype.itemsize, 4.25 / 8)):
        saved = plain.weight_bytes - rank_costs(config, dtype, weights=WEIGHT_FORMATS[name]).weight_bytes
        assert saved == pytest.approx(products * (dtype.itemsize - of_product) + params * (dtype.itemsize - of_expert)), name
