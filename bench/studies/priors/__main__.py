"""`python -m headway.bench.studies.priors`: measure tables that may ship, judge those that do, and write measured ones as such.

`measure --output FOLDER` takes a GPU and some minutes; each file is written as soon as it is there. `ship FILES` writes whole
tables, and times of products and experts that a start has kept, as files of the package, which a commit then holds. Figures of
"prior" and "first start" mean most where the shipped table is another run's: measure, ship, and measure again on another machine.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from headway.core.contract.errors import HeadwayError
from headway.core.system.terminal import Terminal

GEOMETRIES = "32/8/128,16/8/128,64/8/128,40/8/128"
"""Llama 3 8B and Mistral 7B; Qwen3 0.6B and 1.7B; Llama 3 70B; Qwen3 14B."""
app = typer.Typer(pretty_exceptions_enable=False, no_args_is_help=True)


@app.command()
def measure(
    output: Annotated[Path, typer.Option(help="Folder of the files.")],
    geometries: Annotated[str, typer.Option(help="Heads, kv heads and elements, comma-separated.")] = GEOMETRIES,
    seconds: Annotated[float, typer.Option(help="For all of it.")] = 500.0,
    points: Annotated[int, typer.Option(min=1, help="Held-out points of each seed and layer.")] = 24,
    seed: Annotated[
        str, typer.Option(help="Seeds of the points, comma-separated; not those that rules were tuned on.")
    ] = "11,12",
    model: Annotated[str, typer.Option(help="Model whose starts are timed, with random weights; none: no start.")] = "llama-3-8b",
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU if there is one.")] = None,
) -> None:
    """Measure full tables, first starts, what auto loses by each, and the time to the first token of a cold start."""
    from headway.bench.studies.priors.measure import PriorsStudy
    from headway.cli.options import sizes_of
    from headway.tuning.measure.device import resolve_device

    output.mkdir(parents=True, exist_ok=True)
    seeds = sizes_of("--seed", seed, least=0) or [11]
    study = PriorsStudy.begin(resolve_device(device), output, geometries.split(","), seconds, points, seeds)
    study.run(None if model == "none" else model)


@app.command()
def ship(
    files: Annotated[list[Path], typer.Argument(help="Whole tables of level kernel, and kept times of products or experts.")],
    folder: Annotated[Path, typer.Option("--to", help="The package's folder.")] = Path("tuning/priors"),
) -> None:
    """Write measured files as those that ship with Headway."""
    from headway.bench.studies.priors.ship import ship_all

    for path in ship_all(files, folder):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


@app.command()
def first_token(model: str) -> None:
    """Start an engine with random weights, make a token, and print where the seconds went: `measure` calls it as a process."""
    import psutil

    began = psutil.Process().create_time()
    from headway.core.sampling.params import SamplingParams
    from headway.llm import LLM

    before = time.time() - began
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192)
    llm.generate({"prompt_token_ids": list(range(10, 522))}, SamplingParams(max_tokens=1), use_tqdm=False)
    seconds, parts = time.time() - began, llm.start_times.seconds
    attention = str(llm.engine.selection)
    print(json.dumps({"seconds": seconds, "before": before, "parts": parts, "attention": attention}), flush=True)


if __name__ == "__main__":
    try:
        app()
    except HeadwayError as error:
        Terminal(stderr=True, soft_wrap=True).print(f"headway: error: {error}", highlight=False)
        raise SystemExit(2) from None
