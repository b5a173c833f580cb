"""Control experiments: a cell that failed is tried again with one thing simpler at a time, and what makes it right is said."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from headway.core.contract.errors import HeadwayError
from headway.core.oracle.cells import AXES, PLAIN_INPUTS, CheckCell, Skipped
from headway.core.oracle.inputs import possible
from headway.core.oracle.steps import AS_IN_AN_ENGINE, Lens, Unlike
from headway.testing.kit.checks.answers import cell_steps, run_steps
from headway.testing.kit.stage import Stage

_PLAIN: dict[str, str | int] = {axis: getattr(CheckCell("answer"), axis) for axis in AXES if axis != "layout"}
_OF_ONE_CELL, _OF_ALL = 5.0, 20.0
"""Seconds that one cell's controls may take, and those of all cells of a process."""
_SWEPT: dict[str, Sequence[str | int]] = {
    "kv_heads": (1, 2, 3, 8),
    "group": (1, 2, 4, 7, 8, 16, 64),
    "block_size": (8, 16, 24, 32, 64),
}
"""Axes of which other values are tried too, where the plain one makes a cell right."""
_SINGLE = ("window", "softcap", "alibi", "sinks")
"""Features of which "together" is made."""
_FEW, _SEVERAL, _MANY = 2, 8, 16
Turn = tuple[int, int, int]
"""(query_len, context, num_draft_tokens) of a sequence."""
_QUIET = Unlike(without_guesses=True)


@dataclass
class Controls:
    """The controls of one subject's cells."""

    stage: Stage
    left: float = _OF_ALL
    _until: float = field(default=0.0, init=False)

    def explain(self, cell: CheckCell, run: Callable[[CheckCell], object], *, named: bool) -> str:
        """Say what a failed cell's mistake depends on; empty where no control is right, or time is up.

        run: runs a cell; named: whether the mistake is known, so that only the cell's axes are of interest.
        """
        if self.left <= 0.0 or cell.layer:
            return ""
        said: list[str] = []
        with self._started():
            said = self._of_steps(cell) if not named and cell.check in ("answer", "long") else []
            said += self._of_axes(cell, run, named) if len(said) < _FEW else []
        return "; ".join(said)

    def right_anew(self, run: Callable[[Stage], object]) -> bool:
        """Whether something is right with the subject's file loaded anew, so that nothing is kept of the cells before."""
        subject = None if self.left <= 0.0 else self.stage.subject.anew()
        if subject is None:
            return False
        anew = Stage(subject, {})
        anew.unlike = _QUIET
        with self._started():
            return bool(self._right(lambda: run(anew)))

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Count time, and leave guesses out."""
        started = time.monotonic()
        self._until = started + min(_OF_ONE_CELL, self.left)
        self.stage.unlike = _QUIET
        try:
            yield
        finally:
            self.stage.unlike = AS_IN_AN_ENGINE
            self.left -= time.monotonic() - started

    def _right(self, run: Callable[[], object]) -> bool | None:
        """Whether something runs and is right; None where it does not apply or time is up."""
        if time.monotonic() > self._until:
            return None
        try:
            run()
        except Skipped:
            return None
        except Exception as error:  # an error of ours, unless a backend's is its cause
            return False if not isinstance(error, HeadwayError) or error.__cause__ is not None else None
        return True

    def _of_axes(self, cell: CheckCell, run: Callable[[CheckCell], object], named: bool) -> list[str]:
        """The axes and inputs whose plain value makes the cell right."""
        found = []
        for axis, value in (_PLAIN | PLAIN_INPUTS).items():
            if getattr(cell, axis) == value or (named and axis == "feature"):
                continue
            plainer = replace(cell, **{axis: value})  # type: ignore[arg-type]
            if self._tried(plainer, run):
                found.append(f"{axis} {self._swept(cell, axis, value, run)}")
        return [f"right with {', or with '.join(found)}"] if found and len(found) <= 3 else []

    def _swept(self, cell: CheckCell, axis: str, plain: str | int, run: Callable[[CheckCell], object]) -> str:
        """Values of an axis that are right, and those that are wrong."""
        own = getattr(cell, axis)
        found: dict[str | int, bool | None] = {plain: True, own: False}
        others = _SINGLE if axis == "feature" and str(own).endswith("together") else _SWEPT.get(axis, ())
        for other in others:
            if other not in found:
                found[other] = self._tried(replace(cell, **{axis: other}), run)  # type: ignore[arg-type]
        right, wrong = ([str(value) for value in sorted(found, key=_order) if found[value] is each] for each in (True, False))
        return " or ".join(right) + (f" (wrong with {', '.join(wrong)})" if others else "")

    def _tried(self, cell: CheckCell, run: Callable[[CheckCell], object]) -> bool | None:
        phase = "mixed" if cell.phase in ("-", "long") else cell.phase
        tried = self.stage.claimed.support(cell, phase) and possible(replace(cell, phase=phase))
        return self._right(lambda: run(cell)) if tried else None

    def _of_steps(self, cell: CheckCell) -> list[str]:
        """What about a step makes it wrong: the steps before it, its other sequences, lengths, blocks or padding."""
        steps = cell_steps(cell)

        def right(*lens: Lens, unlike: Unlike = _QUIET, **options: Any) -> bool | None:
            self.stage.unlike = unlike
            found = self._right(lambda: run_steps(self.stage, cell, lens, poison=self.stage.poison, **options))
            self.stage.unlike = _QUIET
            return found

        number = next((n for n in range(len(steps)) if right(*steps[: n + 1]) is False), None)
        if number is None:
            return []
        lens = steps[number]
        if number and right(lens):
            return [self._kept(lens, right)]
        if right(lens, unlike=replace(_QUIET, out_of_zeros=True)):
            return ["right where `out` holds zeros: adds to it in place of writing it"]
        return self._of_sequences(lens, right) + self._of_places(lens, right)

    def _kept(self, lens: Lens, right: Callable[..., bool | None]) -> str:
        """What a step must share with the one before it to be wrong."""
        others = {
            "the same lengths": lens,
            "as many tokens and other lengths": [(query, (context + 1) // 2, drafts) for query, context, drafts in lens],
            "fewer sequences": lens[: max(1, len(lens) // 2)],
        }
        wrong = [name for name, each in others.items() if right(each, lens) is False]
        after = "" if not wrong or len(wrong) == len(others) else f", after one with {' or '.join(wrong)}"
        return f"right as an instance's first step: keeps something of an earlier step{after}"

    def _of_sequences(self, lens: Lens, right: Callable[..., bool | None]) -> list[str]:
        """What other sequences do to a wrong one; or, where it is wrong alone, from which length on."""
        if not lens:
            return ["wrong for a step of padding rows alone"]
        kinds = list(dict.fromkeys(lens))
        alone = {each: right([each]) for each in _thinned(kinds)}
        wrong = [each for each, is_right in alone.items() if is_right is False]
        if wrong:
            said = _shared(wrong, [each for each, is_right in alone.items() if is_right]) or _limit(wrong, right)
            return [said] if said else []
        if not all(alone.values()):
            return []
        prompts, decodes = [each for each in lens if not _decodes(each)], [each for each in lens if _decodes(each)]
        found = ["each of its sequences is right alone"]
        if prompts and decodes and right(prompts) and right(decodes):
            return [*found, "prompts and decodes are right apart: what one part of the step leaves reaches the other"]
        longest = max(lens, key=lambda each: each[0] + each[1])
        if len(lens) > _MANY and (most := _most(lambda count: right(lens[:count]), 1, len(lens))) >= _SEVERAL:
            found.append(f"right with up to {most} of them, wrong with {most + 1}")
        elif right([longest] * min(len(lens), 4)):
            order = sorted(lens, key=lambda each: (_decodes(each), -each[0] - each[1]))
            found.append(f"right where all have one length{', or the longest comes first' if right(order) else ''}")
        return found

    def _of_places(self, lens: Lens, right: Callable[..., bool | None]) -> list[str]:
        """What blocks and padding do to a step."""
        controls: dict[str, dict[str, Any]] = {
            "right where a sequence's blocks follow one another": {"unlike": replace(_QUIET, blocks_in_order=True)},
            "right where block 0 is in no table: 0 is a block like any other": {"unlike": replace(_QUIET, zero_unused=True)},
            "right without padding rows": {"padding": False},
            "right with one layer: a step's plan serves all of its layers": {"layers": 1},
        }
        return [text for text, options in controls.items() if right(lens, **options)][:_FEW]


_KINDS: dict[str, Callable[[Turn], bool]] = {
    "one new token": lambda turn: turn[0] == 1,
    "several new tokens": lambda turn: turn[0] > 1,
    "a context": lambda turn: turn[1] > 0,
    "no context": lambda turn: turn[1] == 0,
}


def _shared(wrong: Sequence[Turn], right: Sequence[Turn]) -> str:
    """What the sequences share that are wrong alone, and no other one of the step."""
    for name, holds in _KINDS.items():
        if right and all(map(holds, wrong)) and not any(map(holds, right)):
            return f"wrong for sequences with {name}, also alone, and right for others"
    return ""


def _limit(wrong: Sequence[Turn], right: Callable[..., bool | None]) -> str:
    """From how many tokens on a sequence is wrong by itself."""
    query, context, drafts = min(wrong, key=lambda each: each[0] + each[1])
    turn = (lambda length: (query, length - query, drafts)) if context else (lambda length: (length, 0, 0))
    most = _most(lambda length: right([turn(length)]), query + 1 if context else 1, query + context)
    if not most:
        return ""
    after = f", and right again with {most + 2:,}" if right([turn(most + 2)]) else ""
    return f"a {'sequence' if context else 'prompt'} alone is right up to {most:,} tokens, and wrong with {most + 1:,}{after}"


def _most(right: Callable[[int], bool | None], least: int, wrong: int) -> int:
    """The largest number below `wrong` that is right, if all are right up to one; 0: `least` is wrong already, or time is up."""
    if not right(least):
        return 0
    while wrong - least > 1:
        middle = (least + wrong) // 2
        found = right(middle)
        if found is None:
            return 0
        least, wrong = (middle, wrong) if found else (least, middle)
    return least


def _thinned(kinds: Sequence[Turn]) -> list[Turn]:
    """At most a dozen, from the first to the last."""
    return list(kinds) if len(kinds) <= 12 else [kinds[at * (len(kinds) - 1) // 11] for at in range(12)]


def _decodes(turn: Turn) -> bool:
    query_len, context, drafts = turn
    return context > 0 and (query_len == 1 or drafts > 0)


def _order(value: object) -> tuple[bool, object]:
    return isinstance(value, str), value
