"""What `LLM` answers with a model that is pooled: vectors, scores, probabilities of labels, rewards of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from headway.compat.vllm_words import check_keywords
from headway.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from headway.pooling.assembly import PoolingClient
from headway.requests.prompts import Prompt


class PooledCalls(ABC):
    """The calls of `LLM` that a model which is pooled answers."""

    @property
    @abstractmethod
    def pooling(self) -> PoolingClient:
        """The model that is pooled, and its engine.

        :raises ConfigError: the model generates text.
        """

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        **others: object,
    ) -> list[EmbeddingRequestOutput]:
        """Make a vector of each prompt; the outputs come in their order.

        prompts: as in `generate`. dimensions: elements to which vectors are cut, where the model was trained for it.
        truncate_prompt_tokens: tokens to which longer prompts are cut, -1 for the model's limit; None: those are refused.
        pooling_params: brings both of these in place of the keywords. others: see `generate`.

        :raises PromptError: an empty or too long prompt; it is found before anything runs.
        :raises ConfigError: a model that generates or scores, or a parameter that cannot work.
        """
        check_keywords("LLM.embed", others, ("prompts", "dimensions", "truncate_prompt_tokens", "use_tqdm"))
        if pooling_params is not None:
            dimensions, truncate_prompt_tokens = pooling_params.dimensions, pooling_params.truncate_prompt_tokens
        return self.pooling.run(self.pooling.jobs.embed(prompts, dimensions, truncate_prompt_tokens), use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        **others: object,
    ) -> list[ScoringRequestOutput]:
        """Say how well documents fit queries: one output for each document.

        data_1: a query for all documents, or one for each. data_2: a document or several. A classifier of one label reads both
        texts; of an embedding model the score is the cosine of their vectors. truncate_prompt_tokens, others: see `embed`.

        :raises PromptError: two texts that are too long together.
        :raises ConfigError: a model that generates, or a parameter that cannot work.
        """
        check_keywords("LLM.score", others, ("data_1", "data_2", "truncate_prompt_tokens", "use_tqdm"))
        return self.pooling.run(self.pooling.jobs.score(data_1, data_2, truncate_prompt_tokens), use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        **others: object,
    ) -> list[ClassificationRequestOutput]:
        """Give each prompt the probabilities of the model's labels; the outputs come in their order. Arguments: see `embed`.

        :raises PromptError: an empty or too long prompt; it is found before anything runs.
        :raises ConfigError: a model that is no classifier.
        """
        check_keywords("LLM.classify", others, ("prompts", "use_tqdm", "pooling_params"))
        return self.pooling.run(self.pooling.jobs.classify(prompts, _most(pooling_params)), use_tqdm)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        **others: object,
    ) -> list[PoolingRequestOutput]:
        """Give each token of a prompt, or each step of it, what a reward model or a classifier of tokens says.

        Each output's data is float32 [tokens, labels], or [steps, labels] of a model that rewards steps. Arguments: see `embed`.

        :raises PromptError: an empty or too long prompt; it is found before anything runs.
        :raises ConfigError: a model that rewards no tokens.
        """
        check_keywords("LLM.reward", others, ("prompts", "use_tqdm", "pooling_params"))
        return self.pooling.run(self.pooling.jobs.reward(prompts, _most(pooling_params)), use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """Do what `embed`, `classify` or `reward` does, with the answer as a tensor; or embed each token of a prompt.

        pooling_task: embed, classify, token_embed or token_classify; None: the model's.
        """
        task = self.pooling.jobs.pooling_task(pooling_task)
        if task == "token_embed":
            check_keywords("LLM.encode", others, ("prompts", "use_tqdm", "pooling_params", "pooling_task"))
            asked = pooling_params or PoolingParams()
            job = self.pooling.jobs.embed_tokens(prompts, asked.dimensions, asked.truncate_prompt_tokens)
            return self.pooling.run(job, use_tqdm)
        if task == "token_classify":
            return self.reward(prompts, pooling_params, use_tqdm=use_tqdm, **others)
        made: Sequence[EmbeddingRequestOutput | ClassificationRequestOutput]
        made = (self.classify if task == "classify" else self.embed)(
            prompts, pooling_params=pooling_params, use_tqdm=use_tqdm, **others
        )
        return [PoolingRequestOutput.of(each) for each in made]


def _most(params: PoolingParams | None) -> int | None:
    """Tokens to which prompts are cut."""
    return None if params is None else params.truncate_prompt_tokens
