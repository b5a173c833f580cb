"""Runs the conformance kit on each mistake until a cell fails, in processes of their own, and counts what is caught."""

from __future__ import annotations

import dataclasses
import linecache
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headway.bench.studies.mutants import reference
from headway.bench.studies.mutants.equivalent import changes_nothing
from headway.bench.studies.mutants.grammar import mistakes
from headway.bench.studies.mutants.states import planted
from headway.core.contract.backend import AttentionBackend
from headway.core.oracle.cells import CheckCell
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import subject_of

SECONDS = 120
"""After which in one cell, of a second or two otherwise, a mistake counts as one that hangs, which is found."""
_CLASS = "TiledAttention"


@dataclass(frozen=True)
class Outcome:
    """What the kit said of one mistake."""

    kind: str
    where: str
    caught: str
    """The first cell that failed; empty where all passed."""
    reason: str = ""
    guess: str = ""
    raises: bool = False
    """Whether the backend raised there: too easy a find to count."""
    seconds: float = 0.0
    equivalent: bool = False
    """Whether nothing found it because it changes nothing: `changes_nothing`."""


def everything() -> list[tuple[str, str]]:
    """Kind and place of every mistake, those of the grammar first."""
    return [(each.kind, each.where) for each in _grammar()] + [(kind, name) for kind, name, _ in planted()]


def score(numbers: list[int], *, quick: bool, jobs: int) -> Iterator[Outcome]:
    """The outcome of each mistake by its number in `everything`, as they end."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.imap_unordered(_run, [(number, quick) for number in numbers])


@cache
def _grammar() -> list[Any]:
    return list(mistakes(Path(reference.__file__).read_text(encoding="utf-8"), _CLASS))


@cache
def _cells(quick: bool) -> list[CheckCell]:
    """The cells of the right backend, the cheap and telling ones first."""
    cells = Kit(subject_of(reference.TiledAttention, torch.device("cpu"))).cells(quick)
    return sorted(cells, key=lambda cell: (cell.check not in ("answer", "lse", "options"), cell.check in ("engine", "claims")))


def _class_of(number: int) -> tuple[str, str, type[AttentionBackend]]:
    grammar = _grammar()
    if number >= len(grammar):
        return list(planted())[number - len(grammar)]
    mistake = grammar[number]
    module = types.ModuleType(f"headway_mutant_{number}")
    sys.modules[module.__name__] = module  # where a dataclass looks for its annotations
    linecache.cache[module.__name__] = len(mistake.text), None, mistake.text.splitlines(True), module.__name__
    exec(compile(mistake.text, module.__name__, "exec"), module.__dict__)
    return mistake.kind, mistake.where, getattr(module, _CLASS)


def _run(task: tuple[int, bool]) -> Outcome:
    number, quick = task
    started = time.monotonic()
    kind, where, found = _class_of(number)
    outcome = Outcome(kind, where, "")
    signal.signal(signal.SIGALRM, _too_long)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
            outcome = _first_failure(Kit(subject_of(found, torch.device("cpu"))), outcome, _cells(quick))
    except _TooLong:
        outcome = dataclasses.replace(outcome, caught="hangs")
    finally:
        signal.alarm(0)
    if not outcome.caught and number < len(_grammar()):  # those planted by hand are mistakes beyond what small steps show
        outcome = dataclasses.replace(outcome, equivalent=changes_nothing(found))
    return dataclasses.replace(outcome, seconds=round(time.monotonic() - started, 1))


def _first_failure(kit: Kit, outcome: Outcome, cells: list[CheckCell]) -> Outcome:
    for cell in cells:
        signal.alarm(SECONDS)
        result = kit.run(cell)
        if result.status == "failed":
            raises = result.reason.startswith("raised")
            return dataclasses.replace(outcome, caught=result.cell, reason=result.reason, guess=result.guess, raises=raises)
    return outcome


class _TooLong(BaseException):
    """A mistake that hangs."""


def _too_long(*_: object) -> None:
    raise _TooLong
