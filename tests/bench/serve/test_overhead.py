"""The server over a stand-in for the engine: what it measures is there, and adds up."""

from __future__ import annotations

from headway import AsyncLLM
from headway.bench.studies.servers.overhead import measure, paced_driver
from headway.hosting.thread_host import EngineThread


def test_tokens_and_first_tokens_are_measured_against_the_stand_in() -> None:
    llm = AsyncLLM.over(EngineThread(paced_driver(None, 2e-3, 0, 1e-3)))
    found = measure(llm, streams=3, tokens=4, rounds=2, prompt=5)
    llm.shutdown()
    assert 0 < found["of_paced"] < 1.5
    assert 1 <= found["tokens_per_chunk"] <= 4
    assert found["first_token_over_ms"] > -4  # a request that comes first may be a step of its own
    assert found["server_us_per_request"] > 0
