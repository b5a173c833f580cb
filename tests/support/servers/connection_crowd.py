"""Many connections to one server at once, in a child process: python connection_crowd.py PORT CONNECTIONS IDLE.

All stay open until every one but the first IDLE has asked and has been answered; meanwhile /health is asked every 20 ms. Prints
JSON: `statuses` (status, or "none" -> connections), `odd` (answers that are neither 200 nor an error in OpenAI's shape with
Retry-After), `opened` (connections at once), and `health` (seconds of each answer).
"""

from __future__ import annotations

import http.client
import json
import resource
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import suppress

BODY = json.dumps({"prompt": [5, 6, 7], "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HEAD += b"content-length: %d\r\nconnection: close\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY


def probe(port: int, found: list[float], ended: threading.Event) -> None:
    """Ask for the server's health, again and again."""
    while not ended.wait(0.02):
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("GET", "/health")
            fine = connection.getresponse().status == 200
        except OSError:
            fine = False
        connection.close()
        found.append(time.perf_counter() - started if fine else 1e9)


def status_of(answer: bytes) -> tuple[str, bool]:
    """The status of an answer, and whether it is as it should be."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return "none", False
    status = head[9:12].decode()
    if status == "200":
        return status, b'"choices"' in body
    with suppress(ValueError, KeyError, TypeError):
        return status, bool(json.loads(body)["error"]["message"]) and b"retry-after:" in head.lower()
    return status, False


def main() -> None:
    port, count, idle = map(int, sys.argv[1:])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    health: list[float] = []
    ended = threading.Event()
    watcher = threading.Thread(target=probe, args=(port, health, ended))
    watcher.start()
    chosen, socks = selectors.DefaultSelector(), []
    answers: dict[socket.socket, bytes] = {}
    for number in range(count):
        if number % 100 == 99:  # faster than 4,000 a second the system's own queue of connections overflows
            time.sleep(0.025)
        sock = socket.socket()
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.connect(("127.0.0.1", port))
        socks.append(sock)
        if number >= idle:
            answers[sock] = b""
            chosen.register(sock, selectors.EVENT_WRITE)
    left = len(answers)
    while left:
        for key, events in chosen.select():
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                if events & selectors.EVENT_WRITE:
                    sock.sendall(REQUEST)
                    chosen.modify(sock, selectors.EVENT_READ)
                    continue
                part = sock.recv(65536)
                answers[sock] += part
            except OSError:
                part = b""
            if not part:
                chosen.unregister(sock)
                left -= 1
    ended.set()
    watcher.join()
    found = list(map(status_of, answers.values()))
    statuses = Counter(status for status, _ in found)
    print(json.dumps({"statuses": statuses, "odd": sum(not fine for _, fine in found), "opened": len(socks), "health": health}))


if __name__ == "__main__":
    main()
