"""An engine in a process of its own: `python -m headway.bench.studies.ranks.child`, started by tokens.py and faults.py beside it.

Reads one request and answers with events, as headway.bench.crossover.worker does.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from typing import Any

from headway.bench.crossover.worker_protocol import Tell, receive_request
from headway.core.contract.errors import HeadwayError
from headway.core.engine.ranks.ranked_executor import RankedExecutor
from headway.core.sampling.params import SamplingParams
from headway.core.system.logs import log_to_stderr
from headway.llm import LLM

_BEST = 5
"""Most likely tokens of each position that are told."""
_LENGTHS = (5, 9, 14, 18, 23, 29, 35, 41)
"""Tokens of the prompts."""
_OUTPUT_LEN = 16


def main() -> None:
    """Answer the request; the last event is "done", "lost" or "error"."""
    request, tell = receive_request()
    log_to_stderr(logging.INFO)
    try:
        for dtype in request["dtypes"]:
            for size in request["sizes"]:
                _write(request, dtype, size, tell)
    except HeadwayError as error:
        tell("lost" if request["forever"] else "error", text=str(error))
    else:
        tell("done")


def _write(request: dict[str, Any], dtype: str, size: int, tell: Tell) -> None:
    """Start an engine of so many ranks, and write the same requests: once, or for ever."""
    started = time.perf_counter()
    llm = LLM(
        request["folder"],
        dtype=dtype,
        device=request["device"],
        tensor_parallel_size=size,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory="32MiB",
        autotune_budget=0,
    )
    executor = llm.engine.executor
    pids = executor.pids if isinstance(executor, RankedExecutor) else []
    seconds = time.perf_counter() - started
    tokens, best = _generate(llm)
    graphs = llm.engine.stats.num_graph_steps
    tell(
        "wrote", dtype=dtype, size=size, pids=[os.getpid(), *pids], seconds=seconds, tokens=tokens, best=best, graph_steps=graphs
    )
    while request["forever"]:
        _generate(llm)
    del llm, executor
    gc.collect()


def _generate(llm: LLM) -> tuple[list[list[int]], list[list[dict[int, float]]]]:
    """Greedy tokens of each prompt, and for each position the log-probabilities of the most likely ones."""
    vocab_size = llm.model.decoder.vocab_size
    prompts = [[3 + (7 * place + number) % (vocab_size - 3) for place in range(size)] for number, size in enumerate(_LENGTHS)]
    params = SamplingParams(temperature=0, max_tokens=_OUTPUT_LEN, ignore_eos=True, logprobs=_BEST)
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    faults = [each.error for each in outputs if each.error]
    if faults:
        raise HeadwayError(faults[0])
    best = [[{token: found.logprob for token, found in at.items()} for at in each.logprobs or []] for each in outputs]
    return [each.token_ids for each in outputs], best


if __name__ == "__main__":
    main()
