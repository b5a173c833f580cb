"""Engines of one model, one after another, and what is asked of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import torch

from headway.bench.studies.requests.results import RequestsCell, Study
from headway.core.contract.errors import HeadwayError
from headway.core.engine.data.stats import EngineStats
from headway.core.sampling.params import SamplingParams
from headway.llm import LLM


@dataclass(frozen=True)
class Sizes:
    """How much is asked."""

    batch_sizes: Sequence[int] = (1, 64)
    """Sequences of each load of `sampling` and `speculation`; the last is that of `overload`."""
    input_len: int = 128
    output_len: int = 128
    second_turn_len: int = 4000
    """Tokens of the first turn of `second-turn`."""
    acceptance: float = 0.7
    """Probability that a guess of `speculation` is right, given that those before it are."""
    repeat: int = 5
    """Timed turns of each way, after one that warms up; the median counts."""


@dataclass(frozen=True)
class Asked:
    """What came of some requests that were sent at once."""

    tokens: list[list[int]]
    seconds: float
    stats: EngineStats

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


@dataclass(frozen=True)
class Engines:
    """Makes engines; of each that is dropped, the device's memory is free again before the next."""

    model: str
    options: Mapping[str, Any]
    """Options of EngineArgs that hold for every engine."""
    random: Random = field(default_factory=lambda: Random(0))

    def start(self, *, tokens: float | None = None, **options: Any) -> LLM:
        """tokens: what the cache holds; None leaves it to the options."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if tokens is not None:
            options["kv_cache_memory"] = int(tokens * self.token_bytes)
        settings = {"load_format": "dummy", **self.options, "skip_tokenizer_init": True, **options}
        return LLM(settings.pop("model", self.model), **settings)

    @cached_property
    def _small(self) -> LLM:
        return self.start(max_model_len=64, max_num_seqs=1, enforce_eager=True, kv_cache_memory="256MiB", autotune_budget=0.0)

    @cached_property
    def token_bytes(self) -> float:
        """Cache bytes per token, all layers together."""
        pages = self._small.engine.capacity.pool.page_format
        return pages.page_bytes / pages.groups[0].page_size

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Random token ids, each time others, so that no prompt is in the prefix cache."""
        vocab_size = self._small.model.decoder.vocab_size
        return [[self.random.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def ask(llm: LLM, prompts: list[list[int]], output_len: int, **params: Any) -> Asked:
    """Send prompts at once and wait for exactly `output_len` tokens of each; greedy if nothing else is said.

    :raises HeadwayError: a request that wrote less.
    """
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": output_len, "ignore_eos": True, **params})
    before, began = llm.engine.stats.snapshot(), time.perf_counter()
    outputs = llm.generate(prompts, wanted, use_tqdm=False)
    seconds = time.perf_counter() - began
    for output in outputs:
        found = output.outputs[0]
        if len(found.token_ids) != output_len:
            why = found.error or f"finish_reason {found.finish_reason}"
            raise HeadwayError(
                f"headway.bench.studies.requests: a request needs {output_len} output tokens, got {len(found.token_ids)} ({why})"
            )
    return Asked([list(output.outputs[0].token_ids) for output in outputs], seconds, llm.engine.stats - before)


def cell(
    study: Study, load: str, way: str, unit: str, found: Sequence[float], base: float | None = None, **others: Any
) -> RequestsCell:
    """found: of each timed turn. base: the median of the load's first way; None: this is it."""
    median = statistics.median(found)
    gain = 1.0 if base is None else median / base if unit == "tok/s" else base / median
    return RequestsCell(study=study, load=load, way=way, unit=unit, median=median, all=list(found), gain=gain, **others)  # type: ignore[arg-type]


def same(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> float:
    """Share of sequences with equal tokens."""
    return sum(a == b for a, b in zip(expected, got, strict=True)) / len(expected)


def sequences(count: int) -> str:
    """Names a load."""
    return "1 sequence" if count == 1 else f"{count} sequences"
