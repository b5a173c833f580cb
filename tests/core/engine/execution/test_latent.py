"""Latent layers composed: which spec and backend serve which part of a step, and that every way gives the same answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor

from graph_stub import AsItIs
from headway.backends.sdpa import SDPAMath
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution import latent
from headway.core.sampling.params import SamplingParams
from headway.core.select.request import BackendRequest, LayerSpecs
from headway.core.select.selector import Selector
from headway.kernels.step.config import LatentConfig
from headway.kernels.step.torch_operations import PlainLatentLayer
from headway.registry import Registry, create_registry
from headway.testing.broken.attention import PlainBackend, PlainPlan
from tiny_engine import TextModel, generate, made_engine, registering, tokens_of

HEADS = 3
SIZES = LatentConfig(kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=12)
CONFIG = EngineConfig(block_size=8, kv_cache_memory=2**20, max_num_batched_tokens=24, max_num_seqs=5, max_model_len=96)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(40)), [7], list(range(20, 50)), [*range(20, 41), 9, 9]]
ABSORBED = AttentionSpec(HEADS, 1, SIZES.kv_dim, 0.3, v_head_dim=SIZES.kv_lora_rank, value_in_key=True)
EXPANDED = AttentionSpec(HEADS, HEADS, SIZES.q_dim, 0.3, v_head_dim=SIZES.v_head_dim, dense=True)


class LatentModel(TextModel):
    """Two latent layers around one with keys and values of its own."""

    max_position_embeddings = 96

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * 0.3

        self.attention_specs = [ABSORBED, AttentionSpec(4, 2, 8, 0.3), ABSORBED]
        width = HEADS * (SIZES.qk_nope_head_dim + SIZES.v_head_dim)
        self.latent_layers = {n: PlainLatentLayer(EXPANDED, SIZES, draw(width, SIZES.kv_lora_rank)) for n in (0, 2)}
        self.embed, self.places = draw(self.vocab_size, 32) * 3, draw(self.max_position_embeddings, 32) * 3
        self.into = [draw(32, HEADS * SIZES.q_dim + SIZES.kv_dim), draw(32, 64), draw(32, HEADS * SIZES.q_dim + SIZES.kv_dim)]
        self.out = draw(HEADS * SIZES.v_head_dim, 32)

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + self.places[positions]
        for layer, into in enumerate(self.into):
            if layer == 1:
                x = x + attention(layer, *(x @ into).view(-1, 8, 8).split([4, 2, 2], dim=1)).flatten(1)
                continue
            q, rows = (x @ into).split([HEADS * SIZES.q_dim, SIZES.kv_dim], dim=1)
            rows = rows[:, None]
            found = attention(layer, q.view(-1, HEADS, SIZES.q_dim), rows, rows[..., : SIZES.kv_lora_rank])
            x = x + found.flatten(1) @ self.out
        return x

    def dense(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every latent is expanded, and none cached."""
        return super().dense(layer, q, *(self.latent_layers[layer].expand(k) if layer in self.latent_layers else (k, v)))


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [LatentModel().greedy(prompt, GREEDY.max_tokens) for prompt in PROMPTS]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """How often each way served a part, and whether its contexts were gathered."""
    seen: Counter[tuple[str, bool]] = Counter()
    attend = latent.attend

    def counted(heads: object, phase: Phase, backend: AttentionBackend, plan: object, *rest: object) -> None:
        seen[phase.value, isinstance(plan, latent.Gathered)] += 1
        attend(heads, phase, backend, plan, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(latent, "attend", counted)
    return seen


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("backend", ["sdpa", "sdpa.math"])
def test_chunks_are_absorbed_or_their_contexts_expanded_and_nobody_can_tell(
    registry: Registry,
    expected: list[list[int]],
    calls: Counter[tuple[str, bool]],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    gathers: bool,
) -> None:
    monkeypatch.setattr(latent, "gathers", lambda view, cached, expanded: gathers)
    engine = made_engine(LatentModel(), registry, replace(CONFIG, attn_backend=backend))
    assert [cache.layout.name for cache in engine.executor.caches] == ["latent", "nhd", "latent"]
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected
    assert calls.keys() == {("prefill", False), ("decode", False), ("extend", gathers)}
    again = generate(engine, PROMPTS, GREEDY)  # from the prefix cache
    assert tokens_of(again) == expected
    assert sum(written.num_cached_tokens for written in again) > 80


class Uniform(PlainBackend):
    """A paged backend that any decode can be captured with."""

    graph_level = GraphLevel.UNIFORM
    capabilities = replace(PlainBackend.capabilities, dense_prefill=True, v_head_dims=None, value_in_key=True)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None
    ) -> None:
        metadata, start = plan.metadata, 0
        if metadata.phase is Phase.EXTEND:
            return super().prefill(q, k, v, cache, plan, out)
        for number, query_len in enumerate(metadata.query_lens):
            tokens = slice(start, start + query_len)
            out[tokens] = self.sequence(q[tokens], k[tokens], v[tokens], 0, number, metadata)
            start += query_len


def test_graphs_of_decodes_and_prompts_and_pieces_of_the_rest(expected: list[list[int]]) -> None:
    engine = made_engine(LatentModel(), registering(plain=Uniform), replace(CONFIG, attn_backend="plain"))
    engine.executor.capture(AsItIs())
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected
    assert [generate(engine, [prompt], GREEDY)[0].token_ids for prompt in PROMPTS[:1]] == expected[:1]
    assert engine.stats.num_graph_steps > 10
    assert engine.stats.steps_in_pieces.total() > 0


def test_what_an_fp8_cache_holds_is_what_prompts_see(registry: Registry) -> None:
    """However a prompt is cut into chunks, its tokens are the same."""
    config = replace(CONFIG, attn_backend="sdpa.math", kv_cache_dtype="fp8_e4m3")
    whole = made_engine(LatentModel(), registry, replace(config, max_num_batched_tokens=96))
    cut = made_engine(LatentModel(), registry, replace(config, max_num_batched_tokens=10))
    written = [tokens_of(generate(engine, PROMPTS, GREEDY)) for engine in (whole, cut)]
    assert written[0] == written[1]


def test_latents_have_no_int8_cache(registry: Registry) -> None:
    config = replace(CONFIG, attn_backend="sdpa", kv_cache_dtype="int8_per_token_head")
    with pytest.raises(UnsupportedError, match="kv_cache_dtype: needs auto or fp8_e4m3, as values lie in keys"):
        made_engine(LatentModel(), registry, config)


class NoLatents(SDPAMath):
    """Serves what is expanded, and nothing that lies in a key."""

    name = "no-latents"
    capabilities = replace(SDPAMath.capabilities, value_in_key=False)


class NoPrompts(SDPAMath):
    name = "no-prompts"
    capabilities = replace(SDPAMath.capabilities, dense_prefill=False)


def test_each_phase_asks_for_its_spec_alone() -> None:
    registry = registering(**{each.name: each for each in (NoLatents, NoPrompts)})
    layers = LayerSpecs([ABSORBED], {ABSORBED: EXPANDED})
    assert {phase: layers.in_phase(ABSORBED, phase) for phase in Phase} == {
        Phase.PREFILL: EXPANDED,
        Phase.EXTEND: ABSORBED,
        Phase.DECODE: ABSORBED,
    }
    assert layers.phases_of(ABSORBED) == {Phase.EXTEND, Phase.DECODE}
    assert layers.phases_of(EXPANDED) == {Phase.PREFILL}
    assert LayerSpecs([ABSORBED]).phases_of(ABSORBED) == set(Phase)

    def select(request: str) -> Selector:
        return Selector(registry, layers, BackendRequest.parse(request), block_size=16)

    with pytest.raises(UnsupportedError, match="value_in_key: needs a backend that reads the value out of the key"):
        select("no-latents")
    with pytest.raises(UnsupportedError, match="dense: needs a prompt, and a backend that reads no cache for it, got prefill"):
        select("no-prompts")
    selector = select("auto")
    assert selector.selection.layout.name == "latent"
    assert selector.backends_for(Phase.PREFILL).keys() >= {EXPANDED}
    assert selector.backends_for(Phase.DECODE).keys() >= {ABSORBED}
    assert selector.gathering[ABSORBED].spec == replace(EXPANDED, dense=False)


def test_contexts_are_gathered_where_that_is_less_work_and_fits() -> None:
    cached = replace(ABSORBED, num_heads=16, head_dim=576, v_head_dim=512, dtype=torch.bfloat16)
    expanded = replace(EXPANDED, num_heads=16, num_kv_heads=16, head_dim=192, v_head_dim=128, dtype=torch.bfloat16)

    def gathers(query_len: int, context_len: int, count: int = 1) -> bool:
        blocks = [list(range(-(-(query_len + context_len) // 16)))] * count
        return latent.gathers(AttentionMetadata.build([query_len] * count, [context_len] * count, blocks, 16), cached, expanded)

    assert gathers(2048, 4096)
    assert gathers(512, 8192, 4)
    assert not gathers(16, 4096), "few queries: expanding costs more than it saves"
    assert not gathers(2048, 200_000), "the expanded keys and values find no room"


def test_a_gathered_plan_reads_the_blocks_of_its_sequences() -> None:
    view = AttentionMetadata.build([3, 4, 2], [17, 4, 9], [[5, 2, 9], [1], [7, 3]], 8)
    backend = SDPAMath(replace(EXPANDED, dense=False), create_registry(load_entry_points=False).layout("nhd").layout, 8)
    plan = latent.plan_gathered(view, backend)
    assert plan.slots.view(-1, 8)[:, 0].tolist() == [8 * block for block in (5, 2, 9, 1, 7, 3)]
    assert plan.new.tolist() == [17, 18, 19, 28, 29, 30, 31, 41, 42]
    assert numpy.array_equal(plan.slots[plan.new].numpy(), view.slot_mapping.numpy())


def test_latent_caches_go_to_the_host_and_come_back(registry: Registry) -> None:
    model = LatentModel()
    prompts = [[*range(number, number + 30), *range(10)] for number in range(4)]
    expected = tokens_of(generate(made_engine(model, registry, CONFIG), prompts, GREEDY))
    pages = made_engine(model, registry, CONFIG).capacity.pool.page_format
    tight = replace(CONFIG, kv_cache_memory=13 * pages.page_bytes, kv_offload_size="1MiB", preemption_mode="swap")
    engine = made_engine(model, registry, tight)
    for _ in range(2):
        assert tokens_of(generate(engine, prompts, GREEDY)) == expected
    assert engine.stats.offload_hits > 0
