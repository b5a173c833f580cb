"""The server over a stand-in for the engine: what it measures is there, and adds up."""

from __future__ import annotations

from functools import partial

import pytest

from headway import AsyncLLM
from headway.bench.studies.servers.overhead import measure, paced_driver
from headway.hosting.process_host import EngineProcess
from headway.hosting.thread_host import EngineThread


@pytest.mark.parametrize("in_thread", [True, False])
def test_tokens_and_first_tokens_are_measured_against_the_stand_in(in_thread: bool) -> None:
    make = partial(paced_driver, None, 2e-3, 0, 1e-3)
    llm = AsyncLLM.over(EngineThread(make()) if in_thread else EngineProcess(make))
    found = measure(llm, streams=3, tokens=4, rounds=2, prompt=5)
    llm.shutdown()
    assert 0 < found["of_paced"] < 1.5
    assert 1 <= found["tokens_per_chunk"] <= 4
    assert found["first_token_over_ms"] > -4  # a request that comes first may be a step of its own
    assert found["server_us_per_request"] > 0
