"""Tokens a second of engines on a CPU, each in a process of its own, in one run.

    python -m headway.bench.studies.cpu_peers --llama-python VENV/bin/python --engines \
        "headway float32;headway bfloat16;llama.cpp F16=model-f16.gguf;transformers float32" --output result.json

An engine is its name, its element type or the name of a format, and perhaps the file (default: the default model). Rates count
the tokens written and the whole time, the prompt's included; the median of the passes stands in the table.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.provenance import Origin, command_line, cpu_name
from headway.models.checkpoints.locate import DEFAULT_MODEL

HERE = Path(__file__).parent


def measure(engine: str, llama_python: str, backend: str, threads: int, work: list[list[int]]) -> list[list[float]]:
    """Tokens a second of every pass of every work.

    :raises ConfigError: no such engine, or its process failed.
    """
    name, _, rest = engine.strip().partition(" ")
    kind, _, path = rest.partition("=")
    asked: dict[str, Any] = {"path": path or DEFAULT_MODEL, "threads": threads, "work": work}
    if name == "llama.cpp":
        command = [llama_python, str(HERE / "llama_child.py")]
    elif name in ("headway", "transformers"):
        known = kind in ("float32", "bfloat16", "float16")
        asked |= {"engine": name, "dtype": kind if known else "auto" if name == "headway" else "float32", "backend": backend}
        command = [sys.executable, "-m", "headway.bench.studies.cpu_peers.child"]
    else:
        raise ConfigError("--engines", "headway, transformers or llama.cpp, and a type", repr(engine))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    run = subprocess.run([*command, json.dumps(asked)], capture_output=True, text=True, env=environment, check=False)
    if run.returncode:
        raise ConfigError(f"--engines {engine}", "a process that ends well", (run.stderr.strip().splitlines() or ["nothing"])[-1])
    rates: list[list[float]] = json.loads(run.stdout.strip().splitlines()[-1])
    return rates


def study(
    engines: Annotated[str, typer.Option(help="ENGINE TYPE[=FILE], separated by semicolons.")],
    llama_python: Annotated[str, typer.Option(help="A Python that has llama-cpp-python.")] = "python3",
    backend: Annotated[str, typer.Option(help="Headway's --attn-backend.")] = "prefill=sdpa,decode=native",
    batches: Annotated[str, typer.Option(help="Prompts at once.")] = "1,16",
    prompt: Annotated[int, typer.Option(help="Tokens of each.")] = 32,
    new: Annotated[int, typer.Option(help="Tokens written for each.")] = 64,
    passes: Annotated[int, typer.Option(help="Timed passes after the first.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of every engine.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Time engines on a CPU beside each other."""
    work = [[int(batch), prompt, new, passes] for batch in batches.split(",")]
    results = {}
    for engine in engines.split(";"):
        rates = measure(engine, llama_python, backend, threads, work)
        name = engine.strip().partition("=")[0]
        results[name] = {f"batch {batch[0]}": passed for batch, passed in zip(work, rates, strict=True)}
        medians = "  ".join(f"{place} {statistics.median(passed):.1f}" for place, passed in results[name].items())
        print(f"{name:32} {medians}", flush=True)
    if output is not None:
        llama = subprocess.run(
            [llama_python, "-c", "import llama_cpp; print(llama_cpp.__version__)"], capture_output=True, text=True, check=False
        )
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        told = {
            "command": command_line("python", "-m", "headway.bench.studies.cpu_peers"),
            "versions": {**versions, "llama-cpp-python": llama.stdout.strip()},
        }
        settings = {
            "prompt": prompt,
            "new": new,
            "threads": threads,
            "backend": backend,
            "torch threads": torch.get_num_threads(),
        }
        output.write_text(
            json.dumps(
                {
                    **told,
                    "origin": Origin.here().model_dump(),
                    "cpu": cpu_name(),
                    "date": date.today().isoformat(),
                    "settings": settings,
                    "tok_s": results,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    run_study(study)
