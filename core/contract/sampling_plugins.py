"""Plugins of sampling: logits processors, and proposers, which guess tokens for the engine to verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class LogitsProcessorInfo:
    """A logits processor that requests may name in `SamplingParams.logits_processors`."""

    name: str
    summary: str
    """One line for lists."""
    load: Callable[[], Callable[[Mapping[str, Any]], Callable[..., Any]]]
    """Returns a function that makes the processor of one completion from its request's `extra_args` (empty where there are none):
    (token_ids, logits) -> logits, or (prompt_token_ids, token_ids, logits) -> logits. Called when the name is first used."""


class SequenceProposer(Protocol):
    """The guesses for one sequence. The engine calls it between steps, so it should take microseconds."""

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Guess up to `most` of the tokens that follow; an empty sequence is a valid answer.

        token_ids: prompt and output so far. Each call passes the tokens of the last call and more after them, so that none need
        be read twice. The list is the engine's own: it must not be changed or kept.
        """

    def finish(self, token_ids: Sequence[int]) -> None:
        """Take note that the sequence has ended with these tokens."""


class Proposer(Protocol):
    """Guesses for all sequences of an engine."""

    def begin(self, num_prompt_tokens: int) -> SequenceProposer:
        """Return the proposer of a new sequence, which begins with a prompt of this many tokens."""


@runtime_checkable
class BatchProposer(Protocol):
    """A `Proposer` that guesses for all sequences of a step at once, as a model does; of its own, and never by a plugin yet."""

    def propose_batch(self, sequences: Sequence[Sequence[int]], most: Sequence[int]) -> list[list[int]]:
        """Guess at most so many tokens of each sequence, given as prompt and output so far. An empty guess is a valid answer."""


@dataclass(frozen=True, slots=True)
class ProposerOptions:
    """Options of proposers that a user may set. Names are those of vLLM's speculative_config."""

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
    """Registration of a proposer by a plugin, under the name that the option `speculate` takes."""

    name: str
    summary: str
    """One line that says what the proposer guesses from."""
    make: Callable[[ProposerOptions], Proposer] = field(repr=False)
