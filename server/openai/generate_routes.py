"""Paths of other servers than OpenAI's: SGLang's /generate and what it tells of its model, vLLM's /generate, and /invocations."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headway.core.sampling.params import SamplingParams
from headway.core.system.json_text import parse_model
from headway.server.errors import ApiError
from headway.server.openai.generate_answers import DemoAnswer, NativeAnswer, TokensAnswer
from headway.server.openai.generate_requests import DemoRequest, NativeRequest, TokensRequest
from headway.server.openai.params import completion_params, prompts_of
from headway.server.openai.reply import Reply
from headway.server.openai.requests import CompletionRequest
from headway.server.request_ids import check_id, request_name
from headway.server.routing import Endpoint, add_posts, endpoint, fields_of, read_text
from headway.server.service import Service
from headway.version import __version__

POOLING: Final = (*("/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling"),)
"""Paths that a server of a model which embeds or scores has."""
TOKENS: Final = "/inference/v1/generate"
BEYOND_TEXT: Final = ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech", "/v1/images/generations")
_PROBE: Final = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class GenerateRoutes:
    """The routes of SGLang's server and of vLLM's small one, over the same engine; and SageMaker's one path for all bodies."""

    def __init__(self, service: Service, posts: dict[str, Endpoint]) -> None:
        """posts: the paths of OpenAI's API, which /invocations passes requests on to."""
        self._service = service
        self._llm = service.llm
        self._posts = posts

    @property
    def direct(self) -> dict[str, Endpoint]:
        """The paths whose first token a client waits for; see `DirectMiddleware`."""
        return {"/generate": self.generate, TOKENS: self.tokens, "/invocations": self.invocations}

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        schemas = [each.model_json_schema() for each in (NativeRequest, DemoRequest)]
        body = {"content": {"application/json": {"schema": {"anyOf": schemas}}}, "required": True}
        app.add_api_route("/generate", endpoint(self.generate), methods=["POST"], openapi_extra={"requestBody": body})
        add_posts(app, (TOKENS, self.tokens, TokensRequest))
        app.add_api_route("/invocations", endpoint(self.invocations), methods=["POST"])
        for path, told in (
            ("/get_model_info", self.model_info),
            ("/model_info", self.model_info),
            ("/get_server_info", self.server_info),
            ("/server_info", self.server_info),
            ("/health_generate", self.health_generate),
        ):
            app.add_api_route(path, endpoint(told), methods=["GET"])
        app.add_api_route("/flush_cache", endpoint(self.flush_cache), methods=["GET", "POST"])
        for path in POOLING:
            app.add_api_route(path, endpoint(self.pools_not), methods=["POST"])
        for path in BEYOND_TEXT:
            app.add_api_route(path, endpoint(self.reads_text_alone), methods=["POST"])

    async def generate(self, request: Request) -> Response:
        """Continue prompts: SGLang's body with `text` or `input_ids`, or vLLM's with `prompt`."""
        self._service.check_room()
        text, name = await read_text(request, self._service.options), self._service.names[0]
        if "prompt" in fields_of(text):
            demo = parse_model(text, DemoRequest)
            body = demo.as_completion()
            return Reply(self._service, DemoAnswer(body, name), partial(self._prepare, body))
        asked = parse_model(text, NativeRequest)
        for each in [asked.rid] if isinstance(asked.rid, str) else asked.rid or ():
            check_id("rid", each, "rid")
        body = asked.as_completion()
        return Reply(self._service, NativeAnswer(asked, body, name), partial(self._prepare, body), asked.unknown())

    async def tokens(self, request: Request) -> Response:
        """Continue token ids by token ids."""
        self._service.check_room()
        asked = await self._service.read(request, TokensRequest)
        body = asked.as_completion()
        answer = TokensAnswer(asked, body, self._service.names[0], request_name(request, asked.request_id))
        return Reply(self._service, answer, partial(self._prepare, body), asked.unknown())

    async def _prepare(self, body: CompletionRequest) -> Any:
        params = completion_params(body, self._service.params_maker)
        return await self._llm.check(prompts_of(body), params, priority=body.priority)

    async def invocations(self, request: Request) -> Response:
        """Answer whatever path the body is for: a chat where it has messages, else a completion."""
        text = await read_text(request, self._service.options)
        body, unread = fields_of(text), [{"type": "http.request", "body": text, "more_body": False}]
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions" if "prompt" in body else None
        if path is None:
            raise ApiError(400, "this path: needs messages or a prompt, got neither", code="unknown_body")

        async def receive() -> Any:
            return unread.pop() if unread else await request.receive()

        return await self._posts[path](Request(request.scope, receive))

    async def model_info(self) -> Response:
        """Tell of the model what SGLang's frontend asks for."""
        name = self._llm.model.name
        return _json(
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

    async def server_info(self) -> Response:
        """Tell of the engine what SGLang's benchmark asks for."""
        facts = self._llm.facts
        tokens = facts.block_size * facts.num_blocks
        told = {"version": __version__, "model_path": self._llm.model.name, "max_total_num_tokens": tokens}
        limits = {"max_running_requests": facts.max_num_seqs, "context_length": facts.limits.max_model_len}
        return _json({**told, **limits, "attention_backend": facts.selection, "internal_states": [{}]})

    async def health_generate(self) -> Response:
        """Answer 200 when the engine has written a token."""
        await self._llm.check_health(self._service.options.step_timeout)
        self._service.check_room()
        async for _ in self._llm.generate([0], _PROBE):
            pass
        return Response()

    async def pools_not(self) -> Response:
        """Refuse: the model generates text."""
        got = f"{self._llm.model.name}, which generates text (headway serve --runner pooling makes vectors of a decoder's states)"
        raise ApiError(404, f"this path: needs a model that embeds or scores, got {got}", code="wrong_model")

    async def reads_text_alone(self) -> Response:
        """Refuse: there are models of text alone."""
        raise ApiError(404, f"this path: needs another kind of model, got {self._llm.model.name}, which reads texts alone")

    async def flush_cache(self) -> Response:
        """Forget the prompts that the cache holds."""
        self._service.check_operator()
        await self._llm.reset_prefix_cache()
        return PlainTextResponse("Cache flushed.\n")


def _json(data: object) -> Response:
    return Response(orjson.dumps(data), media_type="application/json")
