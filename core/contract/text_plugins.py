"""Contracts of plugins for text: logits processors, proposers of draft tokens, and parsers of model output in chats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable
from uuid import uuid4


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


class ChatPiece(NamedTuple):
    """A part of an answer. Parts arrive in text order; concatenated by kind and call, they form the answer."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    """Kind of part: "call" begins a tool call, "arguments" continues it."""
    text: str
    """Part of the content or reasoning, name of the called function ("call"), or part of the JSON arguments ("arguments")."""
    call: int = -1
    """Index of the call, from 0, for "call" and "arguments"; otherwise -1."""
    id: str = ""
    """ID of the tool call, only for "call"."""


class ChatParser(Protocol):
    """An incremental parser of one completion.

    The concatenated parts must not depend on how the text is split, and no text may be lost: text that turns out not to be a call
    is content.
    """

    def feed(self, text: str) -> Sequence[ChatPiece]:
        """Parse more text and return the parts that are certain now."""

    def end(self) -> Sequence[ChatPiece]:
        """Finish parsing at the end of the text and return the remaining parts."""


@dataclass(frozen=True, slots=True)
class ChatContext:
    """Properties of a request that a parser may use."""

    prompt: str = ""
    """Text of the prompt after the chat template was applied. Empty if the request gave token ids."""
    tools: Mapping[str, Mapping[str, Any]] | None = None
    """JSON schema of each tool's parameters, by tool name."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of a model family's tool calls. Grammars for required tools and for strict schemas are made from it."""

    head: str
    """Text before a call's arguments. NAME stands for the function's name, NUMBER for digits."""
    tail: str
    """Text after a call's arguments."""
    trigger: str
    """Prefix of `head` that unambiguously begins a call."""
    before: str = ""
    """Text before the first call."""
    between: str | None = ""
    """Text between two calls. None means an answer has only one call."""
    after: str = ""
    """Text after the last call."""
    needs: str = ""
    """Token that the tokenizer must have. If the tokenizer lacks it, the next syntax is used."""


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """Markers around a model family's reasoning."""

    opens: str = "<think>"
    closes: str = "</think>"
    assumed: bool = False
    """True if text without the opening marker is also reasoning, unless the prompt has closed the reasoning."""
    ends_before: tuple[str, ...] = ()
    """Markers that end the reasoning and belong to the following text."""
    answer: str = ""
    """Text between the reasoning and an answer that is not a tool call."""

    def begun(self, prompt: str) -> bool | None:
        """Return True if the prompt ends with the opening marker, False if it ends with the closing marker, otherwise None."""
        tail = prompt.rstrip()
        if tail.endswith(self.opens):
            return True
        return False if tail.endswith(self.closes) else None


def call_id(name: str, number: int) -> str:
    """Return a random ID for a tool call."""
    return f"call_{uuid4().hex[:24]}"


def recognizes_none(template: str) -> bool:
    """Return False: the parser is used only if it is selected by name."""
    return False


@dataclass(frozen=True)
class ChatParserInfo:
    """A plugin's registration of a chat parser."""

    name: str
    """Name for `--tool-call-parser` or `--reasoning-parser`."""
    summary: str
    """One-line description of the format."""
    reads: Literal["calls", "reasoning"]
    make: Callable[[ChatContext], ChatParser]
    """Function that makes the parser of one completion. A parser of calls gets the text without the reasoning."""
    recognizes: Callable[[str], bool] = recognizes_none
    """Function that takes a chat template and returns whether models with this template write the format. The first parser that
    matches is used."""
    syntaxes: tuple[CallSyntax, ...] = ()
    """Call syntaxes, preferred first. If empty, grammars use the syntax of `hermes`."""
    reasoning: ReasoningSyntax | None = None
    """Reasoning markers. Structured output begins after the reasoning. None means that structured output begins at once."""
    make_id: Callable[[str, int], str] = call_id
    """Function that makes a call's id from the function's name and the index of the call."""
    marks: tuple[str, ...] = ()
    """Marker texts of the format. If one is a special token of the tokenizer, special tokens are not stripped from the text."""
    whole: bool = False
    """True if the parser reads the whole text (reasoning, content and calls). Such a parser is used for every chat."""
