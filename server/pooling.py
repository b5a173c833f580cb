"""Server of a pooling model: application, routes and metrics. /v1/embeddings follows OpenAI's API, /rerank and /score vLLM's."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final
from uuid import uuid4

import numpy
from fastapi import FastAPI
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from headway.core.contract.errors import BackendError
from headway.core.pooling.engine import PoolingStats
from headway.outputs import ClassificationRequestOutput, EmbeddingRequestOutput
from headway.pooling.assembly import AsyncPooling
from headway.requests.chat_template import chat_prompt
from headway.server.errors import ApiError
from headway.server.middleware import PROBES, Admission, guard, request_name
from headway.server.openai.batches.routes import BatchRoutes
from headway.server.openai.batches.worker import LineAnswers
from headway.server.openai.params import template_kwargs
from headway.server.openai.requests import (
    ClassifyRequest,
    EmbeddingRequest,
    PooledRequest,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from headway.server.operators.metrics import CONTENT_TYPE, REQUEST_SECONDS, Histogram, Labels, exposition
from headway.server.options import ServerOptions
from headway.server.routing import CommonRoutes, answers, fields_of, json_response, read_body, read_text, replayed
from headway.version import __version__


class PoolingMetrics:
    """Counts and times of the server's requests. For use only in the server's event loop."""

    def __init__(self, model_name: str) -> None:
        """model_name: label of every metric."""
        self._labels = Labels(model_name)
        self._seconds = Histogram(REQUEST_SECONDS)
        self._tokens = self._requests = 0
        self.refused: Counter[str] = Counter()
        """Status -> number of error responses."""

    def answered(self, seconds: float, tokens: int) -> None:
        """Add an answered request."""
        self._seconds.observe(seconds)
        self._tokens += tokens
        self._requests += 1

    def page(self, stats: PoolingStats, queued: int) -> Response:
        """Return all metrics. queued: number of requests without an answer."""
        return Response(exposition(self._families(stats, queued)), media_type=CONTENT_TYPE)

    def _families(self, stats: PoolingStats, queued: int) -> Iterator[Metric]:
        yield self._labels.gauge("vllm:num_requests_waiting", "Requests without an answer.", [((), queued)])
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of answered texts.", self._tokens),
            ("vllm:request_success", "Answered requests.", self._requests),
            ("headway:pooled_texts", "Processed texts.", stats.num_texts),
            ("headway:pooled_batches", "Processed batches.", stats.num_batches),
        ):
            yield self._labels.counter(name, text, [((), value)])
        name, text = "vllm:e2e_request_latency_seconds", "Seconds from arrival to answer."
        yield self._labels.histogram(name, text, self._seconds.buckets, self._seconds.sum)
        steps = ((("prefill", backend), count) for backend, count in sorted(stats.batches_by_backend.items()))
        yield self._labels.counter("headway:steps", "Batches by backend.", steps, "phase", "backend")
        yield self._labels.refused(self.refused)


GENERATING: Final = ("/v1/chat/completions", "/v1/completions")
"""Routes of a server for generation models."""


class PoolingRoutes(CommonRoutes):
    """Routes of a pooling model. Routes that the model does not support return an error."""

    def __init__(self, pooling: AsyncPooling, options: ServerOptions) -> None:
        self._pooling = pooling
        self.service = Admission([*options.served_model_names] or [pooling.model.name], options)
        self._metrics = PoolingMetrics(self.service.names[0])
        super().__init__(self._metrics.refused)

    @answers("POST", "/v1/embeddings", body=[EmbeddingRequest])
    async def embeddings(self, request: Request) -> Response:
        """Return the embeddings of texts."""
        body = await self._body(request, EmbeddingRequest)
        make = self._making(self._pooling.jobs.embed, body, body.dimensions, body.truncate_prompt_tokens)
        outputs, tokens = await self._run(make)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(output.outputs.embedding, body.encoding_format)}
            for index, output in enumerate(outputs)
        ]
        return self._answer("embd", {"object": "list", "data": data}, body, tokens)

    @answers("POST", "/classify", body=[ClassifyRequest])
    async def classify(self, request: Request) -> Response:
        """Classify texts. Return each text's most likely label and all probabilities."""
        body = await self._body(request, ClassifyRequest)
        outputs, tokens = await self._run(self._making(self._pooling.jobs.classify, body, body.truncate_prompt_tokens))
        names, data = self._pooling.model.labels, []
        for index, output in enumerate(outputs):
            probs = output.outputs.probs
            best = max(range(len(probs)), key=probs.__getitem__)
            label = names[best] if best < len(names) else f"LABEL_{best}"
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return self._answer("classify", {"object": "list", "data": data}, body, tokens)

    @answers("POST", "/pooling", body=[PoolRequest])
    async def pool(self, request: Request) -> Response:
        """Return embeddings or label probabilities, for each text or for each token, according to `task` or else the model's
        task."""
        body = await self._body(request, PoolRequest)
        jobs = self._pooling.jobs
        task = jobs.pooling_task(body.task)
        if task in ("embed", "token_embed"):
            embed: Any = jobs.embed if task == "embed" else jobs.embed_tokens
            make = self._making(embed, body, body.dimensions, body.truncate_prompt_tokens)
        else:
            make = self._making(jobs.classify if task == "classify" else jobs.reward, body, body.truncate_prompt_tokens)
        outputs, tokens = await self._run(make)
        rows = [_numbers(each) for each in outputs]
        encoded = (_encoded(row, body.encoding_format) for row in rows)
        data = [{"index": index, "object": "pooling", "data": each} for index, each in enumerate(encoded)]
        return self._answer("pool", {"object": "list", "data": data}, body, tokens)

    @answers("POST", "/invocations", body=[PooledRequest])
    async def invocations(self, request: Request) -> Response:
        """Handle the body of any other route, because SageMaker's clients send all bodies to one path."""
        text = await read_text(request, self.service.options)
        body = fields_of(text)
        kinds = (
            ("/v1/embeddings", "input"),
            ("/v1/embeddings", "messages"),
            ("/rerank", "query"),
            ("/score", "text_1"),
            ("/score", "queries"),
        )
        path = next((path for path, field in kinds if field in body), None)
        if path is None:
            raise ApiError(
                400, "this path: needs input, messages, query, or text_1 and text_2, got none of them", code="unknown_body"
            )
        if path == "/v1/embeddings":
            path = {"embed": path, "score": "/classify", "reward": "/pooling"}[self._pooling.model.task]

        return await self.posts()[path](replayed(request, text))

    @answers("POST", ("/score", "/v1/score"), body=[ScoreRequest])
    async def score(self, request: Request) -> Response:
        """Return the scores of pairs of texts."""
        body = await self._body(request, ScoreRequest)
        queries, documents = body.texts
        make = partial(self._pooling.jobs.score, queries, documents, body.truncate_prompt_tokens)
        outputs, tokens = await self._run(make)
        data = [{"object": "score", "index": index, "score": output.outputs.score} for index, output in enumerate(outputs)]
        return self._answer("score", {"object": "list", "data": data}, body, tokens)

    @answers("POST", ("/rerank", "/v1/rerank", "/v2/rerank"), body=[RerankRequest])
    async def rerank(self, request: Request) -> Response:
        """Order documents by their score for a query."""
        body = await self._body(request, RerankRequest)
        make = partial(self._pooling.jobs.score, body.query, body.documents, body.truncate_prompt_tokens)
        outputs, tokens = await self._run(make)
        order = sorted(range(len(outputs)), key=lambda index: -outputs[index].outputs.score)
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": outputs[index].outputs.score} for index in order]
        if body.return_documents:
            results = [{**each, "document": {"text": body.documents[each["index"]]}} for each in results]
        return self._answer("rerank", {"results": results[: body.top_n or None]}, body, tokens)

    @answers("POST", GENERATING)
    async def generates_not(self) -> Response:
        """Reject the request: the model does not generate text."""
        paths = {"embed": "/v1/embeddings", "score": "/rerank and /score", "reward": "/pooling"}[self._pooling.model.task]
        need = f"a model that generates text, got {self._pooling.model.name}, whose server has {paths}"
        raise ApiError(404, f"this path: needs {need}", code="wrong_model")

    @answers("GET", "/v1/models")
    async def models(self) -> Response:
        """List the names of the model."""
        return json_response({"object": "list", "data": [self._model(name) for name in self.service.names]})

    @answers("GET", "/v1/models/{name:path}")
    async def model(self, name: str) -> Response:
        """Describe the model that has this name."""
        self.service.check_model(name)
        return json_response(self._model(name))

    @answers("GET", PROBES)
    @answers("HEAD", PROBES)
    async def health(self) -> Response:
        """Return 200 while the engine works, and 503 with the reason if it has ended or is stuck."""
        self._pooling.check_health(self.service.options.step_timeout)
        return Response()

    @answers("GET", "/metrics")
    async def metrics(self) -> Response:
        """Return metrics for Prometheus."""
        return self._metrics.page(self._pooling.stats, self.service.num_queued)

    async def _body(self, request: Request, kind: Any) -> Any:
        self.service.check_room()  # before reading the body
        body = await read_body(request, kind, self.service.options)
        self.service.check_model(body.model)
        body.request_id = request_name(request, body.request_id)
        return body

    def _making(self, make: Callable[..., Any], body: EmbeddingRequest, *options: object) -> Callable[[], Any]:
        """Return a function, to be called in a thread, that renders a request's conversations and makes the job for its texts."""

        def made() -> Any:
            if (body.input is None) == (body.messages is None):
                got = "neither" if body.input is None else "both"
                raise ApiError(400, f"input: needs either input or messages, got {got}", "input")
            if body.messages is None:
                return make(body.prompts, *options)
            prompt = chat_prompt(
                self._pooling.model.tokenizer,
                self._pooling.model.name,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=template_kwargs(body),
            )
            return make([prompt], *options)

        return made

    async def _run(self, make: Any) -> Any:
        """Run a job while it occupies a place in the queue. Return its outputs and number of tokens."""
        with self.service.queued():
            started = time.perf_counter()
            limit = self.service.options.request_timeout
            try:
                async with asyncio.timeout(limit):
                    found = await self._pooling.run(make)
            except BackendError as error:
                raise ApiError(500, str(error)) from error
            except TimeoutError:
                raise ApiError(504, f"the request has taken longer than {limit:g} s (request_timeout)") from None
            seconds = time.perf_counter() - started
            self.service.took(seconds)
            self._metrics.answered(seconds, found[1])
            return found

    def _answer(self, prefix: str, fields: dict[str, Any], body: PooledRequest, tokens: int) -> Response:
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        made = {
            "id": f"{prefix}-{body.request_id or uuid4().hex}",
            "created": int(time.time()),
            "model": body.model or self.service.names[0],
        }
        return json_response({**made, **fields, "usage": usage})

    def _model(self, name: str) -> dict[str, Any]:
        return self.entry(name, self._pooling.model.name, self._pooling.model.max_length)


def _numbers(output: Any) -> list[Any]:
    """Return a text's result: a list of numbers, or one such list per token or step."""
    found: list[Any]
    match output:
        case EmbeddingRequestOutput():
            found = output.outputs.embedding
        case ClassificationRequestOutput():
            found = output.outputs.probs
        case _:
            found = output.outputs.data.tolist()
    return found


def _encoded(vector: list[Any], encoding: str) -> list[Any] | str:
    """Return a vector as a list or, for base64, as little-endian float32 values, which OpenAI's client expects."""
    return vector if encoding == "float" else base64.b64encode(numpy.array(vector, dtype="<f4").tobytes()).decode()


OPEN_PATHS = frozenset(("/health", "/ping", "/metrics"))
"""Paths that need no API key, because probes and scrapers do not send one."""


def create_pooling_app(pooling: AsyncPooling, options: ServerOptions | None = None) -> FastAPI:
    """Return an ASGI application for a pooling model. The application does not stop the engine. `app.state.routes` is its
    PoolingRoutes."""
    options = options or ServerOptions()
    app = FastAPI(title="Headway", version=__version__)
    routes = PoolingRoutes(pooling, options)
    served = {path: answer for path, answer in routes.posts().items() if path not in GENERATING}
    lines = LineAnswers(served, routes.refuse, lambda: pooling.has_lost_engine)
    batches = BatchRoutes(options, lines, options.batch_concurrency or max(options.max_queue // 2, 1))
    app.state.routes = routes
    app.state.batches = batches
    app.state.line_answers = lines
    routes.add_to(app)
    batches.add_to(app)
    app.state.refused = routes.refused
    guard(app, options, OPEN_PATHS, app.state.refused)
    return app
