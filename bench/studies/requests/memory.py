"""What memory beyond the device's gains: a second turn whose blocks had to leave, and more sequences than the cache holds."""

from __future__ import annotations

from collections.abc import Iterator

from headway.bench.studies.requests.engines import Asked, Engines, Sizes, ask, cell, same, sequences
from headway.bench.studies.requests.results import RequestsCell


def second_turn(engines: Engines, sizes: Sizes) -> Iterator[RequestsCell]:
    """A prompt is answered, pushed out of the cache by two others, and asked again with its answer and 32 tokens more."""
    length, base = sizes.second_turn_len, None
    room = 2.2 * length + 64
    tier = {"kv_offload_size": int(6 * room * engines.token_bytes)}
    for way, options in {"computed again": {}, "from the host's memory": tier}.items():
        llm = engines.start(tokens=room, max_model_len=int(1.2 * length) + 64, **options)
        times = []
        for turn in range(1 + sizes.repeat):
            first = engines.prompts(1, length)
            answer = ask(llm, first, 8).tokens[0]
            for _ in range(2):
                ask(llm, engines.prompts(1, length), 8)
            again = ask(llm, [[*first[0], *answer, *engines.prompts(1, 32)[0]]], 1)
            times += [1e3 * again.seconds] if turn else []
        counts = {"tokens brought back": again.stats.offload_hits, "tokens found in the cache": again.stats.num_cached_tokens}
        row = cell("second-turn", f"{length} tokens", way, "ms", times, base, counts=counts)
        base = base or row.median
        yield row


def overload(engines: Engines, sizes: Sizes) -> Iterator[RequestsCell]:
    """The cache has room for half of the sequences' tokens, so some must leave and come back."""
    count, outputs = sizes.batch_sizes[-1], 4 * sizes.output_len
    whole = count * (4 * sizes.input_len + outputs)
    base = expected = None
    for way in ("recompute", "swap", "auto"):
        llm = engines.start(
            tokens=0.5 * whole,
            max_model_len=4 * sizes.input_len + outputs,
            max_num_seqs=count,
            kv_offload_size=int(whole * engines.token_bytes),
            preemption_mode=way,
        )
        engines.random.seed(1)  # the same prompts for each way
        turns = [ask(llm, engines.prompts(count, 4 * sizes.input_len), outputs) for _ in range(1 + sizes.repeat)]
        expected = expected or [turn.tokens for turn in turns]
        equal = min(same(one, turn.tokens) for one, turn in zip(expected, turns, strict=True))
        seconds = [turn.seconds for turn in turns[1:]]
        row = cell("overload", sequences(count), way, "s", seconds, base, equal=equal, counts=_moved(turns[-1]))
        base = base or row.median
        yield row


def _moved(turn: Asked) -> dict[str, float]:
    stats = turn.stats
    counts = {"tokens computed again": float(stats.num_prefill_tokens - stats.num_prompt_tokens)}
    counts |= {f"preemptions by {kind}": float(number) for kind, number in stats.preemptions_by_kind.items()}
    return {
        **counts,
        "blocks swapped": stats.blocks_swapped,
        "GB out": stats.offload_bytes_out / 1e9,
        "GB in": stats.offload_bytes_in / 1e9,
    }
