"""The engine on a GPU: real kernels under continuous batching write the tokens that plain attention writes on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5TextConfig

from engine_logits import save_random
from headway.core.contract.errors import HeadwayError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import HND, NHD, VLLM_5D
from headway.core.contract.metadata import Phase
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.models.checkpoints.weights import Weights
from headway.models.families.families import read_decoder_config
from headway.models.layers.decoder import Decoder
from headway.models.loader import load_model
from headway.registry import Registry, create_registry
from hybrid_models import ROWS
from plain_models import sizes
from tiny_engine import generate, made_engine, tokens_of, told_of

pytestmark = pytest.mark.gpu

PROMPTS = [list(range(1, 1 + length)) for length in (3, 40, 17, 1, 130, 64)]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SIZES = {"prefill whole": 2048, "chunked": 48}
REGISTRY = create_registry(load_entry_points=False)
CHOICES = [(name, layout) for name in REGISTRY.backends for layout in (NHD, HND, VLLM_5D)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**sizes(211, 256, 256, 3, head_dim=64, max_position_embeddings=512, initializer_range=0.2))
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def decoder(folder: Path, dtype: torch.dtype, device: str) -> Decoder:
    return Decoder(read_decoder_config(LlamaConfig.from_pretrained(folder)), Weights(folder, dtype, torch.device(device)))


def run(model: Decoder, registry: Registry, config: EngineConfig) -> list[list[int]]:
    return tokens_of(generate(made_engine(model, registry, config), PROMPTS, GREEDY))


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


def many(engine: EngineLoop) -> list[tuple[list[int], str | None]]:
    """64 requests of random lengths, every third with tokens that end it; many outgrow a block of 256 while they write."""
    random = Random(0)
    prompts, wishes = [], []
    for number in range(64):
        prompts.append([random.randrange(211) for _ in range(random.randint(1, 300))])
        stops = random.sample(range(211), 20) if number % 3 == 0 else []
        wishes.append(SamplingParams(temperature=0, max_tokens=random.randint(1, 90), stop_token_ids=stops))
    return [(written.token_ids, written.finish_reason) for written in generate(engine, prompts, wishes)]


@pytest.mark.parametrize("name", [name for name in REGISTRY.backends if name != "sdpa.math"])
def test_graphs_and_overlap_change_no_token(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    half = torch.float32 not in REGISTRY.backend(name).capabilities.dtypes if REGISTRY.availability(name) else True
    model = decoder(folder, torch.bfloat16 if half else torch.float32, "cuda")
    # 16 blocks of 256 tokens: 16 sequences begin, and some are preempted when others need a second block.
    bytes_per_token = 2 * 3 * 2 * 64 * model.attention_specs[0].dtype.itemsize
    config = EngineConfig(
        attn_backend=name, kv_cache_memory=4096 * bytes_per_token, max_model_len=512, max_num_batched_tokens=512
    )
    try:
        plain = made_engine(model, REGISTRY, replace(config, enforce_eager=True, async_scheduling=False))
    except HeadwayError as error:
        pytest.skip(f"{name}: {error}")
    fast = made_engine(model, REGISTRY, config)
    expected, got = many(plain), many(fast)
    same = sum(a == b for a, b in zip(expected, got, strict=True))
    assert {reason for _, reason in expected} == {"stop", "length"}
    assert plain.stats.num_preemptions > 0
    assert fast.stats.num_preemptions > 0
    graphs = plain.selection.names[Phase.DECODE] == name and REGISTRY.backend(name).graph_level > GraphLevel.NONE
    assert (fast.stats.num_graph_steps > 0) == graphs
    assert fast.stats.steps_in_pieces["a prompt in the step"] > 0
    assert not fast.stats.steps_without_graph
    assert plain.stats.num_graph_steps == plain.stats.steps_in_pieces.total() == 0
    # Rounding to 8 bits makes near-ties frequent, and a padded batch sums in another order; float32 has no such excuse.
    assert same == 64 if not half else same >= 32


@pytest.mark.parametrize("states", ["torch", "triton"])
def test_drafts_of_a_hybrid_are_verified_in_graphs(tmp_path: Path, states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with fewer drafts than the graph is wide, and padding, beside states that move on in their slots."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    shapes = {"vocab_size": 50, "head_dim": 64, "max_position_embeddings": 512}
    save_random(Qwen3_5TextConfig.from_dict(ROWS["qwen3_5"].to_dict() | shapes), tmp_path)
    model = load_model(str(tmp_path), "float32", skip_tokenizer_init=True, device="cuda").decoder
    random = Random(3)
    prompts = [[random.randrange(3, 50) for _ in range(length)] for length in (20, 90, 3, 41, 9)]
    config = EngineConfig(state_backend=states, kv_cache_memory=2**26, max_model_len=256, max_num_seqs=6)
    plain = made_engine(model, REGISTRY, replace(config, enforce_eager=True))
    expected = tokens_of(generate(plain, prompts, GREEDY))
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    fast = made_engine(model, REGISTRY, config, proposer=told_of(texts), measured=False)
    assert tokens_of(generate(fast, prompts, GREEDY)) == expected
    assert fast.stats.num_draft_tokens > fast.stats.num_accepted_tokens > 20
    assert fast.stats.num_graph_steps > 3
    assert not any("to verify" in reason for reason in fast.stats.steps_in_pieces)
    assert not fast.stats.steps_without_graph


def test_sampled_tokens_are_the_same_in_a_graph(folder: Path) -> None:
    model = decoder(folder, torch.float32, "cuda")
    config = EngineConfig(kv_cache_memory=2**27, max_model_len=256)
    wishes = [
        SamplingParams(temperature=t, seed=n, top_k=k, max_tokens=20) for n, (t, k) in enumerate([(0, -1), (1.5, -1), (0.7, 9)])
    ]
    outputs = []
    for engine in (made_engine(model, REGISTRY, config), made_engine(model, REGISTRY, replace(config, enforce_eager=True))):
        outputs.append(tokens_of(generate(engine, PROMPTS[: len(wishes)], wishes)))
    assert outputs[0] == outputs[1]


def test_a_nan_in_a_graph_ends_its_request_only(folder: Path) -> None:
    model = decoder(folder, torch.float32, "cuda")
    model.embed = replace(model.embed, table=model.embed.table.clone())
    engine = made_engine(model, REGISTRY, EngineConfig(kv_cache_memory=2**27, max_model_len=256))
    (first,) = generate(engine, [[1, 2, 3]], GREEDY)
    sick = first.token_ids[5]
    assert sick not in PROMPTS[1]
    model.embed.table[sick] = float("nan")
    again, other = generate(engine, [[1, 2, 3], PROMPTS[1]], GREEDY)
    assert again.finish_reason == "error"
    assert again.token_ids == first.token_ids[: first.token_ids.index(sick) + 1]
    assert other.finish_reason == ("error" if sick in other.token_ids else "length")


def test_auto_on_a_gpu_runs_and_says_what_it_chose(folder: Path) -> None:
    engine = made_engine(decoder(folder, torch.bfloat16, "cuda"), REGISTRY, EngineConfig(kv_cache_memory=2**27))
    (seq,) = generate(engine, PROMPTS[1:2], GREEDY)
    assert len(seq.token_ids) == 24
    assert engine.selection.names[Phase.DECODE] == "triton"
