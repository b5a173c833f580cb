"""The engine on a GPU: real kernels under continuous batching write the tokens that plain attention writes on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headway.core.config import EngineConfig
from headway.core.engine import Engine
from headway.core.errors import HeadwayError
from headway.core.layout import HND, NHD, VLLM_5D
from headway.core.metadata import Phase
from headway.core.sampling_params import SamplingParams
from headway.models.config import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.weights import Weights
from headway.registry import Registry, create_registry

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(1, 1 + length)) for length in (3, 40, 17, 1, 130, 64)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SIZES = {"prefill whole": 2048, "chunked": 48}
REGISTRY = create_registry(load_entry_points=False)
CHOICES = [(name, layout) for name in REGISTRY.backends for layout in (NHD, HND, VLLM_5D)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def decoder(folder: Path, dtype: torch.dtype, device: str) -> Decoder:
    config = LlamaConfig.from_pretrained(folder)
    return Decoder(DecoderConfig.from_transformers(config), Weights(folder, dtype, torch.device(device)))


def run(model: Decoder, registry: Registry, config: EngineConfig) -> list[list[int]]:
    engine = Engine(model, registry, config)
    seqs = [engine.add_request(str(number), prompt, GREEDY)[0] for number, prompt in enumerate(PROMPTS)]
    while engine.has_unfinished:
        engine.step()
    engine.blocks.check_integrity([])
    return [seq.output_token_ids for seq in seqs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return run(decoder(folder, torch.float32, "cpu"), REGISTRY, EngineConfig(attn_backend="sdpa.math", kv_cache_memory=2**26))


@pytest.mark.parametrize("budget", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("name", "layout"), CHOICES, ids=[f"{name}-{layout.name}" for name, layout in CHOICES])
def test_the_tokens_are_those_of_plain_attention(
    folder: Path, expected: list[list[int]], name: str, layout: object, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model = decoder(folder, torch.float32, "cuda")
    config = EngineConfig(
        attn_backend=name, kv_layout=layout.name, max_num_batched_tokens=budget, kv_cache_memory=2**27, max_model_len=512
    )
    phases = [REGISTRY.supports(name, model.attention_specs[0], layout, 256, phase) for phase in Phase]
    if not all(phases):  # refused with reasons, in the registry's words and the engine's alike
        with pytest.raises(HeadwayError, match="cannot be used here"):
            run(model, REGISTRY, config)
        return
    assert run(model, REGISTRY, config) == expected


def test_auto_on_a_gpu_runs_and_says_what_it_chose(folder: Path) -> None:
    engine = Engine(decoder(folder, torch.bfloat16, "cuda"), REGISTRY, EngineConfig(kv_cache_memory=2**27))
    (seq,) = engine.add_request("r", PROMPTS[1], GREEDY)
    while engine.has_unfinished:
        engine.step()
    assert len(seq.output_token_ids) == 24
    assert engine.selection.names[Phase.DECODE] == "triton"
