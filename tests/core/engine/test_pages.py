"""Pages: how groups of layers share one memory, and how many sequences it then holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheLayout
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.cache.block_manager import BlockManager
from headway.core.engine.data import pool
from headway.core.engine.data.groups import PageFormat, page_format
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.params import SamplingParams
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
        assert scheduler.stats.num_preemptions == 0
        assert len(scheduler.running) <= size.num_sequences(length)
        return len(scheduler.running)

    assert held(kept) == 16
    assert held(page_format(specs, layouts, block_size, length)) >= times * 16
