"""A server on a free port of the loopback, in a thread, over an LLM of the test's own."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from headway import LLM, AsyncLLM
from headway.pooling.assembly import AsyncPooling
from headway.server.launch import Server
from headway.server.options import ServerOptions
from headway.server.service import Service


class Running:
    """A server that listens."""

    def __init__(self, server: Server, llm: AsyncLLM) -> None:
        self.server, self.llm = server, llm
        self.url = f"http://127.0.0.1:{server.port}"

    @property
    def service(self) -> Service:
        """Objects that its requests share."""
        app = self.server.config.app
        return app.state.service  # type: ignore[union-attr]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=10)

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Wait until no request is left, and check that no request left any state."""
        ends = time.monotonic() + seconds
        engine = self.llm.engine
        while self.llm.num_unfinished_requests or engine.has_unfinished or self.service.num_queued:
            assert time.monotonic() < ends, "requests are left"
            time.sleep(0.005)
        assert self.service.num_unsubmitted == 0
        engine.blocks.check_integrity([])


@contextmanager
def listening(server: Server) -> Iterator[str]:
    """Run a server in a thread; yields its URL."""
    thread = Thread(target=server.run, name="server")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has not started"
            time.sleep(0.002)
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        thread.join(20)


@contextmanager
def running(llm: LLM, options: ServerOptions | None = None) -> Iterator[Running]:
    """Serve an LLM; it is left as it was found."""
    served = AsyncLLM.from_llm(llm)
    server = Server(served, options or ServerOptions(served_model_names=("tiny",)), port=0)
    try:
        with listening(server):
            found = Running(server, served)
            yield found
            found.wait_idle()
    finally:
        served.shutdown()


@contextmanager
def pooled(llm: LLM, *names: str, **options: Any) -> Iterator[tuple[str, AsyncPooling]]:
    """Serve a model that is pooled under these names; yields the URL."""
    pooling = AsyncPooling(llm.pooling)
    with listening(Server(pooling, ServerOptions(served_model_names=names, **options), port=0)) as url:
        yield url, pooling


def raw(method: str, path: str, body: bytes = b"", **headers: object) -> bytes:
    """An HTTP request as bytes. A body is JSON unless headers say otherwise."""
    headers = {"content_type": "application/json", **headers}
    lines = [f"{method} {path} HTTP/1.1", "host: test", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
