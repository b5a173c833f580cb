"""A server's options and its address, without importing torch or the server's libraries: a mistake is reported at once."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from headway.core.contract.adapters import LoRARequest, check_name
from headway.core.contract.chat_parsers import ChatParserInfo
from headway.core.contract.errors import ConfigError

LONGEST_TIME: Final = 10_000_000
"""Seconds that a limit of time may be, four months; event loops take no infinite ones."""
_ORIGIN: Final = re.compile(r"https?://[^/\s,*]+")
_TIMES: Final = ("request_timeout", "read_timeout", "write_timeout", "step_timeout", "shutdown_timeout")


@dataclass(frozen=True)
class ServerOptions:
    """Limits and names of a server."""

    served_model_names: Sequence[str] = ()
    """Names by which requests may call the model; none: the name that it was loaded by."""
    lora_modules: Sequence[LoRARequest] = ()
    """Adapters that the engine has read, which requests may name as their model."""
    api_key: str | None = None
    """Key that requests must bring; None: none."""
    max_queue: int = 1024
    """Requests that may wait for their first token; one more is answered 429."""
    max_body_bytes: int = 16 * 2**20
    max_connections: int = 4096
    """Most connections at a time; one more is answered 503 and closed."""
    request_timeout: float | None = None
    """Seconds that a request may take; None: no limit."""
    read_timeout: float = 30.0
    """Seconds that a client may take to send a request's head, and again its body."""
    write_timeout: float = 60.0
    """Seconds that a client may take to read what is written to it."""
    step_timeout: float = 300.0
    """Seconds without the end of a step, while there is work, after which /health says that the engine is stuck."""
    shutdown_timeout: float = 30.0
    """Seconds that requests may go on after the server was told to stop."""
    profile_dir: Path | None = None
    """Folder for traces of the engine's steps; None: /start_profile is refused."""
    enable_request_id_headers: bool = False
    """Whether answers have the header X-Request-Id: the request's, or one that is made for it."""
    split_special_tokens: bool = False
    """Whether the names of control tokens in messages of users and tools are text, where a chat does not say."""
    otlp_traces_endpoint: str | None = None
    """Where spans of requests are sent, by OpenTelemetry's protocol; None: there are none."""
    operator_paths: bool = False
    """Whether requests may pause the server, end the requests of others and empty the prefix cache."""
    files_dir: Path | None = None
    """Folder for files and batches, this server's alone; None: /v1/files and /v1/batches are refused."""
    max_file_bytes: int = 200 * 2**20
    batch_concurrency: int | None = None
    """Lines of a batch that are answered at a time; None: half of what the engine or the queue takes."""
    max_stored_responses: int = 1000
    """Responses of /v1/responses that can be asked for again and continued; 0: none."""
    allowed_hosts: Sequence[str] = ()
    """Hosts that requests may name in the header Host, "*.example.org" for all below one; none: any."""
    allowed_origins: Sequence[str] = ()
    """Pages whose scripts a browser lets ask this server and read its answers (CORS), as "https://example.org"; "*": all."""

    generation_config: str = "auto"
    """Where parameters come from that a request leaves out: "auto": the model's generation_config.json; "vllm": none of it; or a
    folder with such a file."""
    tool_call_parser: str | None = None
    """Parser of calls of tools; None: by the model's chat template."""
    reasoning_parser: str | None = None
    """Parser of reasoning; None: by the model's chat template; "none": reasoning is content."""
    enable_auto_tool_choice: bool = True
    """Whether calls are read where a request leaves it to the model to make some."""
    chat_template: str | None = None
    """A file with a chat template, or its text, in place of the model's own."""
    chat_parsers: Sequence[ChatParserInfo] = ()
    """Parsers of plugins."""

    @cached_property
    def template_text(self) -> str | None:
        """The chat template that stands in place of the model's own; None: the model's own.

        :raises ConfigError: there is no such file.
        """
        given = self.chat_template
        if given is None or "{" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--chat-template", "a file with a template, or its text", f"{given} ({error})") from None

    def __post_init__(self) -> None:
        """:raises ConfigError: a key that no header can carry, an empty name, an endless time, or a file in a folder's place."""
        key = self.api_key
        if key is not None and (not key or key != key.strip() or not key.isprintable()):  # not shown: it is a secret
            got = "one with spaces around it or control characters" if key else "an empty one"
            hint = "a file's last line break may belong to it" if key else "a variable of the shell may not be set"
            raise ConfigError("--api-key", "a text that a header carries", got, hint)
        for name in self.served_model_names:
            check_name("--served-model-name", name)
        for name in _TIMES:
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds <= LONGEST_TIME:  # NaN is not, either
                raise ConfigError(f"--{name.replace('_', '-')}", f"seconds, at most {LONGEST_TIME:,}", seconds)
        for host in self.allowed_hosts:
            name = host.removeprefix("*.")
            if not name or host.count(":") == 1 or set(name) & set("*/ ,"):
                need = "names or addresses without ports, or *.NAME for all below one"
                raise ConfigError("--allowed-hosts", need, repr(host), "repeat the option for each")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                need = '"*", or the scheme, name and port of a page, such as https://example.org or http://localhost:3000'
                raise ConfigError("--allowed-origins", need, repr(origin), "repeat the option for each")
        _ = self.template_text  # a file that cannot be read is told of at once
        given = self.generation_config
        if given not in ("auto", "vllm") and not Path(given).is_dir():
            raise ConfigError("--generation-config", "auto, vllm or a folder with a generation_config.json", repr(given))
        for option, folder in (("--profile-dir", self.profile_dir), ("--files-dir", self.files_dir)):
            if folder is not None and folder.exists() and not folder.is_dir():
                raise ConfigError(option, "a folder", f"{folder}, which is none", "name another place")


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet: a port that is taken is found before a model is loaded.

    :raises ConfigError: the address is taken, or belongs to another machine.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        got = f"{host}:{port} ({error})"
        hint = "--port 0 takes a free port" if error.errno == errno.EADDRINUSE else "--host 127.0.0.1 serves this machine"
        raise ConfigError("--host and --port", "an address of this machine that is free", got, hint) from error
    return sock


def is_local(host: str) -> bool:
    """Whether a server that listens on this host is reachable from this machine alone."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
