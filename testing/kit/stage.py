"""Sets a session up for a cell: who serves which part of a step, over which cache, with what in the slots that hold no token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, wraps

import torch

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import PHASES, CheckCell, Finding, Skipped, check_refusal
from headway.core.oracle.steps import FINITE_POISON, CellErrors, Lens, StepTurns, Tokens, Turn, blocks_for
from headway.testing.kit.cover import Claimed
from headway.testing.kit.model_layers import ModelLayer
from headway.testing.kit.session import Session, SessionRoom
from headway.testing.kit.subject import BASELINE, Subject


class Stage:
    """A subject, what it claims, and sessions to try it in."""

    def __init__(self, subject: Subject, layers: Mapping[str, ModelLayer]) -> None:
        """layers: of the model that the subject is tried on, by name."""
        self.subject = subject
        self._layers = layers
        self.guesses = True
        """Whether a failure says what it looks like."""
        self.errors = CellErrors()
        """Measured errors of the cell that runs."""

    @cached_property
    def claimed(self) -> Claimed:
        """Everything the subject accepts."""
        return Claimed(self.subject, self._layers)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens in a block that the kit tries, the plainest first."""
        return tuple(int(size) for size in self.claimed.usual["block_size"])

    @property
    def poison(self) -> float:
        """What slots of no token hold: NaN, or a large number where the subject says that it multiplies it by zero."""
        return FINITE_POISON if self.subject.claims.reads_whole_blocks else math.nan

    def backend(self, cell: CheckCell, name: str = "") -> AttentionBackend:
        """An instance for a cell's layer: the subject's, or that of another backend."""
        return self.subject.make(self.claimed.spec(cell), cell.layout, cell.block_size, name)

    def session(
        self,
        cell: CheckCell,
        lens: Sequence[Lens],
        *,
        poison: float | None = None,
        layers: int = 2,
        extra_tokens: int = 0,
        spec: AttentionSpec | None = None,
    ) -> Session:
        """A session with room for steps of these lengths, its parts served by the subject, else by the baseline.

        spec: another layer than the cell's.

        :raises Skipped: the subject rightly refuses the cell's cache.
        """
        subject, spec = self.subject, spec or self.claimed.spec(cell)
        prefill, decode = self.parts(cell)
        made = {name: subject.make(spec, cell.layout, cell.block_size, name) for name in dict.fromkeys((prefill, decode))}
        room = SessionRoom(
            num_blocks=sum(blocks_for(each, cell.block_size) for each in lens) + 2 + extra_tokens // cell.block_size,
            max_tokens=max(sum(query_len for query_len, _, _ in each) for each in lens) + 16,
            layers=1 if cell.memory == "far" or cell.check == "long" or cell.work in ("many", "deep") else layers,
        )
        poison = self.poison if poison is None else poison
        session = Session(subject, cell, spec, (made[prefill], made[decode]), room, poison)
        session.guesses = self.guesses
        session.errors = self.errors
        self._accepted(cell, session)
        return session

    def parts(self, cell: CheckCell) -> tuple[str, str]:
        """Who serves the two parts of a step: the subject wherever it claims the layer."""
        spec = self.claimed.spec(cell)
        prefills = PHASES[cell.phase] - {Phase.DECODE} if cell.phase in PHASES else {Phase.PREFILL, Phase.EXTEND}
        first = all(self.subject.supports(spec, cell.layout, cell.block_size, phase) for phase in prefills)
        second = bool(self.subject.supports(spec, cell.layout, cell.block_size, Phase.DECODE))
        return self.subject.name if first else BASELINE, self.subject.name if second else BASELINE

    def _accepted(self, cell: CheckCell, session: Session) -> None:
        support = self.subject.backend.accepts(session.layers.given[0].cache)
        if support:
            return
        if cell.memory == "own":
            raise Finding(f"accepts() must take a cache that layout {cell.layout} allocates: {support}")
        check_refusal(support, "accepts() must say what it needs and what it got")
        raise Skipped.refused(support)


def open_all(session: Session, lens: Lens, like: Sequence[Turn] = ()) -> list[Turn]:
    """The sequences of a step, their contexts cached; the second and third of several blocks share blocks of the first.

    like: turns whose sequences are still open, each of which shares every full block of its context with the sequence in its row,
    as after a prefix hit.
    """
    work: list[Turn] = []
    first: Tokens | None = None
    sharing = 0
    for number, (query_len, context, drafts) in enumerate(lens):
        share = like[number].seq if like else first if context > session.block_size and sharing < 2 else None
        seq = session.open(context, share)
        sharing += share is not None
        if first is None and context > session.block_size:
            first = seq
        work.append(Turn(seq, query_len, drafts))
    return work


def close_all(session: Session, seqs: Sequence[Tokens]) -> None:
    """Give every block of some sequences back, shared ones once."""
    session.close(Tokens(sorted({block for seq in seqs for block in seq.blocks})))


def sequences(work: StepTurns) -> list[Tokens]:
    """The sequences of a step's turns."""
    return [turn.seq for turn in work]


def without_stray_reads(run: Callable[[Stage, CheckCell, float], None]) -> Callable[[Stage, CheckCell], str]:
    """Make a check of a function of the poison. Where NaN comes out, it runs once more with zeros in the slots of no token, and
    the finding says what that shows."""

    @wraps(run)
    def check(stage: Stage, cell: CheckCell) -> str:
        try:
            run(stage, cell, stage.poison)
        except Finding as finding:
            if not finding.guess.startswith("NaN"):
                raise
            try:
                run(stage, cell, 0.0)
            except Finding as clean:
                if clean.guess.startswith("NaN"):
                    finding.guess += ", whatever the unused slots hold"
                else:
                    reads = "reads slots that hold no token of the sequence (and is wrong with zeros there, too)"
                    finding.guess = clean.guess or reads
            else:
                past = "past a sequence's end or of another block (right once they hold zeros)"
                finding.guess = f"reads slots that hold no token, {past}"
            raise
        return ""

    return check


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
