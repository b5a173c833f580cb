"""Server options and address. Imports neither torch nor the server's libraries, so that invalid options are reported at once."""

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
from headway.core.contract.errors import ConfigError
from headway.core.contract.text_plugins import ChatParserInfo

LONGEST_TIME: Final = 10_000_000
"""Maximum value of a time limit in seconds (about four months). Event loops do not accept infinity."""
_ORIGIN: Final = re.compile(r"https?://[^/\s,*]+")
_TIMES: Final = ("request_timeout", "read_timeout", "write_timeout", "step_timeout", "shutdown_timeout")


_SERVER: Final = partial(typer.Option, rich_help_panel="Server")
_LIMIT: Final = partial(typer.Option, rich_help_panel="Limits")
_CHAT: Final = partial(typer.Option, rich_help_panel="Tools and reasoning")


@dataclass(frozen=True)
class ServerOptions:
    """Limits and names of a server. Fields with a help text are options of `headway serve`, in this order."""

    api_key: Annotated[
        str | None,
        _SERVER(
            envvar="HEADWAY_API_KEY",
            help="Key that requests must send as Authorization: Bearer KEY. Prefer the environment variable: other processes on "
            "this machine can read the command line.",
        ),
    ] = None
    served_model_names: Annotated[
        Sequence[str], _SERVER("--served-model-name", help="Model name that requests use. Repeatable. Default: MODEL.")
    ] = ()
    lora_modules: Sequence[LoRARequest] = ()
    """Loaded adapters, which requests may name as their model."""
    log_requests: Annotated[bool, _SERVER("--log-requests", help="Log one line per request.")] = False
    enable_request_id_headers: Annotated[
        bool,
        _SERVER("--enable-request-id-headers", help="Return the header X-Request-Id: the request's value, or a new one."),
    ] = False
    profile_dir: Annotated[
        Path | None,
        _SERVER(help="Folder for traces of engine steps. Enables /start_profile and /stop_profile."),
    ] = None
    allowed_hosts: Annotated[
        Sequence[str],
        _SERVER(help="Allowed value of the Host header. *.example.org allows all subdomains. Repeatable. Default: any."),
    ] = ()
    allowed_origins: Annotated[
        Sequence[str],
        _SERVER(
            help="Origin whose browser scripts may call this server (CORS), such as https://example.org. * means any. "
            "Repeatable, or a JSON list. Default: none."
        ),
    ] = ()
    split_special_tokens: Annotated[
        bool,
        _SERVER(
            "--split-special-tokens",
            help="Tokenize control tokens in user and tool messages as plain text. A request can override this.",
        ),
    ] = False
    generation_config: Annotated[
        str,
        _SERVER(help="Default sampling parameters: auto (the model's recommendation), vllm (vLLM's defaults), or a folder."),
    ] = "auto"
    chat_template: Annotated[
        str | None, _CHAT(help="Chat template: a file, or the template itself. Default: the model's template.")
    ] = None
    tool_call_parser: Annotated[
        str | None, _CHAT(help="Format of the model's tool calls. Default: detected from the chat template.")
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _CHAT(help="Format of the model's reasoning. none leaves it in the content. Default: detected from the chat template."),
    ] = None
    enable_auto_tool_choice: Annotated[bool, _CHAT(help="Parse tool calls for requests with tool_choice=auto.")] = True
    max_queue: Annotated[
        int, _LIMIT(min=1, help="Maximum number of requests that wait for a first token. Further requests get status 429.")
    ] = 1024
    max_body_bytes: Annotated[int, _LIMIT("--max-body", min=1, help="Maximum size of a request body in bytes.")] = 16 * 2**20
    max_connections: Annotated[int, _LIMIT(min=1, help="Maximum number of connections. Further connections get status 503.")] = (
        4096
    )
    otlp_traces_endpoint: Annotated[
        str | None, _SERVER(help="OTLP endpoint to send one span per request to. Needs the extra otel.")
    ] = None
    operator_paths: Annotated[
        bool,
        _SERVER(
            "--operator-paths", help="Enable /pause, /resume, /abort_requests and /reset_prefix_cache, which affect all clients."
        ),
    ] = False
    files_dir: Annotated[
        Path | None,
        _SERVER(help="Folder that keeps clients' files and batches across restarts. Enables /v1/files and /v1/batches."),
    ] = None
    max_file_bytes: Annotated[
        int, _LIMIT("--max-file", min=1, help="Maximum size of an uploaded file in bytes. Needs --files-dir.")
    ] = 200 * 2**20
    batch_concurrency: Annotated[
        int | None,
        _LIMIT(min=1, help="Maximum number of concurrent requests of a batch. Default: half of --max-num-seqs."),
    ] = None
    max_stored_responses: Annotated[
        int, _LIMIT(min=0, help="Number of /v1/responses results to keep in memory, for requests that continue them by id.")
    ] = 1000
    request_timeout: Annotated[
        float | None, _LIMIT(min=0.001, help="Maximum duration of a request in seconds. Default: no limit.")
    ] = None
    read_timeout: Annotated[float, _LIMIT(min=0.001, help="Maximum time in seconds for a client to send a request.")] = 30.0
    write_timeout: Annotated[
        float, _LIMIT(min=0.001, help="Seconds without a read by the client after which its connection is closed.")
    ] = 60.0
    shutdown_timeout: Annotated[
        float, _LIMIT(min=0, help="Seconds for running requests to finish after SIGTERM. Then they are aborted.")
    ] = 30.0
    step_timeout: Annotated[float, _LIMIT(min=0.001, help="Seconds without a finished step after which /health returns 503.")] = (
        300.0
    )
    chat_parsers: Sequence[ChatParserInfo] = ()

    @cached_property
    def template_text(self) -> str | None:
        """Chat template that replaces the model's own, or None. :raises ConfigError: if the file does not exist."""
        given = self.chat_template
        if given is None or "{" in given:
            return given
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("--chat-template", "a file with a template, or its text", f"{given} ({error})") from None

    def __post_init__(self) -> None:
        """:raises ConfigError: if the API key cannot be sent in a header, a name is empty, a time is infinite, or a folder is a
        file.
        """
        key = self.api_key
        if key is not None and (not key or key != key.strip() or not key.isprintable()):  # not shown: it is a secret
            got = "one with spaces around it or control characters" if key else "an empty one"
            hint = "a file's last line break may belong to it" if key else "a variable of the shell may not be set"
            raise ConfigError("--api-key", "a text that a header carries", got, hint)
        for name in self.served_model_names:
            check_name("--served-model-name", name)
        for name in _TIMES:
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds <= LONGEST_TIME:  # also false for NaN
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
        _ = self.template_text  # report an unreadable file now
        given = self.generation_config
        if given not in ("auto", "vllm") and not Path(given).is_dir():
            raise ConfigError("--generation-config", "auto, vllm or a folder with a generation_config.json", repr(given))
        for option, folder in (("--profile-dir", self.profile_dir), ("--files-dir", self.files_dir)):
            if folder is not None and folder.exists() and not folder.is_dir():
                raise ConfigError(option, "a folder", f"{folder}, which is none", "name another place")


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but not listening, so that address errors are reported before a model is loaded. :raises
    ConfigError: if the address is unusable."""
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
    """Return whether a server on this host can be reached only from this machine."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
