"""Routes of other servers: SGLang's /generate, vLLM's /generate and /inference/v1/generate, and SageMaker's /invocations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headway.core.contract.errors import ConfigError
from headway.core.sampling.logprobs import Logprob
from headway.core.sampling.params import SamplingParams
from headway.core.system.json_text import parse_model
from headway.core.system.text import shown
from headway.outputs import CompletionOutput, LogprobsByToken, RequestOutput
from headway.server.errors import ApiError, Fields
from headway.server.middleware import check_id, request_name
from headway.server.openai.answers import Answer, completion_logprobs, event, prompt_logprobs
from headway.server.openai.params import completion_params, prompts_of
from headway.server.openai.reply import Reply
from headway.server.openai.requests import CompletionRequest, TokenIds
from headway.server.routing import Endpoint, RouteGroup, answers, fields_of, json_response, read_text, replayed
from headway.server.service import Service
from headway.version import __version__

_NAMES: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's name of a sampling parameter -> OpenAI's or vLLM's name."""
_SAME: Final = (
    *("n", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "frequency_penalty", "logit_bias"),
    *("presence_penalty", "repetition_penalty", "skip_special_tokens"),
)
_FORMS: Final = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""SGLang's name of a structured output -> the field of structured_outputs."""
_NOT_READ: Final = ("spaces_between_special_tokens", "no_stop_trim", "stream_interval", "custom_params")
"""Parameters that are ignored, except that no_stop_trim becomes include_stop_str_in_output."""


class NativeRequest(Fields):
    """SGLang's body: a text, token ids, or a list of either."""

    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    rid: str | list[str] | None = None
    """Request id, repeated in the answer."""
    return_logprob: bool = False
    logprob_start_len: int = -1
    """Index of the first prompt token whose log-probability is returned. -1 means no prompt tokens."""
    top_logprobs_num: int = Field(default=0, ge=0)
    return_text_in_logprobs: bool = False

    @property
    def is_list(self) -> bool:
        """True if the answer is a list."""
        listed = isinstance(self.text, list) or (bool(self.input_ids) and isinstance(self.input_ids[0], list))  # type: ignore[index]
        return listed or (self.sampling_params.get("n") or 1) > 1

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of the prompt are returned."""
        return self.return_logprob and self.logprob_start_len >= 0

    def as_completion(self) -> CompletionRequest:
        """Return the equivalent /v1/completions body. :raises ConfigError: if the prompt or a parameter is unsupported."""
        if (self.text is None) == (self.input_ids is None):
            raise ConfigError("text", "a text or input_ids, and not both", "both" if self.text is not None else "neither")
        given, forms = dict(self.sampling_params), {}
        for name, own in _FORMS.items():
            if (value := given.pop(name, None)) is not None:
                forms[own] = value
        fields: dict[str, Any] = {name: given.pop(name) for name in _SAME if name in given}
        fields |= {own: given.pop(name) for name, own in _NAMES.items() if name in given}
        for name in _NOT_READ:
            if given.pop(name, None) and name == "no_stop_trim":
                fields["include_stop_str_in_output"] = True
        wrong = next((name for name, value in given.items() if value is not None), None)
        if wrong is not None:
            raise ConfigError("sampling_params", f"{', '.join((*_SAME, *_NAMES, *_FORMS))}", shown(wrong))
        if fields.get("max_tokens", 1) == 0:  # used by SGLang's `select`: only the prompt's log-probabilities
            fields["max_tokens"] = 1
        fields.setdefault("max_tokens", 128)
        logprobs = self.top_logprobs_num if self.return_logprob else None
        fields |= {"prompt": self.input_ids if self.text is None else self.text, "stream": self.stream, "logprobs": logprobs}
        fields |= {"prompt_logprobs": logprobs if self.scores_prompt else None, "structured_outputs": forms or None}
        return CompletionRequest(**fields)


class TokensRequest(Fields):
    """vLLM's body of token ids, answered with token ids: {token_ids, sampling_params}."""

    request_id: str | None = None
    token_ids: TokenIds
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    stream: bool = False
    priority: int = 0

    def as_completion(self) -> CompletionRequest:
        """Return the equivalent /v1/completions body. :raises ConfigError: if the request asks for a stream or a parameter is
        unknown."""
        if self.stream:
            raise ConfigError("stream", "false, because the tokens come at once on this path", "true", "/v1/completions streams")
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        for name in ("output_kind", "detokenize", "spaces_between_special_tokens"):  # no effect on token ids
            given.pop(name, None)
        wrong = next((name for name in given if name not in CompletionRequest.model_fields), None)
        if wrong is not None:
            raise ConfigError("sampling_params", "fields of SamplingParams", shown(wrong))
        given |= {"prompt": self.token_ids, "return_token_ids": True, "priority": self.priority}
        return CompletionRequest(**given)


class DemoRequest(Fields):
    """The body of vLLM's api_server: a text and the fields of SamplingParams."""

    prompt: str = Field(max_length=10_000_000)
    stream: bool = False

    def as_completion(self) -> CompletionRequest:
        """Return the equivalent /v1/completions body. :raises ConfigError: if a field is not a sampling parameter."""
        given = dict(self.model_extra or {})
        if given.pop("use_beam_search", False):
            raise ConfigError("use_beam_search", "false, because tokens are drawn or chosen one by one", "true")
        wrong = next((name for name in given if name not in CompletionRequest.model_fields), None)
        if wrong is not None:
            hint = "this path takes vLLM's {prompt, stream, n, max_tokens, ...}, or SGLang's {text or input_ids, sampling_params}"
            raise ConfigError(shown(wrong), "a field of SamplingParams", "another", hint)
        given.setdefault("max_tokens", SamplingParams().max_tokens)
        return CompletionRequest(**{**given, "prompt": self.prompt, "stream": self.stream})


_Scored = list[Any]  # A token's log-probability, its id, and its text or None


class NativeAnswer(Answer):
    """Writer of answers in SGLang's format. Each event of a stream contains the whole text so far."""

    prefix = "gen-"

    def __init__(self, native: NativeRequest, body: CompletionRequest, model: str) -> None:
        super().__init__(body, model)
        self._native = native
        self._began = time.perf_counter()
        self.reports_usage = True  # an event repeats the text before it

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        assert used is not None, "reports_usage"
        place = index % (self.body.n or 1)
        response = self._fields(used[0], used[0].outputs[place], self._id_of(index // (self.body.n or 1)))
        return event({"index": index, **response} if self._native.is_list else response)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        response = [
            self._fields(output, each, self._id_of(number)) for number, output in enumerate(outputs) for each in output.outputs
        ]
        return orjson.dumps(response if self._native.is_list else response[0])

    def _id_of(self, number: int) -> str:
        """Return the id of a prompt's answer: the caller's id, or else a new id."""
        given = self._native.rid
        if isinstance(given, str):
            return given
        return given[number] if given and number < len(given) else f"{self.id}-{number}"

    def _fields(self, output: RequestOutput, new: CompletionOutput, request_id: str) -> dict[str, Any]:
        native, usage = self._native, (len(output.prompt_token_ids), len(new.token_ids), output.num_cached_tokens)
        meta: dict[str, Any] = {
            "id": request_id,
            "finish_reason": _reason(new),
            **dict(zip(("prompt_tokens", "completion_tokens", "cached_tokens"), usage, strict=True)),
            "weight_version": "default",
            "e2e_latency": time.perf_counter() - self._began,
        }
        if native.return_logprob:
            pairs = zip(new.logprobs or (), new.token_ids, strict=False)
            meta["output_token_logprobs"] = [self._scored(place[token], token) for place, token in pairs]
            meta["input_token_logprobs"] = self._of_prompt(output)
            if native.top_logprobs_num:
                meta["output_top_logprobs"] = [self._top(place) for place in new.logprobs or ()]
                meta["input_top_logprobs"] = [self._top(place) for place in (output.prompt_logprobs or ())[self._first :]]
        return {"text": new.text, "output_ids": new.token_ids, "meta_info": meta}

    @property
    def _first(self) -> int:
        return max(self._native.logprob_start_len, 0)

    def _of_prompt(self, output: RequestOutput) -> list[_Scored]:
        if not self._native.scores_prompt:
            return []
        pairs = list(zip(output.prompt_logprobs or (), output.prompt_token_ids, strict=False))
        return [self._scored(None if place is None else place[token], token) for place, token in pairs[self._first :]]

    def _top(self, place: LogprobsByToken | None) -> list[_Scored] | None:
        if place is None:
            return None
        likely = sorted(place.items(), key=lambda each: -each[1].logprob)[: self._native.top_logprobs_num]
        return [self._scored(each, token) for token, each in likely]

    def _scored(self, found: Logprob | None, token: int) -> _Scored:
        if found is None:
            return [None, token, None]
        return [found.logprob, token, found.decoded_token if self._native.return_text_in_logprobs else None]


def _reason(new: CompletionOutput) -> dict[str, Any] | None:
    if new.finish_reason is None:
        return None
    if new.finish_reason == "length":
        return {"type": "length", "length": len(new.token_ids)}
    matched = new.stop_reason if new.stop_reason is not None else (new.token_ids[-1] if new.token_ids else None)
    return {"type": new.finish_reason, "matched": matched}


class TokensAnswer(Answer):
    """Writer of answers that are token ids, as in vLLM's /inference/v1/generate."""

    prefix = "generate-tokens-"

    def __init__(self, native: TokensRequest, body: CompletionRequest, model: str, name: str = "") -> None:
        super().__init__(body, model, native.request_id or name)
        self.id = native.request_id or self.id
        self._most = body.logprobs

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        choices = [
            {
                "index": each.index,
                "token_ids": each.token_ids,
                "finish_reason": each.finish_reason,
                "logprobs": None
                if self._most is None
                else completion_logprobs(each.logprobs or [], each.token_ids, 0, self._most, True, "token_id:{}".format)[0],
            }
            for each in outputs[0].outputs
        ]
        response = {"request_id": self.id, "choices": choices, **prompt_logprobs(self.body, outputs[0])}
        return orjson.dumps(response)


class DemoAnswer(Answer):
    """Writer of answers in the format of vLLM's api_server: prompt and completion as one text. A stream has one line per step."""

    prefix = "gen-"

    def __init__(self, body: CompletionRequest, model: str) -> None:
        super().__init__(body, model)
        self.reports_usage = True

    def piece(self, index: int, new: CompletionOutput, used: tuple[RequestOutput, int] | None) -> bytes:
        assert used is not None, "reports_usage"
        return orjson.dumps({"text": _texts(used[0])}) + b"\n"

    def end(self, used: Sequence[tuple[RequestOutput, int]]) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return orjson.dumps(error.body) + b"\n"

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        return orjson.dumps({"text": _texts(outputs[0])})


def _texts(output: RequestOutput) -> list[str]:
    return [f"{output.prompt or ''}{each.text}" for each in output.outputs]


POOLING: Final = (*("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling"),)
"""Routes of a server for pooling models."""
TOKENS: Final = "/inference/v1/generate"
BEYOND_TEXT: Final = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/images/generations")
_PROBE: Final = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class GenerateRoutes(RouteGroup):
    """Routes with the paths of SGLang's server and vLLM's api_server, and SageMaker's single path for all request bodies."""

    def __init__(self, service: Service, posts: dict[str, Endpoint]) -> None:
        self._service = service
        self._llm = service.llm
        self._posts = posts

    @answers("POST", "/generate", body=[NativeRequest, DemoRequest], direct=True)
    async def generate(self, request: Request) -> Response:
        """Continue the prompts of a body in SGLang's format (`text` or `input_ids`) or in vLLM's format (`prompt`)."""
        self._service.check_room()
        text, name = await read_text(request, self._service.options), self._service.names[0]
        if "prompt" in fields_of(text):
            demo = parse_model(text, DemoRequest)
            body = demo.as_completion()
            return Reply(self._service, DemoAnswer(body, name), partial(self._prepare, body))
        native = parse_model(text, NativeRequest)
        for each in [native.rid] if isinstance(native.rid, str) else native.rid or ():
            check_id("rid", each, "rid")
        body = native.as_completion()
        return Reply(self._service, NativeAnswer(native, body, name), partial(self._prepare, body), native.unknown())

    @answers("POST", TOKENS, body=[TokensRequest], direct=True)
    async def tokens(self, request: Request) -> Response:
        """Continue token ids, returning token ids."""
        self._service.check_room()
        native = await self._service.read(request, TokensRequest)
        body = native.as_completion()
        answer = TokensAnswer(native, body, self._service.names[0], request_name(request, native.request_id))
        return Reply(self._service, answer, partial(self._prepare, body), native.unknown())

    async def _prepare(self, body: CompletionRequest) -> Any:
        params = completion_params(body, self._service.params_maker)
        return await self._llm.check(prompts_of(body), params, priority=body.priority)

    @answers("POST", "/invocations", direct=True)
    async def invocations(self, request: Request) -> Response:
        """Handle a body as a chat if it has messages, else as a completion."""
        text = await read_text(request, self._service.options)
        body = fields_of(text)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions" if "prompt" in body else None
        if path is None:
            raise ApiError(400, "this path: needs messages or a prompt, got neither", code="unknown_body")

        return await self._posts[path](replayed(request, text))

    @answers("GET", ("/get_model_info", "/model_info"))
    async def model_info(self) -> Response:
        """Return the model information that SGLang's frontend reads."""
        name = self._llm.model.name
        return json_response(
            {
                "model_path": name,
                "tokenizer_path": name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "served_model_name": self._service.names[0],
                "max_context_length": self._llm.facts.limits.max_model_len,
            }
        )

    @answers("GET", ("/get_server_info", "/server_info"))
    async def server_info(self) -> Response:
        """Return the engine information that SGLang's benchmark reads."""
        facts = self._llm.facts
        tokens = facts.block_size * facts.num_blocks
        response = {"version": __version__, "model_path": self._llm.model.name, "max_total_num_tokens": tokens}
        limits = {"max_running_requests": facts.max_num_seqs, "context_length": facts.limits.max_model_len}
        return json_response({**response, **limits, "attention_backend": facts.selection, "internal_states": [{}]})

    @answers("GET", "/health_generate")
    async def health_generate(self) -> Response:
        """Return 200 after the engine has generated a token."""
        await self._llm.check_health(self._service.options.step_timeout)
        self._service.check_room()
        async for _ in self._llm.generate([0], _PROBE):
            pass
        return Response()

    @answers("POST", POOLING)
    async def pools_not(self) -> Response:
        """Reject the request: the model generates text."""
        got = f"{self._llm.model.name}, which generates text (headway serve --runner pooling makes vectors of a decoder's states)"
        raise ApiError(404, f"this path: needs a model that embeds or scores, got {got}", code="wrong_model")

    @answers("POST", BEYOND_TEXT)
    async def reads_text_only(self) -> Response:
        """Reject the request: only text models are supported."""
        raise ApiError(404, f"this path: needs another kind of model, got {self._llm.model.name}, which reads texts alone")

    @answers("GET", "/flush_cache")
    @answers("POST", "/flush_cache")
    async def flush_cache(self) -> Response:
        """Forget all cached prompts."""
        self._service.check_operator()
        await self._llm.reset_prefix_cache()
        return PlainTextResponse("Cache flushed.\n")
