"""What each sampling parameter costs: tokens a second beside greedy decoding of the same prompts' length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor

from headway.bench.studies.requests.engines import Engines, Sizes, ask, cell, sequences
from headway.bench.studies.requests.results import RequestsCell


def halve(output: list[int], logits: Tensor) -> Tensor:
    """A logits processor that depends on the last token: every other token is forbidden."""
    logits[(output[-1] if output else 0) % 2 :: 2] = -float("inf")
    return logits


WISHES: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 0.7, "top_k": 50},
    "top_k, top_p, min_p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
    "bias, bad words": {"logit_bias": {5: 1.0}, "bad_words_token_ids": [[4], [2, 3]]},
    "5 logprobs": {"logprobs": 5},
    "a logits processor": {"logits_processors": [halve]},
}


def sampling(engines: Engines, sizes: Sizes) -> Iterator[RequestsCell]:
    """All requests of a load ask for the same; the host's milliseconds a step stand beside."""
    llm = engines.start(max_model_len=2 * (sizes.input_len + sizes.output_len), max_num_seqs=max(sizes.batch_sizes))
    for batch in sizes.batch_sizes:
        base = None
        for way, wish in WISHES.items():
            turns = [ask(llm, engines.prompts(batch, sizes.input_len), sizes.output_len, **wish) for _ in range(1 + sizes.repeat)]
            stats = turns[-1].stats
            counts = {"host ms a step": 1e3 * stats.host_seconds / stats.num_steps}
            counts |= {f"after the graph: {reason}": count for reason, count in stats.steps_after_model.items()}
            counts |= {f"waited for the step before: {reason}": count for reason, count in stats.steps_waiting.items()}
            rates = [turn.rate for turn in turns[1:]]
            row = cell("sampling", sequences(batch), way, "tok/s", rates, base, counts=counts)
            base = base or row.median
            yield row
