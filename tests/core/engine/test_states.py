"""Layers that keep states: chunks, prefix hits, preemption, drafts, graphs and aborts change no token, and no slot is lost."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from graph_backend import Walk
from graph_stub import AsItIs
from headway.backends.states.torch_states import TorchStates
from headway.core.contract.errors import ConfigError
from headway.core.contract.model import Attention
from headway.core.contract.state import KEY_VALUE
from headway.core.engine.data.config import EngineConfig
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
def test_random_lives_write_the_tokens_of_lone_texts(registry: Registry, name: str, lives: int) -> None:
    happened = live(registry, name, range(lives), most_prompts=8)
    assert happened["hits"]
    assert happened["accepted"]


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MODELS)
def test_a_thousand_random_lives_write_the_tokens_of_lone_texts(registry: Registry, name: str) -> None:
    happened = live(registry, name, range(1000), most_prompts=1000)
    assert happened["preemptions"]
    assert happened["evictions"]
