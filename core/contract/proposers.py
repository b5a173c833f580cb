"""What guesses the tokens that follow, for the engine to verify. A plugin may bring its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class SequenceProposer(Protocol):
    """The guesses for one sequence. The engine calls it between steps, so it should take microseconds."""

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Guess up to `most` of the tokens that follow; none is an answer too.

        token_ids: prompt and output so far. Each call has all that the last one had and more after it, so that what was read
        once need not be read again. The list is the engine's own: it must not be changed or kept.
        """

    def finish(self, token_ids: Sequence[int]) -> None:
        """The sequence has ended, with these tokens."""


class Proposer(Protocol):
    """Guesses for all sequences of an engine."""

    def begin(self, num_prompt_tokens: int) -> SequenceProposer:
        """What guesses for a new sequence, whose first tokens are a prompt of this length."""


@dataclass(frozen=True, slots=True)
class ProposerOptions:
    """What a user may say of any proposer. Names are those of vLLM's speculative_config."""

    prompt_lookup_max: int = 4
    """Tokens of the longest match that `ngram` looks for."""
    suffix_decoding_max_tree_depth: int = 24
    """Tokens of the longest match that `suffix` looks for."""
    suffix_decoding_max_spec_factor: float = 1.0
    """`suffix` guesses at most this many tokens for each token of its match."""
    suffix_decoding_min_token_prob: float = 0.1
    """`suffix` stops where what it has guessed is less likely than this."""
    suffix_decoding_max_cached_tokens: int = 2**17
    """Tokens of finished outputs that `suffix` remembers; the oldest output goes first. A token takes about 400 bytes."""


@dataclass(frozen=True)
class ProposerInfo:
    """A proposer that a plugin brings, by the name that `speculate` takes."""

    name: str
    summary: str
    """A line that says what it guesses from."""
    make: Callable[[ProposerOptions], Proposer] = field(repr=False)
