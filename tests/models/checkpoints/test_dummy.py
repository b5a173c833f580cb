"""Random weights: any configuration, no files but its config.json, the same on every start."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from headway.core.contract.errors import ConfigError, ModelError, PromptError
from headway.core.sampling.params import SamplingParams
from headway.kernels.experts.plain import Routed, RouteTokens
from headway.kernels.linear.axes import Axis
from headway.llm import LLM
from headway.models.checkpoints.formats.stored import ExpertsMxfp4, Float8Format, Int8Format, PackQuantized, StoredFormat
from headway.models.checkpoints.weights import STD, DummyWeights
from headway.models.loader import load_model
from plain_models import sizes

CPU = torch.device("cpu")
SMALL = sizes(97, 48, 80, 2, max_position_embeddings=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with only a config.json."""
    Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    return tmp_path


def test_weights_are_normal_and_norms_are_one() -> None:
    weights = DummyWeights(torch.float32, CPU)
    drawn = weights.take("model.layers.0.mlp.down_proj.weight", (300, 200))
    assert abs(drawn.mean()) < STD / 50
    assert abs(drawn.std() / STD - 1) < 0.02
    for name in ("model.norm", "model.layers.3.input_layernorm", "model.layers.0.self_attn.q_norm"):
        assert bool((weights.take(f"{name}.weight", (48,)) == 1).all())
    assert weights.take_merged({"q": 4, "k": 2}, 3).shape == (6, 3)
    assert weights.take_merged({"q.bias": 4, "k.bias": 2}).shape == (6,)
    assert "lm_head.weight" not in weights


def test_equal_on_every_start() -> None:
    first, second = (DummyWeights(torch.bfloat16, CPU).take("a", (5, 7)) for _ in range(2))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, second)
    assert not torch.equal(first, DummyWeights(torch.bfloat16, CPU, seed=1).take("a", (5, 7)))


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True), Qwen2Config(**SMALL, tie_word_embeddings=True)],
    ids=lambda config: config.model_type,
)
def test_any_configuration_becomes_a_decoder(tmp_path: Path, config: LlamaConfig | Qwen2Config) -> None:
    config.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "bfloat16", load_format="dummy")
    assert model.tokenizer is None
    assert (model.decoder.lm_head.weight is model.decoder.embed.table) == config.tie_word_embeddings
    assert model.decoder.vocab_size == 97


def test_a_model_without_a_tokenizer_reads_and_writes_token_ids(folder: Path) -> None:
    llm = LLM(str(folder), load_format="dummy", kv_cache_memory="4MiB", num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 9
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "length")
    streamed = list(llm.stream([5, 6, 7], params))
    assert {text for text, _ in streamed} == {""}
    assert streamed[-1][1].outputs[0].token_ids == output.outputs[0].token_ids
    with pytest.raises(PromptError, match="prompt 1: needs token ids, got a text .*loaded without a tokenizer"):
        llm.generate([[5], "a text"], params, use_tqdm=False)
    with pytest.raises(ConfigError, match="stop: needs a model with a tokenizer"):
        llm.generate([[5]], SamplingParams(stop="x"), use_tqdm=False)
    with pytest.raises(ConfigError, match="chat template"):
        llm.chat_prompt("hello")
    assert not llm.engine.has_unfinished


def test_a_tokenizer_that_is_there_is_read_unless_it_is_not_wanted(tmp_path: Path) -> None:
    from sandbox import save_tiny_model

    folder = save_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    options = {"kv_cache_memory": "4MiB", "num_threads": 1}
    (output,) = LLM(str(folder), load_format="dummy", **options).generate("the fox", use_tqdm=False)
    assert output.outputs[0].text
    assert LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **options).tokenizer is None
    with pytest.raises(ModelError, match=r"holds no \.safetensors file"):
        LLM(str(folder), **options)


def test_an_unknown_format_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_format: needs auto or dummy, got 'npz'"):
        load_model(str(tmp_path / "nothing"), load_format="npz")


def test_the_shapes_that_ship_are_valid_json_and_need_the_format() -> None:
    from headway.models.checkpoints.locate import SHAPES, locate

    for name in ("qwen3-0.6b", "llama-3-8b"):
        assert locate(name, weights=False) == SHAPES / name
        assert json.loads((SHAPES / name / "config.json").read_text())["dtype"] == "bfloat16"
        with pytest.raises(ModelError, match=f"model {name}: only its shapes ship.*--load-format dummy"):
            locate(name)


def test_a_dummy_router_spreads_tokens_over_the_experts(tmp_path: Path) -> None:
    sizes = {**SMALL, "hidden_size": 256, "num_hidden_layers": 6, "head_dim": 32}
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    Qwen3MoeConfig(**sizes, **experts).save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path), "float32", load_format="dummy").decoder
    touched: list[int] = []

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every token attends to all: what tokens have in common grows as much as it can."""
        return v.mean(0, keepdim=True).expand_as(v).repeat_interleave(2, dim=1)

    for layer in decoder.layers:
        bound = layer.mlp.compute
        bound.route = partial(counted, touched, bound.route)
    with torch.inference_mode():
        decoder(torch.arange(24), torch.arange(24), attention)
    uniform = 32 * (1 - (1 - 4 / 32) ** 24)
    assert len(touched) == 6
    assert min(touched) > 0.6 * uniform, touched


def counted(touched: list[int], route: RouteTokens, x: Tensor, sorts: bool) -> Routed:
    routed = route(x, sorts)
    touched.append(len(set(routed.experts.flatten().tolist())))
    return routed


FORMATS = {
    "fp8 rows": Float8Format("channel"),
    "fp8 blocks": Float8Format((128, 128)),
    "int8": Int8Format("channel"),
    "int4": PackQuantized(4, 32, symmetric=True),
    "mxfp4": ExpertsMxfp4(),
}


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_weights_in_a_format_are_drawn_as_large_as_plain_ones_and_cut_as_they_are(form: StoredFormat) -> None:
    """Each of two ranks holds its shard of the unsharded weight: rows of experts, or columns."""

    source = partial(DummyWeights, torch.float32, CPU, form=form)
    rows, columns, half = Axis.all(384), Axis.all(256), Axis(256, (range(128, 256),))
    whole = source().take_experts({"a": rows}, columns)
    assert not isinstance(whole, Tensor)
    expected = whole.dequantized(torch.float32)
    assert bool(expected.isfinite().all())
    assert abs(expected.mean()) < STD / 20
    assert abs(expected.std() / STD - 1) < 0.03
    cut = source().take_experts({"a": rows}, half)
    plain = cut if isinstance(cut, Tensor) else cut.dequantized(torch.float32)
    assert torch.equal(plain, expected[:, 128:])
    stacked = source().take_stacked("a", (Axis(3, (range(1, 3),)), 256, 128), transposed=True)
    plain = stacked if isinstance(stacked, Tensor) else stacked.dequantized(torch.float32)
    assert torch.equal(plain, expected[128:])
