"""Layers that keep states with the host's memory behind them: states leave the device, come back, and no token changes."""

from __future__ import annotations

import functools
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from headway.core.contract.errors import ConfigError
from headway.core.engine.cache.checkpoints import Checkpoints
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.state_slots import StateSlots
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from stateful_model import MODELS
from stateful_worlds import live
from tiny_engine import generate, made_engine, tokens_of, told_of

pytestmark = pytest.mark.xdist_group("states")  # what lone texts say is computed once, for tests/core/engine/test_states.py too
GREEDY = SamplingParams(temperature=0, max_tokens=20)
CONFIG = EngineConfig(
    attn_backend="sdpa",
    block_size=8,
    kv_cache_memory=100_000,
    kv_offload_size=2**20,
    max_model_len=160,
    max_num_batched_tokens=1200,
    max_num_seqs=4,
)
_random = Random(5)
PROMPTS = [[_random.randrange(50) for _ in range(130)] for _ in range(8)]


@functools.cache
def expected_of(name: str) -> list[list[int]]:
    return [MODELS[name].greedy(prompt, 20) for prompt in PROMPTS]


def tokens(engine: EngineLoop) -> list[list[int]]:
    return tokens_of(generate(engine, PROMPTS, GREEDY))


def check(engine: EngineLoop) -> None:
    engine.blocks.check_integrity(engine.scheduler.holders)
    engine.scheduler.offloader.tier.check_integrity(idle=True)


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize(("name", "rows"), [("kda", 4), ("mamba2 and a window", 1), ("mamba1", 1)])
def test_a_start_comes_back_with_its_state(registry: Registry, name: str, rows: int) -> None:
    """Two tokens after the state: a state that another sequence has left behind would be seen.

    One row has four checkpoints, so that half of the prompts' states have been overwritten; with four rows
    most pages have, and few states.
    """
    engine = made_engine(MODELS[name], registry, replace(CONFIG, max_num_seqs=rows))
    assert tokens(engine) == expected_of(name)
    again = generate(engine, PROMPTS, GREEDY)
    assert tokens_of(again) == expected_of(name)
    assert [each.num_cached_tokens for each in again] == [128] * len(PROMPTS)
    stats = engine.stats
    assert stats.offload_hits > 3 * 128
    assert rows == 4 or (stats.states_restored > 3 and stats.states_offloaded > 3)
    assert engine.snapshot().num_offloaded_states == len(engine.scheduler.offloader.tier.states)  # type: ignore[union-attr]
    states = engine.cache_usage().states
    assert states.num_offloaded == engine.snapshot().num_offloaded_states
    assert stats.offload_bytes_in >= stats.states_restored * states.slots.bytes_per_slot
    check(engine)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("name", "memory"), [("gated delta", 80_000), ("lightning", 66_000)])
def test_a_preempted_sequence_goes_on_where_it_was(registry: Registry, name: str, memory: int) -> None:
    """Nothing of a swapped sequence is computed again, not even the tokens of a page that is not whole."""
    computed = {}
    for mode in ("recompute", "swap"):
        engine = made_engine(MODELS[name], registry, replace(CONFIG, preemption_mode=mode, kv_cache_memory=memory))
        assert tokens(engine) == expected_of(name)
        stats = engine.stats
        assert stats.num_preemptions > 0
        assert set(stats.preemptions_by_kind) == {mode}
        assert stats.states_swapped == stats.preemptions_by_kind["swap"]
        computed[mode] = stats.num_prefill_tokens
        assert not stats.offload_failures
        check(engine)
    assert computed["swap"] == sum(map(len, PROMPTS)) < computed["recompute"]


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("name", "least"), [("kda", 120_000), ("lightning", 71_000)])
def test_a_state_is_copied_from_the_slot_of_the_last_draft_that_held(registry: Registry, name: str, least: int) -> None:
    texts = [[*prompt, *after] for prompt, after in zip(PROMPTS, expected_of(name), strict=True)]
    swapped = 0
    for memory in range(least, least + 6000, 1500):
        config = replace(CONFIG, preemption_mode="swap", kv_cache_memory=memory, num_speculative_tokens=4)
        guesses = told_of(texts, wrong_every=4)
        engine = made_engine(MODELS[name], registry, config, proposer=guesses, measured=False)
        assert tokens(engine) == expected_of(name)
        swapped += engine.stats.states_swapped
        check(engine)
    assert swapped > 1


def test_a_held_slot_is_not_handed_out() -> None:
    kept = Checkpoints(StateSlots(num_rows=1, per_row=1, num_checkpoints=2, bytes_per_slot=8), 64, EngineStats())
    for digest in (b"first", b"second"):
        slot = kept.allocate(evict=False)
        assert slot is not None
        kept.name(digest, slot)
    first = kept.hold(b"first")
    assert first is not None
    coming = kept.hold(b"third")  # in place of the second, for the first one is held
    assert coming is not None
    assert not kept.knows(b"second")
    assert kept.allocate(evict=True) is None
    assert not kept.has_slot_for(b"fourth")
    kept.clear()
    kept.check_integrity([], [first, coming])
    kept.unhold(first)
    assert kept.allocate(evict=False) == first
    kept.publish_restored(b"third", coming)
    kept.unhold(coming)
    assert kept.knows(b"third")
    kept.check_integrity([first], [])


@pytest.mark.parametrize(
    ("name", "lives"), [("lightning", 2), *(pytest.param(name, 5, marks=pytest.mark.slow) for name in ("lightning", "mamba1"))]
)
def test_random_lives_in_a_crowded_cache_write_the_tokens_of_lone_texts(registry: Registry, name: str, lives: int) -> None:
    assert live(registry, name, range(lives), most_prompts=8, crowded=True)["states_offloaded"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_crowded_lives_write_the_tokens_of_lone_texts(registry: Registry, name: str) -> None:
    happened = live(registry, name, range(1000), most_prompts=1000, crowded=True)
    for what in ("states_swapped", "states_restored", "evictions", "copies_failed"):
        assert happened[what], what


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload_dir": "/tmp/never"}, "kv_offload_dir: needs a model whose layers keep no state"),
        ({"kv_offload_size": 3000}, "bytes of a block and a state"),
        ({"kv_cache_memory": 10_000, "max_num_seqs": 1, "max_model_len": 40}, "room for a checkpoint"),
    ],
)
def test_what_cannot_keep_states_is_refused(registry: Registry, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made_engine(MODELS["gated delta"], registry, replace(CONFIG, **options))
