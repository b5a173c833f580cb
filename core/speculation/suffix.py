"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what most often followed the longest match, here or earlier."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.contract.proposers import ProposerOptions
from headway.core.speculation.occurrences import Guess, Occurrences, Remembered


class SuffixProposer:
    """Each sequence has its own counts, over prompt and output; all share those of finished outputs."""

    def __init__(self, options: ProposerOptions | None = None) -> None:
        self._options = options or ProposerOptions()
        self._remembered = Remembered(self._options.suffix_decoding_max_cached_tokens)

    def begin(self, num_prompt_tokens: int) -> SequenceSuffixes:
        """See Proposer."""
        return SequenceSuffixes(self._options, self._remembered, num_prompt_tokens)


class SequenceSuffixes:
    """One sequence, and what it shares with those that have finished."""

    def __init__(self, options: ProposerOptions, remembered: Remembered, num_prompt_tokens: int) -> None:
        self._options, self._remembered, self._num_prompt_tokens = options, remembered, num_prompt_tokens
        self._own = Occurrences()
        self._own.begin()
        self._num_read = 0

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """See SequenceProposer. The better of the two guesses, by the tokens of it that are expected to hold."""
        self._own.append(token_ids[self._num_read :])
        self._num_read = len(token_ids)
        context = token_ids[-self._options.suffix_decoding_max_tree_depth :]
        own, shared = self._guess(self._own, context, most), self._guess(self._remembered.occurrences, context, most)
        return max(own, shared, key=lambda guess: guess.score).tokens

    def _guess(self, occurrences: Occurrences, context: Sequence[int], most: int) -> Guess:
        options = self._options
        factor, least = options.suffix_decoding_max_spec_factor, options.suffix_decoding_min_token_prob
        return occurrences.guess(context, options.suffix_decoding_max_tree_depth, most, factor, least)

    def finish(self, token_ids: Sequence[int]) -> None:
        """See SequenceProposer."""
        self._remembered.add(token_ids[self._num_prompt_tokens :])
