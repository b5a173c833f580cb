"""The bodies of requests: OpenAI's fields, those that vLLM adds, and those of pooling models. See `Fields` for others."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.core.contract.errors import ConfigError
from headway.core.system.text import shown
from headway.requests.prompts import Prompt
from headway.server.errors import Fields

MOST_COMPLETIONS = 128
"""Most completions of one prompt, as in OpenAI's API: a large n is quickly written and slowly computed."""
MOST_PROMPTS = 2048
MOST_STOPS = 64

Count = Annotated[int, Field(ge=1, le=MOST_COMPLETIONS)]
Stops = Annotated[list[str], Field(max_length=MOST_STOPS)]
TokenIds = list[Annotated[int, Field(strict=True)]]
"""Whole numbers; true and "5" are none."""


class StreamOptions(BaseModel):
    """Parts of a stream beside its text."""

    include_usage: bool = False
    """Send a last chunk with the usage and without choices."""
    continuous_usage_stats: bool = False
    """Send the usage so far in every chunk, as in vLLM."""


class JsonSchema(BaseModel):
    """A named schema."""

    model_config = ConfigDict(populate_by_name=True, strict=True)

    name: str = "schema"
    strict: bool | None = None
    """False: properties that the schema does not name may come, too."""
    schema_: dict[str, Any] | bool = Field(alias="schema", default=True)


class ResponseFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    """The schema of "json_schema"; a "structural_tag" has `format`, or `structures` and `triggers`, in its place."""


class SamplingRequest(Fields):
    """The fields that chats and completions share. None: the field was not given."""

    model: str | None = None
    """One of the server's names for its model; None: that model."""
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
    # vLLM's
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
    prompt_logprobs: int | None = None
    vllm_xargs: dict[str, Any] | None = None
    """`extra_args` of SamplingParams."""
    structured_outputs: dict[str, Any] | None = None
    """Fields of StructuredOutputsParams."""
    guided_json: str | dict[str, Any] | None = None
    """This and the next three: forms of the answer, by the names that they had in vLLM before 0.10."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    """This and the next: forms of the answer, by SGLang's names."""
    ebnf: str | None = None
    use_beam_search: bool | None = None
    """Search for the likeliest continuations, n of which are kept at each token and returned, in place of drawing tokens."""
    length_penalty: float | None = None
    """The power of its length over which the log-probability of a search's continuation is taken when they are ranked."""
    priority: int = 0
    request_id: str | None = None
    """What the answer's id is made of, where the header X-Request-Id gives none."""
    split_special_tokens: bool | None = None
    """True to read control token names in prompts and contents as text. None: in chats the server's option, in prompts no."""
    return_token_ids: bool = False
    """Add `token_ids` to every choice, and the prompt's to the first."""
    return_tokens_as_token_ids: bool = False
    """Write the tokens of log-probabilities as "token_id:123"."""

    @property
    def older_form(self) -> dict[str, Any]:
        """The form in fields of the names that vLLM once had, or that SGLang has, by vLLM's name today; empty: none."""
        found = {
            "json": self.guided_json,
            "regex": self.guided_regex or self.regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar or self.ebnf,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a completion at most; None: the request does not say."""
        return self.max_tokens


class ChatRequest(SamplingRequest):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: list[dict[str, Any]] | None = None
    """Shown to the model by its chat template, or described in the first message where the template has none."""
    tool_choice: str | dict[str, Any] | None = None
    """None: "auto" where there are tools."""
    parallel_tool_calls: bool | None = None
    """False: at most one call."""
    modalities: list[Literal["text"]] | None = None
    """Not read: answers are text."""
    reasoning_effort: str | None = None
    """A variable of the chat template; "none" also sets enable_thinking to false."""
    functions: list[Any] | None = None
    """Refused: `tools` have taken their place."""
    function_call: Any = None
    """Refused, as `functions`."""
    # vLLM's
    include_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """Refused: a template is a program."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    """A variable of the chat template: texts that the answer may rest on."""
    echo: bool = False
    """Begin the answer with the last message, where it is the assistant's or is continued."""

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class BatchChatRequest(ChatRequest):
    """The body of /v1/chat/completions/batch: the fields of a chat, and several conversations as its messages."""

    messages: Annotated[list[list[dict[str, Any]]], Field(min_length=1, max_length=MOST_PROMPTS)]  # type: ignore[assignment]

    @cached_property
    def chats(self) -> list[ChatRequest]:
        """The chat of each conversation. :raises ConfigError: a field that this path does not have; vLLM refuses the same."""
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
    """None: prompt_embeds has the prompts."""
    prompt_embeds: str | Annotated[list[str], Field(max_length=MOST_PROMPTS)] | None = None
    """Prompts as rows of embeddings, base64 of what torch.save writes; they come before those of `prompt`."""
    echo: bool | None = False
    """Begin each text with its prompt."""
    logprobs: int | None = Field(default=None, ge=0)
    suffix: str | None = None


class TokenizeRequest(Fields):
    """The body of /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    split_special_tokens: bool | None = None
    """As in a SamplingRequest."""
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
