"""Adapters over ranks: each holds the part of A or B that goes with its part of the base."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.core.contract.adapters import LoRARequest

pytestmark = pytest.mark.slow
OPTIONS = {"kv_cache_memory": "4MiB", "num_threads": 1, "block_size": 16, "autotune_budget": 0, "enable_lora": True}


def test_two_ranks_write_what_one_writes(base: Path, adapters: list[LoRARequest]) -> None:
    prompts = ["the quick brown fox", "jumps over", "a lazy dog sleeps", "the quick"] * 2
    wanted = [*adapters, None, *adapters[:3]]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for size in (1, 2):
        llm = LLM(str(base), **OPTIONS, max_lora_rank=8, max_loras=2, tensor_parallel_size=size)
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=wanted)
        found.append([output.outputs[0].token_ids for output in outputs])
        llm.engine.executor.shutdown()
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0]}) == 8
