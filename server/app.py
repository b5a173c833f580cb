"""The server's application and routes. FastAPI, with raw ASGI for streaming tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from headway.async_llm import AsyncLLM
from headway.core.engine.data.request_limits import CheckedRequest
from headway.core.sampling.params import SamplingParams
from headway.requests.tool_use import ToolUse
from headway.server.anthropic import MessagesRoutes
from headway.server.errors import ApiError
from headway.server.middleware import PROBES, RecordMiddleware, guard, request_name
from headway.server.openai.answers import CompletionAnswer
from headway.server.openai.batches.routes import BatchRoutes
from headway.server.openai.batches.worker import LineAnswers
from headway.server.openai.beams import reply_of
from headway.server.openai.chat import BatchChatAnswer, Chats
from headway.server.openai.generate import GenerateRoutes
from headway.server.openai.params import completion_params, prompts_of
from headway.server.openai.reply import Reply
from headway.server.openai.requests import BatchChatRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from headway.server.openai.responses import ResponsesRoutes
from headway.server.operators.metrics import CONTENT_TYPE
from headway.server.operators.routes import AdapterRoutes, OperatorRoutes, ProfileRoutes, models_of
from headway.server.options import ServerOptions
from headway.server.page.routes import ASSETS, PageRoutes
from headway.server.routing import CommonRoutes, DirectMiddleware, answers, json_response
from headway.server.service import Service
from headway.version import __version__

OPEN_PATHS: Final = frozenset(("/health", "/ping", "/metrics", *ASSETS))
"""Paths that need no API key: probes and scrapers do not send a key, and the web UI's files are public. The data that the web UI
shows need the key."""


def create_app(llm: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """Return an ASGI application for a model. The application does not shut down the engine. `app.state.service` is its
    Service."""
    service = Service(llm, options or ServerOptions())
    app = FastAPI(title="Headway", version=__version__)
    app.state.service = service
    chats = Chats(service)
    routes = Routes(service, chats)
    messages, responses = MessagesRoutes(service, chats), ResponsesRoutes(service, chats)
    native = GenerateRoutes(service, routes.posts())
    direct = {path: answer for each in (routes, messages, responses) for path, answer in each.posts(direct=True).items()}
    lines = LineAnswers(direct, routes.refuse, lambda: llm.has_lost_engine)
    batches = BatchRoutes(service.options, lines, batch_concurrency(service.options, llm.facts.max_num_seqs))
    app.state.batches = batches
    app.state.line_answers = lines
    operated = OperatorRoutes(service), AdapterRoutes(service), PageRoutes(service), ProfileRoutes(service)
    app.state.routes = routes, native, messages, responses, batches, *operated
    for each in app.state.routes:
        each.add_to(app)
    app.add_middleware(DirectMiddleware, endpoints={**direct, **native.posts(direct=True)}, refuse=routes.refuse)
    app.add_middleware(RecordMiddleware, record=llm.record)
    app.state.refused = routes.refused
    guard(app, service.options, OPEN_PATHS, app.state.refused)
    return app


def batch_concurrency(options: ServerOptions, most: int) -> int:
    """Return the number of concurrent lines of a batch, leaving room for other requests. most: maximum number of sequences per
    step."""
    return options.batch_concurrency or max(min(most, options.max_queue) // 2, 1)


class Routes(CommonRoutes):
    """Routes of a generation model's API."""

    def __init__(self, service: Service, chats: Chats) -> None:
        self._service = service
        self._llm = service.llm
        self._chats = chats
        super().__init__(service.metrics.refused)

    @answers("POST", "/v1/chat/completions", body=[ChatRequest], direct=True)
    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        self._service.check_room()  # before reading the body
        body = await self._service.read(request, ChatRequest)
        answer = self._chats.answer(body, request_name(request, body.request_id))
        return reply_of(body)(self._service, answer, partial(self._chats.prepare, body, answer), body.unknown())

    @answers("POST", "/v1/chat/completions/batch", body=[BatchChatRequest])
    async def chat_batch(self, request: Request) -> Response:
        """Answer several conversations at once, as vLLM does, with one choice per conversation."""
        self._service.check_room()
        body = await self._service.read(request, BatchChatRequest)
        name, model = request_name(request, body.request_id), body.model or self._service.names[0]
        answer = BatchChatAnswer(body, model, self._service.token_bytes, name)
        return Reply(self._service, answer, partial(self._chats.prepare_all, body, answer), body.unknown())

    @answers("POST", "/v1/completions", body=[CompletionRequest], direct=True)
    async def completions(self, request: Request) -> Response:
        """Continue prompts."""
        self._service.check_room()  # before reading the body
        body = await self._service.read(request, CompletionRequest)
        name = request_name(request, body.request_id)
        answer = CompletionAnswer(body, body.model or self._service.names[0], self._decode, name)
        return reply_of(body)(self._service, answer, partial(self._prepare_completions, body), body.unknown())

    @answers("POST", "/tokenize", body=[TokenizeRequest])
    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text, or of a conversation in the model's chat template."""
        body = await self._service.read(request, TokenizeRequest)
        tokenizer = self._tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: needs either a prompt or messages", "prompt")
        if body.messages is not None:
            prompt: Any = await self._chats.prompt(body, ToolUse.of(body.tools))
            tokens = prompt["prompt_token_ids"]
        elif body.split_special_tokens:
            prompt = await self._llm.text_prompt(body.prompt or "", add_special_tokens=body.add_special_tokens)
            tokens = prompt["prompt_token_ids"]
        else:
            encode = partial(tokenizer, body.prompt, add_special_tokens=body.add_special_tokens)
            tokens = list((await self._llm.in_thread(encode))["input_ids"])
        texts = {"token_strs": tokenizer.convert_ids_to_tokens(tokens)} if body.return_token_strs else {}
        return json_response(
            {"count": len(tokens), "max_model_len": self._llm.facts.limits.max_model_len, "tokens": tokens, **texts}
        )

    @answers("POST", "/detokenize", body=[DetokenizeRequest])
    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        body = await self._service.read(request, DetokenizeRequest)
        if body.tokens:
            self._llm.facts.limits.check_ids(body.tokens, "tokens")
        decode = partial(self._tokenizer().decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": await self._llm.in_thread(decode)})

    @answers("GET", "/v1/models")
    async def models(self) -> Response:
        """List the names of the model and its adapters."""
        service = self._service
        adapters = models_of([*service.adapters.values()], service.names[0], self._model)
        return json_response({"object": "list", "data": [*map(self._model, service.names), *adapters]})

    @answers("GET", "/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        """Describe the model, by one of its names, or an adapter."""
        adapter = self._service.adapter_of(name)
        found = [self._model(name)] if adapter is None else models_of([adapter], self._service.names[0], self._model)
        return json_response(found[0])

    @answers("GET", PROBES)
    @answers("HEAD", PROBES)
    async def health(self) -> Response:
        """Return 200 while the engine works, and 503 with the reason if it has ended or is stuck."""
        await self._llm.check_health(self._service.options.step_timeout)
        return Response()

    @answers("GET", "/metrics")
    async def metrics(self) -> Response:
        """Return metrics for Prometheus."""
        snapshot = await self._llm.stats()
        return Response(self._service.metrics.page(snapshot, self._service.num_unsubmitted), media_type=CONTENT_TYPE)

    async def _prepare_completions(self, body: CompletionRequest) -> Sequence[CheckedRequest]:
        params = completion_params(body, self._service.params_maker)
        prompts = prompts_of(body)
        if body.suffix:
            return await self._prepare_infills(body, params, prompts, body.suffix)
        if body.split_special_tokens:
            prompts = [await self._llm.text_prompt(each) if isinstance(each, str) else each for each in prompts]
        return await self._check(body, prompts, params)

    async def _prepare_infills(
        self, body: CompletionRequest, params: SamplingParams, prompts: Sequence[Any], suffix: str
    ) -> Sequence[CheckedRequest]:
        """Prepare fill-in-the-middle completions of prompts with a suffix. :raises ApiError: if a prompt consists of token
        ids."""
        if not all(isinstance(each, str) for each in prompts):
            raise ApiError(400, "prompt: needs texts beside suffix, got token ids", "prompt")
        split = bool(body.split_special_tokens)
        made = [await self._llm.infill_prompt(each, suffix, split_special_tokens=split) for each in prompts]
        if not body.ignore_eos:
            ends = self._llm.host.validator.infill.stop_token_ids
            params = replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ends])
        return await self._check(body, made, params)

    async def _check(self, body: CompletionRequest, prompts: Sequence[Any], params: SamplingParams) -> list[CheckedRequest]:
        adapter = self._service.adapter_of(body.model)
        return await self._llm.check(prompts, params, priority=body.priority, lora_request=adapter)

    def _model(self, name: str) -> dict[str, Any]:
        chats = self._service.chat_format
        parsers = {"tool_call_parser": chats.calls.name, "reasoning_parser": chats.reasoning and chats.reasoning.name}
        return self.entry(name, self._llm.model.name, self._llm.facts.limits.max_model_len) | (parsers if chats.template else {})

    def _tokenizer(self) -> Any:
        tokenizer = self._llm.get_tokenizer()
        if tokenizer is None:
            raise ApiError(400, f"{self._llm.model.name} was loaded without a tokenizer")
        return tokenizer

    def _decode(self, token_ids: list[int]) -> str:
        tokenizer = self._llm.get_tokenizer()
        return "" if tokenizer is None else str(tokenizer.decode(token_ids, skip_special_tokens=False))
