"""`headway serve`: a model behind OpenAI's API."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from headway.cli.engine_options import PANEL, takes_engine_options
from headway.cli.options import AdapterModules, ConfigFile, adapters_of, on_command_line
from headway.core.contract.errors import ConfigError
from headway.core.system.json_text import parse_json
from headway.engine_args import EngineArgs, help_texts

if TYPE_CHECKING:
    from headway.async_llm import AsyncLLM
    from headway.engine_args import PoolingModel
    from headway.hosting.process_messages import SpawnedEngine
    from headway.pooling.async_pooling import AsyncPooling
    from headway.server.options import ServerOptions

SERVER = "Server"
LIMITS = "Limits"
CHATS = "Tools and reasoning"
_KEY_VARIABLE = "HEADWAY_API_KEY"


@takes_engine_options(*(name for name in help_texts() if name not in ("model", "generation_config")))  # which the server has
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=help_texts()["model"])] = "smollm2",
    model_option: Annotated[str | None, typer.Option("--model", help="Another way to give MODEL.", rich_help_panel=PANEL)] = None,
    *,
    engine: dict[str, Any],
    config: ConfigFile = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every address of this machine.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on. 0 picks a free port.", rich_help_panel=SERVER)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=_KEY_VARIABLE,
            help="What requests must bring as Authorization: Bearer KEY. Processes of this machine see a command line.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name by which requests call the model. Repeatable; default: MODEL.", rich_help_panel=SERVER),
    ] = None,
    lora_modules: AdapterModules = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log a line for every request.", rich_help_panel=SERVER)
    ] = False,
    enable_request_id_headers: Annotated[
        bool,
        typer.Option(
            "--enable-request-id-headers",
            help="Answer with the header X-Request-Id: the request's, or one made for it.",
            rich_help_panel=SERVER,
        ),
    ] = False,
    profile_dir: Annotated[
        Path | None,
        typer.Option(
            help="Let /start_profile and /stop_profile look at the engine's steps, and write traces into this folder.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Host that requests may name in the header Host; *.example.org: all below it. Repeatable; default: any.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Page whose scripts may ask this server in a browser (CORS), such as https://example.org; *: any. Repeatable, "
            "or a list in JSON; default: none.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    split_special_tokens: Annotated[
        bool,
        typer.Option(
            "--split-special-tokens",
            help="Read the names of control tokens in messages of users and tools as text; a request may say otherwise.",
            rich_help_panel=SERVER,
        ),
    ] = False,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling of requests that leave it open: auto (as the model recommends), vllm (vLLM's defaults), or a folder.",
            rich_help_panel=SERVER,
        ),
    ] = "auto",
    chat_template: Annotated[
        str | None,
        typer.Option(help="File with a chat template, or its text. Default: the model's own.", rich_help_panel=CHATS),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="Format in which the model calls tools. Default: by its chat template.", rich_help_panel=CHATS),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Format of the model's reasoning; none: it is content. Default: by its chat template.", rich_help_panel=CHATS
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(help="Read calls where a request leaves it to the model to make some.", rich_help_panel=CHATS),
    ] = True,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Requests that may wait for a first token; one more gets 429.", rich_help_panel=LIMITS)
    ] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request's body.", rich_help_panel=LIMITS)] = 16 * 2**20,
    max_connections: Annotated[int, typer.Option(min=1, help="One more gets 503.", rich_help_panel=LIMITS)] = 4096,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="Send a span of each request to this OTLP endpoint (extra otel).", rich_help_panel=SERVER),
    ] = None,
    operator_paths: Annotated[
        bool,
        typer.Option(
            "--operator-paths",
            help="Serve /pause, /resume, /abort_requests and /reset_prefix_cache, which all clients feel.",
            rich_help_panel=SERVER,
        ),
    ] = False,
    files_dir: Annotated[
        Path | None,
        typer.Option(help="Let clients store files and run batches, kept in this folder over restarts.", rich_help_panel=SERVER),
    ] = None,
    max_file: Annotated[int, typer.Option(min=1, help="Bytes of a file, with --files-dir.", rich_help_panel=LIMITS)] = 200
    * 2**20,
    batch_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Lines of a batch that run at a time. Default: half of what the engine takes.", rich_help_panel=LIMITS
        ),
    ] = None,
    max_stored_responses: Annotated[
        int,
        typer.Option(min=0, help="Responses of /v1/responses kept in memory to be continued by id.", rich_help_panel=LIMITS),
    ] = 1000,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that a request may take. Default: any.", rich_help_panel=LIMITS)
    ] = None,
    read_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a client may take to send a request.", rich_help_panel=LIMITS)
    ] = 30.0,
    write_timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a client may leave an answer unread.", rich_help_panel=LIMITS)
    ] = 60.0,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that requests may go on after SIGTERM.", rich_help_panel=LIMITS)
    ] = 30.0,
    step_timeout: Annotated[
        float,
        typer.Option(
            min=0.001, help="Seconds without the end of a step after which /health answers 503.", rich_help_panel=LIMITS
        ),
    ] = 300.0,
    restart_engine: Annotated[
        int,
        typer.Option(
            min=0,
            help="Times that an engine is started again which a fault has ended. With none left the server ends, exit code 1.",
            rich_help_panel=LIMITS,
        ),
    ] = 0,
) -> None:
    """Serve MODEL over HTTP, with OpenAI's API and a web page.

    The API has chats and completions, or embeddings and scores, by the model. /metrics is for Prometheus.
    """
    from headway.server.options import ServerOptions, bound_socket

    model = _model(context, model, model_option)
    options = ServerOptions(
        served_model_names=tuple(served_model_name or ()) or (model,),
        lora_modules=adapters_of(lora_modules or (), engine["enable_lora"]),
        api_key=os.environ.get(_KEY_VARIABLE) if api_key is None else api_key,  # typer takes an empty variable for none
        max_queue=max_queue,
        max_body_bytes=max_body,
        max_connections=max_connections,
        request_timeout=request_timeout,
        read_timeout=read_timeout,
        write_timeout=write_timeout,
        shutdown_timeout=shutdown_timeout,
        step_timeout=step_timeout,
        otlp_traces_endpoint=otlp_traces_endpoint,
        operator_paths=operator_paths,
        files_dir=files_dir,
        max_file_bytes=max_file,
        batch_concurrency=batch_concurrency,
        max_stored_responses=max_stored_responses,
        profile_dir=profile_dir,
        enable_request_id_headers=enable_request_id_headers,
        split_special_tokens=split_special_tokens,
        allowed_hosts=tuple(allowed_hosts or ()),
        allowed_origins=_origins(allowed_origins or ()),
        generation_config=generation_config,
        chat_template=chat_template,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
    )
    args = EngineArgs.of(model, **engine)
    generating = {
        "--profile-dir": profile_dir,
        "--restart-engine": restart_engine,
        "--operator-paths": operator_paths,
        "--otlp-traces-endpoint": otlp_traces_endpoint,
    }
    sock = bound_socket(host, port)
    pooled = _find_pooled(args, restart_engine, generating)
    _check_at_once(options)
    _listen(args, pooled, options, host, sock, log_requests, restart_engine)


def _check_at_once(options: ServerOptions) -> None:
    """Check what the server opens only when it has its model, which may take minutes to load.

    :raises ConfigError: libraries for spans are missing, or the folder of files cannot be used.
    """
    if options.otlp_traces_endpoint is not None:
        from headway.server.operators.tracing import find_exporter

        find_exporter(options.otlp_traces_endpoint)
    if options.files_dir is not None:
        from headway.server.openai.batches.store import open_stores

        open_stores(options.files_dir)


def _model(context: typer.Context, argument: str, option: str | None) -> str:
    """What MODEL says, or --model, that of the command line before that of --config.

    :raises ConfigError: both are on the command line, and differ: MODEL may have been meant for the option before it.
    """
    told = [name for name in ("model", "model_option") if on_command_line(context, name)]
    if len(told) == 2 and argument != option:
        hint = "--served-model-name is repeated for each name of the model"
        raise ConfigError("MODEL and --model", "one model", f"{argument!r} and {option!r}", hint)
    return argument if told == ["model"] else option or argument


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """What --allowed-origins was given, a list in JSON taken apart.

    :raises ConfigError: a text that begins as a list and is none of texts.
    """
    found: list[str] = []
    for text in given:
        try:
            parts = parse_json(text, "--allowed-origins") if text.startswith("[") else [text]
        except ValueError:
            parts = [None]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigError("--allowed-origins", 'origins, or a list of them in JSON such as ["*"]', repr(text))
        found += parts
    return tuple(found)


def _listen(
    args: EngineArgs,
    pooled: PoolingModel | None,
    options: ServerOptions,
    host: str,
    sock: socket.socket,
    log_requests: bool,
    restart_engine: int,
) -> None:
    """Load the model and serve it until a signal. sock: bound to the host."""
    from headway.hosting.process_messages import spawn_engine

    model = args.model
    # It imports what it needs while this process does. Windows hands no sockets to children: there the engine has a thread, and
    # so has one that pools, whose texts wait for no other process.
    spawned = None if sys.platform == "win32" or pooled is not None else spawn_engine()
    try:
        from headway.server.launch import ready_lines
        from headway.server.launch import serve as listen
    except ImportError as error:
        if spawned is not None:
            spawned.wire.close()
        raise ConfigError("headway serve", "its libraries", str(error), "pip install 'headway[serve]'") from error
    if pooled is None:
        options = _with_parsers(options, args)
    err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    started = time.perf_counter()
    with err.status(f"loading {model}"):
        llm, found = _load(args, spawned, restart_engine, options) if pooled is None else _load_pooled(args, pooled)
    err.print(f"{model}: loaded in {time.perf_counter() - started:.1f} s; attention: {found}")
    from headway.hosting.host import EngineDeadError

    try:
        listen(llm, options, host, sock, log_requests, lambda url: err.print("\n".join(ready_lines(url, llm, options))))
    except EngineDeadError as error:
        err.print(f"headway: the server has ended with its engine: {error}")
        raise typer.Exit(1) from error


def _with_parsers(options: ServerOptions, args: EngineArgs) -> ServerOptions:
    """The options with the parsers of chats that plugins bring.

    :raises HeadwayError: a plugin that cannot be registered, or no parser has a name that was given.
    """
    from headway.core.chat.builtin import BUILTIN
    from headway.requests.chats import check_names

    brought = tuple(info for info in args.make_registry().chat_parsers.values() if info not in BUILTIN)
    check_names(options.tool_call_parser, options.reasoning_parser, brought)
    return replace(options, chat_parsers=brought)


def _find_pooled(args: EngineArgs, restarts: int, generating: Mapping[str, object]) -> PoolingModel | None:
    """The model, if it is one that is pooled.

    :raises ConfigError: an option that this machine or, of `generating`, a model which is pooled does not have.
    """
    from headway.engine_args import find_pooling_model

    if restarts and sys.platform == "win32":
        raise ConfigError("--restart-engine", "0 on Windows, where the engine has no process of its own", restarts)
    pooled = find_pooling_model(args)
    for name, value in generating.items():
        if value and pooled is not None:
            raise ConfigError(name, "a model that generates text", f"{args.model}, which is pooled", f"leave {name} out")
    return pooled


def _load_pooled(args: EngineArgs, found: PoolingModel) -> tuple[AsyncPooling, str]:
    """Load a model that is pooled; returns it and the choice of its backends in words."""
    from headway.pooling.assembly import PoolingClient, assemble_pooling
    from headway.pooling.async_pooling import AsyncPooling

    assembly = assemble_pooling(args, found)
    return AsyncPooling(PoolingClient(assembly)), str(assembly.engine.selector.selection)


def _load(args: EngineArgs, spawned: SpawnedEngine | None, restarts: int, options: ServerOptions) -> tuple[AsyncLLM, str]:
    """Have the engine's process load the model; without one, load it here.

    Returns it, and in words the choice of its backends and how its chats are read.
    """
    from headway.async_llm import AsyncLLM
    from headway.hosting.driver import driver_of
    from headway.hosting.host import add_adapter
    from headway.hosting.process_host import EngineProcess, RestartingEngine
    from headway.hosting.thread_host import EngineThread
    from headway.server.service import chat_format_of

    make = partial(driver_of, args)
    host = EngineThread(make()) if spawned is None else RestartingEngine(EngineProcess(make, spawned), make, restarts)
    for adapter in options.lora_modules:
        add_adapter(host, adapter)
    llm = AsyncLLM.over(host)
    chats = chat_format_of(llm, options)
    lines = llm.facts.selection, f"chats: {chats.why}" if chats.template else "", llm.facts.rounding
    return llm, "\n".join(filter(None, lines))
