"""Whole generations through one backend, in a process of its own: `python -m headway.bench.crossover.worker`.

Reads one JSON request from stdin and answers with lines on stdout that begin with MARK; whatever else libraries print is ignored.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from headway.core.contract.errors import ConfigError, HeadwayError, UnsupportedError
from headway.core.sampling.params import SamplingParams
from headway.llm import LLM
from headway.testing.cases import parse_case
from headway.tuning.schema import SpecRecord

MARK: Final = "@headway "
_WARM_UP_TOKENS = 4
_LEAST_SECONDS = 2.0
"""A generation is repeated until its passes have taken this long, ..."""
_MOST_PASSES = 5
"""... or this many passes are done. Single generations of half a second differ by up to 4 %."""


def main() -> None:
    """Answer the request: ready, then begin, pass before each generation, and done or failed for each case; or fatal."""
    request = json.load(sys.stdin)
    try:
        llm = LLM(**request["llm"])
    except HeadwayError as error:
        status = "unsupported" if isinstance(error, (UnsupportedError, ConfigError)) else "error"
        return _say("fatal", status=status, reason=_line(error))
    except (torch.OutOfMemoryError, MemoryError) as error:
        return _say("fatal", status="oom", reason=_line(error))
    specs = llm.model.decoder.attention_specs
    _say("ready", selection=str(llm.engine.selection), spec=SpecRecord.of(specs[0]).model_dump())
    for case in request["cases"]:
        _say("begin", case=case)
        try:
            times = _measure(llm, parse_case(case), request["repeat"], request["seed"])
            _say("done", case=case, times_us=times, served=_served(llm))
        except (torch.OutOfMemoryError, MemoryError) as error:
            _say("failed", case=case, status="oom", reason=_line(error))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        except Exception as error:
            _say("failed", case=case, status="error", reason=_line(error))
    return None


def _measure(llm: LLM, requests: Sequence[tuple[int, int]], repeat: int, seed: int) -> list[float]:
    """Microseconds of each pass, all requests sent at once; a short pass before the first warms everything up.

    requests: (input length, input and output length) of each. repeat: passes at least; short ones are repeated more often.

    :raises RuntimeError: a request ended before its time.
    """
    draw = random.Random(seed)
    vocabulary = llm.model.decoder.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(query_len)] for query_len, _ in requests]
    wanted = [total - query_len for query_len, total in requests]
    _generate(llm, prompts, [min(count, _WARM_UP_TOKENS) for count in wanted])
    times: list[float] = []
    while len(times) < repeat or (len(times) < _MOST_PASSES and sum(times) < 1e6 * _LEAST_SECONDS):
        _say("pass")
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
    """Steps that each backend has served since the start."""
    return dict(llm.engine.stats.steps_by_backend)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _say(event: str, **found: Any) -> None:
    print(MARK + json.dumps({"event": event, **found}), flush=True)


if __name__ == "__main__":
    main()
