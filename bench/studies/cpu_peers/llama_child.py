"""llama.cpp in a process of its own, by llama-cpp-python's functions: batches of random prompts, greedy tokens.

Run by the Python of an environment that has llama-cpp-python; it imports nothing of Headway. The first argument is a JSON object:
path, threads, and work, a list of [batch, prompt, new, passes]. Prints a JSON list of tokens a second for each work.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import llama_cpp as llama  # type: ignore[import-not-found]
import numpy


def generate(context: Any, batch: Any, vocab: int, prompts: list[list[int]], new: int) -> float:
    """Tokens a second of one pass: all prompts at once, then one token of each sequence a step."""
    count = len(prompts)
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    began = time.perf_counter()
    rows = [(token, at, row, at == len(prompt) - 1) for row, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
    position = len(prompts[0])
    for _ in range(new):
        batch.n_tokens = len(rows)
        for place, (token, at, row, wanted) in enumerate(rows):
            batch.token[place], batch.pos[place], batch.logits[place] = token, at, wanted
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
        if llama.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        wanted_at = [place for place, row in enumerate(rows) if row[3]]
        tokens = [
            int(numpy.ctypeslib.as_array(llama.llama_get_logits_ith(context, place), (vocab,)).argmax()) for place in wanted_at
        ]
        rows = [(token, position, row, True) for row, token in enumerate(tokens)]
        position += 1
    return count * new / (time.perf_counter() - began)


def main() -> None:
    """Print the rates of the work that the first argument names."""
    asked = json.loads(sys.argv[1])
    llama.llama_backend_init()
    options = llama.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(asked["path"].encode(), options)
    vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    rates = []
    for count, prompt, new, passes in asked["work"]:
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = count * (prompt + new + 32)
        settings.n_seq_max = count
        settings.n_threads = asked["threads"]
        settings.n_threads_batch = asked["threads"]
        settings.kv_unified = True
        context = llama.llama_init_from_model(model, settings)
        batch = llama.llama_batch_init(count * prompt, 0, 1)
        draw = random.Random(0)
        prompts = [[draw.randrange(3, vocab) for _ in range(prompt)] for _ in range(count)]
        passed = [generate(context, batch, vocab, prompts, new) for _ in range(passes + 1)]
        rates.append(passed[1:])
        llama.llama_batch_free(batch)
        llama.llama_free(context)
    print(json.dumps(rates))


main()
