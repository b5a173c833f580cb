"""The server of `headway serve` as replicas behind Ray Serve.

    pip install "headway[serve]" "ray[serve]" pyarrow
    serve run replicas:app model=Qwen/Qwen3-0.6B gpus=1 min_replicas=1 max_replicas=4

A replica is a process with the whole OpenAI API, and has its model and engine in a child process, as `headway serve` does. In
front of the replicas stands an ingress without a model: it reads a request's body once, so that Ray's router sees the prompt,
and passes on what a replica answers. Ray starts a new replica for one that has died. What the dead one had not begun to answer
goes to another replica; a stream that had begun ends with an error event, for nobody can know which of its tokens the client has
read.
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
"""Replicas that are asked before a request is given up."""
Message = dict[str, Any]
"""Of ASGI."""


@dataclass
class Asked:
    """A request on its way to a replica."""

    scope: dict[str, Any]
    body: bytes
    prompt: str
    """What Ray's router compares: requests with the same beginning go to the same replica, which finds it in its prefix cache."""


@serve.deployment
class Replica:
    """One engine, and the API over it."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        """options: those of AsyncLLM."""
        from headway import AsyncLLM, EngineArgs
        from headway.server.app import create_app
        from headway.server.options import ServerOptions

        self._llm = AsyncLLM.from_engine_args(EngineArgs.of(model, **options), own_process=True)
        self._app = create_app(self._llm, ServerOptions(served_model_names=(model,)))
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def answer(self, asked: Asked) -> AsyncGenerator[Message, None]:
        """The messages with which the API answers."""
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
        finally:  # also where the client has gone: the engine must not go on for nobody
            left.set()
            await asyncio.sleep(0)
            running.cancel()

    async def check_health(self) -> None:
        """Ray asks; a replica whose engine has ended is replaced."""
        await self._llm.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_llm"):
            self._llm.shutdown()


@serve.deployment(max_ongoing_requests=1000)
class Ingress:
    """Passes requests on to replicas."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Have a replica answer; another one, where it dies before it has begun."""
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
    """The parts of a stream; one that stops before its end says so, whatever the reason."""
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
    """Whether a message is the last of its answer."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _error(text: str) -> bytes:
    return json.dumps({"error": {"message": text, "type": "server_error", "param": None, "code": None}}).encode()


def prompt_of(path: str, body: bytes) -> str:
    """The text by which requests are compared, never empty: of a chat its messages one after the other, else the prompt."""
    try:
        asked = json.loads(body)
        found = asked.get("messages", asked.get("prompt"))
    except (ValueError, AttributeError):
        found = None  # a replica answers what is wrong with it
    return path if not found else found if isinstance(found, str) else json.dumps(found)


def router() -> RequestRouterConfig:
    """Ray's router by common prefixes; where this Ray has none, its usual one."""
    try:
        from ray.serve.llm.request_router import PrefixCacheAffinityRouter  # needs vLLM or SGLang to be installed as well
    except ImportError:
        try:
            from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
        except ImportError as error:
            log.warning("requests are spread without regard to prefixes: %s", error)
            return RequestRouterConfig()
    return RequestRouterConfig(request_router_class=PrefixCacheAffinityRouter, request_router_kwargs={"imbalanced_threshold": 8})


def app(args: dict[str, Any]) -> Application:
    """The application; `serve run` hands `name=value` over as args.

    model: as for `headway serve`. min_replicas, max_replicas. requests: how many a replica should have at once. cpus and gpus: of
    each replica. All others are options of AsyncLLM; their texts are read as YAML, `deterministic=true` or `max_num_seqs=64`.
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
