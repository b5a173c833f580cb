"""Worker process for end-to-end generation with one backend: `python -m headway.bench.crossover.worker`.

The process reads one request and answers with events; see `worker_protocol.events`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import torch

from headway.bench.crossover.worker_protocol import Emit, receive_request
from headway.core.contract.errors import ConfigError, HeadwayError, UnsupportedError
from headway.core.oracle.cases import parse_case
from headway.core.sampling.params import SamplingParams
from headway.llm import LLM
from headway.tuning.table.schema import SpecRecord

_WARM_UP_TOKENS = 4
_LEAST_SECONDS = 2.0
"""Minimum total seconds of a generation's passes. Passes are repeated until they reach this time or `_MOST_PASSES`."""
_MOST_PASSES = 5
"""Maximum number of passes made to reach `_LEAST_SECONDS`. Generations of half a second differ by up to 4 %."""


def main() -> None:
    """Answer the request with events: "ready", then for each case "begin", "pass" before each generation, and "done" or "failed".
    If the engine cannot start, the only event is "fatal"."""
    request, emit = receive_request()
    try:
        llm = LLM(**request["llm"])
    except HeadwayError as error:
        status = "unsupported" if isinstance(error, (UnsupportedError, ConfigError)) else "error"
        return emit("fatal", status=status, reason=_line(error))
    except (torch.OutOfMemoryError, MemoryError) as error:
        return emit("fatal", status="oom", reason=_line(error))
    specs = llm.model.decoder.attention_specs
    emit("ready", selection=str(llm.engine.selection), spec=SpecRecord.of(specs[0]).model_dump())
    for case in request["cases"]:
        emit("begin", case=case)
        try:
            times = _measure(llm, parse_case(case), request["repeat"], request["seed"], emit)
            emit("done", case=case, times_us=times, served=_served(llm))
        except (torch.OutOfMemoryError, MemoryError) as error:
            emit("failed", case=case, status="oom", reason=_line(error))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        except Exception as error:
            emit("failed", case=case, status="error", reason=_line(error))
    return None


def _measure(llm: LLM, requests: Sequence[tuple[int, int]], repeat: int, seed: int, emit: Emit) -> list[float]:
    """Return the microseconds of each pass, in which all requests are sent at once. A short pass first warms everything up.
    requests: (input length, input plus output length) of each request. repeat: minimum number of passes; short passes are
    repeated more often.
    :raises RuntimeError: if a request ended early.
    """
    draw = random.Random(seed)
    vocabulary = llm.model.decoder.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(query_len)] for query_len, _ in requests]
    wanted = [total - query_len for query_len, total in requests]
    _generate(llm, prompts, [min(count, _WARM_UP_TOKENS) for count in wanted])
    times: list[float] = []
    while len(times) < repeat or (len(times) < _MOST_PASSES and sum(times) < 1e6 * _LEAST_SECONDS):
        emit("pass")
        times.append(_generate(llm, prompts, wanted))
    return times


def _generate(llm: LLM, prompts: Sequence[list[int]], wanted: Sequence[int]) -> float:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in wanted]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = 1e6 * (time.perf_counter() - started)
    for output, count in zip(outputs, wanted, strict=True):
        made = output.outputs[0]
        if len(made.token_ids) != count:
            raise RuntimeError(f"{len(made.token_ids)} of {count} tokens: {getattr(made, 'error', None) or made.finish_reason}")
    return took


def _served(llm: LLM) -> dict[str, int]:
    """Return backend -> number of steps that used the backend since the start."""
    return dict(llm.engine.stats.steps_by_backend)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


if __name__ == "__main__":
    main()
