"""Decoders of transformers through the engine, on our paged cache, against transformers' own attention over whole sequences."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine_logits import logits_of, watched
from graph_stub import PiecesTape
from headway import LLM
from headway.core.contract.errors import ModelError
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.model_runner import CompilationWatch
from headway.core.sampling.params import SamplingParams
from headway.models.loader import LoadOptions, load_model
from headway.models.transformers_adapter.interface import NAME, attend
from headway.models.transformers_adapter.load import compile_layers
from headway.models.transformers_adapter.model import TransformersModel
from headway.registry import Registry
from plain_models import sizes
from tiny_engine import generate, made_engine
from transformers_release import needs

NEW_TOKENS = 21
"""One of the prompt, twenty of decode steps."""
VOCABULARY = 97
WINDOW = 6
PROMPT_LENS = (13, 10, 31)
"""Lengths of prompts beyond the window; the last is split into chunks, which run with the decodes of the others."""

# Large weights, so that attention is far from uniform and a wrong key shows.
SIZES = sizes(
    VOCABULARY, 48, 80, 3, max_position_embeddings=64, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.1] * 6,
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"head_dim": 12, "sliding_window": WINDOW},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Gemma2ForCausalLM": {"head_dim": 16, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 3.0, **ALTERNATING},
    "Gemma3ForCausalLM": {"head_dim": 16, "query_pre_attn_scalar": 9, **ALTERNATING},
    "GPT2LMHeadModel": {},
    "OPTForCausalLM": {"ffn_dim": 80, "word_embed_proj_dim": 48, "init_std": 0.2},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.5},
    "Phi3ForCausalLM": {"max_position_embeddings": 256, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    "GraniteForCausalLM": {"attention_multiplier": 0.4, "logits_scaling": 3.0, "residual_multiplier": 0.7},
    "Olmo2ForCausalLM": {},
    "Starcoder2ForCausalLM": {"sliding_window": WINDOW},
    "CohereForCausalLM": {"logit_scale": 0.3},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "Qwen3MoeForCausalLM": {**EXPERTS, "head_dim": 16},
    "GptOssForCausalLM": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING},
    "DeepseekV2ForCausalLM": {**LATENT, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": LATENT,
}
EVERYDAY = {
    "GPT2LMHeadModel": "sdpa",
    "Gemma2ForCausalLM": "sdpa.math",
    "Phi3ForCausalLM": "sdpa",
    "Qwen3MoeForCausalLM": "sdpa.math",
    "GptOssForCausalLM": "sdpa",
    "DeepseekV3ForCausalLM": "sdpa.math",
}
"""Architectures that show what the others do, and the backend of each."""
COMPILED = ("Gemma2ForCausalLM",)


def config_of(architecture: str, **changes: Any) -> PreTrainedConfig:
    needs(architecture)
    settings = {**SIZES, **CONFIGS.get(architecture, {}), **changes}
    config: PreTrainedConfig = getattr(transformers, architecture).config_class(**settings)
    return config


def save_random(config: PreTrainedConfig, folder: Path) -> Any:
    """A model with weights of standard deviation 0.2, norms and biases too; it attends by transformers' eager code."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_" in name or "sinks" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


CASES = [
    *((name, backend) for name, backend in EVERYDAY.items()),
    *(
        pytest.param(name, backend, marks=pytest.mark.slow)
        for name in CONFIGS
        for backend in ("sdpa", "sdpa.math")
        if EVERYDAY.get(name) != backend
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("architecture", "backend"), CASES)
def test_logits_equal_those_of_transformers(tmp_path: Path, registry: Registry, architecture: str, backend: str) -> None:
    reference = save_random(config_of(architecture), tmp_path)
    model = load_model(str(tmp_path), skip_tokenizer_init=True, model_impl="transformers", options=LoadOptions(max_model_len=64))
    assert architecture in model.implementation
    config = EngineConfig(attn_backend=backend, max_num_batched_tokens=16, max_num_seqs=8, block_size=8, kv_cache_memory="8MiB")
    engine = made_engine(model.decoder, registry, config)
    assert set(engine.selection.names.values()) == {backend}
    take = watched(engine)
    first, second = ([torch.randint(1, VOCABULARY, (length,)).tolist() for length in PROMPT_LENS] for _ in range(2))
    for number, prompts in enumerate((first, first, second)):
        if number == 2:
            engine.executor.capture(PiecesTape())
        written = generate(engine, prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
        assert [one.error for one in written] == [None] * len(prompts)
        assert [one.num_cached_tokens for one in written] == [(length - 1) * (number == 1) for length in PROMPT_LENS]
        logits = take()
        for prompt, one in zip(prompts, written, strict=True):
            expected = logits_of(reference, prompt, one.token_ids)
            assert len(expected) == NEW_TOKENS
            torch.testing.assert_close(logits[tuple(one.token_ids)], expected, rtol=0, atol=1e-4)
    assert engine.stats.steps_in_pieces.total()


def adapted(architecture: str, dtype: torch.dtype = torch.float32, **changes: Any) -> TransformersModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(architecture, **changes), dtype=dtype, attn_implementation=NAME)
    with torch.inference_mode():
        return TransformersModel(model, dtype, torch.device("cpu"))


def values_alone(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An attention of each token to itself."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


def kinds_of(model: TransformersModel) -> list[tuple[AttentionSpec, str]]:
    """Each layer's: its attention, and the modules that it is made of."""
    return [(replace(spec, sinks=None), str(layer)) for spec, layer in zip(model.attention_specs, model.layers, strict=True)]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_half_precision_is_half_precision_everywhere(architecture: str) -> None:
    assert {spec.dtype for spec in adapted(architecture, torch.bfloat16).attention_specs} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in COMPILED else pytest.mark.slow) for name in CONFIGS]
)
@torch.inference_mode()
def test_layers_of_a_kind_are_compiled_once_for_any_number_of_tokens(architecture: str) -> None:
    model, graphs = adapted(architecture), []
    ids = torch.arange(1, 12)
    expected = [model(ids[:count], ids[:count], values_alone) for count in (1, 2, 7, 11)]

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_layers(model, compiler)
    assert len(graphs) == 2 * len(set(kinds_of(model)))
    compiled = len(graphs)
    for count, hidden in zip((1, 2, 7, 11), expected, strict=True):
        torch.testing.assert_close(model(ids[:count], ids[:count].int(), values_alone), hidden, rtol=0, atol=1e-5)
    assert len(graphs) == compiled


@pytest.mark.slow
@torch.inference_mode()
def test_torchs_own_compiler_computes_the_same_and_tells_of_it() -> None:
    model, watch = adapted("Qwen3ForCausalLM"), CompilationWatch()
    ids = torch.arange(1, 12)
    expected = model(ids, ids, values_alone)
    torch._dynamo.reset()
    compile_layers(model)
    assert "layers of the model (torch.compile)" in watch.take()
    torch.testing.assert_close(model(ids, ids, values_alone), expected, rtol=0, atol=1e-4)
    assert "torch.compile" in model.implementation


@torch.inference_mode()
def test_a_call_that_differs_from_the_spec_is_an_error_and_no_wrong_answer() -> None:
    model = adapted("Gemma2ForCausalLM")
    ids = torch.arange(4)
    module = model.layers[1].self_attn
    module.scaling = 0.9
    with pytest.raises(ModelError, match=r"layer 1 \(model.layers.1.self_attn\): scaling needs 0.333.*, got 0.9"):
        model(ids, ids, values_alone)
    module.scaling = 9**-0.5
    module.sliding_window = 3
    with pytest.raises(ModelError, match="sliding_window needs None.*, got 3"):
        model(ids, ids, values_alone)
    module.sliding_window = None
    model(ids, ids, values_alone)
    tensors = torch.zeros(1, 4, 4, 16), torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16)
    passed = {"scaling": 9**-0.5, "softcap": 3.0}
    with pytest.raises(ModelError, match="attention_mask needs none.*, got Tensor"):
        attend(module, *tensors, torch.zeros(4, 4), **passed)
    with pytest.raises(ModelError, match="num_kv_heads needs 2.*, got 4"):
        attend(module, tensors[0], tensors[0], tensors[0], None, **passed)


@torch.inference_mode()
def test_sinks_that_are_replaced_are_an_error() -> None:
    model = adapted("GptOssForCausalLM")
    model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    with pytest.raises(ModelError, match="layer 0 .*: sinks needs those that it had"):
        model(torch.arange(4), torch.arange(4), values_alone)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("RecurrentGemmaForCausalLM", {"num_hidden_layers": 3, "lru_width": 48}, "its tokens meet outside attention"),
        ("BertLMHeadModel", {}, "its attention is bidirectional"),
        ("DiffLlamaForCausalLM", {}, "is called twice"),
        ("DogeForCausalLM", {}, "has a mask of the model's own"),
        ("Llama4ForCausalLM", {"attention_chunk_size": 16, "num_local_experts": 2, "head_dim": 12}, "its mask shows it"),
        (
            "Gemma4ForCausalLM",
            {"head_dim": 12, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "layer_types": ["full_attention"] * 3},
            r"layer 2 .*reads those of model.layers.1.self_attn .num_kv_shared_layers=1 in config.json.; .* share them yet",
        ),
        ("BloomForCausalLM", {"n_head": 4}, "never calls its attention"),
    ],
)
def test_what_attends_otherwise_is_refused_when_it_is_loaded(architecture: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        adapted(architecture, **changes)


LARGE = sizes(
    211, 256, 256, 4, max_position_embeddings=512, initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=0
)
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
ON_A_GPU: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"head_dim": 64},
    "Gemma3ForCausalLM": {"head_dim": 64, "query_pre_attn_scalar": 50, **WINDOWED},
    "GPTNeoXForCausalLM": {},
    "GPT2LMHeadModel": {},
}
LONG = [[Random(length).randrange(1, 211) for _ in range(length)] for length in (3, 40, 17, 130, 64)]
GREEDY_ON_A_GPU = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def freed() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def written_by(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(LONG, GREEDY_ON_A_GPU, use_tqdm=False)]


@pytest.mark.gpu
@pytest.mark.usefixtures("freed")
@pytest.mark.parametrize("architecture", ON_A_GPU)
def test_compiled_layers_in_graphs_write_the_same_tokens(tmp_path: Path, architecture: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, architecture).config_class(**{**LARGE, **ON_A_GPU[architecture]})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    common = {
        "dtype": "float32",
        "device": "cuda",
        "model_impl": "transformers",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 96,
        "kv_cache_memory": "256MiB",
    }
    plain = written_by(LLM(str(tmp_path), torch_compile=False, enforce_eager=True, **common))
    fast = LLM(str(tmp_path), torch_compile=True, **common)
    written = written_by(fast)
    same = sum(a == b for ours, theirs in zip(written, plain, strict=True) for a, b in zip(ours, theirs, strict=True))
    assert same >= 0.9 * GREEDY_ON_A_GPU.max_tokens * len(LONG), "near-ties may flip a token and so the rest of a text, rarely"
    stats = fast.engine.stats
    assert stats.num_graph_steps > 0
    assert stats.steps_in_pieces.total() > 0
    assert not stats.compilations, "nothing is compiled after the engine is ready"
