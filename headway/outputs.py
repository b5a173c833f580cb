"""Outputs of `LLM.generate`, `LLM.embed` and `LLM.score`, with the names of vLLM's offline API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from headway.core.sampling.logprobs import Logprob

if TYPE_CHECKING:
    from torch import Tensor

    from headway.core.contract.adapters import LoRARequest

LogprobsByToken = dict[int, Logprob]
"""Log-probabilities at one position, by token id: first the token that stands there, then the most likely ones."""


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Number of the completion among the request's n."""
    text: str
    token_ids: list[int]
    """Token ids of the completion; a stop token that ended it is the last."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of its tokens; None where none were asked for."""
    logprobs: list[LogprobsByToken] | None = None
    """One for each token; None where none were asked for."""
    finish_reason: str | None = None
    """"stop" (end-of-text token, stop token or stop text), "length", or "error"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token's id or the stop text that ended it; None for an end-of-text token and all else."""
    error: str | None = None
    """Cause of "error": backend, phase and shapes, the NaN, the schema that cannot be compiled, the processor that raised."""

    def finished(self) -> bool:
        """Whether the completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Seconds on one clock (time.perf_counter)."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    scheduled_time: float | None = None
    """When the first completion was admitted to a step."""

    @property
    def time_to_first_token(self) -> float:
        """Seconds from arrival to the first token."""
        assert self.first_token_time is not None, "no token yet"
        return self.first_token_time - self.arrival_time

    first_token_latency = property(attrgetter("time_to_first_token"))
    queued_ts = property(attrgetter("arrival_time"))
    scheduled_ts = property(attrgetter("scheduled_time"))
    first_token_ts = property(attrgetter("first_token_time"))
    last_token_ts = property(attrgetter("finished_time"))
    """This and the four before: the times by vLLM's names. The last token ends the request."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step; None before it."""
        return None if self.scheduled_time is None else self.scheduled_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt and its completions."""

    encoder_prompt: ClassVar[None] = None
    """This and the next three: fields of vLLM's, for models and engines that Headway does not have."""
    encoder_prompt_token_ids: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[Mapping[str, object]] = MappingProxyType({})
    kv_transfer_params: ClassVar[None] = None

    request_id: str
    prompt: str | None
    """None where token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = field(default=0)
    """Prompt tokens whose keys and values were already in the cache."""
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    """One for each token of the prompt, None for the first; None as a whole where none were asked for."""
    lora_request: LoRARequest | None = None
    """The adapter that the completions were written with."""


Made = TypeVar("Made")


@dataclass
class PooledOutput(Generic[Made]):
    """A text, or a query with a document, and what a model has made of it."""

    request_id: str
    outputs: Made
    prompt_token_ids: list[int]
    """Tokens of the text; those of a pair have what stands around and between both texts."""
    finished: bool = True


@dataclass
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Elements of the vector."""
        return len(self.embedding)


class EmbeddingRequestOutput(PooledOutput[EmbeddingOutput]):
    """A prompt and its embedding."""


@dataclass
class ClassificationOutput:
    """What a classifier says of a text."""

    probs: list[float]
    """For each label its probability, or what the model's configuration says in its place."""

    @property
    def num_classes(self) -> int:
        """Labels."""
        return len(self.probs)


class ClassificationRequestOutput(PooledOutput[ClassificationOutput]):
    """A prompt and what a classifier says of it."""


@dataclass
class PoolingOutput:
    """What a text has become, as a tensor."""

    data: Tensor
    """float32 [size]: a vector, or probabilities of labels; of the tokens of a text [tokens, size]."""


class PoolingRequestOutput(PooledOutput[PoolingOutput]):
    """A prompt and what it has become."""

    @classmethod
    def of(cls, pooled: EmbeddingRequestOutput | ClassificationRequestOutput) -> PoolingRequestOutput:
        """The output of `LLM.encode` where `LLM.embed` or `LLM.classify` has this one."""
        import torch

        row = pooled.outputs.embedding if isinstance(pooled, EmbeddingRequestOutput) else pooled.outputs.probs
        return cls(pooled.request_id, PoolingOutput(torch.tensor(row)), pooled.prompt_token_ids, pooled.finished)


@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of `LLM.embed`, `LLM.encode` and `LLM.reward`, as vLLM's programs hand them over."""

    dimensions: int | None = None
    """Elements to which vectors are cut, where the model was trained for it."""
    truncate_prompt_tokens: int | None = None
    """Tokens to which longer prompts are cut, -1 for the model's limit; None: those are refused."""
    task: str | None = None

    def clone(self) -> PoolingParams:
        """A copy."""
        return replace(self)


@dataclass
class ScoringOutput:
    """How well a document fits a query."""

    score: float
    """What a classifier answers, as a rule between 0 and 1; of an embedding model the cosine, between -1 and 1."""


class ScoringRequestOutput(PooledOutput[ScoringOutput]):
    """A query with a document, and their score."""
