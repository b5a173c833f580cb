"""Kinds of layers on backends of their own, in CUDA graphs, choose the tokens of one backend. A CPU tests the tests."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, Gemma4TextConfig

from engine_logits import logits_by_transformers, observed, save_random
from headway.core.contract.metadata import Phase
from headway.core.contract.model import AttentionFunctions
from headway.core.contract.text_plugins import ProposerOptions
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.models.loader import load_model
from headway.registry import create_registry
from plain_models import GEMMA, GEMMA4, VOCAB
from tiny_engine import generate, made_engine, tokens_of

REGISTRY = create_registry(load_entry_points=False)
GPU = pytest.mark.gpu
TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "max_position_embeddings": 256, "sliding_window": 24}
CONFIG = EngineConfig(kv_cache_memory=2**26, max_model_len=256, max_num_batched_tokens=48, max_num_seqs=8, async_scheduling=False)
RANDOM = Random(4)
PROMPTS = [[RANDOM.randrange(3, VOCAB) for _ in range(length)] for length in (70, 3, 130, 1, 41)]
"""The longest run in chunks, beside sequences that decode."""


def assert_graphs(engine: EngineLoop, device: str) -> None:
    """On a GPU every step replays graphs: decodes one each, and prompts pieces."""
    assert (engine.stats.num_graph_steps > 0) == (engine.stats.steps_in_pieces.total() > 0) == (device == "cuda")
    assert not engine.stats.steps_without_graph


def compare(fast: EngineLoop, plain: EngineLoop, prompts: list[list[int]], tolerance: float) -> list[int]:
    """Both engines see one text up to the first token that differs, so their logits must agree that far; tokens differ only where
    there is a tolerance. Return the numbers of prompt tokens that the first found in its cache."""
    both = [observed(engine, prompts, TOKENS) for engine in (fast, plain)]
    for (tokens, logits, _), (others, right, _) in zip(*both, strict=True):
        equal = [token == other for token, other in zip(tokens, others, strict=True)]
        assert tolerance or all(equal)
        seen = slice(0, [*equal, False].index(False) + 1)
        assert (logits[seen] - right[seen]).float().norm() <= (tolerance or 1e-3) * right[seen].float().norm()
    return [hit for _, _, hit in both[0]]


@pytest.mark.parametrize(
    ("device", "dtype", "backends", "sinks"),
    [
        ("cpu", "float32", "window=sdpa.math,full:prefill=sdpa,full:decode=native", False),
        ("cpu", "float32", "window=sdpa.math,full=sdpa", True),
        pytest.param("cuda", "float32", "prefill=triton,window:decode=triton,full:decode=vllm_paged", False, marks=GPU),
        pytest.param("cuda", "float32", "prefill=triton,window:decode=vllm_paged,full:decode=triton", True, marks=GPU),
        pytest.param("cuda", "bfloat16", "window=triton,full:prefill=hopper,full:decode=hopper_decode", True, marks=GPU),
        pytest.param("cuda", "bfloat16", "full=triton,window:prefill=hopper,window:decode=hopper_decode", False, marks=GPU),
    ],
)
def test_kinds_choose_what_one_backend_chooses(tmp_path: Path, device: str, dtype: str, backends: str, sinks: bool) -> None:
    """Gemma 3's layers, or with sinks like those of gpt-oss: chunks, an uneven batch, and prefix hits."""
    for name in replace(CONFIG, attn_backend=backends).backend_request.names:
        if not REGISTRY.availability(name):
            pytest.skip(f"{name}: {REGISTRY.availability(name)}")
    save_random(Gemma3TextConfig(**{**GEMMA, **SIZES, "head_dim": 64}, sliding_window_pattern=3), tmp_path)
    model = load_model(str(tmp_path), dtype, device, skip_tokenizer_init=True).decoder
    if sinks:
        model.attention_specs = [replace(each, sinks=(2.0, -1.0, 0.5, 3.0)) for each in model.attention_specs]
    fast = made_engine(model, REGISTRY, replace(CONFIG, attn_backend=backends))
    assert len({part.names[Phase.DECODE] for part in fast.selection.parts.values()}) == 2
    one = "sdpa" if device == "cpu" else "triton"
    plain = made_engine(model, REGISTRY, replace(CONFIG, attn_backend=one, enforce_eager=True))
    tolerance = 0.0 if dtype == "float32" else 0.1
    assert compare(fast, plain, PROMPTS, tolerance) == [0] * len(PROMPTS)
    assert compare(fast, plain, [[*prompt, 5, 6] for prompt in PROMPTS], tolerance)[2] >= 112
    assert_graphs(fast, device)
    assert plain.stats.num_graph_steps == 0
    if not tolerance:  # a step is launched before the tokens of the step before are read
        usual = made_engine(model, REGISTRY, replace(CONFIG, attn_backend=backends, async_scheduling=None))
        assert tokens_of(generate(usual, PROMPTS, GREEDY)) == tokens_of(generate(plain, PROMPTS, GREEDY))


AS_31B = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
AS_E2B = {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_key_value_heads": 1}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("own", [AS_31B, AS_E2B], ids=["31B", "E2B"])
def test_gemma4_with_drafts_writes_what_transformers_writes(tmp_path: Path, device: str, own: dict[str, Any]) -> None:
    """Heads of 256 and 512 elements. A KV cache that layers share is written once, and rejected drafts are taken back in all."""
    shape = {**GEMMA4, **SIZES, "head_dim": 256, "global_head_dim": 512, **own}
    reference = save_random(Gemma4TextConfig(**shape), tmp_path)
    precise = deepcopy(reference).double()
    model = load_model(str(tmp_path), "float32", device, skip_tokenizer_init=True).decoder
    calls: list[tuple[str, int]] = []

    def noting(what: str) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        return lambda layer, q, k, v: calls.append((what, layer)) or torch.zeros_like(q)

    ids = torch.arange(2, device=device)
    with torch.inference_mode():
        model(ids, ids, AttentionFunctions(noting("write"), attend_again=noting("read")))
    shared = [("read", 1), ("read", 1), ("read", 2)] if own is AS_E2B else [("write", layer) for layer in (3, 4, 5)]
    assert calls == [("write", 0), ("write", 1), ("write", 2), *shared]
    config = replace(CONFIG, attn_backend="triton" if device == "cuda" else "sdpa")
    fast, expected = made_engine(model, REGISTRY, config), []
    prompts = [[*prompt, *prompt[:9]] for prompt in PROMPTS]
    for prompt, (tokens, logits, _) in zip(prompts, observed(fast, prompts, TOKENS), strict=True):
        right = logits_by_transformers(precise, prompt, tokens)
        assert tokens == right.argmax(-1).tolist()
        rounding = (logits_by_transformers(reference, prompt, tokens) - right).norm()  # of 31B's shape, 6e-4 of the answer
        assert (logits.cpu() - right).norm() < 4 * rounding + 1e-6 * right.norm()
        expected.append(tokens)
    assert_graphs(fast, device)
    ngram = REGISTRY.proposer("ngram").make(ProposerOptions())
    drafting = made_engine(model, REGISTRY, replace(config, async_scheduling=None), proposer=ngram, measured=False)
    for _ in range(2):  # the second time from the prefix cache
        assert tokens_of(generate(drafting, prompts, GREEDY)) == expected
    assert drafting.stats.num_draft_tokens >= drafting.stats.num_accepted_tokens > 0
    assert_graphs(drafting, device)
