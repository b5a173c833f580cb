"""The floor counts what a model's own tensors hold, and what its steps must read and compute."""

from __future__ import annotations

import pytest
import torch

from headway.bench.generate.roofline import Rates, Roofline, keys_seen
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.stats import EngineStats
from headway.models.checkpoints.locate import SHAPES
from headway.models.checkpoints.weights import DummyWeights
from headway.models.families.families import read_decoder_config
from headway.models.layers.decoder import Decoder
from headway.models.loader import read_config
from tiny_bench import CPU

META = torch.device("meta")


class MetaWeights(DummyWeights):
    """Shapes without memory; counts the numbers that are taken."""

    def __init__(self) -> None:
        self.dtype, self.device, self.count = torch.bfloat16, META, 0

    def draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        sinks = name.endswith("sinks")  # which the host reads
        tensor = torch.zeros(shape) if sinks else torch.empty(shape, dtype=self.dtype, device=META)
        self.count += tensor.numel()
        return tensor


@pytest.fixture(params=["qwen3-0.6b", "llama-3-8b"])
def model(request: pytest.FixtureRequest) -> tuple[Decoder, int]:
    weights = MetaWeights()
    return Decoder(read_decoder_config(read_config(SHAPES / request.param)), weights), weights.count


def test_weights_read_a_step_are_those_of_the_model_less_norms_and_a_separate_embedding(model: tuple[Decoder, int]) -> None:
    decoder, count = model
    config = decoder.config
    norms = (2 * config.num_layers + 1) * config.hidden_size + 2 * config.num_layers * config.head_dim * (
        config.qk_norm is not None
    )
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert Roofline(config, decoder.attention_specs).weight_bytes == 2 * (count - norms - embedding)


@pytest.mark.slow
def test_the_shapes_that_ship_are_of_the_published_sizes() -> None:
    sizes = {}
    for folder in SHAPES.iterdir():
        weights = MetaWeights()
        decoder = Decoder(read_decoder_config(read_config(folder)), weights)
        sizes[folder.name] = (weights.count, Roofline(decoder.config, decoder.attention_specs).kv_bytes)
    assert sizes == {
        "qwen3-0.6b": (596_049_920, 114_688),
        "qwen3-30b-a3b": (30_532_122_624, 98_304),
        "llama-3-8b": (8_030_261_248, 131_072),
        "llama-3-70b": (70_553_706_496, 327_680),
        "gpt-oss-20b": (20_914_757_184, 49_152),
        "qwen3-next-80b-a3b": (79_674_391_296, 24_576),  # less what proposes drafts
    }


def test_of_experts_a_step_reads_those_that_its_tokens_touch() -> None:
    config = read_decoder_config(read_config(SHAPES / "qwen3-30b-a3b"))
    spec = AttentionSpec(32, 4, 128, 1.0, torch.bfloat16, CPU)
    roofline = Roofline(config, [spec] * 48)
    expert = 48 * 3 * 768 * 2048
    assert roofline.expert_bytes(0) == 0
    assert roofline.expert_bytes(1) == pytest.approx(2 * 8 * expert)
    assert roofline.expert_bytes(1000) == pytest.approx(2 * 128 * expert)
    dense = 48 * 2048 * (2 * 4096 + 2 * 512 + 128) + 151936 * 2048
    assert roofline.weight_bytes == 2 * dense
    stats = EngineStats(num_steps=10, num_decode_tokens=160)
    floor = roofline.floor(stats, [], 1, Rates(1.0, 1.0))
    assert floor.decode == pytest.approx(10 * (2 * dense + roofline.expert_bytes(16)) / 1e9)
    more = roofline.prefill_flops([7]) - 4 * 32 * 128 * 48 * 28
    assert more == 2 * (7 * (dense - 151936 * 2048 + 8 * expert) + 151936 * 2048)


def test_each_of_several_ranks_reads_and_computes_its_part() -> None:
    config = read_decoder_config(read_config(SHAPES / "qwen3-30b-a3b"))
    whole, part = (Roofline(config, [AttentionSpec(32 // n, 4 // n, 128, 1.0, torch.bfloat16, CPU)] * 48, n) for n in (1, 2))
    stats, rates = EngineStats(num_steps=10, num_decode_tokens=160, kv_tokens_read=1000), Rates(4000.0, 700.0)
    one, two = (each.floor(stats, [8192], 16384, rates) for each in (whole, part))
    assert (2 * two.decode, 2 * two.prefill) == (pytest.approx(one.decode), pytest.approx(one.prefill))


def test_the_floor_is_bytes_over_the_read_rate_and_operations_over_the_matrix_rate(model: tuple[Decoder, int]) -> None:
    decoder, _ = model
    roofline = Roofline(decoder.config, decoder.attention_specs)
    stats = EngineStats(num_steps=10, kv_tokens_read=1000)
    rates = Rates(read_gbps=4000.0, matrix_tflops=700.0)
    floor = roofline.floor(stats, [8192], 16384, rates)
    assert floor.decode == pytest.approx((10 * roofline.weight_bytes + 1000 * roofline.kv_bytes) / 4e12)
    saved = roofline.weight_bytes / 4e12  # the prompt's one step reads the weights while it computes
    assert floor.prefill == pytest.approx(roofline.prefill_flops([8192]) / 7e14 - saved)
    assert roofline.floor(stats, [1], 16384, rates).prefill == 0, "one token computes less than it reads"


def test_a_prompts_operations_are_two_a_weight_and_token_and_four_a_key(model: tuple[Decoder, int]) -> None:
    decoder, _ = model
    config, roofline = decoder.config, Roofline(decoder.config, decoder.attention_specs)
    head = config.vocab_size * config.hidden_size
    products = 2 * ((roofline.weight_bytes // 2 - head) * 3 + head)
    assert roofline.prefill_flops([3]) == products + 4 * config.num_layers * config.num_heads * config.head_dim * (1 + 2 + 3)


@pytest.mark.parametrize(("length", "window"), [(7, None), (7, 7), (7, 9), (7, 3), (1, 1), (5, 1)])
def test_keys_are_those_that_causality_and_window_show(length: int, window: int | None) -> None:
    assert keys_seen(length, window) == sum(min(at + 1, window or length) for at in range(length))
