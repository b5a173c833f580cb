"""Contracts of sampling plugins: logits processors, and proposers of draft tokens for speculative decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class LogitsProcessorInfo:
    """A plugin's registration of a logits processor, which requests name in `SamplingParams.logits_processors`."""

    name: str
    summary: str
    """One-line description for lists."""
    load: Callable[[], Callable[[Mapping[str, Any]], Callable[..., Any]]]
    """Function that is called when the name is first used. It returns a function that makes the processor of one completion from
    the request's `extra_args` (empty if there are none): (token_ids, logits) -> logits, or (prompt_token_ids, token_ids, logits)
    -> logits."""


class SequenceProposer(Protocol):
    """Proposer of draft tokens for one sequence. The engine calls it between steps, so calls should take microseconds."""

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Return at most `most` draft tokens that may follow `token_ids`. An empty sequence is valid.

        token_ids: prompt and output so far. Each call passes the previous call's tokens and the tokens after them, so no token
        need be read twice. The list belongs to the engine: do not modify or store it.
        """

    def finish(self, token_ids: Sequence[int]) -> None:
        """Handle the end of the sequence. token_ids: all tokens of the sequence."""


class Proposer(Protocol):
    """Proposer of draft tokens for all sequences of an engine."""

    def begin(self, num_prompt_tokens: int) -> SequenceProposer:
        """Return the proposer of a new sequence with a prompt of this many tokens."""


@runtime_checkable
class BatchProposer(Protocol):
    """A `Proposer` that proposes for all sequences of a step at once, such as a draft model. Not available to plugins yet."""

    def propose_batch(self, sequences: Sequence[Sequence[int]], most: Sequence[int]) -> list[list[int]]:
        """Return up to most[i] draft tokens for each sequence i, given its prompt and output so far. An empty list is valid."""


@dataclass(frozen=True, slots=True)
class ProposerOptions:
    """Options of proposers that a user may set, named as in vLLM's speculative_config."""

    prompt_lookup_max: int = 4
    """Maximum length of a match of `ngram`, in tokens."""
    suffix_decoding_max_tree_depth: int = 24
    """Maximum length of a match of `suffix`, in tokens."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Maximum number of draft tokens that `suffix` proposes per token of its match."""
    suffix_decoding_min_token_prob: float = 0.1
    """Minimum estimated probability of a draft token. `suffix` stops at a less likely token."""
    suffix_decoding_max_cached_tokens: int = 2**17
    """Number of tokens of finished outputs that `suffix` stores, about 400 bytes each. The oldest output is evicted first."""


@dataclass(frozen=True)
class ProposerInfo:
    """A plugin's registration of a proposer, under its name in the option `speculate`."""

    name: str
    summary: str
    """One-line description of the source of the draft tokens."""
    make: Callable[[ProposerOptions], Proposer] = field(repr=False)
