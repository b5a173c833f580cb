"""Random requests through the engine's loop and a device that looks at every slot that is read."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from fake_device import VOCABULARY, FakeDevice, History
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import Capacity
from headway.core.engine.data.groups import CacheGroup, PageFormat
from headway.core.engine.data.pool import PoolSize
from headway.core.engine.data.request_limits import RequestLimits
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from random_engines import FAULTS, MAX_MODEL_LEN, World
from tiny_engine import drain


class Always(Random):
    """Whatever may happen does."""

    def random(self) -> float:
        return 0.0


@pytest.mark.parametrize("ooms", [0, 1], ids=["launched", "without memory for it"])
def test_steps_launched_after_a_faulty_step_fail_with_it(ooms: int) -> None:
    prompt = [0, 1, 2] * 12
    histories = {seed: History(prompt, seed, MAX_MODEL_LEN) for seed in (8, 16, 24)}
    pool = PoolSize(64, PageFormat((CacheGroup(4),), 4, 1), MAX_MODEL_LEN)
    device = FakeDevice(Capacity(pool, 4, MAX_MODEL_LEN), histories, Always(), faults=1.0)
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64, async_scheduling=True)
    engine = EngineLoop(device, config, RequestLimits(MAX_MODEL_LEN, VOCABULARY, ""))
    engine.add_request("first", engine.limits.checked(prompt, SamplingParams(max_tokens=3, seed=8)))
    assert engine.step() == []
    device.faults, device.ooms = 0.0, ooms
    # the second finds the prompt of the first in the cache
    engine.add_request("second", engine.limits.checked(prompt, SamplingParams(max_tokens=3, seed=16)))
    ended = {delta.request_id: (delta.finish_reason, delta.error) for delta in engine.step()}
    assert ended == dict.fromkeys(["first", "second"], ("error", "a fault of the device"))
    engine.add_request("third", engine.limits.checked(prompt, SamplingParams(max_tokens=3, seed=24)))
    written = drain(engine)["third", 0]
    assert (written.finish_reason, written.num_cached_tokens) == ("length", 0)
    assert written.token_ids == histories[24].tokens[36:39].tolist()


def test_deltas_kept_by_an_interrupt_are_dropped_for_an_aborted_request() -> None:
    pool = PoolSize(64, PageFormat((CacheGroup(4),), 4, 1), MAX_MODEL_LEN)
    device = FakeDevice(Capacity(pool, 4, MAX_MODEL_LEN), {8: History([0, 1], 8, MAX_MODEL_LEN)}, Random(0), interrupts=1.0)
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64, async_scheduling=True)
    engine = EngineLoop(device, config, RequestLimits(MAX_MODEL_LEN, VOCABULARY, ""))
    engine.add_request("first", engine.limits.checked([0, 1], SamplingParams(max_tokens=9, seed=8)))
    assert engine.step() == []
    for _ in range(2):  # the second time after a step was read
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.abort("first")
    assert not engine.has_unfinished


def run_worlds(first: int, num_worlds: int, num_requests: int) -> Counter[str]:
    """Returns what has happened in all of them."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + num_worlds):
        world = World(seed)
        try:
            world.run(num_requests)
        except BaseException as error:
            error.add_note(world.told)
            raise
        counts += world.counts
    return counts


def test_200_random_requests() -> None:
    counts = run_worlds(first=200, num_worlds=10, num_requests=20)
    assert counts["swap"]
    assert counts["hits"]
    assert counts["stored"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "num_worlds"), [(1000, 40), pytest.param(2000, 100, marks=pytest.mark.soak)], ids=["4,000", "10,000"]
)
def test_thousands_of_random_requests(first: int, num_worlds: int) -> None:
    counts = run_worlds(first, num_worlds, num_requests=100)
    never = [what for what in ("swap", "recompute", "hits", "stored", "interrupts", *FAULTS) if not counts[what]]
    assert not never, "requests as random as these should have come to that"
