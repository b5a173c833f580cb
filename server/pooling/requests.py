"""The bodies of requests for embeddings and scores: OpenAI's fields, and those that vLLM and Cohere's rerank API add."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.requests.prompts import Prompt
from headway.server.openai.requests import MOST_PROMPTS, TokenIds

Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]


class PooledRequest(BaseModel):
    """The fields that all of them share; other fields are ignored, as OpenAI's servers do."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    """One of the server's names for its model; None: that model."""
    truncate_prompt_tokens: int | None = None
    """Tokens to which longer texts are cut; -1: the model's limit; None: longer ones are refused."""
    request_id: str | None = None
    """What the answer's id is made of, where the header X-Request-Id gives none."""
    user: str | None = None


class EmbeddingRequest(PooledRequest):
    """The body of /v1/embeddings: texts, or a conversation."""

    input: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Texts
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
        | None
    ) = None
    messages: list[dict[str, Any]] | None = None
    """A conversation, which is one text in the model's chat template."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    """Refused: a template is a program."""
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """The texts of `input`, or the token ids of each."""
        if self.input is None:
            return []
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [{"prompt_token_ids": self.input}]
        return [each if isinstance(each, str) else {"prompt_token_ids": each} for each in self.input]


class ClassifyRequest(EmbeddingRequest):
    """The body of /classify: texts, as /v1/embeddings has them."""


class PoolRequest(EmbeddingRequest):
    """The body of /pooling."""

    task: str | None = None
    """embed, classify, token_embed or token_classify; None: what the model is for."""


class ScoreRequest(PooledRequest):
    """The body of /score: two texts, a text and a list, or two lists of one length."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    """The same as `text_1`, in newer releases of vLLM."""
    documents: str | Texts | None = None
    """The same as `text_2`."""

    @property
    def texts(self) -> tuple[str | list[str], str | list[str]]:
        """Queries and documents; an empty list where one is missing, which is refused with its name."""
        return self.queries or self.text_1 or [], self.documents or self.text_2 or []


class RerankRequest(PooledRequest):
    """The body of /rerank."""

    query: str
    documents: Texts
    top_n: int = Field(default=0, ge=0)
    """Documents that are returned, the best first; 0: all."""
    return_documents: bool = True
    """Whether each result brings its document's text, as vLLM's does."""
