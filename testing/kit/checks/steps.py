"""One instance over many steps: growing sequences, turns with another backend, the thousandth step, the first one."""

from __future__ import annotations

import time

from headway.core.oracle.cells import CheckCell, placed
from headway.core.oracle.steps import Before, Lens, Tokens, Turn, first_step
from headway.testing.kit.attention import AttentionStage, close_all, open_all, without_stray_reads
from headway.testing.kit.stage import synchronize
from headway.testing.kit.subject import BASELINE

STEPS = 50
_WATCHED = frozenset({0, 1, 2, 3, 4, 5, 9, 19, 33, 48, 49})
THOUSANDTH = 1_003


def thousand(stage: AttentionStage, cell: CheckCell) -> str:
    """The thousandth step is as right as the first: what counts steps, or fills up, shows late."""
    lens: Lens = [(5, 0, 0), (1, 20, 0), (1, cell.block_size, 0)]
    session = stage.session(cell, [lens] * 4, extra_tokens=4 * cell.block_size, layers=1)
    done = 0
    for number in (0, 299, 999, THOUSANDTH - 1):
        work = open_all(session, lens)
        if number > done:  # steps that are not judged: the same one again and again
            idle = session.lay_out(work)
            before = Before(idle)
            for _ in range(number - done):
                session.run(idle)
            session.finish(idle, work, before, checked=False)
        with placed(f"step {number + 1} of one instance"):
            session.step(work)
        close_all(session, [turn.seq for turn in work])
        done = number + 1
    return ""


@without_stray_reads
def steps(stage: AttentionStage, cell: CheckCell, poison: float) -> None:
    """Fifty steps in which sequences come, grow in chunks, decode and go, and their blocks become other sequences'."""
    room: list[Lens] = [[(1, 400, 0)] * 4, [(40, 0, 0)] * 4]
    session = stage.session(cell, room, poison=poison, extra_tokens=6 * (cell.block_size + STEPS))
    running: list[Tokens] = []
    for number in range(STEPS):
        work = [Turn(seq) for seq in running]
        if number % 7 == 0:
            work.insert(0, Turn(session.open(0), 5 + number % 3 * 9))
        elif number % 7 == 3:
            share = max(running, key=lambda seq: seq.length, default=None)
            context = max(cell.block_size, 1) if share is None or share.length <= cell.block_size else share.length - 1
            work.insert(0, Turn(session.open(min(context, 90), share), 3 + number % 4))
        with placed(f"step {number + 1} of one instance"):
            session.step(work, checked=number in _WATCHED)
        running = [turn.seq for turn in work]
        if len(running) > 5:
            gone = running.pop(0)
            shared = {block for seq in running for block in seq.blocks}
            session.close(Tokens([block for block in gone.blocks if block not in shared]))


@without_stray_reads
def turns(stage: AttentionStage, cell: CheckCell, poison: float) -> None:
    """The subject and the baseline serve one cache by turns, also within a step."""
    lens: Lens = [(9, 0, 0), (20, 2 * cell.block_size, 0), (5, cell.block_size + 3, 0), (1, 33, 0), (1, cell.block_size, 0)]
    session = stage.session(cell, [lens], poison=poison, extra_tokens=6 * len(lens) * cell.block_size)
    subject = session.prefill, session.decode
    baseline = stage.backend(cell, BASELINE)
    work = open_all(session, lens)
    seqs = [turn.seq for turn in work]
    for prefill, decode in (subject, (baseline, subject[1]), (subject[0], baseline), (baseline, baseline), subject):
        session.prefill = prefill
        session.decode = decode
        session.step(work)
        work = [Turn(seq, 4 if number < 2 else 1) for number, seq in enumerate(seqs)]


def cold(stage: AttentionStage, cell: CheckCell) -> str:
    """How long the first step of a fresh process takes, compilation included, and the second."""
    lens = first_step(cell.phase, cell.block_size)
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        session = stage.session(cell, [lens])
        session.run(session.lay_out(open_all(session, lens)))
        synchronize(stage.subject.device)
        taken.append(time.perf_counter() - started)
    return f"first call {taken[0]:.2f} s, second {taken[1]:.3f} s"
