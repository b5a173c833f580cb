"""`python -m headway.bench.studies.mutants`: how many of the mistakes planted in a backend the kit finds."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Annotated

import typer

from headway.bench.studies.command import run_study
from headway.core.system.terminal import Terminal


def mutants(
    quick: Annotated[bool, typer.Option("--quick", help="The cells of `headway check --quick` alone.")] = False,
    sample: Annotated[int, typer.Option(min=0, help="So many mistakes, drawn at random; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(help="Which sample.")] = 0,
    kind: Annotated[str, typer.Option(help="Mistakes of one kind.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = min(8, os.cpu_count() or 1),
    floor: Annotated[float, typer.Option(min=0.0, max=1.0, help="Exit with 1 where the score is lower.")] = 0.0,
    guesses: Annotated[bool, typer.Option("--guesses", help="Print what each failure was taken for.")] = False,
) -> None:
    """Caught / planted, by kind, and what is missed.

    Left out of both are what raises in its first call, and changes of the text that change no bit of any of 300 random steps.
    """
    from headway.bench.studies.mutants.score import everything, score

    known = everything()
    numbers = [number for number, (each, _) in enumerate(known) if kind in ("", each)]
    if sample:
        numbers = random.Random(seed).sample(numbers, min(sample, len(numbers)))
    console = Terminal()
    tried, caught, easy, seconds = Counter[str](), Counter[str](), 0, 0.0
    missed: list[str] = []
    equivalent: list[str] = []
    with console.status("") as status:
        for done, outcome in enumerate(score(numbers, quick=quick, jobs=jobs), start=1):
            status.update(f"{done} of {len(numbers)} mistakes, {len(missed)} missed")
            seconds += outcome.seconds
            easy += outcome.raises
            if outcome.equivalent:
                equivalent.append(f"{outcome.kind} {outcome.where}")
            if outcome.raises or outcome.equivalent:
                continue
            tried[outcome.kind] += 1
            caught[outcome.kind] += bool(outcome.caught)
            if not outcome.caught:
                missed.append(f"{outcome.kind} {outcome.where}")
            elif guesses:
                console.print(f"{outcome.kind} {outcome.where}: {outcome.guess or '-'}", soft_wrap=True, highlight=False)
    for name in sorted(tried):
        console.print(f"{name:<10} {caught[name]:>4} of {tried[name]:>4}")
    for line in sorted(missed):
        console.print(f"missed: {line}", soft_wrap=True, highlight=False)
    for line in sorted(equivalent):
        console.print(f"changes nothing: {line}", soft_wrap=True, highlight=False)
    whole = sum(caught.values()) / max(1, tried.total())
    way = "quick" if quick else "whole"
    rest = f"{easy} more raise at once, {len(equivalent)} change nothing"
    console.print(f"caught {caught.total()} of {tried.total()} ({whole:.3f}, {way}); {rest}; {seconds:.0f} s")
    if whole < floor:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_study(mutants)
