"""Times generation and a conversation's second turn of a model: `python -m headway.bench.studies.hybrid_engine MODEL`.

It is meant for models whose layers keep states, whose prefix hits need a checkpoint. Weights are random, in the shapes of the
model's config.json; `headway bench throughput` measures generation with more care, but no second turn.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from headway.bench.studies.command import run_study

if TYPE_CHECKING:
    import torch

    from headway import LLM


class _Answer(NamedTuple):
    token_ids: list[list[int]]
    seconds: float
    first_ms: float
    """Milliseconds from the first request's arrival to its first token."""


class _Client:
    """Sends random prompts."""

    def __init__(self, llm: LLM, generator: torch.Generator) -> None:
        self._llm = llm
        self._generator = generator

    def draw(self, count: int) -> list[int]:
        """Draw a prompt."""
        import torch

        most = self._llm.model.decoder.vocab_size
        drawn: list[int] = torch.randint(3, most, (count,), generator=self._generator).tolist()
        return drawn

    def ask(self, prompts: list[list[int]], count: int) -> _Answer:
        """Have `count` tokens written for each prompt, greedily."""
        from headway import SamplingParams

        params, start = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds, metrics = time.perf_counter() - start, outputs[0].metrics
        assert metrics is not None
        first = (metrics.first_token_time or 0.0) - metrics.arrival_time
        return _Answer([list(each.outputs[0].token_ids) for each in outputs], seconds, 1e3 * first)


def hybrid_engine(
    model: Annotated[str, typer.Argument(help="A folder with a config.json, or the name of a shape.")],
    batch_sizes: Annotated[str, typer.Option(help="Prompts sent at once, comma-separated.")] = "1,16,64",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, and written for it.")] = 512,
    turn: Annotated[int, typer.Option(min=1, help="Tokens of a conversation's first turn.")] = 4000,
    repeat: Annotated[int, typer.Option(min=1, help="Passes; all are shown.")] = 3,
    autotune_budget: Annotated[float, typer.Option(min=0.0, help="Seconds that auto may measure at the start.")] = 0.0,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Generate with random weights and random prompts, greedily; then ask twice in a conversation."""
    import torch

    from headway import LLM

    began, sizes = time.perf_counter(), [int(size) for size in batch_sizes.split(",")]
    llm = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        autotune_budget=autotune_budget,
        max_model_len=max(2 * tokens, turn + 128),
        max_num_seqs=max(sizes),
    )
    ready = time.perf_counter() - began
    client = _Client(llm, torch.Generator().manual_seed(1))
    rates: dict[str, list[float]] = {}
    for size in sizes:
        passes = [client.ask([client.draw(tokens) for _ in range(size)], tokens).seconds for _ in range(repeat)]
        rates[f"{size}x{tokens}+{tokens}"] = found = [size * tokens / seconds for seconds in passes]
        print(f"{size} x {tokens}: {', '.join(f'{rate:,.0f}' for rate in found)} tokens/s", flush=True)
    turns = []
    for _ in range(repeat):
        prompt = client.draw(turn)
        first = client.ask([prompt], 64)
        second = client.ask([[*prompt, *first.token_ids[0], *client.draw(40)]], 16)
        turns.append({"first_ms": first.first_ms, "second_ms": second.first_ms})
        print(
            f"first token of a turn of {turn} tokens: {first.first_ms:.1f} ms, of the next {second.first_ms:.1f} ms", flush=True
        )
    if output is not None:
        _write(output, llm, {"model": model, "ready_seconds": ready, "tokens_per_second": rates, "turns": turns})


def _write(output: Path, llm: LLM, figures: dict[str, Any]) -> None:
    from headway.core.system.json_files import write_bytes
    from headway.core.system.provenance import Origin, command_line
    from headway.tuning.measure.device import identify_device

    made = {
        "command": command_line("python", "-m", "headway.bench.studies.hybrid_engine"),
        "origin": Origin.here().model_dump(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": identify_device(llm.device).model_dump(),
    }
    write_bytes(json.dumps({**made, **figures}, indent=1).encode(), output)


if __name__ == "__main__":
    run_study(hybrid_engine)
