"""Kinds of layers on backends of their own, in CUDA graphs, choose the tokens of one backend. A CPU tests the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, Gemma4TextConfig

from engine_logits import logits_by_transformers, observed, save_random
from headway.core.contract.metadata import Phase
from headway.core.contract.model import AttentionFunctions
from headway.core.contract.sampling_plugins import ProposerOptions
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.models.loader import load_model
from headway.registry import create_registry
from plain_models import GEMMA, GEMMA4, VOCAB
from tiny_engine import generate, made_engine, tokens_of

REGISTRY = create_registry(load_entry_points=False)
MAX_TOKENS = 64
LENGTHS = (70, 3, 130, 1, 41)
CONFIG = EngineConfig(kv_cache_memory=2**26, max_model_len=256, max_num_batched_tokens=48, max_num_seqs=8)
"""All prompts are longer than a step together, and the longest runs in chunks."""
GPU = pytest.mark.gpu
SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}


def random_prompts() -> list[list[int]]:
    random = Random(4)
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]


def assert_graphs(fast: EngineLoop, device: str) -> None:
    """All decodes replay a graph, and prompts run in pieces of graphs."""
    assert (fast.stats.num_graph_steps > 0) == (sum(fast.stats.steps_in_pieces.values()) > 0) == (device == "cuda")
    assert device == "cpu" or not fast.stats.steps_without_graph


def assert_same_choices(fast: EngineLoop, plain: EngineLoop, prompts: list[list[int]], tolerance: float) -> list[int]:
    """Both engines see the same text up to the first token that differs: their logits must agree as far as that. Without a
    tolerance the tokens must be equal. Return the numbers of prompt tokens in the prefix cache of the first."""
    both = [observed(engine, prompts, MAX_TOKENS) for engine in (fast, plain)]
    for (tokens, logits, _), (expected, right, _) in zip(*both, strict=True):
        same = next((place for place, pair in enumerate(zip(tokens, expected, strict=True)) if len(set(pair)) > 1), MAX_TOKENS)
        assert same == MAX_TOKENS or tolerance
        upto = slice(0, same + 1)
        assert (logits[upto] - right[upto]).float().norm() <= (tolerance or 1e-3) * right[upto].float().norm()
    return [hit for _, _, hit in both[0]]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(
    ("device", "dtype", "backends", "one"),
    [
        ("cpu", "float32", "window=sdpa.math,full:prefill=sdpa,full:decode=native", "sdpa"),
        pytest.param("cuda", "float32", "prefill=triton,window:decode=triton,full:decode=vllm_paged", "triton", marks=GPU),
        pytest.param("cuda", "float32", "prefill=triton,window:decode=vllm_paged,full:decode=triton", "triton", marks=GPU),
        pytest.param("cuda", "bfloat16", "window=triton,full:prefill=hopper,full:decode=hopper_decode", "triton", marks=GPU),
        pytest.param("cuda", "bfloat16", "full=triton,window:prefill=hopper,window:decode=hopper_decode", "triton", marks=GPU),
    ],
)
def test_kinds_on_their_backends_choose_what_one_backend_chooses(
    tmp_path: Path, device: str, dtype: str, backends: str, one: str, sinks: bool
) -> None:
    """Gemma 3's layers, with sinks too as those of gpt-oss: chunks, an uneven batch, and prefix hits."""
    config = EngineConfig(attn_backend=backends)
    for name in config.backend_request.names:
        if not REGISTRY.availability(name):
            pytest.skip(f"{name}: {REGISTRY.availability(name)}")
    if sinks and "native" in backends:
        backends = "window=sdpa.math,full=sdpa"
    shape = {**GEMMA, **SIZES, "head_dim": 64, "sliding_window": 24, "sliding_window_pattern": 3}
    save_random(Gemma3TextConfig(**shape), tmp_path)
    model = load_model(str(tmp_path), dtype, device, skip_tokenizer_init=True).decoder
    if sinks:
        model.attention_specs = [replace(each, sinks=(2.0, -1.0, 0.5, 3.0)) for each in model.attention_specs]
    fast = made_engine(model, REGISTRY, replace(CONFIG, attn_backend=backends, async_scheduling=False))
    assert len({part.names[Phase.DECODE] for part in fast.selection.parts.values()}) == 2
    plain = made_engine(model, REGISTRY, replace(CONFIG, attn_backend=one, enforce_eager=True, async_scheduling=False))
    tolerance, prompts = 0.0 if dtype == "float32" else 0.1, random_prompts()
    assert assert_same_choices(fast, plain, prompts, tolerance) == [0] * len(prompts)
    again = [[*prompt, 5, 6] for prompt in prompts]
    assert assert_same_choices(fast, plain, again, tolerance)[2] >= 112
    assert_graphs(fast, device)
    assert plain.stats.num_graph_steps == 0
    if dtype == "float32":  # as served: the next step is launched before a step's tokens are read
        usual = made_engine(model, REGISTRY, replace(CONFIG, attn_backend=backends))
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        assert tokens_of(generate(usual, prompts, greedy)) == tokens_of(generate(plain, prompts, greedy))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_gemma4_with_drafts_writes_what_transformers_writes(tmp_path: Path, device: str) -> None:
    """As E2B: heads of 256 and 512 elements, layers that share a KV cache, and an embedding per layer."""
    shape = {**GEMMA4, **SIZES, "head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 1, "sliding_window": 24}
    own = {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
    reference = save_random(Gemma4TextConfig(**{**shape, **own}), tmp_path)
    model = load_model(str(tmp_path), "float32", device, skip_tokenizer_init=True).decoder
    calls: list[tuple[str, int]] = []

    def noting(what: str) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        return lambda layer, q, k, v: calls.append((what, layer)) or torch.zeros_like(q)

    ids = torch.arange(2, device=device)
    model(ids, ids, AttentionFunctions(noting("writes"), attend_again=noting("reads")))
    assert calls == [("writes", 0), ("writes", 1), ("writes", 2), ("reads", 1), ("reads", 1), ("reads", 2)]
    config = replace(CONFIG, attn_backend="triton" if device == "cuda" else "sdpa")
    fast = made_engine(model, REGISTRY, replace(config, async_scheduling=False))
    assert len(fast.executor.caches) == 3
    prompts, expected = [[*each, *each[:9]] for each in random_prompts()], []
    for prompt, (tokens, logits, _) in zip(prompts, observed(fast, prompts, MAX_TOKENS), strict=True):
        right = logits_by_transformers(reference, prompt, tokens)
        assert tokens == right.argmax(-1).tolist()
        assert (logits.cpu() - right).norm() < 1e-3 * right.norm()
        expected.append(tokens)
    assert_graphs(fast, device)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    ngram = REGISTRY.proposer("ngram").make(ProposerOptions())
    drafting = made_engine(model, REGISTRY, config, proposer=ngram, measured=False)
    for _ in range(2):  # the second time from the prefix cache
        assert tokens_of(generate(drafting, prompts, greedy)) == expected
    assert drafting.stats.num_draft_tokens > drafting.stats.num_accepted_tokens > 0
    assert_graphs(drafting, device)
