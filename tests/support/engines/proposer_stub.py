"""A proposer that says what a function says."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Told:
    """propose: all tokens of a sequence -> guesses of those that follow."""

    def __init__(self, propose: Callable[[list[int]], Sequence[int]]) -> None:
        self._propose = propose
        self.finished: list[list[int]] = []

    def begin(self, num_prompt_tokens: int) -> Told:
        return self

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        return list(self._propose(list(token_ids)))[:most]

    def finish(self, token_ids: Sequence[int]) -> None:
        self.finished.append(list(token_ids))


def told_of(texts: Sequence[Sequence[int]], most: int = 7, wrong_every: int = 5) -> Told:
    """Guesses what follows in one of these texts, with a mistake now and then, and sometimes nothing."""

    def propose(token_ids: list[int]) -> list[int]:
        text = next((text for text in texts if list(text[: len(token_ids)]) == token_ids), [])
        if len(token_ids) % 6 == 0:
            return []
        guesses = text[len(token_ids) : len(token_ids) + 1 + len(token_ids) % most]
        return [(guess + ((len(token_ids) + place) % wrong_every == 0)) % 50 for place, guess in enumerate(guesses)]

    return Told(propose)
