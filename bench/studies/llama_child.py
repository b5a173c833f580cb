"""llama.cpp in its own process, called through llama-cpp-python: batches of prompts of equal length, with greedy tokens.

engines.py starts it with a Python that has llama-cpp-python, so it does not import Headway. It reads the same request as
engine_child.py and answers with the same events, as JSON lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy


def generate(context: Any, batch: Any, vocab: int, prompts: list[list[int]], new: int) -> None:
    """Run one pass: all prompts at once, then one token per sequence and step."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    rows = [(token, at, row, at == len(prompt) - 1) for row, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
    position = len(prompts[0])
    for _ in range(new):
        batch.n_tokens = len(rows)
        for place, (token, at, row, wanted) in enumerate(rows):
            batch.token[place] = token
            batch.pos[place] = at
            batch.logits[place] = wanted
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = row
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        places = [place for place, row in enumerate(rows) if row[3]]
        logits = (numpy.ctypeslib.as_array(llama.llama_get_logits_ith(context, place), (vocab,)) for place in places)
        rows = [(int(each.argmax()), position, row, True) for row, each in enumerate(logits)]
        position += 1


def main() -> None:
    """Answer the request with events: "ready", then for each workload "begin", "pass" before each generation, and "done". An
    error ends the events with "fatal"."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep llama.cpp's output out of the answers
    request = json.loads(sys.stdin.readline())

    def emit(event: str, **found: object) -> None:
        print(json.dumps({"event": event, **found}), file=answers, flush=True)

    try:
        llama.llama_backend_init()
        options = llama.llama_model_default_params()
        options.n_gpu_layers = 0
        model = llama.llama_model_load_from_file(request["model"].encode(), options)
        vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        emit("ready", version=llama.__version__, settings=f"on the CPU, {request['threads']} threads, greedy")
        for work in request["workloads"]:
            emit("begin", label=work["label"])
            emit("done", label=work["label"], seconds=_times(request, work, model, vocab, emit))
    except Exception as error:  # any error of llama.cpp is reported
        emit("fatal", reason=" ".join(f"{type(error).__name__}: {error}".split())[:400])


def _times(request: dict[str, Any], work: dict[str, Any], model: Any, vocab: int, emit: Any) -> list[float]:
    """Return the seconds of each timed pass over requests of equal lengths."""
    prompts, new = work["prompts"], work["output_lens"][0]
    if len({len(prompt) for prompt in prompts}) > 1 or set(work["output_lens"]) != {new}:
        raise ValueError(f"{work['label']}: needs requests of equal lengths")
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = len(prompts) * (len(prompts[0]) + new + 32)
    settings.n_seq_max = len(prompts)
    settings.n_threads = settings.n_threads_batch = request["threads"]
    settings.kv_unified = True
    context = llama.llama_init_from_model(model, settings)
    batch = llama.llama_batch_init(sum(map(len, prompts)), 0, 1)
    seconds = []
    for _ in range(request["warmup"] + request["repeat"]):
        emit("pass")
        started = time.perf_counter()
        generate(context, batch, vocab, prompts, new)
        seconds.append(time.perf_counter() - started)
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    return seconds[request["warmup"] :]


main()
