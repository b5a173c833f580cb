"""Statistics: the line, the page and the log have the numbers of the engine."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import pytest

from headway import LLM, EngineSnapshot, SamplingParams
from headway.core.contract.errors import ConfigError
from headway.core.engine.data.stats import EngineStats
from headway.hosting.stats_report import stats_line, stats_page

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
NONE = EngineSnapshot(0.0, 0, 0, 512, 0, 0, EngineStats())


def test_the_numbers_of_a_snapshot_are_those_of_the_engine(tiny_model_folder: Path) -> None:
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1, block_size=16, attn_backend="sdpa")
    prompt = list(range(1, 34))
    start = llm.stats()
    assert (start.num_running, start.num_used_blocks, start.num_cached_blocks) == (0, 0, 0)
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    during = llm.stats()
    assert (during.num_running, during.num_waiting, during.num_used_blocks) == (1, 0, 3)
    assert len(list(stream)) == 7
    llm.generate([prompt], GREEDY, use_tqdm=False)
    end = llm.stats()
    assert (end.num_running, end.num_used_blocks, end.num_blocks) == (0, 0, llm.engine.blocks.num_pages)
    assert end.num_cached_blocks == 3
    done = end.totals - start.totals
    assert (done.num_output_tokens, done.num_prompt_tokens, done.num_cached_tokens) == (16, 66, 32)
    page = "\n".join(stats_page(end, start))
    for words in ("66 tokens, 32 of them (48%)", "16 tokens in", "s of work", "0 running, 0 waiting", "16 sdpa", "3 cached"):
        assert words in page
    line = stats_line(end, during)
    assert line.startswith("run 0 | ")
    assert "hits 97%" in line  # of the second prompt alone
    assert line.endswith("sdpa")


def test_the_line_fits_80_columns_and_leaves_out_zeros() -> None:
    assert stats_line(NONE, NONE) == "run 0 | 0.0 tok/s | blocks 0%, cached 0%"
    many = EngineStats(
        num_output_tokens=10**9,
        num_prompt_tokens=10**9,
        num_cached_tokens=10**9,
        num_preemptions=10**7,
        num_draft_tokens=10**9,
        num_accepted_tokens=10**9,
        steps_by_backend=Counter({"a_backend_with_a_long_name": 3, "another_of_the_kind": 2}),
        steps_without_graph=Counter({"more tokens than were captured": 10**7}),
    )
    line = stats_line(EngineSnapshot(1.0, 10**6, 10**7, 10**7, 10**7, 10**7, many), NONE)
    assert len(line) <= 80
    assert line.startswith("run 1,000,000 wait 10,000,000 | 1,000,000,000 tok/s")
    page = "\n".join(stats_page(EngineSnapshot(1.0, 1, 0, 10, 1, 0, many), NONE))
    assert "outside a graph: 10,000,000 more tokens than were captured" in page


def test_offloaded_blocks_are_shown_where_there_are_any() -> None:
    now = EngineSnapshot(1.0, 0, 0, 512, 0, 256, EngineStats(), num_offloaded_blocks=1234)
    assert stats_line(now, NONE) == "run 0 | 0.0 tok/s | blocks 0%, cached 50%, host 1,234"
    assert "blocks     0 of 512 used, 256 cached; 1,234 kept in the host's memory" in stats_page(now, NONE)
    assert "host" not in "\n".join([stats_line(NONE, NONE), *stats_page(NONE, NONE)])


def test_a_line_is_logged_once_in_an_interval(tiny_model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="log_stats_interval: needs a number of seconds above 0, got 0"):
        LLM(str(tiny_model_folder), log_stats_interval=0)
    llm = LLM(str(tiny_model_folder), kv_cache_memory="1MiB", num_threads=1, log_stats_interval=1e-6)
    assert not logging.getLogger("headway").isEnabledFor(logging.INFO)  # as in commands without -v
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    lines = [record.message for record in caplog.records if " tok/s | blocks " in record.message]
    assert len(lines) == 8
    assert all(line.startswith("run ") for line in lines)
