"""Random lives of an engine whose layers keep states, and what each request must have written: tokens of a lone text."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from headway.core.contract.state import KEY_VALUE
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from page_copier_stub import Later
from stateful_model import MODELS
from tiny_engine import Written, drain, made_engine, told_of

MOST = 24
"""Tokens of the longest completion."""


@functools.cache
def prompts() -> list[list[int]]:
    """Prompts that share starts of many lengths."""
    random = Random(7)
    trunk = [random.randrange(50) for _ in range(260)]
    cuts = (1, 5, 63, 64, 65, 66, 100, 128, 129, 130, 170, 192, 193, 240)
    branches = [[*trunk[:cut], *(random.randrange(50) for _ in range(random.choice((1, 3, 70))))] for cut in cuts]
    return [*branches, *(trunk[:cut] for cut in cuts), *([random.randrange(50) for _ in range(size)] for size in (2, 67, 200))]


@functools.cache
def answer(name: str, index: int) -> list[int]:
    return MODELS[name].greedy(prompts()[index], MOST)


def run_world(registry: Registry, name: str, seed: int, most_prompts: int = 1000, crowded: bool = False) -> Counter[str]:
    """Run one random schedule, and check every completion against the text without other requests. Returns counts of events.

    most_prompts: number of possible prompts, whose texts are computed first. crowded: True if the cache has little more room than
    for one sequence, with host memory for offloading.
    """
    random = Random(seed)
    offloads, rows, drafts = crowded or random.random() < 0.2, random.randrange(1, 6), random.choice((0, 0, 1, 4, 7))
    state = sum(KEY_VALUE.bytes_per_slot(spec) for spec, _ in MODELS[name].state_layers)
    states = 2 * rows * (1 + drafts) * state
    pages = 48 * 1024 * len(MODELS[name].attention_specs)
    config = EngineConfig(
        attn_backend="sdpa",
        block_size=random.choice((8, 16)),
        max_num_batched_tokens=random.choice((random.randrange(1, 65), random.randrange(64, 400))),
        max_num_seqs=rows,
        max_model_len=336,
        kv_cache_memory=states + (random.randrange(105, 125) if crowded else random.randrange(130, 200)) * pages // 100,
        enable_prefix_caching=offloads or random.random() < 0.9,
        async_scheduling=random.random() < 0.5,
        num_speculative_tokens=max(drafts, 1),
        kv_offload_size=random.choice((2**20, 2**17 + random.randrange(8) * state)) if offloads else None,
        preemption_mode=random.choice(("swap", "swap", "auto", "recompute")) if offloads else "auto",
    )
    every = range(len(prompts()))
    indices = every[-most_prompts:] if crowded else every[:most_prompts]  # the longer ones stand behind
    texts = [[*prompts()[index], *answer(name, index)] for index in indices]
    guesses = told_of(texts, wrong_every=random.randrange(2, 7)) if drafts else None
    engine = made_engine(MODELS[name], registry, config, proposer=guesses, measured=False)
    if offloads:
        _delay(engine.executor.mover, random, broken=random.choice((0.0, 0.0, 0.2)))
    asked: dict[str, tuple[int, SamplingParams]] = {}
    written: dict[tuple[str, int], Written] = {}
    aborted: set[str] = set()
    for number in range(random.randrange(3, 14) + 8 * crowded):
        index = random.choice(indices)
        params = SamplingParams(temperature=0, max_tokens=random.randrange(1, MOST + 1), n=random.choice((1, 1, 1, 3)))
        asked[str(number)] = index, params
        engine.add_request(str(number), engine.limits.checked(prompts()[index], params))
        for _ in range(random.choice((0, 0, 1, 3, 8))):
            if engine.has_unfinished:
                _take(engine.step(), written)
        engine.blocks.check_integrity(engine.scheduler.holders)
        if engine.scheduler.offloader is not None:
            engine.scheduler.offloader.tier.check_integrity(idle=False)
        if random.random() < 0.15:
            aborted.add(gone := random.choice(list(asked)))
            engine.abort(gone)
    drain(engine, written)
    for (request, _), got in written.items():
        index, params = asked[request]
        expected = answer(name, index)[: params.max_tokens]
        whole = got.token_ids == expected and got.finish_reason == "length"
        assert whole or (request in aborted and got.token_ids == expected[: len(got.token_ids)]), (seed, request, got, expected)
    missing = [request for request in asked if (request, 0) not in written and request not in aborted]
    assert not missing, (seed, missing)
    _look_at_what_is_left(engine)
    stats = engine.stats
    return Counter(
        worlds=1,
        preemptions=stats.num_preemptions,
        hits=stats.num_checkpoint_hits,
        evictions=stats.num_checkpoint_evictions,
        accepted=stats.num_accepted_tokens,
        aborted=len(aborted),
        offloaded=stats.blocks_offloaded,
        states_swapped=stats.states_swapped,
        states_offloaded=stats.states_offloaded,
        states_restored=stats.states_restored,
        copies_failed=sum(stats.offload_failures.values()),
    )


def live(registry: Registry, name: str, seeds: range, most_prompts: int, crowded: bool = False) -> Counter[str]:
    """Return counts of events in several random schedules; see `run_world`."""
    return sum((run_world(registry, name, seed, most_prompts, crowded) for seed in seeds), Counter[str]())


def _delay(mover: Any, random: Random, broken: float) -> None:
    """Make copies as slow as allowed, and let some fail. broken: share of copies that fail, half way or at their end."""

    def delayed(move: Callable[..., object]) -> Callable[..., Later[None]]:
        def begin(moves: list[tuple[int, int]], states: list[tuple[int, int]]) -> Later[None]:
            fault = RuntimeError("a copy has failed") if random.random() < broken else None
            move(moves, states) if fault is None else move(moves[: len(moves) // 2], [])
            if fault is not None and random.random() < 0.5:
                raise fault
            return Later(None, random.randint(0, 4), fault)

        return begin

    mover.move_out, mover.move_back = delayed(mover.move_out), delayed(mover.move_back)


def _look_at_what_is_left(engine: EngineLoop) -> None:
    """Nothing may be held once every request has ended."""
    engine.read_launched()
    assert engine.scheduler.holders == []
    engine.blocks.check_integrity([])
    offloader = engine.scheduler.offloader
    if offloader is not None:
        for _ in range(6):  # copies that are under way
            offloader.flush(idle=True)
        offloader.tier.check_integrity(idle=True)


def _take(deltas: list, written: dict[tuple[str, int], Written]) -> None:  # type: ignore[type-arg]
    for delta in deltas:
        one = written.setdefault((delta.request_id, delta.completion), Written())
        one.token_ids += delta.new_token_ids
        one.finish_reason = delta.finish_reason
