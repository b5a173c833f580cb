"""Request bodies: OpenAI's fields, vLLM's additions, and bodies for pooling models. `Fields` handles unknown fields."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.contract.errors import ConfigError
from headway.core.system.text import shown
from headway.requests.prompts import Prompt
from headway.server.errors import Fields

MOST_COMPLETIONS = 128
"""Maximum number of completions per prompt, as in OpenAI's API: a large n is cheap to request and expensive to compute."""
MOST_PROMPTS = 2048
MOST_STOPS = 64

Count = Annotated[int, Field(ge=1, le=MOST_COMPLETIONS)]
Stops = Annotated[list[str], Field(max_length=MOST_STOPS)]
TokenIds = list[Annotated[int, Field(strict=True)]]
"""Token ids as integers; true and "5" are rejected."""


class StreamOptions(BaseModel):
    """Options for a stream's usage statistics."""

    include_usage: bool = False
    """True to send a last chunk with the usage and without choices."""
    continuous_usage_stats: bool = False
    """True to send the usage so far in every chunk, as in vLLM."""


class JsonSchema(BaseModel):
    """A named JSON schema."""

    model_config = ConfigDict(populate_by_name=True, strict=True)

    name: str = "schema"
    strict: bool | None = None
    """False allows properties that the schema does not name."""
    schema_: dict[str, Any] | bool = Field(alias="schema", default=True)


class ResponseFormat(BaseModel):
    """Structured output of the answer."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    """Schema if the type is "json_schema". The type "structural_tag" has `format`, or `structures` and `triggers`, instead."""


class SamplingRequest(Fields):
    """Fields that chats and completions share. None means that a field was not given."""

    model: str | None = None
    """One of the server's names for its model, or an adapter's name. None means the base model."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Count | None = 1
    best_of: Count | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Stops | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    # Fields of vLLM
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Stops | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    """`extra_args` of SamplingParams."""
    structured_outputs: dict[str, Any] | None = None
    """Fields of StructuredOutputsParams."""
    guided_json: str | dict[str, Any] | None = None
    """JSON schema. This and the next three fields use the names that structured outputs had before vLLM 0.10."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    """Regular expression. This and the next field use SGLang's names of structured outputs."""
    ebnf: str | None = None
    use_beam_search: bool | None = None
    """True to find the n most likely continuations by beam search instead of sampling."""
    length_penalty: float | None = None
    """Exponent of the length penalty: beam search divides a continuation's log-probability by its length raised to this power."""
    priority: int = 0
    request_id: str | None = None
    """The client's part of the answer's id, used if the request has no header X-Request-Id."""
    split_special_tokens: bool | None = None
    """True to treat names of control tokens in prompts and message contents as text. None means the server's option for message
    contents and False for prompts."""
    return_token_ids: bool = False
    """Add `token_ids` to every choice, and the prompt's token ids to the first choice."""
    return_cache_report: bool = False
    """Add `missed` to `usage.prompt_tokens_details`: the number of prompt tokens not found in the prefix cache, by reason."""
    return_tokens_as_token_ids: bool = False
    """True to write the tokens of log-probabilities as "token_id:123"."""

    @property
    def older_form(self) -> dict[str, Any]:
        """Structured output from vLLM's older fields or SGLang's fields, keyed by vLLM's current names; empty if none is
        given."""
        found = {
            "json": self.guided_json,
            "regex": self.guided_regex or self.regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar or self.ebnf,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens of a completion. None if not given."""
        return self.max_tokens


class ChatRequest(SamplingRequest):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: list[dict[str, Any]] | None = None
    """Tools for the model. They are passed to the chat template, or described in the first message if the template does not
    support tools."""
    tool_choice: str | dict[str, Any] | None = None
    """Choice of the tools to call. None means "auto" if there are tools."""
    parallel_tool_calls: bool | None = None
    """False allows at most one call."""
    modalities: list[Literal["text"]] | None = None
    """Ignored: answers are text."""
    reasoning_effort: str | None = None
    """Variable of the chat template; "none" also sets enable_thinking to false."""
    functions: list[Any] | None = None
    """Rejected: replaced by `tools`."""
    function_call: Any = None
    """Rejected: replaced by `tool_choice`."""
    # Fields of vLLM
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """Rejected: a template is a program that could run forever."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    """Variable of the chat template: texts on which the answer may be based."""
    echo: bool = False
    """True to begin the answer with the last message, if that message is the assistant's or the request continues it."""

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class BatchChatRequest(ChatRequest):
    """The body of /v1/chat/completions/batch: a chat's fields with several conversations as messages."""

    messages: Annotated[list[list[dict[str, Any]]], Field(min_length=1, max_length=MOST_PROMPTS)]  # type: ignore[assignment]

    @cached_property
    def chats(self) -> list[ChatRequest]:
        """The chat of each conversation. :raises ConfigError: if a field is unsupported; vLLM rejects the same fields."""
        one = "/v1/chat/completions takes one"
        for name, wanted in (("stream", False), ("use_beam_search", False), ("n", 1), ("best_of", 1)):
            if (got := getattr(self, name)) not in (None, wanted):
                raise ConfigError(name, f"{str(wanted).lower()} for several conversations", shown(got), one)
        if self.tools:
            raise ConfigError("tools", "none for several conversations", len(self.tools), one)
        given = {name: getattr(self, name) for name in ChatRequest.model_fields}
        return [ChatRequest.model_construct(self.model_fields_set, **{**given, "messages": each}) for each in self.messages]


class CompletionRequest(SamplingRequest):
    """The body of /v1/completions."""

    prompt: str | TokenIds | Annotated[list[str] | list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)] | None = None
    """Prompts as texts or token ids. None if prompt_embeds has the prompts."""
    prompt_embeds: str | Annotated[list[str], Field(max_length=MOST_PROMPTS)] | None = None
    """Prompts as embeddings: base64 of torch.save's output. They precede the prompts in `prompt`."""
    echo: bool | None = False
    """True to begin each text with its prompt."""
    logprobs: int | None = Field(default=None, ge=0)
    suffix: str | None = None


class TokenizeRequest(Fields):
    """The body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    split_special_tokens: bool | None = None
    """True to treat names of control tokens as text, as in SamplingRequest."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]


class PooledRequest(BaseModel):
    """Fields that all pooling bodies share. Other fields are ignored, as on OpenAI's servers."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    """One of the server's names for its model. None means the model itself."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens to which longer texts are truncated; -1 means the model's limit. None rejects texts longer than the
    model's limit."""
    request_id: str | None = None
    """The client's part of the answer's id, used if the request has no header X-Request-Id."""
    user: str | None = None


class EmbeddingRequest(PooledRequest):
    """The body of /v1/embeddings: texts or a conversation."""

    input: (
        str
        | Annotated[TokenIds, Field(min_length=1)]
        | Texts
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
        | None
    ) = None
    messages: list[dict[str, Any]] | None = None
    """Conversation to embed as one text, rendered with the model's chat template."""
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    """Rejected: a template is a program that could run forever."""
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts in `input`, each as a text or as a list of token ids."""
        if self.input is None:
            return []
        if isinstance(self.input, str):
            return [self.input]
        if self.input and isinstance(self.input[0], int):
            return [{"prompt_token_ids": self.input}]
        return [each if isinstance(each, str) else {"prompt_token_ids": each} for each in self.input]


class ClassifyRequest(EmbeddingRequest):
    """The body of /classify: texts, as in /v1/embeddings."""


class PoolRequest(EmbeddingRequest):
    """The body of /pooling."""

    task: str | None = None
    """embed, classify, token_embed or token_classify. None means the model's task."""


class ScoreRequest(PooledRequest):
    """The body of /score: two texts, a text and a list, or two lists of equal length."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    """Name of `text_1` in newer releases of vLLM."""
    documents: str | Texts | None = None
    """Same as `text_2`."""

    @property
    def texts(self) -> tuple[str | list[str], str | list[str]]:
        """Queries and documents. A missing field yields an empty list, which is rejected later with the field's name."""
        return self.queries or self.text_1 or [], self.documents or self.text_2 or []


class RerankRequest(PooledRequest):
    """The body of /rerank."""

    query: str
    documents: Texts
    top_n: int = Field(default=0, ge=0)
    """Number of documents to return, best first. 0 means all documents."""
    return_documents: bool = True
    """True to return each document's text with its result, as vLLM does."""
