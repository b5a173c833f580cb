"""The server of `headway serve` as replicas behind Ray Serve.

    pip install "headway[serve]" "ray[serve]" pyarrow
    serve run replicas:app model=Qwen/Qwen3-0.6B gpus=1 min_replicas=1 max_replicas=4

A replica is a process with the whole OpenAI API and, as in `headway serve`, a child process for model and engine. An ingress
without a model receives requests: it reads the body, so that Ray's router sees the prompt, and forwards the replica's response.
Ray replaces a replica that has died. Requests that it had not begun to answer go to another replica. A stream that had begun
ends with an error event, because it is unknown which of its tokens the client has read.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

log = logging.getLogger("ray.serve")

ATTEMPTS = 3
"""Maximum number of replicas to try for a request."""
Message = dict[str, Any]
"""ASGI message."""


@dataclass
class Asked:
    """A request that is forwarded to a replica."""

    scope: dict[str, Any]
    body: bytes
    prompt: str
    """Text for Ray's router, which sends requests with a common prefix to the same replica, for prefix cache hits."""


@serve.deployment
class Replica:
    """One engine and its API."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        """options: keyword arguments of AsyncLLM."""
        from headway import AsyncLLM, EngineArgs
        from headway.server.app import create_app
        from headway.server.options import ServerOptions

        self._llm = AsyncLLM.from_engine_args(EngineArgs.of(model, **options), own_process=True)
        self._app = create_app(self._llm, ServerOptions(served_model_names=(model,)))
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def answer(self, asked: Asked) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of the API's response."""
        told: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=64)
        unread, left = [{"type": "http.request", "body": asked.body, "more_body": False}], asyncio.Event()

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**asked.scope, "type": "http", "asgi": {"version": "3.0"}}, receive, told.put)
            finally:
                await told.put(None)

        running = asyncio.ensure_future(run())
        try:
            while (message := await told.get()) is not None:
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], (b"x-replica", self._name)]}
                yield message
        finally:  # also if the client has disconnected: stop generating
            left.set()
            await asyncio.sleep(0)
            running.cancel()

    async def check_health(self) -> None:
        """Check the engine. Ray calls this and replaces a replica whose engine has stopped."""
        await self._llm.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()


@serve.deployment(max_ongoing_requests=1000)
class Ingress:
    """Entry point that forwards requests to replicas."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Forward a request to a replica, and to another one if it dies before it has begun to answer."""
        body = await request.body()
        scope = {key: request.scope[key] for key in ("method", "path", "raw_path", "query_string", "headers", "http_version")}
        asked = Asked({**scope, "scheme": "http", "root_path": ""}, body, prompt_of(request.url.path, body))
        for _ in range(ATTEMPTS):
            messages = self._replicas.answer.remote(asked)
            try:
                start = await anext(messages)
                headers = dict(start["headers"])
                if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                    parts = [message async for message in messages]
                    if not _ended(parts[-1] if parts else start):
                        raise RayError("the replica has stopped in the middle of its answer")
                    return _with_headers(Response(b"".join(part.get("body", b"") for part in parts), start["status"]), start)
            except (RayError, StopAsyncIteration) as error:
                log.warning("a replica was lost, and its request goes to another: %s", type(error).__name__)
                continue
            return _with_headers(StreamingResponse(_rest(messages), start["status"]), start)
        return Response(_error(f"{ATTEMPTS} replicas were lost one after the other"), 503, media_type="application/json")


def _with_headers(response: Response, start: Message) -> Response:
    response.raw_headers = list(start["headers"])
    return response


async def _rest(messages: DeploymentResponseGenerator) -> AsyncIterator[bytes]:
    """Yield the parts of a stream, and an error event if it stops before its end."""
    ended = False
    try:
        async for message in messages:
            ended = _ended(message)
            yield message.get("body", b"")
    except RayError as error:
        log.warning("a replica was lost in the middle of a stream: %s", type(error).__name__)
    finally:
        messages.cancel()
    if not ended:
        yield b"data: " + _error("the replica that answered has ended") + b"\n\n"


def _ended(message: Message) -> bool:
    """Return whether a message is the last of its response."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _error(text: str) -> bytes:
    return json.dumps({"error": {"message": text, "type": "server_error", "param": None, "code": None}}).encode()


def prompt_of(path: str, body: bytes) -> str:
    """Return the non-empty text by which the router compares requests: a chat's messages, or the prompt."""
    try:
        asked = json.loads(body)
        found = asked.get("messages", asked.get("prompt"))
    except (ValueError, AttributeError):
        found = None  # the replica reports the error
    return path if not found else found if isinstance(found, str) else json.dumps(found)


def router() -> RequestRouterConfig:
    """Return Ray's prefix-aware router, or its default router if this version of Ray has none."""
    try:
        from ray.serve.llm.request_router import PrefixCacheAffinityRouter  # also needs vLLM or SGLang to be installed
    except ImportError:
        try:
            from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
        except ImportError as error:
            log.warning("requests are spread without regard to prefixes: %s", error)
            return RequestRouterConfig()
    return RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter, request_router_kwargs={"imbalanced_threshold": 8})


def app(args: dict[str, Any]) -> Application:
    """Return the application. `serve run` passes `name=value` arguments as `args`.

    model: as for `headway serve`. min_replicas, max_replicas: numbers of replicas. requests: target number of concurrent requests
    per replica. cpus, gpus: numbers per replica. Others are options of AsyncLLM with values as YAML, such as `max_num_seqs=64`.
    """
    args = {"model": "smollm2", "min_replicas": 1, "max_replicas": 2, "requests": 32, "cpus": 1, "gpus": 0, **args}
    model, least, most, requests, cpus, gpus = (
        args.pop(name) for name in ("model", "min_replicas", "max_replicas", "requests", "cpus", "gpus")
    )
    scaling = AutoscalingConfig(min_replicas=int(least), max_replicas=int(most), target_ongoing_requests=float(requests))
    replicas = Replica.options(
        autoscaling_config=scaling,
        max_ongoing_requests=4 * int(requests),
        request_router_config=router(),
        ray_actor_options={"num_cpus": float(cpus), "num_gpus": float(gpus)},
        health_check_period_s=2,
    )
    options = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in args.items()}
    return Ingress.bind(replicas.bind(model, options))
