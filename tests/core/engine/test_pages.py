"""Pages: how groups of layers share one memory, and how many sequences it then holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from backend_cases import spec
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheLayout
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.cache.usage import OWN, RESERVED, SHARED
from headway.core.engine.data import pool
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.groups import PageFormat, page_format
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from tiny_engine import TextModel, TinyModel, generate, made_engine, tokens_of
from windowed_model import MODELS, Windowed


@pytest.mark.parametrize("layout", [NHD, HND, VLLM_5D], ids=str)
@pytest.mark.parametrize("name", ["one of six sees all", "two windows", "other heads", "a window of one"])
def test_groups_share_memory_by_pages_and_no_two_blocks_overlap(name: str, layout: CacheLayout) -> None:
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


def test_layers_of_one_kind_have_separate_memory_and_pages_of_one_block() -> None:
    for windows in ([None] * 3, [12] * 3, [None, 256, 300]):  # no sequence leaves the last
        specs = Windowed(*[(window, 2) for window in windows]).attention_specs
        shared = page_format(specs, [NHD] * 3, 8, 256)
        (group,) = shared.groups
        assert (group.page_size, group.blocks_per_page, group.page_stride, shared.columns) == (8, 1, 1, 1)
        assert group.window == (12 if windows[0] else None)
        assert shared.reserved == bool(windows[0])
        caches = pool.allocate(specs, [NHD] * 3, pool.PoolSize(4, shared, 8))
        assert len({tensor.data_ptr() for cache in caches for tensor in cache.tensors.values()}) == 6


def test_layers_that_cannot_share_pages_keep_every_token_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
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
def test_the_pool_holds_many_more_than_16_long_sequences(layers: int, every: int, window: int, times: float, chunk: int) -> None:
    """Run, not computed: as many as fit are admitted, prompt by prompt, and decode beside each other without preemption."""
    specs, length, block_size = pattern(layers, every, window), 8192, 16
    layouts = [NHD] * layers
    kept = page_format(specs, layouts, block_size, length, free_before_window=False)
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
        assert scheduler.stats.num_preemptions == 0
        assert len(scheduler.running) <= size.num_sequences(length)
        return len(scheduler.running)

    assert held(kept) == 16
    assert held(page_format(specs, layouts, block_size, length)) >= times * 16


LAYOUTS = [NHD] * 3
SPECS = [spec()] * 3  # 2 kv heads x 32 x 4 bytes, key and value: 512 bytes a token and layer
FORMAT = page_format(SPECS, LAYOUTS, 16, 4096)


def test_the_pool_fills_the_memory_but_never_more_than_all_sequences_could() -> None:
    size = pool.pool_size(FORMAT, max_model_len=100, max_num_seqs=8, chunk=100, memory=1_000_000)
    assert size.num_bytes == size.num_pages * 16 * 512 * 3
    assert 1_000_000 - 16 * 512 * 3 < size.num_bytes <= 1_000_000
    roomy = pool.pool_size(FORMAT, max_model_len=100, max_num_seqs=2, chunk=100, memory=10**9)
    assert roomy.num_pages == 2 * 7
    layers = pool.allocate(SPECS, LAYOUTS, size)
    assert sum(layer.key.nbytes + layer.value.nbytes for layer in layers) == size.num_bytes


def test_a_pool_too_small_for_one_sequence_says_what_fits_and_that_hint_works() -> None:
    with pytest.raises(ConfigError) as caught:
        pool.pool_size(FORMAT, max_model_len=4096, max_num_seqs=8, chunk=128, memory=1_000_000)
    assert "max_model_len=4096" in caught.value.reason.need
    fits = int(caught.value.reason.hint.split()[-1])
    assert pool.pool_size(FORMAT, fits, 8, 128, 1_000_000).num_pages * 16 >= fits
    assert pool.longest_that_fits(FORMAT, 128, 1_000_000, at_most=4096) == fits


PROMPTS = [[1, 2, 3], list(range(20)), [7], list(range(20, 45)), [*range(20, 40), 9, 9]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
CONFIG = EngineConfig(block_size=16, kv_cache_memory=2**20, max_num_batched_tokens=24)


class TwoKinds(TextModel):
    """A layer with keys and values of its own, and one whose values lie in its keys."""

    max_position_embeddings = 64

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        plain = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.3)
        latent = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16, scale=0.2, value_in_key=True)
        self.attention_specs = [plain, replace(latent, v_head_dim=8), plain]
        self.embed = torch.randn(self.vocab_size, 32, generator=generator)
        self.places = torch.randn(self.max_position_embeddings, 32, generator=generator)
        self.qkv = torch.randn(3, 32, 64, generator=generator) * 0.3
        self.out = torch.randn(16, 32, generator=generator) * 0.3

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + self.places[positions]
        for layer in (0, 2):
            q, k, v = (x @ self.qkv[layer]).view(-1, 8, 8).split([4, 2, 2], dim=1)
            x = x + attention(layer, q, k, v).flatten(1)
            if layer == 0:
                q, k = (x @ self.qkv[1])[:, :48].view(-1, 3, 16).split([2, 1], dim=1)
                x = x + attention(1, q, k, k[..., :8]).flatten(1) @ self.out
        return x


@pytest.mark.parametrize(
    ("asked", "layouts"), [("auto", ["nhd", "latent", "nhd"]), ("vllm_5d", ["vllm_5d", "latent", "vllm_5d"])]
)
def test_each_group_has_its_layout_and_one_table_serves_all(registry: Registry, asked: str, layouts: list[str]) -> None:
    model = TwoKinds()
    engine = made_engine(model, registry, replace(CONFIG, kv_layout=asked))
    assert [cache.layout.name for cache in engine.executor.caches] == layouts
    pool = engine.capacity.pool
    assert pool.num_bytes == sum(t.nbytes for cache in engine.executor.caches for t in cache.tensors.values())
    expected = [model.greedy(prompt, GREEDY.max_tokens) for prompt in PROMPTS]
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected
    again = generate(engine, PROMPTS, GREEDY)  # from the prefix cache, whole blocks and copied parts
    assert tokens_of(again) == expected
    assert [written.num_cached_tokens for written in again] == [0, 19, 0, 24, 21]
    tight = replace(CONFIG, kv_layout=asked, kv_cache_memory=6 * pool.num_bytes // pool.num_pages, max_model_len=64)
    short = made_engine(model, registry, tight)
    assert tokens_of(generate(short, PROMPTS, GREEDY)) == expected
    assert short.stats.num_preemptions > 0


def test_layout_that_no_layer_can_use_is_refused(registry: Registry) -> None:
    model = TwoKinds()
    model.attention_specs = model.attention_specs[1:2]
    with pytest.raises(UnsupportedError, match="needs a layout that keeps the value inside the key, got nhd"):
        made_engine(model, registry, replace(CONFIG, kv_layout="nhd"))


def test_occupancy_agrees_with_cache_usage(registry: Registry) -> None:
    engine = made_engine(TinyModel(), registry, EngineConfig(block_size=8, kv_cache_memory=2**20))
    params, prompt = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), list(range(1, 34))
    engine.add_request("first", engine.limits.checked(prompt, params))
    for _ in range(3):
        engine.step()
    engine.add_request("again", engine.limits.checked(prompt, params))
    engine.add_request("other", engine.limits.checked([40, 41, 42], params))
    for _ in range(9):
        engine.step()
        now, usage = engine.occupancy(most=8), engine.cache_usage()
        assert now.num_holding == len(usage.sequences)
        for held, drawn in zip(now.holdings, usage.sequences, strict=True):
            letters = drawn.blocks[0]
            assert (held.request_id, held.num_tokens) == (drawn.name, drawn.num_tokens)
            assert held.found + held.computed == letters.count(OWN) + letters.count(SHARED)
            assert held.reserved == letters.count(RESERVED)
    assert [held.found for held in now.holdings] == [0, 4, 0]
    assert now.num_decoding == 3
    assert now.num_decoding_tokens == sum(held.num_tokens for held in now.holdings)
    assert [held.request_id for held in engine.occupancy(most=1).holdings] == ["first"]
    assert engine.occupancy(most=1).num_holding == 3
    engine.abort_all()
    assert engine.occupancy(most=8).num_holding == engine.occupancy(most=8).num_decoding == 0
