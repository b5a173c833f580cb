"""The cheap count of who holds the cache, against the count of every block."""

from __future__ import annotations

from headway.core.engine.cache.usage import OWN, RESERVED, SHARED
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.engine import EngineParts, make_engine
from headway.core.engine.loop import occupancy
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from tiny_model import TinyModel


def test_occupancy_agrees_with_cache_usage(registry: Registry) -> None:
    engine = make_engine(
        EngineParts(model=TinyModel(), source=registry, config=EngineConfig(block_size=8, kv_cache_memory=2**20))
    )
    params, prompt = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), list(range(1, 34))
    engine.add_request("first", engine.limits.checked(prompt, params))
    for _ in range(3):
        engine.step()
    engine.add_request("again", engine.limits.checked(prompt, params))
    engine.add_request("other", engine.limits.checked([40, 41, 42], params))
    for _ in range(9):
        engine.step()
        now, usage = occupancy(engine, most=8), engine.cache_usage()
        assert now.num_holding == len(usage.sequences)
        for held, drawn in zip(now.holdings, usage.sequences, strict=True):
            letters = drawn.blocks[0]
            assert (held.request_id, held.num_tokens) == (drawn.name, drawn.num_tokens)
            assert held.found + held.computed == letters.count(OWN) + letters.count(SHARED)
            assert held.reserved == letters.count(RESERVED)
    assert [held.found for held in now.holdings] == [0, 4, 0]
    assert now.num_decoding == 3
    assert now.num_decoding_tokens == sum(held.num_tokens for held in now.holdings)
    assert [held.request_id for held in occupancy(engine, most=1).holdings] == ["first"]
    assert occupancy(engine, most=1).num_holding == 3
    engine.abort_all()
    assert occupancy(engine, most=8).num_holding == occupancy(engine, most=8).num_decoding == 0
