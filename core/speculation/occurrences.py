"""Where each stretch of a text occurred before, and what followed: the counts of a suffix tree without the tree.

A suffix tree that grows by the token keeps a node for every prefix of every suffix, or pays for keeping fewer. What is asked of
it here, how often each token followed the longest match, can be read from the places where the match occurred. So the text itself
is kept, and an index of its short n-grams; the places are narrowed down token by token, as a descent through the tree would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_ANCHORS = (3, 1)
"""Lengths of the n-grams whose places are kept, the longest first."""
_MOST_PLACES = 32
"""Places of an n-gram that are looked at, the latest: they bound what a guess costs, as they bound how exact its counts are."""


class Guess(NamedTuple):
    """Tokens that may follow, and the sum of their probabilities: how many of them are expected to hold."""

    tokens: list[int]
    score: float


NOTHING = Guess([], 0.0)


class Occurrences:
    """An index of texts; each grows at its end or is dropped whole, the oldest first."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._newest = -1
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        """n-gram -> (text, position after it), in the order in which they were added."""

    def begin(self) -> None:
        """What is appended from now on is a new text."""
        self._newest += 1
        self._texts[self._newest] = []

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the newest text."""
        text, places = self._texts[self._newest], self._places
        first = len(text)
        text += tokens
        for size in _ANCHORS:
            # An n-gram is noted once something follows it: the one at the end of the text when the text grows.
            for end in range(max(first, size), len(text)):
                listed = places.setdefault(tuple(text[end - size : end]), [])
                listed.append((self._newest, end))
                if len(listed) > 2 * _MOST_PLACES:
                    del listed[:_MOST_PLACES]

    def drop_oldest(self) -> int:
        """Forget the oldest text; returns how many tokens it had."""
        number = next(iter(self._texts))
        text = self._texts.pop(number)
        for size in _ANCHORS:
            for end in range(size, len(text)):
                key = tuple(text[end - size : end])
                listed = self._places.get(key)
                if listed is not None and listed[0][0] <= number:
                    kept = [place for place in listed if place[0] > number]
                    if kept:
                        self._places[key] = kept
                    else:
                        del self._places[key]
        return len(text)

    @property
    def num_ngrams(self) -> int:
        """Different n-grams in the index."""
        return len(self._places)

    def guess(self, context: Sequence[int], depth: int, most: int, factor: float, least: float) -> Guess:
        """What follows the longest match of the context's end: the most frequent token, then the one after it, and so on.

        depth: tokens of the longest match. most: tokens that are guessed. factor: at most this many for each token of the match.
        least: the probability below which a path is not followed further (Oliaro et al. 2024, arXiv 2411.04975).
        """
        places, length = self._longest_match(context, depth)
        if not places:
            return NOTHING
        found = [(self._texts[text], end) for text, end in places]
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        for step in range(min(most, int(factor * length))):
            following = Counter(text[end + step] for text, end in found if end + step < len(text))
            if not following:
                break
            token, count = following.most_common(1)[0]
            probability *= count / following.total()
            if probability < least:
                break
            tokens.append(token)
            score += probability
            found = [(text, end) for text, end in found if end + step < len(text) and text[end + step] == token]
        return Guess(tokens, score)

    def _longest_match(self, context: Sequence[int], depth: int) -> tuple[list[tuple[int, int]], int]:
        """Where the longest match of the context's end ends, and its length."""
        size = len(context)
        for length in _ANCHORS:
            listed = self._places.get(tuple(context[size - length :])) if size >= length else None
            if listed:
                break
        else:
            return [], 0
        places = listed[-_MOST_PLACES:]
        while length < min(depth, size):
            before = context[size - 1 - length]
            longer = [place for place in places if place[1] > length and self._texts[place[0]][place[1] - 1 - length] == before]
            if not longer:
                break
            places = longer
            length += 1
        return places, length


class Remembered:
    """Finished outputs, as many as fit a number of tokens."""

    def __init__(self, most_tokens: int) -> None:
        self.occurrences = Occurrences()
        self._most, self._held = most_tokens, 0

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an output, and forget the oldest ones that no longer fit."""
        if len(tokens) < 2:  # in which nothing follows anything
            return
        tokens = tokens[-self._most :]
        self.occurrences.begin()
        self.occurrences.append(tokens)
        self._held += len(tokens)
        while self._held > self._most:
            self._held -= self.occurrences.drop_oldest()
