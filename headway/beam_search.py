"""Beam search: find the most likely continuations by keeping several candidates at each token (Graves 2012)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError, refuses_unknown_fields
from headway.core.sampling.params import SamplingParams
from headway.core.system.text import shown
from headway.outputs import LogprobsByToken, RequestOutput

_MOST_PENALTY = 10  # Largest exponent of the length; scores of long continuations overflow above it


@refuses_unknown_fields({}, "docs/sampling.md")
@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's names and meanings."""

    beam_width: int
    """Number of continuations to keep after each token and to return."""
    max_tokens: int
    ignore_eos: bool = False
    """Continue past the model's end-of-text tokens."""
    temperature: float = 0.0
    """Ignored: the search uses the model's own probabilities."""
    length_penalty: float = 1.0
    """Exponent p in the score of a continuation: log-probability / length ** p. Larger values favor longer continuations."""
    include_stop_str_in_output: bool = False
    """Keep the end-of-text token among the tokens."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, "a whole number of at least 1", shown(value))
        power = self.length_penalty
        if isinstance(power, bool) or not isinstance(power, (int, float)) or not -_MOST_PENALTY <= power <= _MOST_PENALTY:
            raise ConfigError("length_penalty", f"a number from -{_MOST_PENALTY} to {_MOST_PENALTY}", shown(power))


@dataclass
class BeamSearchSequence:
    """A continuation, with its prompt."""

    tokens: list[int]
    """Tokens of the prompt and the continuation."""
    logprobs: list[LogprobsByToken]
    """Candidates and their log-probabilities for each token of the continuation."""
    cum_logprob: float = 0.0
    """Sum of the log-probabilities of the continuation's tokens."""
    text: str | None = None
    """Text of `tokens`. None if the model has no tokenizer."""
    finish_reason: str | None = None
    """"stop" or "length"."""
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None


@dataclass
class BeamSearchOutput:
    """The continuations of one prompt, most likely first."""

    sequences: list[BeamSearchSequence]


@dataclass
class BeamSearch:
    """The beam search for one prompt."""

    prompt: Sequence[int]
    params: BeamSearchParams
    ends: frozenset[int]
    """Ids of the tokens that end a continuation."""
    room: int
    """Maximum number of tokens in a continuation, limited by the model's maximum length."""
    beams: list[BeamSearchSequence] = field(init=False)
    """Unfinished continuations."""
    complete: list[BeamSearchSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.beams = [BeamSearchSequence(list(self.prompt), [])]

    @property
    def unfinished(self) -> bool:
        """True if the search needs another token."""
        return bool(self.beams) and len(self.beams[0].logprobs) < min(self.params.max_tokens, self.room)

    def take(self, found: Sequence[LogprobsByToken]) -> None:
        """Extend the beams by one token. found: the most likely next tokens for each beam."""
        longer = []
        for beam, likely in zip(self.beams, found, strict=True):
            for token, scored in likely.items():
                made = BeamSearchSequence([*beam.tokens, token], [*beam.logprobs, likely], beam.cum_logprob + scored.logprob)
                if token in self.ends and not self.params.ignore_eos:
                    made.finish_reason = "stop"
                    made.stop_reason = token
                    self.complete.append(made)
                else:
                    longer.append(made)
        self.beams = sorted(longer, key=self._score, reverse=True)[: self.params.beam_width]

    def best(self, tokenizer: Any, lora_request: LoRARequest | None = None) -> BeamSearchOutput:
        """Return the most likely continuations, with their texts and adapter."""
        for beam in self.beams:
            beam.finish_reason = "length"
        finished = sorted([*self.complete, *self.beams], key=self._score, reverse=True)[: self.params.beam_width]
        for beam in finished:
            if beam.finish_reason == "stop" and not self.params.include_stop_str_in_output:
                beam.tokens = beam.tokens[:-1]
            beam.lora_request = lora_request
            beam.text = None if tokenizer is None else tokenizer.decode(beam.tokens)
        return BeamSearchOutput(finished)

    def _score(self, beam: BeamSearchSequence) -> float:
        length = len(beam.logprobs) - (beam.finish_reason == "stop")
        return beam.cum_logprob / float(max(length, 1) ** self.params.length_penalty)


def search(searches: Sequence[BeamSearch], generate: Callable[[list[list[int]], SamplingParams], list[RequestOutput]]) -> None:
    """Run searches to completion. generate: function that completes prompts of token ids. Each step passes one prompt per beam,
    and most of each prompt is cached."""
    while inputs := next_tokens(searches):
        take_tokens(searches, generate(*inputs))


def next_tokens(searches: Sequence[BeamSearch]) -> tuple[list[list[int]], SamplingParams] | None:
    """Return a prompt of token ids for the next token of each beam, and the parameters of these prompts; None if all searches
    have ended. All searches must have the same beam_width."""
    going = [each for each in searches if each.unfinished]
    if not going:
        return None
    wanted = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * going[0].params.beam_width, detokenize=False)
    return [beam.tokens for each in going for beam in each.beams], wanted


def take_tokens(searches: Sequence[BeamSearch], outputs: Sequence[RequestOutput]) -> None:
    """Extend the searches with the outputs for the prompts of `next_tokens`, one output per prompt."""
    found = iter(outputs)
    for each in searches:
        if each.unfinished:
            each.take([_likely(next(found)) for _ in each.beams])


def _likely(output: RequestOutput) -> LogprobsByToken:
    completion = output.outputs[0]
    if completion.error is not None or not completion.logprobs:
        raise ConfigError("LLM.beam_search", "a step that ends well", completion.error or "an aborted request")
    return completion.logprobs[0]
