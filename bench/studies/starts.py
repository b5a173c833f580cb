"""Time `headway generate --chat` with empty caches, and then with the caches filled: `python -m headway.bench.studies.starts`.

Prints, for the first and later starts, the seconds from command to answer and the answer's tokens per second.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from subprocess import run
from typing import Annotated, Any

import typer

from headway.bench.studies.command import run_study
from headway.core.system.terminal import Terminal

QUESTION = "What is the capital of France?"


def _start(cache: Path, options: list[str]) -> dict[str, Any]:
    """Return a command's `--json` output, with `seconds` from its start to its end."""
    command = [sys.executable, "-m", "headway", "generate", "--chat", "--json", "--temperature", "0", *options, QUESTION]
    began = time.perf_counter()
    done = run(command, env={**os.environ, "HEADWAY_CACHE": str(cache)}, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    return {**json.loads(done.stdout), "seconds": seconds}


def main(
    later: Annotated[int, typer.Option(help="Number of starts after the first.")] = 3,
    option: Annotated[list[str] | None, typer.Option(help="Option of `headway generate`. Repeatable.")] = None,
) -> None:
    """Time a first start and later starts, each in its own process. The machine should be otherwise idle."""
    out = Terminal(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + later):
            record = _start(Path(folder), option or [])
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in record["start_parts"].items() if seconds >= 0.1)
            title = "first start" if number == 0 else "later start"
            out.print(
                f"{title}  {record['seconds']:5.1f} s to the answer, {record['tokens_per_second']:6.1f} tokens/s "
                f"({record['output_tokens']} tokens), loaded in {record['load_time']:.1f} s: {parts}",
                soft_wrap=True,
            )


if __name__ == "__main__":
    run_study(main)
