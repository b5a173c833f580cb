"""The course of a session of layers with states: which sequences come, what each does in a step, and what happens to slots."""

from __future__ import annotations

import torch

from headway.core.contract.state import CHECKPOINT_TOKENS
from headway.testing.kit.state_session import StateSession, StateTokens, StateTurn

_SIDE_BY_SIDE = 4
_LENGTHS = (20, 64, 33, 90, 41, 7)
"""Tokens of the sequences that come after the first three, each when another has ended."""
_CUTS = (1, 2, 64, 3, 5, 37)
"""New tokens of a prompt in a step: fewer than a convolution remembers, a whole chunk, and parts of one."""


class Course:
    """Sequences that are cut anywhere, guess, take a prefix up, are moved, forked and set back from outside, and end."""

    def __init__(self, session: StateSession, drafts: int) -> None:
        self._session = session
        self._drafts = drafts
        self._numbers = torch.Generator().manual_seed(2)
        self._steps = 0
        self._set_back = False

    def run(self) -> str:
        """Run to the end of every sequence; returns what was run, in words.

        :raises Finding: an output or a state is wrong.
        """
        session, waiting = self._session, list(_LENGTHS)
        checkpoint, first, second = session.take(), session.open(170), session.open(140)
        session.step([StateTurn(first, 100, checkpoint=(CHECKPOINT_TOKENS, checkpoint)), StateTurn(second, 1)])
        running = [first, second, session.open(120, first, CHECKPOINT_TOKENS, checkpoint)]
        count = len(running)
        while running:
            while waiting and len(running) < _SIDE_BY_SIDE:
                running.append(session.open(waiting.pop(0)))
                count += 1
            self._change_slots(running)
            prompts: list[StateTurn] = []
            decodes: list[StateTurn] = []
            for number, seq in enumerate(running):
                turn = self._turn(seq, number)
                (decodes if turn.accepted else prompts).append(turn)
            session.step(prompts + decodes)
            self._steps += 1
            for seq in [seq for seq in running if not seq.left]:
                session.end(seq)
                running.remove(seq)
        return f"{self._steps} steps of {count} sequences"

    def _draw(self) -> int:
        return int(torch.randint(1 << 30, (1,), generator=self._numbers))

    def _turn(self, seq: StateTokens, number: int) -> StateTurn:
        draw = self._draw()
        if seq.done and (number + self._steps) % 2:
            held = min(seq.left, 1 + draw % (self._drafts + 1))
            return StateTurn(seq, min(held + draw % 3, self._drafts + 1), accepted=held)
        return StateTurn(seq, min(seq.left, _CUTS[draw % len(_CUTS)]))

    def _change_slots(self, running: list[StateTokens]) -> None:
        """Do to the slots what an engine does between steps: it restores, forks and moves states, and no backend is asked."""
        session, begun = self._session, [seq for seq in running if seq.done]
        if len(begun) > 1 and self._steps % 4 == 1:
            session.swap(begun[0], begun[-1])
        if begun and self._steps % 4 == 3:
            session.move(begun[-1])
        if begun and self._steps % 6 == 2 and len(running) < _SIDE_BY_SIDE + 2:
            running.append(session.fork(begun[0]))
        if len(begun) > 1 and not self._set_back and self._steps > 4:
            # One sequence goes on alone, and is then set back to where it was, in the slot that it has by then.
            self._set_back = True
            seq = max(begun, key=lambda each: each.left)
            kept, done = session.fork(seq), seq.done
            session.step([StateTurn(seq, 1, accepted=1)])
            session.copy(kept.slot, seq.slot)
            seq.done = done
            session.give_back(kept.slot)
