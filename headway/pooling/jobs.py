"""Jobs of pooling models: conversion of a call's arguments to checked token ids, and of the engine's rows to outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.pooling.engine import EncodedText
from headway.core.system.text import shown
from headway.models.encoders.pooling.detect import PoolingTask
from headway.models.encoders.pooling.loader import LoadedPoolingModel
from headway.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from headway.requests.prompts import Prompt, parse_prompts, whole_text

Output = TypeVar("Output")

_OF_MODELS: Final[Mapping[PoolingTask, str]] = {"embed": "embed", "score": "classify", "reward": "token_classify"}
"""Task of a model -> vLLM's name for the task."""
_WORDS: Final[Mapping[str | None, str]] = {
    **{word: word for word in _OF_MODELS.values()},
    "token_embed": "token_embed",
    "reward": "token_classify",
}
"""vLLM's name of a pooling task, old or new -> the new name."""


@dataclass(frozen=True)
class PoolingJob(Generic[Output]):
    """Texts of a call, and the conversion of their result rows to outputs."""

    texts: Sequence[EncodedText]
    finish: Callable[[Sequence[Tensor]], list[Output]]
    """Function to call with each text's result: float32 [size], or [tokens, size] for a model that scores tokens."""

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in the job's texts."""
        return sum(len(text.token_ids) for text in self.texts)


class PoolingJobs:
    """Factory for the jobs of one model. Thread-safe."""

    def __init__(self, model: LoadedPoolingModel) -> None:
        self.model = model
        self._numbers = map(str, count())

    def embed(
        self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> PoolingJob[EmbeddingRequestOutput]:
        """Embed prompts; see `LLM.embed`. :raises PromptError: if a prompt is too long. :raises ConfigError: if the model does
        not support the request."""
        self._check_embeds("embed")
        self._check_dimensions(dimensions)
        texts = self._texts(prompts, truncate_prompt_tokens)

        def made(row: Tensor, text: EncodedText) -> EmbeddingOutput:
            return EmbeddingOutput(_truncated(row[None], dimensions)[0].tolist())

        return self._job(texts, EmbeddingRequestOutput, made)

    def embed_tokens(
        self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None, truncate_prompt_tokens: int | None = None
    ) -> PoolingJob[PoolingRequestOutput]:
        """Embed each token of prompts, with the post-processing of embeddings applied to each token. Raises the same errors as
        `embed`."""
        self._check_embeds("token_embed")
        self._check_dimensions(dimensions)
        texts = [text._replace(each_token=True) for text in self._texts(prompts, truncate_prompt_tokens)]
        return self._job(texts, PoolingRequestOutput, lambda rows, text: PoolingOutput(_truncated(rows, dimensions).clone()))

    def classify(
        self, prompts: Prompt | Sequence[Prompt], truncate_prompt_tokens: int | None = None
    ) -> PoolingJob[ClassificationRequestOutput]:
        """Classify prompts; see `LLM.classify`. :raises PromptError: if a prompt is too long. :raises ConfigError: if the model
        is not a sequence classifier."""
        if self.model.task != "score" or self.model.score_prompt is not None:
            hint = "task='score' says that a model is one" if self.model.task == "embed" else self._instead()
            raise ConfigError("classify", "a sequence classifier", self.model.name, hint)
        texts = self._texts(prompts, truncate_prompt_tokens)

        return self._job(texts, ClassificationRequestOutput, lambda row, text: ClassificationOutput(row.tolist()))

    def reward(
        self, prompts: Prompt | Sequence[Prompt], truncate_prompt_tokens: int | None = None
    ) -> PoolingJob[PoolingRequestOutput]:
        """Reward tokens or steps; see `LLM.reward`. :raises PromptError: if a prompt is too long. :raises ConfigError: if the
        model does not score tokens or steps."""
        if self.model.task != "reward":
            need = "a reward model, or a classifier of tokens"
            raise ConfigError("reward", need, f"{self.model.name}, which says one thing of a whole text", self._instead())
        texts, step = self._texts(prompts, truncate_prompt_tokens), self.model.step_token_id
        texts = [text._replace(each_token=True) for text in texts]

        def made(rows: Tensor, text: EncodedText) -> PoolingOutput:
            return PoolingOutput(rows.clone() if step is None else rows[torch.tensor(text.token_ids) == step])

        return self._job(texts, PoolingRequestOutput, made)

    def _job(
        self, texts: Sequence[EncodedText], kind: type[Output], made: Callable[[Tensor, EncodedText], object]
    ) -> PoolingJob[Output]:
        """Return the job for texts. kind: class of the outputs, a `PooledOutput`. made: function that converts a text's rows to
        the contents of its output."""

        def finish(found: Sequence[Tensor]) -> list[Output]:
            pairs = zip(found, texts, strict=True)
            return [kind(next(self._numbers), made(rows, text), list(text.token_ids)) for rows, text in pairs]  # type: ignore[call-arg]

        return PoolingJob(texts, finish)

    def pooling_task(self, requested: str | None) -> str:
        """Return the task's current name: embed, classify, token_embed or token_classify.

        requested: vLLM's name of the task; None or encode means the model's own task.
        :raises ConfigError: if the name is unknown. The job checks whether the model supports the task.
        """
        if requested in (None, "encode"):
            return _OF_MODELS[self.model.task]
        if requested in _WORDS:
            return _WORDS[requested]
        raise ConfigError("pooling_task", "embed, classify, token_embed or token_classify", shown(requested))

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], truncate_prompt_tokens: int | None = None
    ) -> PoolingJob[ScoringRequestOutput]:
        """Score documents for queries; see `LLM.score`. :raises PromptError: if two texts together are too long. :raises
        ConfigError: if the model or the number of texts does not allow scoring."""
        pairs, labels = _pairs(queries, documents), self.model.network.size
        if self.model.task == "embed":
            return self._similarities(pairs, truncate_prompt_tokens)
        if self.model.task == "reward":
            raise ConfigError(
                "score", "a model that embeds or scores texts", f"{self.model.name}, which rewards tokens", "use reward"
            )
        if labels != 1:
            raise ConfigError("score", "a classifier of one label", f"{self.model.name}, which has {labels}", "use classify")
        texts = self._encoded_pairs(pairs, self._most(truncate_prompt_tokens))
        for number, text in enumerate(texts):
            self._check(text.token_ids, f"pair {number}")

        return self._job(texts, ScoringRequestOutput, lambda row, text: ScoringOutput(float(row[0])))

    def _similarities(self, pairs: Sequence[tuple[str, str]], truncate: int | None) -> PoolingJob[ScoringRequestOutput]:
        """Return the job that computes the cosine of each pair's embeddings. Each distinct text is embedded once."""
        listed = list(dict.fromkeys(text for pair in pairs for text in pair))
        texts = self._texts(listed, truncate)
        place = {text: number for number, text in enumerate(listed)}

        def finish(found: Sequence[Tensor]) -> list[ScoringRequestOutput]:
            rows = normalize(torch.stack(list(found)), dim=-1)
            first, second = (torch.tensor([place[pair[side]] for pair in pairs]) for side in (0, 1))
            cosines = (rows[first] * rows[second]).sum(-1).tolist()
            ids = [[*texts[place[query]].token_ids, *texts[place[document]].token_ids] for query, document in pairs]
            scored = zip(cosines, ids, strict=True)
            return [ScoringRequestOutput(next(self._numbers), ScoringOutput(score), own) for score, own in scored]

        return PoolingJob(texts, finish)

    def _check_embeds(self, method: str) -> None:
        if self.model.task != "embed":
            does = "scores a query and a document" if self.model.task == "score" else "rewards tokens"
            raise ConfigError(method, "a model that embeds texts", f"{self.model.name}, which {does}", self._instead())

    def _instead(self) -> str:
        """Return a hint that names the methods this model supports."""
        return {"embed": "use embed", "score": "use score, or rerank", "reward": "use reward, or /pooling"}[self.model.task]

    def _check_dimensions(self, dimensions: int | None) -> None:
        size, allowed = self.model.network.size, self.model.dimensions
        if dimensions is None or dimensions == size:
            return
        if allowed is None:
            hint = "is_matryoshka or matryoshka_dimensions in its config.json allow others"
            raise ConfigError("dimensions", f"{size}, the length of this model's embeddings", shown(dimensions), hint)
        if not 1 <= dimensions < size or (allowed and dimensions not in allowed):
            need = f"one of {', '.join(map(str, allowed))}" if allowed else f"a whole number from 1 to {size}"
            raise ConfigError("dimensions", need, shown(dimensions))

    def _texts(self, prompts: Prompt | Sequence[Prompt], truncate: int | None) -> list[EncodedText]:
        parsed, most = parse_prompts(prompts), self._most(truncate)
        untokenised = [prompt.text or "" for prompt in parsed if prompt.token_ids is None]
        tokenised = iter(self._tokenised(untokenised, most))
        texts = []
        for number, prompt in enumerate(parsed):
            ids = next(tokenised) if prompt.token_ids is None else prompt.token_ids[:most]
            self._check(ids, f"prompt {number}")
            texts.append(EncodedText(ids))
        return texts

    def _tokenised(self, texts: Sequence[str], most: int | None) -> list[list[int]]:
        if not texts:
            return []
        whole = [whole_text(text) for text in texts]
        found = self._tokenizer("prompt")(whole, truncation=most is not None, max_length=most)
        return [list(ids) for ids in found["input_ids"]]

    def _encoded_pairs(self, pairs: Sequence[tuple[str, str]], most: int | None) -> list[EncodedText]:
        tokenizer = self._tokenizer("score")
        pairs = [(whole_text(query, "query"), whole_text(document, "document")) for query, document in pairs]
        prompt = self.model.score_prompt
        if prompt is not None:
            return [EncodedText(prompt.encode(tokenizer, query, document, most)) for query, document in pairs]
        first, second = [query for query, _ in pairs], [document for _, document in pairs]
        found = tokenizer(first, second, truncation=most is not None, max_length=most)
        types = found.get("token_type_ids") or [None] * len(pairs)
        return [EncodedText(list(ids), kinds) for ids, kinds in zip(found["input_ids"], types, strict=True)]

    def _tokenizer(self, what: str) -> Any:
        if self.model.tokenizer is None:
            raise PromptError(what, "token ids", "a text", f"{self.model.name} was loaded without a tokenizer")
        return self.model.tokenizer

    def _most(self, truncate: int | None) -> int | None:
        """Return the number of tokens to truncate texts to; None means no truncation."""
        if truncate is None:
            return None
        longest = self.model.max_length
        if truncate != -1 and not 1 <= truncate <= longest:
            raise ConfigError("truncate_prompt_tokens", f"-1 or a whole number from 1 to {longest}", shown(truncate))
        return longest if truncate == -1 else truncate

    def _check(self, token_ids: Sequence[int], what: str) -> None:
        longest, vocab_size = self.model.max_length, self.model.network.vocab_size
        if not token_ids:
            raise PromptError(what, "at least one token", "an empty text")
        if len(token_ids) > longest:
            hint = "truncate_prompt_tokens=-1 cuts longer ones"
            raise PromptError(what, f"at most {longest} tokens (max_model_len={longest})", f"{len(token_ids)} tokens", hint)
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < vocab_size:
                raise PromptError(what, f"token ids from 0 to {vocab_size - 1}", shown(token))


def _truncated(rows: Tensor, dimensions: int | None) -> Tensor:
    """Return vectors truncated to `dimensions` and normalized; None leaves them unchanged. rows: float32 [vectors, size]."""
    if dimensions is None or dimensions >= rows.shape[1]:
        return rows
    return normalize(rows[:, :dimensions], dim=-1)


def _pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return (query, document) pairs. :raises ConfigError: if texts are missing or the counts do not match."""
    listed: list[list[str]] = []
    for name, given in (("queries", queries), ("documents", documents)):
        texts = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else None
        if texts is None or not texts or not all(isinstance(text, str) for text in texts):
            raise ConfigError(name, "a text or a list of texts", shown(given))
        listed.append(texts)
    first, second = listed
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise ConfigError("queries", f"one, or one for each of the {len(second)} documents", len(first))
    return list(zip(first, second, strict=True))
