"""Windowed layers give back what lies behind their windows, and the tokens stay the same."""

from __future__ import annotations

import functools
from collections.abc import Sequence as Items
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from engine_logits import observed
from graph_stub import AsItIs
from headway.backends.sdpa import SDPA
from headway.core.contract.errors import UnsupportedError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.metadata import Phase
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.groups import NULL_PAGE, CacheGroup
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.loop import EngineLoop
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from headway.testing.broken.attention import PlainBackend
from random_schedules import step_through
from tiny_engine import Told, generate, made_engine, registering, tokens_of
from windowed_model import MODELS

pytestmark = pytest.mark.xdist_group("windows")  # what lone texts say is computed once
GREEDY = SamplingParams(temperature=0, max_tokens=40)
CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, kv_cache_memory=2**20, max_num_batched_tokens=48)


_random = Random(3)
SHARED = [_random.randrange(50) for _ in range(90)]
PROMPTS = [
    [1, 2, 3],
    SHARED,
    [_random.randrange(50) for _ in range(150)],
    [7],
    [*SHARED[:61], 9, 9],
    [*SHARED, 4],
    *([number, 49 - number] for number in range(8)),
]


@functools.cache
def expected_of(name: str) -> list[list[int]]:
    return [MODELS[name].greedy(prompt, 40) for prompt in PROMPTS]


@pytest.mark.sampled(5, 3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["nhd", pytest.param("vllm_5d", marks=pytest.mark.slow)])
def test_giving_pages_back_behind_windows_changes_no_token(registry: Registry, name: str, layout: str) -> None:
    """Sequences many times longer than the windows: chunks of prompts, prefix hits in part and whole, and preemption."""
    model = MODELS[name]
    config = replace(CONFIG, kv_layout=layout)
    engine = made_engine(model, registry, config)
    expected = expected_of(name)
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected
    assert sum(usage.num_freed for usage in engine.blocks.usage([])) > 40
    again = generate(engine, PROMPTS, GREEDY)
    assert tokens_of(again) == expected
    assert [each.num_cached_tokens for each in again] == [0, 89, 149, 0, 62, 90] + [0] * 8
    pages = engine.capacity.pool.page_format
    tight = replace(config, kv_cache_memory=(pages.pages_for(192, 55) + 2) * pages.page_bytes, max_model_len=192)
    short = made_engine(model, registry, replace(tight, async_scheduling=True))
    assert tokens_of(generate(short, PROMPTS, GREEDY)) == expected
    assert short.stats.num_preemptions > 0
    kept = made_engine(model, registry, replace(config, free_window_blocks=False))
    assert tokens_of(generate(kept, PROMPTS, GREEDY)) == expected
    assert [usage.num_freed for usage in kept.blocks.usage([])] == [0]


@pytest.mark.slow
def test_windowed_layers_share_the_pages_of_an_int8_cache(registry: Registry) -> None:
    """A page's numbers and its scales belong together, whichever group has it; a lone request is what all are held to."""
    model, config = MODELS["two windows"], replace(CONFIG, kv_cache_dtype="int8_per_token_head")
    whole = replace(config, enable_prefix_caching=False, free_window_blocks=False, max_num_batched_tokens=512)
    alone = made_engine(model, registry, whole)
    expected = [tokens_of(generate(alone, [each], GREEDY))[0] for each in PROMPTS]
    engine = made_engine(model, registry, config)
    assert [tokens_of(generate(engine, PROMPTS, GREEDY)) for _ in range(2)] == [expected, expected]
    pages = engine.capacity.pool.page_format
    assert set(pages.column_bytes) == {"key", "value", "key_scale", "value_scale"}
    assert pages.page_bytes == pages.columns * sum(pages.column_bytes.values())
    assert sum(usage.num_freed for usage in engine.blocks.usage([])) > 40
    tight = replace(config, kv_cache_memory=(pages.pages_for(192, 55) + 2) * pages.page_bytes, max_model_len=192)
    short = made_engine(model, registry, replace(tight, async_scheduling=True))
    assert tokens_of(generate(short, PROMPTS, GREEDY)) == expected
    assert short.stats.num_preemptions > 0


class Uniform(PlainBackend):
    graph_level = GraphLevel.UNIFORM


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["two windows", "all windowed"])
def test_graphs_have_a_table_and_slots_for_each_group(name: str) -> None:
    """Replayed decodes, lone prompts and pieces write the tokens of the reference, overlapped."""
    registry = registering(plain=Uniform)
    engine = made_engine(MODELS[name], registry, replace(CONFIG, attn_backend="plain", async_scheduling=True, max_num_seqs=6))
    engine.executor.capture(AsItIs())
    alone = generate(engine, PROMPTS[:1], GREEDY)
    assert engine.stats.num_graph_steps == engine.stats.num_steps
    together = generate(engine, PROMPTS, GREEDY)
    assert tokens_of([*alone, *together]) == [expected_of(name)[0], *expected_of(name)]
    assert engine.stats.num_graph_steps + engine.stats.steps_in_pieces.total() == engine.stats.num_steps
    assert sum(usage.num_freed for usage in engine.blocks.usage([])) > 40


def test_null_page_stays_zero_and_tables_name_no_page_behind_the_window(registry: Registry) -> None:
    engine = made_engine(MODELS["two windows"], registry, CONFIG)
    engine.add_request("a", engine.limits.checked(PROMPTS[2], GREEDY))
    while engine.has_unfinished:
        engine.step()
        for seq in engine.scheduler.running:
            for group, table in zip(engine.blocks.groups, seq.tables, strict=True):
                behind = group.num_pages_before_window(seq.num_known)
                assert table.pages[:behind] == [NULL_PAGE] * behind
                assert NULL_PAGE not in table.pages[behind:]
    for group in engine.blocks.groups:
        for block in group.blocks_of([NULL_PAGE]).tolist():
            for layer in group.layers:
                assert not any(tensor[block].any() for tensor in engine.executor.caches[layer].tensors.values())
    engine.blocks.check_integrity([])


def manager(num_pages: int) -> BlockManager:
    return BlockManager(num_pages, 4, True, [CacheGroup(4), CacheGroup(4, window=6)])


def computed(blocks: BlockManager, prompt: list[int], chunk: int = 100) -> Sequence:
    """A sequence whose prompt is in the cache."""
    seq = Sequence("", 0, prompt, SamplingParams(max_tokens=9), frozenset(), 200)
    blocks.attach_prefix(seq)
    while seq.num_computed < len(prompt):
        count = min(chunk, len(prompt) - seq.num_computed)
        assert blocks.reserve(seq, count)
        seq.num_computed += count
        blocks.copies_launched(seq)
        blocks.advance(seq, partly=True)
    return seq


def test_a_prefix_must_be_held_in_every_group_but_only_its_last_window_in_a_windowed_one() -> None:
    blocks = manager(64)
    first = computed(blocks, list(range(40)))
    assert [len(table.held) for table in first.tables] == [10, 2]
    other = computed(blocks, [*range(30), 77])
    assert other.num_computed == 31
    blocks.check_integrity([first, other])
    blocks.release(first)
    blocks.release(other)
    again = Sequence("", 0, [*range(40), 1, 2], SamplingParams(), frozenset(), 200)
    assert blocks.attach_prefix(again) == 40
    assert again.tables[1].pages[:8] == [NULL_PAGE] * 8, "pages behind the window are left where they are"
    blocks.check_integrity([again])


def test_prefix_hit_is_shorter_without_its_last_window() -> None:
    """What a sequence gave back goes first, so a hit in its middle is lost while one at its end is not."""
    blocks = manager(18)
    blocks.release(computed(blocks, list(range(40)), chunk=4))
    hog = computed(blocks, [49] * 8)  # takes the pages that were never used, and what was given back first
    held = [Sequence("", 0, [*range(length), 48], SamplingParams(), frozenset(), 200) for length in (40, 20)]
    assert [blocks.attach_prefix(each) for each in held] == [40, 0]
    blocks.check_integrity([hog, *held])


def test_chunk_is_cut_to_the_room_of_the_windowed_group() -> None:
    blocks = BlockManager(30, 4, False, [CacheGroup(16), CacheGroup(4, window=8)], smallest_chunk=8)
    scheduler = Scheduler(blocks, 1000, 4)
    scheduler.add(Sequence("", 0, [1] * 200, SamplingParams(max_tokens=3), frozenset(), 300))
    counts = []
    while scheduler.has_unfinished:
        counts += [scheduled.num_new_tokens for scheduled in step_through(scheduler)]
    assert sum(counts) == 202
    assert max(counts) < 100
    assert counts[-2:] == [1, 1]
    assert scheduler.stats.num_preemptions == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["two windows", "a window of one"])
def test_refused_drafts_need_no_page_that_was_given_back(registry: Registry, name: str) -> None:
    """Every other run of guesses goes wrong in its middle."""
    expected = expected_of(name)

    def guess(text: Items[int]) -> list[int]:
        prompt, answer = next(
            (prompt, answer)
            for prompt, answer in zip(PROMPTS, expected, strict=True)
            if [*prompt, *answer][: len(text)] == list(text)
        )
        following = [*prompt, *answer][len(text) : len(text) + 6]
        return [token ^ (place == 3 and len(text) % 2) for place, token in enumerate(following)]

    config = replace(CONFIG, enable_prefix_caching=False)
    engine = made_engine(MODELS[name], registry, config, proposer=Told(guess), measured=False)
    assert tokens_of(generate(engine, PROMPTS[:3], GREEDY)) == expected[:3]
    assert engine.stats.num_steps < 40, "drafts held"
    assert sum(usage.num_freed for usage in engine.cache_usage().groups) > 40


SHORT = SamplingParams(temperature=0, max_tokens=24)
TEXT = torch.randint(50, (90,), generator=torch.Generator().manual_seed(5)).tolist()
TEXTS = [[1, 2, 3], TEXT, [*TEXT[:61], 9, 9], [7], [*TEXT, 4], TEXT[::-1]]
PLAIN_CONFIG = EngineConfig(kv_cache_memory=2**20, max_num_batched_tokens=48)


class Far(PlainBackend):
    """Computes layers that see every key, and no others."""

    name = "far"
    graph_level = GraphLevel.UNIFORM
    capabilities = replace(PlainBackend.capabilities, features=frozenset())


class Near(SDPA):
    """Computes layers with a window, and fails in others."""

    name = "near"

    def plan(self, metadata: object) -> object:
        assert self.spec.sliding_window is not None
        return super().plan(metadata)


def rounded(x: Tensor, dtype: str) -> Tensor:
    """Return what a cache gives back for x [tokens, heads, elements]."""
    if dtype == "fp8_e4m3":
        return x.to(torch.float8_e4m3fn).float()
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales).round() * scales


def engine_of(name: str, registry: Registry, **options: object) -> EngineLoop:
    return made_engine(MODELS[name], registry, replace(PLAIN_CONFIG, **options))


@pytest.mark.parametrize("name", ["one of six sees all", "two windows", "other heads"])
def test_kinds_on_backends_of_their_own_write_what_the_reference_writes(name: str) -> None:
    """In chunks, with prefix hits in part and whole, after preemption."""
    registry = registering(far=Far, near=Near)
    options = {"attn_backend": {"window": "near", "full:decode": "far", "full:prefill": "sdpa"}, "block_size": 8}
    engine = engine_of(name, registry, **options)
    assert {kind: part.names[Phase.DECODE] for kind, part in engine.selection.parts.items()} == {"window": "near", "full": "far"}
    expected = [MODELS[name].greedy(prompt, 24) for prompt in TEXTS]
    assert tokens_of(generate(engine, TEXTS, SHORT)) == expected
    assert {backend for phase, backend in engine.stats.steps_by_phase if phase == "decode"} <= {"near+far", "far+near"}
    again = generate(engine, TEXTS, SHORT)
    assert tokens_of(again) == expected
    assert [each.num_cached_tokens for each in again][1] == 89
    assert sum(usage.num_freed for usage in engine.blocks.usage([])) > 20
    pages = engine.capacity.pool.page_format
    tight = (pages.pages_for(128, 55) + 2) * pages.page_bytes
    short = engine_of(name, registry, **options, kv_cache_memory=tight, max_model_len=128)
    assert tokens_of(generate(short, TEXTS, SHORT)) == expected
    assert short.stats.num_preemptions > 0


def test_graphs_hold_the_backends_of_all_kinds() -> None:
    registry = registering(far=Far, plain=type("Plain", (PlainBackend,), {"graph_level": GraphLevel.UNIFORM}))
    engine = engine_of("two windows", registry, attn_backend="window=plain,full=far", max_num_seqs=6, block_size=8)
    engine.executor.capture(AsItIs())
    expected = [MODELS["two windows"].greedy(prompt, 24) for prompt in TEXTS]
    assert tokens_of(generate(engine, TEXTS, SHORT)) == expected
    assert engine.stats.num_graph_steps > 20


@pytest.mark.parametrize(("dtype", "layout"), [("int8_per_token_head", "nhd_int8"), ("fp8_e4m3", "nhd")])
def test_full_layers_with_a_cache_of_8_bits_beside_windows_without(registry: Registry, dtype: str, layout: str) -> None:
    options = {"kv_cache_dtype": f"full={dtype},window=auto", "attn_backend": "window=sdpa.math,full=sdpa"}
    engine = engine_of("two windows", registry, **options)
    caches = engine.executor.caches
    assert [cache.layout.name for cache in caches] == ["nhd", layout, "nhd"]
    assert [cache.key.element_size() for cache in caches] == [4, 1, 4]
    model = MODELS["two windows"]

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_full = model.attention_specs[layer].sliding_window is None
        return model.dense(layer, q, *((rounded(k, dtype), rounded(v, dtype)) if is_full else (k, v)))

    for _ in range(2):  # the second time from the prefix cache
        for prompt, (tokens, logits, _) in zip(TEXTS, observed(engine, TEXTS, 12), strict=True):
            text = torch.tensor([*prompt, *tokens[:-1]])
            right, plain = (
                model.compute_logits(model(text, torch.arange(len(text)), each)[len(prompt) - 1 :])
                for each in (attention, model.dense)
            )
            assert (logits - right).norm() < 0.01 * right.norm() < (plain - right).norm()
    short = [[number, 49 - number] for number in range(6)]
    long = SamplingParams(temperature=0, max_tokens=60)
    expected = tokens_of(generate(engine, short, long))
    pages = engine.capacity.pool.page_format
    tight = (pages.pages_for(128, 55) + 2) * pages.page_bytes
    full = engine_of("two windows", registry, **options, kv_cache_memory=tight, max_model_len=128)
    assert tokens_of(generate(full, short, long)) == expected
    assert full.stats.num_preemptions > 0


def test_a_backend_that_cannot_compute_a_kind_is_refused_for_it_with_a_fix_that_keeps_the_rest() -> None:
    registry = registering(far=Far)
    with pytest.raises(UnsupportedError, match="^window layers: attention backend far .*sliding_window") as refused:
        engine_of("two windows", registry, attn_backend="window=far,full=far")
    assert "nearest fix: --attn-backend full=far,window=auto" in str(refused.value)
    assert (
        engine_of("two windows", registry, attn_backend="full=far,window=auto").selection.parts["full"].names[Phase.DECODE]
        == "far"
    )
