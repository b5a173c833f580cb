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
"""Token id -> log-probability at one position. The token at this position comes first, followed by the most likely tokens."""


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    """Index of the completion among the request's n completions."""
    text: str
    token_ids: list[int]
    """Token ids of the completion, including a stop token at its end."""
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities. None if not requested."""
    logprobs: list[LogprobsByToken] | None = None
    """Log-probabilities for each token. None if not requested."""
    finish_reason: str | None = None
    """"stop" (end-of-text token, stop token or stop text), "length", "abort" or "error"; None while unfinished."""
    stop_reason: int | str | None = None
    """Stop token id or stop text that ended the completion. None if an end-of-text token or another reason ended it."""
    error: str | None = None
    """Cause of an "error": the backend with phase and shapes, a NaN, an invalid schema, or a logits processor that raised."""

    def finished(self) -> bool:
        """Return whether the completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request in seconds, on the clock of time.perf_counter."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    scheduled_time: float | None = None
    """Time at which the request's first completion was admitted to a step."""

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
    """Time of the last token, with which a request finishes. This attribute and the four above have vLLM's names."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the request's first step. None until that step."""
        return None if self.scheduled_time is None else self.scheduled_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt and its completions."""

    encoder_prompt: ClassVar[None] = None
    """Always None. This and the next three fields exist in vLLM for models and engines that Headway does not have."""
    encoder_prompt_token_ids: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[Mapping[str, object]] = MappingProxyType({})
    kv_transfer_params: ClassVar[None] = None

    request_id: str
    prompt: str | None
    """Text of the prompt. None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = field(default=0)
    """Number of prompt tokens found in the prefix cache."""
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    """Log-probabilities for each prompt token, None for the first. None if not requested."""
    lora_request: LoRARequest | None = None
    """Adapter that generated the completions."""
    cache_report: Mapping[str, int] = field(default_factory=dict)
    """Number of prompt tokens by source: `device` and `offload` if the prefix cache held them, otherwise the reason why they were
    computed."""


Made = TypeVar("Made")


@dataclass
class PooledOutput(Generic[Made]):
    """A text, or a query with a document, and a pooling model's result for it."""

    request_id: str
    outputs: Made
    prompt_token_ids: list[int]
    """Tokens of the text. For a pair, both texts and the tokens around and between them."""
    finished: bool = True


@dataclass
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of elements of the embedding."""
        return len(self.embedding)


class EmbeddingRequestOutput(PooledOutput[EmbeddingOutput]):
    """A prompt and its embedding."""


@dataclass
class ClassificationOutput:
    """A classifier's result for a text."""

    probs: list[float]
    """Probability of each label, or its raw score if the model's configuration requests raw scores."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


class ClassificationRequestOutput(PooledOutput[ClassificationOutput]):
    """A prompt and its classification."""


@dataclass
class PoolingOutput:
    """A pooling model's result for a text, as a tensor."""

    data: Tensor
    """float32 [size]: embedding or label probabilities; [tokens, size] for per-token results."""


class PoolingRequestOutput(PooledOutput[PoolingOutput]):
    """A prompt and its result as a tensor."""

    @classmethod
    def of(cls, pooled: EmbeddingRequestOutput | ClassificationRequestOutput) -> PoolingRequestOutput:
        """Convert an output of `LLM.embed` or `LLM.classify` to the format of `LLM.encode`."""
        import torch

        row = pooled.outputs.embedding if isinstance(pooled, EmbeddingRequestOutput) else pooled.outputs.probs
        return cls(pooled.request_id, PoolingOutput(torch.tensor(row)), pooled.prompt_token_ids, pooled.finished)


@dataclass(kw_only=True)
class PoolingParams:
    """Parameters of `LLM.embed`, `LLM.encode` and `LLM.reward`, as programs for vLLM pass them."""

    dimensions: int | None = None
    """Number of embedding elements to keep, if the model supports shortened embeddings."""
    truncate_prompt_tokens: int | None = None
    """Maximum number of tokens of a prompt, -1 for the model's limit. None rejects longer prompts."""
    task: str | None = None

    def clone(self) -> PoolingParams:
        """Return a copy."""
        return replace(self)


@dataclass
class ScoringOutput:
    """The score of a document for a query."""

    score: float
    """A classifier's score, usually between 0 and 1, or an embedding model's cosine, between -1 and 1."""


class ScoringRequestOutput(PooledOutput[ScoringOutput]):
    """A query with a document, and their score."""
