"""The listening server: uvicorn with Headway's limits."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Final

import uvicorn

from headway.async_llm import AsyncLLM
from headway.core.engine.loop import EngineLoop
from headway.hosting.host import EngineDeadError, query
from headway.machine.process import SWITCH_INTERVAL
from headway.pooling.assembly import AsyncPooling
from headway.server.app import create_app
from headway.server.openai.batches.routes import BatchRoutes
from headway.server.options import ServerOptions, bound_socket, is_local
from headway.server.pooling import create_pooling_app
from headway.server.protocol import limited_protocol
from headway.server.service import Service, chat_format_of

log = logging.getLogger("headway")

_LISTENERS: Final = 8
"""Number of descriptors of the listening socket. libuv accepts one connection per descriptor and iteration of the event loop.
With only one descriptor, the last of many connections, or a probe after them, would wait for as many iterations as there are
connections."""
_SEND_BUFFER: Final = 128 * 1024
"""Bytes of a response that the system buffers before the client reads; Linux doubles this number. The system's default grows to
megabytes, which could buffer a whole unread stream before `write_timeout` starts."""
_SPARE_FILES: Final = 128  # File descriptors reserved for other files (kernels, traces); at most half of all


class Server(uvicorn.Server):
    """HTTP server for a model. SIGTERM and SIGINT give running requests time to end and reject new ones."""

    def __init__(
        self,
        llm: AsyncLLM | AsyncPooling,
        options: ServerOptions,
        host: str = "127.0.0.1",
        port: int = 8000,
        started_at: Callable[[str], None] | None = None,
    ) -> None:
        """started_at: function to call with the URL once the server listens."""
        self._llm = llm
        app = create_app(llm, options) if isinstance(llm, AsyncLLM) else create_pooling_app(llm, options)
        self._batches: BatchRoutes = app.state.batches
        self._service: Service | None = app.state.service if isinstance(llm, AsyncLLM) else None
        config = uvicorn.Config(
            app,
            host,
            port,
            loop="uvloop" if sys.platform != "win32" else "asyncio",
            http=limited_protocol(options, most_connections(), app.state.refused),
            ws="none",
            lifespan="off",
            log_config=None,  # keep the process's logging configuration, so that uvicorn's lines look like all others
            log_level="warning",
            access_log=options.log_requests,
            backlog=4096,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(round(options.shutdown_timeout), 1) + 2,
            server_header=False,
        )
        if options.log_requests:
            access = logging.getLogger("uvicorn.access")
            access.propagate = True  # another server of this process may have silenced it
            access.setLevel(logging.INFO)
        super().__init__(config)
        self._shutdown_timeout = options.shutdown_timeout
        self._started_at = started_at

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown at a signal. A second SIGTERM ends this process and the engine's process at once."""
        if self.should_exit and sig == signal.SIGTERM:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and report the URL."""
        sockets = [bound_socket(self.config.host, self.config.port)] if sockets is None else sockets
        sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it from the listener
        sockets += [sockets[0].dup() for _ in range(_LISTENERS - 1)]
        await super().startup(sockets)
        self._batches.start()
        if isinstance(self._llm, AsyncLLM):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, _record, self._llm)
        if self._started_at is not None:
            host = str(self.config.host)
            self._started_at(f"http://{f'[{host}]' if ':' in host else host}:{self.port}")

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server must stop: on a signal, or after a fault of an engine that will not be restarted."""
        return await super().on_tick(counter) or self.has_lost_engine

    @property
    def has_lost_engine(self) -> bool:
        """True if a fault has ended the engine permanently."""
        return self._llm.has_lost_engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give requests `shutdown_timeout` seconds to end, then end them."""
        if self.server_state.tasks:
            seconds = self._shutdown_timeout
            log.warning("shutting down: waiting up to %g s for running requests: %d", seconds, len(self.server_state.tasks))
        if self._service is not None:
            self._service.stop()
        await self._batches.close()
        ending = asyncio.get_running_loop().call_later(self._shutdown_timeout, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            self._llm.shutdown()
            if self._service is not None and self._service.tracing is not None:
                await asyncio.to_thread(self._service.tracing.close)

    def _end_requests(self) -> None:
        if self.server_state.tasks:
            count, seconds = len(self.server_state.tasks), self._shutdown_timeout
            log.warning("shutting down: aborting requests still running after %g s (--shutdown-timeout): %d", seconds, count)
        self._llm.shutdown()

    @property
    def port(self) -> int:
        """Port of the server. If port 0 was requested, the port that the system has chosen."""
        return int(self.servers[0].sockets[0].getsockname()[1])


def _record(llm: AsyncLLM) -> None:
    with suppress(EngineDeadError):
        llm.host.run_between_steps(query(partial(EngineLoop.record_fault, reason="SIGUSR2", seconds=0.0)))


def serve(
    llm: AsyncLLM | AsyncPooling,
    options: ServerOptions,
    host: str = "127.0.0.1",
    sock: socket.socket | None = None,
    started_at: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal, then shut the engine down. sock: a socket bound to the host; None means port 8000.
    :raises EngineDeadError: if a fault has ended the engine and therefore the server."""
    sock = sock or bound_socket(host, 8000)
    raise_file_limit()
    if most_connections() < options.max_connections:
        log.warning(
            "max_connections=%d, but the system allows this process only %d more open files: further connections are closed "
            "without a response; raise the limit (ulimit -n)",
            options.max_connections,
            most_connections(),
        )
    sys.setswitchinterval(SWITCH_INTERVAL)
    if options.api_key is None and not is_local(host):
        log.warning(
            "listening on %s without an API key: anyone who can reach this machine can use the model; --api-key sets a key", host
        )
    Server(llm, options, host, 0, started_at).run([sock])
    if llm.failure is not None:
        raise llm.failure


def ready_lines(url: str, llm: AsyncLLM | AsyncPooling, options: ServerOptions) -> list[str]:
    """Return lines with the URL, links for a browser on this machine (if the options allow them), and an example request."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    lines = [f"listening on {url} (Ctrl-C stops it)"]
    if options.allowed_hosts and host.strip("[]") not in options.allowed_hosts:
        return lines
    here = f"http://{host}:{port}"
    if isinstance(llm, AsyncLLM):
        lines.append(f"web UI: {here}/")
    if options.api_key is None:
        lines.append(f"API docs: {here}/docs")
    path, fields = _first_call(llm, options)
    body = json.dumps({"model": options.served_model_names[0], **fields} if options.served_model_names else fields)
    key = "" if options.api_key is None else ' -H "Authorization: Bearer $HEADWAY_API_KEY"'
    lines.append("example, with the API key in HEADWAY_API_KEY:" if key else "example:")
    return [*lines, f"  curl {here}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"]


def _first_call(llm: AsyncLLM | AsyncPooling, options: ServerOptions) -> tuple[str, dict[str, object]]:
    question, answer = "What is the capital of France?", "Paris is the capital of France."
    if isinstance(llm, AsyncLLM):
        if chat_format_of(llm, options).template:
            return "/v1/chat/completions", {"messages": [{"role": "user", "content": question}]}
        return "/v1/completions", {"prompt": "The capital of France is"}
    if llm.model.task == "embed":
        return "/v1/embeddings", {"input": question}
    if llm.model.task == "score" and llm.model.network.size == 1:
        return "/score", {"text_1": question, "text_2": answer}
    return "/classify" if llm.model.task == "score" else "/pooling", {"input": answer}


def most_connections() -> int:
    """Return the maximum number of connections for the available file descriptors."""
    try:
        import resource
    except ImportError:  # Windows
        return sys.maxsize
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        used = 0
    free = allowed - used
    return sys.maxsize if allowed == resource.RLIM_INFINITY else max(free - min(_SPARE_FILES, free // 2), 1)


def raise_file_limit() -> None:
    """Raise this process's limit on open files, and thereby on connections, to the maximum that the system allows."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
