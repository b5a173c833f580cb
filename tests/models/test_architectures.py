"""Tests that tiny models of every family give transformers' logits, with paged caches, states and windows, in every layout."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)

import hybrid_models
from backend_cases import LAYOUTS
from dense_attention import DenseAttention, logits_of_text
from engine_logits import logits_by_transformers, observed, save_random
from graph_stub import PiecesTape
from headway.core.contract.errors import ModelError
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.kernels.step.torch_operations import TorchOperations
from headway.models.checkpoints.checkpoint import check_bounds
from headway.models.families.families import FAMILIES, read_decoder_config
from headway.models.layers import decoder
from headway.models.loader import LoadOptions, load_model
from headway.registry import Registry
from hybrid_models import READS_IMAGES
from hybrid_models import ROWS as HYBRIDS
from plain_models import GEMMA4_READS_IMAGES, ROWS, SMALL, VOCAB
from tiny_engine import generate, made_engine, tokens_of
from transformers_release import needs

BATCHED_TOKENS = 24
"""Maximum number of tokens per step: less than the longest prompt, so that it runs in chunks together with decodes."""
PROMPT_LENS = (13, 41, 5)
MAX_TOKENS = 24


def test_every_family_has_a_row() -> None:
    both = [*ROWS.values(), *hybrid_models.ROWS.values()]
    assert {config.model_type for config in both} == set(FAMILIES)


# Layouts differ in attention only, so two models show it.
CASES = [*((name, "auto") for name in ROWS), *((name, other.name) for name in ("llama", "mistral") for other in LAYOUTS[1:])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_logits_equal_transformers(tmp_path: Path, registry: Registry, name: str, layout: str) -> None:
    needs(FAMILIES[ROWS[name].model_type].architecture)
    reference = save_random(ROWS[name], tmp_path)
    engine = made_engine(
        load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder,
        registry,
        EngineConfig(block_size=8, kv_layout=layout, kv_cache_memory=2**20, max_num_batched_tokens=BATCHED_TOKENS),
    )
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENS]
    before = engine.stats.snapshot()
    compare(reference, engine, prompts, [0, 0, 0])
    steps = (engine.stats - before).num_steps
    assert steps < MAX_TOKENS + 4, "prompts were served beside decoding sequences"
    # The first two go on as they were, and the third turns away within a block.
    goes_on, turns = prompts[1] + [5, 6, 7], [*prompts[1][:19], 3, 4, 5]
    compare(reference, engine, [goes_on, turns], [len(prompts[1]), 19])


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.3, 1.1],
    "long_factor": [2.0, 5.0, 9.0],
    "original_max_position_embeddings": 32,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("implementation", ["headway", "transformers"])
@pytest.mark.parametrize(
    ("longest", "lengths"), [(None, (33, 70, 41)), (None, (30, 32, 9)), (32, (5, 7, 3))], ids=["long", "across", "short"]
)
def test_longrope_takes_one_set_of_factors(
    tmp_path: Path, registry: Registry, implementation: str, longest: int | None, lengths: tuple[int, ...]
) -> None:
    """Beyond the original length the long ones, as transformers does for a sequence that is so long; chunks and hits included.

    A sequence that begins within the original length and ends beyond it has the long ones from its first token on, which
    transformers computes anew at the border."""
    reference = save_random(Phi3Config(**SMALL, original_max_position_embeddings=32, rope_parameters=LONGROPE), tmp_path)
    config = EngineConfig(block_size=8, max_num_batched_tokens=BATCHED_TOKENS, max_model_len=longest)
    options = {"skip_tokenizer_init": True, "model_impl": implementation, "options": LoadOptions(max_model_len=longest)}
    loaded = load_model(str(tmp_path), "float32", **options)
    assert loaded.long_factors is (longest is None)
    engine = made_engine(loaded.decoder, registry, config)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    compare(reference, engine, prompts, [0, 0, 0])
    compare(reference, engine, prompts, [length - 1 if length > 8 else 0 for length in lengths])


def compare(reference: Any, engine: EngineLoop, prompts: list[list[int]], cached: list[int]) -> None:
    for prompt, (tokens, logits, hit), expected_hit in zip(prompts, observed(engine, prompts, MAX_TOKENS), cached, strict=True):
        assert len(tokens) == MAX_TOKENS
        assert hit == expected_hit
        expected = logits_by_transformers(reference, prompt, tokens)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


STEPS = 20
WHOLE, CUT = 29, 37
"""Tokens of two prompts."""
CHUNKS = (2, 16, 1, 18)
"""Chunks of the second prompt: one is shorter than a convolution's window, and one is a single token."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_of_hybrids_equal_transformers(tmp_path: Path, name: str) -> None:
    needs(FAMILIES[HYBRIDS[name].model_type].architecture)
    reference = save_random(HYBRIDS[name], tmp_path)
    model = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, VOCAB, (length + STEPS,), generator=generator) for length in (WHOLE, CUT)]
    with torch.inference_mode():
        found = [torch.cat(rows) for rows in zip(*packed(model, texts), strict=True)]
        for text, logits in zip(texts, found, strict=True):
            expected = reference(text[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def packed(model: Any, texts: list[Tensor]) -> Any:
    """Logits of both texts, step by step: the first prompt with chunks of the second, then single tokens of both."""
    attention, done = DenseAttention(model), [0, 0]
    lengths = [(WHOLE, CHUNKS[0]), *((1, chunk) for chunk in CHUNKS[1:])]
    lengths += [(1, 1)] * (STEPS - len(CHUNKS) + 1) + [(0, 1)] * (len(CHUNKS) - 1)
    for counts in lengths:
        places = [torch.arange(start, start + count) for start, count in zip(done, counts, strict=True)]
        ids = torch.cat([text[place] for text, place in zip(texts, places, strict=True)])
        attention.begin([(seq, count) for seq, count in enumerate(counts) if count])
        yield model.compute_logits(model(ids, torch.cat(places), attention)).split(list(counts))
        done = [start + count for start, count in zip(done, counts, strict=True)]
    assert done == [len(text) for text in texts]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_configuration_alone_gives_all_specs(tmp_path: Path, name: str) -> None:
    needs(FAMILIES[HYBRIDS[name].model_type].architecture)
    HYBRIDS[name].save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "bfloat16", load_format="dummy").decoder
    specs = [layer.spec for layer in model.state_layers]
    assert specs
    assert {spec.dtype for spec in specs} == {torch.bfloat16}
    assert {spec.state_dtype for spec in specs} == {torch.float32}
    kinds = [layer for layer in model.config.layers if layer.state]
    assert len(specs) == len(kinds) * (2 if HYBRIDS[name].model_type == "jamba" else 1)
    assert len(model.attention_specs) == len(model.kv_scales) == sum(layer.attention for layer in model.config.layers)
    assert bool(logits_of_text(model, torch.arange(3, 8)).isfinite().all())


@pytest.mark.parametrize("config", [READS_IMAGES, *GEMMA4_READS_IMAGES], ids=lambda config: config.model_type)
def test_the_text_part_of_a_model_that_reads_images_too(tmp_path: Path, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    reference = AutoModelForImageTextToText.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
    text = torch.randint(3, 90, (21,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(logits_of_text(model, text), reference(input_ids=text[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["diffllama", "gemma4, as 31B", "gemma4, as E2B"])
def test_a_model_runs_in_pieces_of_graphs(tmp_path: Path, registry: Registry, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that several layers share are those of the replayed step, not of the recording. The recorder hears torch's operations
    only."""

    def plain(inv_freq: Tensor, factors: Tensor, kernels: Any, experts: Any, halves: Any, _: bool) -> TorchOperations:
        return TorchOperations(inv_freq, factors, experts, halves)

    monkeypatch.setattr(decoder, "operations_for", plain)
    reference = save_random(ROWS[name], tmp_path)
    config = EngineConfig(attn_backend="sdpa", block_size=8, kv_cache_memory=2**20, max_num_batched_tokens=BATCHED_TOKENS)
    engine = made_engine(load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder, registry, config)
    engine.executor.capture(PiecesTape())
    draw = random.Random(0)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENS]
    compare(reference, engine, prompts, [0, 0, 0])
    assert engine.stats.steps_in_pieces.total()


def test_experts_that_a_checkpoint_stacks_are_read_as_single_ones(tmp_path: Path) -> None:
    reference = save_random(HYBRIDS["qwen3_5_moe"], tmp_path)
    stacked = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in stacked)
    first = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
    save_file(stacked, tmp_path / "model.safetensors")
    second = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
    assert torch.equal(*(logits_of_text(model, torch.arange(3, 12)) for model in (first, second)))


@pytest.mark.parametrize(("named", "dtype"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_configuration_may_name_the_states_type(named: str, dtype: torch.dtype) -> None:
    config = read_decoder_config(changed("qwen3_next", mamba_ssm_cache_dtype=named))
    assert config.state.spec.state_dtype == dtype


REFUSED = [
    ("qwen3_next", {"layer_types": ["linear_attention", "mamba3"] * 2}, "layer_types: needs .*, got 'mamba3' in layer 1"),
    ("nemotron_h", {"layers_block_type": ["mlp", "mlp", "lstm"]}, "layers_block_type: needs .*, got 'lstm' in layer 2"),
    ("nemotron_h, experts", {"moe_latent_size": 16}, "moe_latent_size: needs null, got 16"),
    ("qwen3_next", {"linear_num_value_heads": 5}, "linear_num_value_heads: needs a multiple of linear_num_key_heads=2, got 5"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache: needs a whole number of at least 2, got 1"),
    ("bamba", {"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype: needs auto or float32 .*, got 'int8'"),
    ("falcon_h1", {"attention_bias": True}, "attention_in_multiplier: needs 1 with attention_bias, got 1.2"),
]


@pytest.mark.parametrize(("name", "values", "words"), REFUSED, ids=[words.partition(":")[0] for *_, words in REFUSED])
def test_what_the_decoder_does_not_compute_is_refused(name: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_decoder_config(changed(name, **values))


def test_what_neither_implementation_computes_is_refused_by_the_decoders_reason(tmp_path: Path) -> None:
    save_random(changed("qwen3_next", hidden_act="gelu"), tmp_path)
    words = "hidden_act: needs silu for experts, got gelu; and Qwen3NextForCausalLM keeps a state"
    with pytest.raises(ModelError, match=words):
        load_model(str(tmp_path), "float32", skip_tokenizer_init=True)


def changed(name: str, **values: Any) -> Any:
    config = copy.deepcopy(HYBRIDS[name])
    for key, value in values.items():
        setattr(config, key, value)
    return config


def test_sizes_that_contradict_the_tensors_are_named_with_both(tmp_path: Path) -> None:
    save_random(HYBRIDS["bamba"], tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "mamba_d_state": 12}))
    words = r"layers\.0\.mamba\.in_proj\.weight needs shape \[248, 48\] by config.json, got \[240, 48\]"
    with pytest.raises(ModelError, match=words):
        load_model(str(tmp_path), "float32", skip_tokenizer_init=True)


def test_a_size_that_a_model_does_not_use_is_not_bounded_by_its_tensors() -> None:
    sizes, shapes = {"hidden_size": 64, "vocab_size_per_layer_input": 262_144}, {"weight": (64, 64)}
    check_bounds(Path("folder"), {"hidden_size_per_layer_input": 0, **sizes}, shapes)
    with pytest.raises(ModelError, match="vocab_size_per_layer_input needs a whole number of at most"):
        check_bounds(Path("folder"), {"hidden_size_per_layer_input": 8, **sizes}, shapes)


def test_the_adapter_refuses_layers_with_a_state(tmp_path: Path) -> None:
    save_random(HYBRIDS["qwen3_next"], tmp_path)
    words = "keeps a state of each sequence .* the adapter does not carry .layer 0 is linear_attention.; .*model_impl='headway'"
    with pytest.raises(ModelError, match=words):
        load_model(str(tmp_path), "float32", skip_tokenizer_init=True, model_impl="transformers")


WINDOWED: dict[str, Any] = {**SMALL, "num_hidden_layers": 4, "head_dim": 16, "max_position_embeddings": 512}
CONFIGS: dict[str, PretrainedConfig] = {
    "mistral": MistralConfig(**WINDOWED, sliding_window=19),
    "qwen2, one layer sees all": Qwen2Config(**WINDOWED, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "gemma3": Gemma3TextConfig(**{**WINDOWED, "num_hidden_layers": 6}, sliding_window=13, query_pre_attn_scalar=20),
    "gpt_oss": GptOssConfig(**WINDOWED, num_local_experts=4, num_experts_per_tok=2, sliding_window=11),
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, max_model_len=320, max_num_batched_tokens=64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_sequences_of_many_windows_are_continued_as_transformers_does(tmp_path: Path, registry: Registry, name: str) -> None:
    """In chunks, in one batch, after a prefix cache hit, and after preemption."""
    reference = save_random(CONFIGS[name], tmp_path)
    decoder = load_model(str(tmp_path), "float32", skip_tokenizer_init=True).decoder
    random = Random(1)
    shared = [random.randrange(3, VOCAB) for _ in range(130)]
    tails = ([], [3, 4], [random.randrange(3, VOCAB) for _ in range(150)])
    prompts = [[*shared, *tail] for tail in tails] + [[5] * 3, shared[:40]]
    engine = made_engine(decoder, registry, replace(CONFIG, kv_cache_memory=2**22))
    written = []
    for _ in range(2):
        again = observed(engine, prompts, 24)
        for prompt, (tokens, logits, _) in zip(prompts, again, strict=True):
            torch.testing.assert_close(logits, logits_by_transformers(reference, prompt, tokens), rtol=0, atol=1e-4)
            written.append(tokens)
    assert [hit for _, _, hit in again] == [129, 131, 279, 0, 39]
    assert sum(usage.num_freed for usage in engine.cache_usage().groups) > 40
    pages = engine.capacity.pool.page_format
    tight = replace(CONFIG, kv_cache_memory=(pages.pages_for(320, 71) + 4) * pages.page_bytes)
    short = made_engine(decoder, registry, replace(tight, async_scheduling=True))
    crowd = [*range(5), *[3, 4] * 3]
    crowded = generate(short, [prompts[number] for number in crowd], GREEDY)
    assert tokens_of(crowded) == [written[number] for number in crowd]
    assert short.stats.num_preemptions > 0
