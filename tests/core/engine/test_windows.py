"""Windowed layers give back what lies behind their windows: the tokens stay the same, and more sequences fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from driving import Written, generate
from headway.core.contract.backend import BackendInfo, GraphLevel
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheLayout
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.core.engine import pool
from headway.core.engine.blocks import BlockManager
from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.engine.groups import NULL_PAGE, CacheGroup, PageFormat, page_format
from headway.core.engine.scheduler import Scheduler
from headway.core.engine.sequence import Sequence
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry, create_registry, hookimpl
from headway.testing.broken.plain import Plain
from taping import Tape

GREEDY = SamplingParams(temperature=0, max_tokens=40)
CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, kv_cache_memory=2**20, max_num_batched_tokens=48)


class Windowed:
    """Layers of several windows and numbers of heads; every token depends on all that its layers see."""

    vocab_size = 50
    max_position_embeddings = 256

    def __init__(self, *layers: tuple[int | None, int]) -> None:
        """layers: window and kv heads of each."""
        generator = torch.Generator().manual_seed(0)
        spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
        self.attention_specs = [replace(spec, sliding_window=window, num_kv_heads=heads) for window, heads in layers]
        self.embed = torch.randn(self.vocab_size, 32, generator=generator)
        self.places = torch.randn(self.max_position_embeddings, 32, generator=generator)
        self.qkv = torch.randn(len(layers), 32, 96, generator=generator) * 0.5

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + self.places[positions]
        for layer, spec in enumerate(self.attention_specs):
            heads = [4, spec.num_kv_heads, spec.num_kv_heads]
            q, k, v = (x @ self.qkv[layer])[:, : 8 * sum(heads)].view(-1, sum(heads), 8).split(heads, dim=1)
            x = x + attention(layer, q, k, v).flatten(1)
            x = x / x.norm(dim=-1, keepdim=True) * 6
        return x

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mul(hidden @ self.embed.T, 0.2, out=out)

    def greedy(self, prompt: list[int]) -> list[int]:
        """The tokens, from the whole text at every step and without a cache."""

        def dense(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            spec = self.attention_specs[layer]
            k, v = (each.repeat_interleave(spec.group_size, dim=1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
            ages = torch.arange(len(q))[:, None] - torch.arange(len(q))
            hidden = (ages < 0) | (ages >= (spec.sliding_window or len(q)))
            return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

        text = list(prompt)
        for _ in range(GREEDY.max_tokens):
            hidden = self(torch.tensor(text), torch.arange(len(text)), dense)
            text.append(int(self.compute_logits(hidden[-1:]).argmax()))
        return text[len(prompt) :]


MODELS = {
    "one of six sees all": Windowed(*[(12, 2)] * 5, (None, 2)),
    "all windowed": Windowed((20, 2), (20, 2)),
    "two windows": Windowed((9, 2), (None, 2), (30, 2)),
    "other heads": Windowed((12, 1), (None, 4), (12, 1), (12, 1)),
    "a window of one": Windowed((1, 2), (None, 2)),
}
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


def tokens(written: list[Written]) -> list[list[int]]:
    return [each.token_ids for each in written]


@functools.cache
def expected_of(name: str) -> list[list[int]]:
    return [MODELS[name].greedy(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["nhd", "vllm_5d"])
def test_tokens_are_those_of_a_cache_that_keeps_all(registry: Registry, name: str, layout: str) -> None:
    """Sequences many times longer than the windows: chunks of prompts, prefix hits in part and whole, and preemption."""
    model = MODELS[name]
    config = replace(CONFIG, kv_layout=layout)
    engine = Engine(model, registry, config)
    expected = expected_of(name)
    assert tokens(generate(engine, PROMPTS, GREEDY)) == expected
    assert sum(usage.given_back for usage in engine.blocks.usage([])) > 40
    again = generate(engine, PROMPTS, GREEDY)
    assert tokens(again) == expected
    assert [each.num_cached_tokens for each in again] == [0, 89, 149, 0, 62, 90] + [0] * 8
    pages = engine.capacity.pool.page_format
    tight = replace(config, kv_cache_memory=(pages.pages_for(192, 55) + 2) * pages.page_bytes, max_model_len=192)
    short = Engine(model, registry, replace(tight, async_scheduling=True))
    assert tokens(generate(short, PROMPTS, GREEDY)) == expected
    assert short.scheduler.num_preemptions > 0
    kept = Engine(model, registry, replace(config, free_window_blocks=False))
    assert tokens(generate(kept, PROMPTS, GREEDY)) == expected
    assert [usage.given_back for usage in kept.blocks.usage([])] == [0]


@pytest.mark.parametrize("layout", [NHD, HND, VLLM_5D], ids=str)
@pytest.mark.parametrize("name", ["one of six sees all", "two windows", "other heads", "a window of one"])
def test_pages_share_the_memory_and_no_two_blocks_do(name: str, layout: CacheLayout) -> None:
    """Every block of every layer in every page, dealt out to the groups in turn, keeps what was written to it."""
    specs = MODELS[name].attention_specs
    layouts = [layout] * len(specs)
    shared = page_format(specs, layouts, 8, 256)
    size = pool.PoolSize(7, shared, 8)
    caches = pool.allocate(specs, layouts, size)
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for c in caches for t in c.tensors.values()}
    assert sum(memory.values()) == size.num_bytes
    written = []
    for page in range(size.num_pages):
        group = shared.groups[page % len(shared.groups)]
        for layer in group.layers:
            for block in group.blocks_of([page]).tolist():
                written.append((len(written), layer, block))
                for tensor in caches[layer].tensors.values():
                    assert not tensor[block].any(), "zeroed, and nobody else's"
                    tensor[block] = len(written)
    for number, layer, block in written:
        assert all((tensor[block] == number + 1).all() for tensor in caches[layer].tensors.values())


def test_with_one_kind_of_layer_each_has_memory_of_its_own_and_a_page_is_a_block() -> None:
    for windows in ([None] * 3, [12] * 3, [None, 256, 300]):  # no sequence leaves the last
        specs = Windowed(*[(window, 2) for window in windows]).attention_specs
        shared = page_format(specs, [NHD] * 3, 8, 256)
        (group,) = shared.groups
        assert (group.page_size, group.blocks_per_page, group.page_stride, shared.columns) == (8, 1, 1, 1)
        assert group.window == (12 if windows[0] else None)
        assert shared.reserved == bool(windows[0])
        caches = pool.allocate(specs, [NHD] * 3, pool.PoolSize(4, shared, 8))
        assert len({cache.key.untyped_storage().data_ptr() for cache in caches}) == 3


def test_layers_that_cannot_share_pages_keep_every_token_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    specs = Windowed((12, 2), (None, 2)).attention_specs
    fp8 = [replace(specs[0], kv_dtype=torch.float8_e4m3fn), specs[1]]
    uneven = [replace(specs[0], v_head_dim=4), specs[1]]
    for unlike, reason in ((fp8, "several element types"), (uneven, "different proportions")):
        (group,) = page_format(unlike, [NHD] * 2, 8, 256).groups
        assert group.window is None
        assert reason in caplog.records[-1].message


GEMMA = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=256, scale=0.06, dtype=torch.bfloat16)


def pattern(layers: int, every: int, window: int) -> list[AttentionSpec]:
    """Gemma 3's layers: one of `every` sees all tokens."""
    return [replace(GEMMA, sliding_window=None if number % every == every - 1 else window) for number in range(layers)]


@pytest.mark.parametrize(
    ("layers", "every", "window", "times"),
    [(18, 6, 512, 4.0), (26, 6, 512, 4.0), (34, 6, 1024, 3.0), (48, 6, 1024, 3.0), (62, 6, 1024, 3.0), (24, 2, 128, 1.8)],
    ids=["gemma3-270m", "gemma3-1b", "gemma3-4b", "gemma3-12b", "gemma3-27b", "gpt-oss"],
)
@pytest.mark.parametrize("chunk", [2048, 16384])
def test_at_16_sequences_of_8192_tokens_the_pool_holds_many_more(
    layers: int, every: int, window: int, times: float, chunk: int
) -> None:
    """Run, not computed: as many as fit are admitted, prompt by prompt, and decode beside each other without preemption."""
    specs, length, block_size = pattern(layers, every, window), 8192, 16
    layouts = [NHD] * layers
    kept = page_format(specs, layouts, block_size, length, give_back=False)
    memory = 16 * kept.pages_for(length, length) * kept.page_bytes

    def held(shared: PageFormat) -> int:
        """Sequences that run to their ends, beside each other and without being read, once nobody else is admitted."""
        size = pool.pool_size(shared, length, 256, 128, memory)
        assert size.num_bytes <= memory
        blocks = BlockManager(size.num_pages, block_size, False, shared.groups, size.smallest_chunk)
        scheduler = Scheduler(blocks, chunk, 256)
        params = SamplingParams(temperature=0, max_tokens=16)
        for number in range(100):
            scheduler.add(Sequence(str(number), 0, [number] * (length - 8), params, frozenset(), length))
        step = scheduler.schedule()
        while step:
            scheduler.launched(step)
            step = scheduler.schedule()
        assert scheduler.num_preemptions == 0
        assert len(scheduler.running) <= size.num_sequences(length)
        return len(scheduler.running)

    assert held(kept) == 16
    assert held(page_format(specs, layouts, block_size, length)) >= times * 16


class Uniform(Plain):
    graph_level = GraphLevel.UNIFORM


class Plugin:
    @hookimpl
    def headway_register_backends(self) -> list[BackendInfo]:
        return [BackendInfo("plain", "for tests", lambda: Uniform, api_version=2)]


class Again(Tape):
    """Runs decodes and lone prompts again in place of a replay, over the static inputs."""

    def record(self, run: Callable[[], object]) -> Callable[[], None]:
        def replay() -> None:
            run()

        return replay


@pytest.mark.parametrize("name", ["two windows", "all windowed"])
def test_graphs_have_a_table_and_slots_for_each_group(name: str) -> None:
    """Replayed decodes, lone prompts and pieces write the tokens of the reference, overlapped."""
    registry = create_registry([Plugin()], load_entry_points=False)
    config = replace(CONFIG, attn_backend="plain", async_scheduling=True, max_num_seqs=6)
    engine = Engine(MODELS[name], registry, config)
    engine.executor.capture(Again())
    alone = generate(engine, PROMPTS[:1], GREEDY)
    assert engine.stats.num_graph_steps == engine.stats.num_steps
    together = generate(engine, PROMPTS, GREEDY)
    assert tokens([*alone, *together]) == [expected_of(name)[0], *expected_of(name)]
    assert engine.stats.num_graph_steps + engine.stats.steps_in_pieces.total() == engine.stats.num_steps
    assert sum(usage.given_back for usage in engine.blocks.usage([])) > 40


def test_the_null_page_stays_zero_and_no_table_names_what_lies_behind(registry: Registry) -> None:
    engine = Engine(MODELS["two windows"], registry, CONFIG)
    engine.add_request("a", PROMPTS[2], GREEDY)
    while engine.has_unfinished:
        engine.step()
        for seq in engine.scheduler.running:
            for group, table in zip(engine.blocks.groups, seq.tables, strict=True):
                behind = group.num_behind(seq.num_known)
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


def test_without_its_last_window_a_prefix_is_shorter() -> None:
    """What a sequence gave back goes first, so a hit in its middle is lost while one at its end is not."""
    blocks = manager(18)
    seq = computed(blocks, list(range(40)), chunk=4)
    blocks.release(seq)
    hog = computed(blocks, [49] * 8)  # takes the pages that were never used, and what was given back first
    held = [Sequence("", 0, [*range(length), 48], SamplingParams(), frozenset(), 200) for length in (40, 20)]
    assert [blocks.attach_prefix(each) for each in held] == [40, 0]
    blocks.check_integrity([hog, *held])


def test_a_chunk_is_cut_to_what_the_windowed_group_has_room_for() -> None:
    groups = [CacheGroup(16), CacheGroup(4, window=8)]
    blocks = BlockManager(30, 4, False, groups, smallest_chunk=8)
    scheduler = Scheduler(blocks, 1000, 4)
    scheduler.add(Sequence("", 0, [1] * 200, SamplingParams(max_tokens=3), frozenset(), 300))
    counts = []
    while scheduler.running or scheduler.waiting:
        step = scheduler.schedule()
        counts += [scheduled.num_new_tokens for scheduled in step]
        scheduler.launched(step)
        for scheduled in step:
            if scheduled.samples:
                scheduler.read(scheduled.seq, [1])
        scheduler.remove_finished()
        blocks.check_integrity(scheduler.running)
    assert sum(counts) == 202
    assert max(counts) < 100
    assert counts[-2:] == [1, 1]
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("name", ["two windows", "a window of one"])
def test_drafts_that_are_refused_do_not_reach_behind_what_was_given_back(registry: Registry, name: str) -> None:
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

    engine = Engine(MODELS[name], registry, replace(CONFIG, enable_prefix_caching=False), proposer=guess)
    assert tokens(generate(engine, PROMPTS[:3], GREEDY)) == expected[:3]
    assert engine.stats.num_steps < 40, "drafts held"
    assert sum(usage.given_back for usage in engine.cache_usage().groups) > 40


def test_an_abort_in_the_middle_gives_everything_back(registry: Registry) -> None:
    engine = Engine(MODELS["two windows"], registry, replace(CONFIG, async_scheduling=True))
    for number, prompt in enumerate(PROMPTS[:6]):
        engine.add_request(str(number), prompt, GREEDY)
    for steps in range(30):
        engine.step()
        if steps % 5 == 4:
            engine.abort(str(steps // 5))
            engine.blocks.check_integrity(engine.scheduler.running)
    engine.abort_all()
    while engine.has_unfinished:
        engine.step()
    assert engine.blocks.num_free == engine.blocks.num_pages
    engine.blocks.check_integrity([])
