"""Layers that keep states: chunks, prefix hits, preemption, drafts, graphs, aborts and the host's memory change no token."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from graph_backend import Walk
from graph_stub import AsItIs
from headway.backends.states.torch_states import TorchStates
from headway.core.contract.errors import ConfigError
from headway.core.contract.model import Attention
from headway.core.contract.state import KEY_VALUE
from headway.core.engine.cache.checkpoints import Checkpoints
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.state_slots import StateSlots
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry, create_registry
from stateful_model import MODELS, NO_ATTENTION
from stateful_worlds import live
from tiny_engine import drain, generate, made_engine, registering, tokens_of, told_of

pytestmark = pytest.mark.xdist_group("states")  # what lone texts say is computed once
GREEDY = SamplingParams(temperature=0, max_tokens=20)
CONFIG = EngineConfig(attn_backend="sdpa", block_size=8, kv_cache_memory=2**21, max_num_batched_tokens=80, max_num_seqs=6)
_random = Random(5)
EVERY = {**MODELS, "no attention": NO_ATTENTION}
SHARED = [_random.randrange(50) for _ in range(150)]
PROMPTS = [
    [1, 2, 3],
    SHARED,
    [_random.randrange(50) for _ in range(230)],
    [7],
    [*SHARED[:131], 9, 9],
    [*SHARED, 4, 4, 4],
    SHARED,
    *([number, 49 - number] for number in range(3)),
]


@functools.cache
def expected_of(name: str) -> list[list[int]]:
    return [EVERY[name].greedy(prompt, 20) for prompt in PROMPTS]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EVERY)
def test_tokens_are_those_of_a_lone_text(registry: Registry, name: str) -> None:
    """Chunks of prompts beside decodes, prefix hits, more sequences than rows; then everything again, from the cache."""
    engine = made_engine(EVERY[name], registry, CONFIG)
    for _ in range(2):
        assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected_of(name)
    assert engine.stats.num_checkpoint_hits > 3
    assert engine.stats.num_cached_tokens > 2 * 128


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize(
    ("name", "overlapped"),
    [("gated delta", False), ("gated delta", True), ("no attention", True)],
    ids=["one by one", "overlapped", "no attention"],
)
def test_states_that_a_failed_step_has_moved_on_are_computed_again(registry: Registry, name: str, overlapped: bool) -> None:
    model, sizes = copy.copy(EVERY[name]), [0]
    called, logits = type(model).__call__, type(model).compute_logits

    class Large(type(model)):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
            sizes.append(len(input_ids))
            hidden: Tensor = called(self, input_ids, positions, attention)
            return hidden

        def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
            if sizes[-1] > 5 and len(sizes) > 9:
                raise torch.OutOfMemoryError("CUDA out of memory")
            result: Tensor = logits(self, hidden, out)
            return result

    model.__class__ = Large
    engine = made_engine(model, registry, replace(CONFIG, max_num_batched_tokens=40, async_scheduling=overlapped))
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected_of(name)
    assert engine.scheduler.max_num_batched_tokens <= 5
    assert engine.stats.preemptions_by_kind["recompute"] > 2
    engine.blocks.check_integrity([])


def test_preempted_sequences_begin_again_from_a_checkpoint(registry: Registry) -> None:
    """Pages for few sequences: some are preempted, and compute what no checkpoint spares once more."""
    engine = made_engine(MODELS["gated delta"], registry, replace(CONFIG, kv_cache_memory=90_000, max_model_len=256))
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected_of("gated delta")
    assert engine.stats.num_preemptions > 0


def test_without_a_prefix_cache_no_state_is_kept(registry: Registry) -> None:
    engine = made_engine(MODELS["kda"], registry, replace(CONFIG, enable_prefix_caching=False))
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected_of("kda")
    assert engine.capacity.states.num_checkpoints == engine.stats.num_checkpoints == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gated delta", "mamba2 and a window", "no attention"])
def test_drafts_that_hold_in_part_leave_the_state_after_the_last_that_held(registry: Registry, name: str) -> None:
    """Guesses that are right for a while and then wrong, at another place for each length."""
    texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected_of(name), strict=True)]
    engine = made_engine(
        EVERY[name], registry, replace(CONFIG, num_speculative_tokens=4), proposer=told_of(texts), measured=False
    )
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected_of(name)
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


class Bare(TorchStates):
    name = "bare"
    capabilities = replace(TorchStates.capabilities, convolution=False)


def test_convolutions_may_be_another_backend_s() -> None:
    registry = create_registry([Bare], load_entry_points=False)
    engine = made_engine(MODELS["gated delta"], registry, replace(CONFIG, state_backend="bare"))
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected_of("gated delta")


def test_completions_of_one_prompt_share_its_checkpoint(registry: Registry) -> None:
    engine = made_engine(MODELS["lightning"], registry, CONFIG)
    engine.add_request("three", engine.limits.checked(SHARED, SamplingParams(n=3, temperature=0, max_tokens=8)))
    written = drain(engine)
    assert {tuple(each.token_ids) for each in written.values()} == {tuple(expected_of("lightning")[1][:8])}
    assert engine.stats.num_checkpoint_hits == 2


def test_a_second_turn_begins_where_the_first_prompt_ended(registry: Registry) -> None:
    engine = made_engine(MODELS["gated delta"], registry, CONFIG)
    first = generate(engine, [SHARED], GREEDY)[0].token_ids
    second = generate(engine, [[*SHARED, *first, 3, 4]], GREEDY)[0]
    assert second.num_cached_tokens == 128
    assert second.token_ids == MODELS["gated delta"].greedy([*SHARED, *first, 3, 4], 20)


def test_the_place_where_prompts_part_is_kept(registry: Registry) -> None:
    """The second prompt leaves the first at token 131 and ends at 230: the third, like it up to there, finds token 128."""
    engine = made_engine(MODELS["kda"], registry, replace(CONFIG, max_num_batched_tokens=512))
    others = [[*SHARED[:140], *(number for _ in range(120))] for number in (11, 12, 13)]
    generate(engine, [[*SHARED[:140], *([10] * 130)]], GREEDY)
    hits = [generate(engine, [prompt], GREEDY)[0].num_cached_tokens for prompt in others]
    assert hits == [0, 128, 128]


def test_states_that_leave_no_room_for_pages_are_refused(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs: needs states of .*iB a sequence .*set max_num_seqs to at most"):
        made_engine(MODELS["mamba1"], registry, replace(CONFIG, max_num_seqs=2000))


def test_a_model_without_attention_gives_all_memory_to_states(registry: Registry) -> None:
    """Its pages count tokens and take nothing; the host's memory, to which pages go, is refused."""
    row = sum(KEY_VALUE.bytes_per_slot(layer.spec) for layer in NO_ATTENTION.state_layers)
    config = replace(CONFIG, kv_cache_memory=CONFIG.max_num_seqs * row)
    capacity = made_engine(NO_ATTENTION, registry, config).capacity
    assert (capacity.states.num_bytes, capacity.states.num_checkpoints) == (config.kv_cache_memory, 0)
    assert capacity.pool.num_bytes == 0
    assert capacity.pool.num_sequences(NO_ATTENTION.max_position_embeddings) == CONFIG.max_num_seqs
    with pytest.raises(ConfigError, match="max_num_seqs: needs states of .* in the cache's memory, got 6 .*at most 5"):
        made_engine(NO_ATTENTION, registry, replace(config, kv_cache_memory=CONFIG.max_num_seqs * row - 1))
    with pytest.raises(ConfigError, match="kv_offload_size: needs a model with a layer of attention"):
        made_engine(NO_ATTENTION, registry, replace(CONFIG, kv_offload_size="1MiB"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gated delta", "no attention"])
def test_decodes_run_as_graphs_and_prompts_in_pieces(name: str) -> None:
    registry = registering(walk=Walk)
    config = replace(CONFIG, attn_backend="prefill=sdpa,decode=walk", cudagraph_capture_sizes=(1, 2, 4, 6))
    engine = made_engine(EVERY[name], registry, config)
    engine.executor.capture(AsItIs())  # type: ignore[call-arg]
    assert tokens_of(generate(engine, PROMPTS, GREEDY)) == expected_of(name)
    assert engine.stats.num_graph_steps > 10
    assert engine.stats.steps_in_pieces["a prompt in the step"] > 2


@pytest.mark.parametrize(
    ("name", "lives"), [("lightning", 2), *(pytest.param(name, 6, marks=pytest.mark.slow) for name in ("lightning", "mamba1"))]
)
@pytest.mark.parametrize("crowded", [False, True])
def test_random_lives_write_the_tokens_of_lone_texts(registry: Registry, name: str, lives: int, crowded: bool) -> None:
    happened = live(registry, name, range(lives), most_prompts=8, crowded=crowded)
    assert all(happened[what] for what in (("states_offloaded",) if crowded else ("hits", "accepted"))), happened


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("crowded", [False, True])
def test_a_thousand_random_lives_write_the_tokens_of_lone_texts(registry: Registry, name: str, crowded: bool) -> None:
    happened = live(registry, name, range(1000), most_prompts=1000, crowded=crowded)
    wanted = ("states_swapped", "states_restored", "evictions", "copies_failed") if crowded else ("preemptions", "evictions")
    assert all(happened[what] for what in wanted), happened


OFFLOADING = EngineConfig(
    attn_backend="sdpa",
    block_size=8,
    kv_cache_memory=100_000,
    kv_offload_size=2**20,
    max_model_len=160,
    max_num_batched_tokens=1200,
    max_num_seqs=4,
)
_drawn = Random(5)
CROWD = [[_drawn.randrange(50) for _ in range(130)] for _ in range(8)]


@functools.cache
def expected_of_crowd(name: str) -> list[list[int]]:
    return [MODELS[name].greedy(prompt, 20) for prompt in CROWD]


def tokens(engine: EngineLoop) -> list[list[int]]:
    return tokens_of(generate(engine, CROWD, GREEDY))


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
    engine = made_engine(MODELS[name], registry, replace(OFFLOADING, max_num_seqs=rows))
    assert tokens(engine) == expected_of_crowd(name)
    again = generate(engine, CROWD, GREEDY)
    assert tokens_of(again) == expected_of_crowd(name)
    assert [each.num_cached_tokens for each in again] == [128] * len(CROWD)
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
        engine = made_engine(MODELS[name], registry, replace(OFFLOADING, preemption_mode=mode, kv_cache_memory=memory))
        assert tokens(engine) == expected_of_crowd(name)
        stats = engine.stats
        assert stats.num_preemptions > 0
        assert set(stats.preemptions_by_kind) == {mode}
        assert stats.states_swapped == stats.preemptions_by_kind["swap"]
        computed[mode] = stats.num_prefill_tokens
        assert not stats.offload_failures
        check(engine)
    assert computed["swap"] == sum(map(len, CROWD)) < computed["recompute"]


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("name", "least"), [("kda", 120_000), ("lightning", 71_000)])
def test_a_state_is_copied_from_the_slot_of_the_last_draft_that_held(registry: Registry, name: str, least: int) -> None:
    texts = [[*prompt, *after] for prompt, after in zip(CROWD, expected_of_crowd(name), strict=True)]
    swapped = 0
    for memory in range(least, least + 6000, 1500):
        config = replace(OFFLOADING, preemption_mode="swap", kv_cache_memory=memory, num_speculative_tokens=4)
        guesses = told_of(texts, wrong_every=4)
        engine = made_engine(MODELS[name], registry, config, proposer=guesses, measured=False)
        assert tokens(engine) == expected_of_crowd(name)
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
    ("options", "message"),
    [
        ({"kv_offload_dir": "/tmp/never"}, "kv_offload_dir: needs a model whose layers keep no state"),
        ({"kv_offload_size": 3000}, "bytes of a block and a state"),
        ({"kv_cache_memory": 10_000, "max_num_seqs": 1, "max_model_len": 40}, "room for a checkpoint"),
    ],
)
def test_what_cannot_keep_states_is_refused(registry: Registry, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made_engine(MODELS["gated delta"], registry, replace(OFFLOADING, **options))
