"""A server's options and its address, without importing torch or the server's libraries: a mistake is reported at once."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Final

import typer

from headway.core.contract.adapters import LoRARequest, check_name
from headway.core.contract.chat_parsers import ChatParserInfo
from headway.core.contract.errors import ConfigError

LONGEST_TIME: Final = 10_000_000
"""Seconds that a limit of time may be, four months; event loops take no infinite ones."""
_ORIGIN: Final = re.compile(r"https?://[^/\s,*]+")
_TIMES: Final = ("request_timeout", "read_timeout", "write_timeout", "step_timeout", "shutdown_timeout")


_SERVER: Final = partial(typer.Option, rich_help_panel="Server")
_LIMIT: Final = partial(typer.Option, rich_help_panel="Limits")
_CHAT: Final = partial(typer.Option, rich_help_panel="Tools and reasoning")


@dataclass(frozen=True)
class ServerOptions:
    """Limits and names of a server; those with a help text are flags of `headway serve`, in this order."""

    api_key: Annotated[
        str | None,
        _SERVER(
            envvar="HEADWAY_API_KEY",
            help="What requests must bring as Authorization: Bearer KEY. Processes of this machine see a command line.",
        ),
    ] = None
    served_model_names: Annotated[
        Sequence[str], _SERVER("--served-model-name", help="Name by which requests call the model. Repeatable; default: MODEL.")
    ] = ()
    lora_modules: Sequence[LoRARequest] = ()
    """Adapters that the engine has read, which requests may name as their model."""
    log_requests: Annotated[bool, _SERVER("--log-requests", help="Log a line for every request.")] = False
    enable_request_id_headers: Annotated[
        bool,
        _SERVER("--enable-request-id-headers", help="Answer with the header X-Request-Id: the request's, or one made for it."),
    ] = False
    profile_dir: Annotated[
        Path | None,
        _SERVER(help="Let /start_profile and /stop_profile look at the engine's steps, and write traces into this folder."),
    ] = None
    allowed_hosts: Annotated[
        Sequence[str],
        _SERVER(help="Host that requests may name in the header Host; *.example.org: all below it. Repeatable; default: any."),
    ] = ()
    allowed_origins: Annotated[
        Sequence[str],
        _SERVER(
            help="Page whose scripts may ask this server in a browser (CORS), such as https://example.org; *: any. Repeatable, "
            "or a list in JSON; default: none."
        ),
    ] = ()
    split_special_tokens: Annotated[
        bool,
        _SERVER(
            "--split-special-tokens",
            help="Read the names of control tokens in messages of users and tools as text; a request may say otherwise.",
        ),
    ] = False
    generation_config: Annotated[
        str,
        _SERVER(
            help="Sampling of requests that leave it open: auto (as the model recommends), vllm (vLLM's defaults), or a folder."
        ),
    ] = "auto"
    chat_template: Annotated[str | None, _CHAT(help="File with a chat template, or its text. Default: the model's own.")] = None
    tool_call_parser: Annotated[
        str | None, _CHAT(help="Format in which the model calls tools. Default: by its chat template.")
    ] = None
    reasoning_parser: Annotated[
        str | None, _CHAT(help="Format of the model's reasoning; none: it is content. Default: by its chat template.")
    ] = None
    enable_auto_tool_choice: Annotated[bool, _CHAT(help="Read calls where a request leaves it to the model to make some.")] = True
    max_queue: Annotated[int, _LIMIT(min=1, help="Requests that may wait for a first token; one more gets 429.")] = 1024
    max_body_bytes: Annotated[int, _LIMIT("--max-body", min=1, help="Bytes of a request's body.")] = 16 * 2**20
    max_connections: Annotated[int, _LIMIT(min=1, help="One more gets 503.")] = 4096
    otlp_traces_endpoint: Annotated[
        str | None, _SERVER(help="Send a span of each request to this OTLP endpoint (extra otel).")
    ] = None
    operator_paths: Annotated[
        bool,
        _SERVER(
            "--operator-paths", help="Serve /pause, /resume, /abort_requests and /reset_prefix_cache, which all clients feel."
        ),
    ] = False
    files_dir: Annotated[
        Path | None, _SERVER(help="Let clients store files and run batches, kept in this folder over restarts.")
    ] = None
    max_file_bytes: Annotated[int, _LIMIT("--max-file", min=1, help="Bytes of a file, with --files-dir.")] = 200 * 2**20
    batch_concurrency: Annotated[
        int | None, _LIMIT(min=1, help="Lines of a batch that run at a time. Default: half of what the engine takes.")
    ] = None
    max_stored_responses: Annotated[
        int, _LIMIT(min=0, help="Responses of /v1/responses kept in memory to be continued by id.")
    ] = 1000
    request_timeout: Annotated[float | None, _LIMIT(min=0.001, help="Seconds that a request may take. Default: any.")] = None
    read_timeout: Annotated[float, _LIMIT(min=0.001, help="Seconds that a client may take to send a request.")] = 30.0
    write_timeout: Annotated[float, _LIMIT(min=0.001, help="Seconds that a client may leave an answer unread.")] = 60.0
    shutdown_timeout: Annotated[float, _LIMIT(min=0, help="Seconds that requests may go on after SIGTERM.")] = 30.0
    step_timeout: Annotated[
        float, _LIMIT(min=0.001, help="Seconds without the end of a step after which /health answers 503.")
    ] = 300.0
    chat_parsers: Sequence[ChatParserInfo] = ()

    @cached_property
    def template_text(self) -> str | None:
        """The chat template that replaces the model's own; None: the model's own. :raises ConfigError: there is no such file."""
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
    """Bind a socket without listening, before a model is loaded. :raises ConfigError: the address is taken, or not local."""
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
