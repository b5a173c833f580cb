"""A server with OpenAI's API that answers by rule, at a known pace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

PAUSE = 0.02
"""Seconds between the tokens of the server of these tests."""


class Answers(BaseHTTPRequestHandler):
    """Streams max_tokens tokens as OpenAI's servers do; a prompt that begins with 7 is refused."""

    protocol_version = "HTTP/1.1"
    asked: list[dict[str, Any]] = []  # noqa: RUF012

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "ruled"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        if body.get("prompt", [0])[0] == 7:
            self._whole(429, {"error": {"message": "too many"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        chat = "messages" in body
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for number in range(body["max_tokens"]):
            time.sleep(PAUSE)
            text = {"delta": {"content": "x"}} if chat else {"text": "x", "token_ids": [100 + number]}
            self._event({"choices": [{"index": 0, **text}]})
        prompt = len(body.get("prompt", ()))
        self._event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, data: object) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, status: int, data: object) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def ruled_server() -> Iterator[str]:
    """Its URL."""
    Answers.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
