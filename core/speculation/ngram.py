"""Prompt lookup (Saxena 2023): where the last few tokens stood before, what came after them may come again."""

from __future__ import annotations

from collections.abc import Sequence


class NgramProposer:
    """Looks in each sequence by itself."""

    def __init__(self, longest: int = 4) -> None:
        """longest: tokens of the longest match that is looked for."""
        self._longest = longest

    def begin(self, num_prompt_tokens: int) -> SequenceNgrams:
        """See Proposer."""
        return SequenceNgrams(self._longest)


class SequenceNgrams:
    """The n-grams of one sequence, each with where the tokens after it begin.

    Of an n-gram that occurs several times the latest counts, for what was written last is the nearest to what comes.
    """

    def __init__(self, longest: int) -> None:
        self._after: list[dict[int, int]] = [{} for _ in range(longest)]
        """For each length, hash of the n-gram -> position after it."""
        self._num_read = 0

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """See SequenceProposer."""
        self._read(token_ids)
        end = len(token_ids)
        for size in range(min(len(self._after), end - 1), 0, -1):
            position = self._after[size - 1].get(hash(tuple(token_ids[end - size :])))
            # Two n-grams of one hash are told apart here; a wrong guess would only be refused, but it would cost.
            if position is not None and token_ids[position - size : position] == token_ids[end - size :]:
                return token_ids[position : position + most]
        return ()

    def _read(self, token_ids: Sequence[int]) -> None:
        """Note the n-grams that something follows: all but those which end with the newest token."""
        for size, after in enumerate(self._after, start=1):
            for end in range(max(self._num_read, size), len(token_ids)):
                after[hash(tuple(token_ids[end - size : end]))] = end
        self._num_read = len(token_ids)

    def finish(self, token_ids: Sequence[int]) -> None:
        """See SequenceProposer."""
