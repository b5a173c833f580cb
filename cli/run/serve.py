"""`headway serve`: an OpenAI-compatible HTTP server for a model."""

from __future__ import annotations

import inspect
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from headway.cli.engine_options import PANEL, takes_engine_options
from headway.cli.options import AdapterModules, Command, ConfigFile, adapters_of, on_command_line, with_flags
from headway.core.contract.errors import ConfigError
from headway.core.system.json_text import parse_json
from headway.engine_args import EngineArgs, PoolingModel, find_pooling_model, help_texts
from headway.server.options import ServerOptions, bound_socket

if TYPE_CHECKING:
    from headway.async_llm import AsyncLLM
    from headway.hosting.process_messages import SpawnedEngine
    from headway.pooling.assembly import AsyncPooling


def takes_server_options(command: Command) -> Command:
    """Replace a command's parameter `server`, a dict of values, by options for the fields of `ServerOptions`."""
    hints = get_type_hints(ServerOptions, include_extras=True)
    many = [field.name for field in fields(ServerOptions) if field.default == ()]
    flags = []
    for field in fields(ServerOptions):
        if get_origin(hints[field.name]) is Annotated:
            kind, option = get_args(hints[field.name])
            kind, default = (list[str] | None, None) if field.name in many else (kind, field.default)
            place = inspect.Parameter.KEYWORD_ONLY
            flags.append(inspect.Parameter(field.name, place, default=default, annotation=Annotated[kind, option]))
    return with_flags(
        command,
        "server",
        flags,
        lambda values: {name: tuple(each or ()) if name in many else each for name, each in values.items()},
    )


@takes_engine_options(*(name for name in help_texts() if name not in ("model", "generation_config")))  # `serve` has its own
@takes_server_options
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=help_texts()["model"])] = "smollm2",
    model_option: Annotated[
        str | None, typer.Option("--model", help="Alternative to the argument MODEL.", rich_help_panel=PANEL)
    ] = None,
    *,
    engine: dict[str, Any],
    config: ConfigFile = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0 means all addresses of this machine.", rich_help_panel="Server")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on. 0 picks a free port.", rich_help_panel="Server")
    ] = 8000,
    lora_modules: AdapterModules = None,
    server: dict[str, Any],
    restart_engine: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of times to restart a failed engine. After that, the server exits with code 1.",
            rich_help_panel="Limits",
        ),
    ] = 0,
) -> None:
    """Serve MODEL over HTTP with OpenAI's API and a web UI.

    Generation models offer chat and text completions; pooling models offer embeddings and scores. /metrics is for Prometheus.
    """
    model = _model(context, model, model_option)
    if server["api_key"] is None:
        server["api_key"] = os.environ.get("HEADWAY_API_KEY")  # typer treats an empty variable as unset
    server["served_model_names"] = server["served_model_names"] or (model,)
    server["allowed_origins"] = _origins(server["allowed_origins"])
    server["lora_modules"] = adapters_of(lora_modules or (), engine["enable_lora"])
    options = ServerOptions(**server)
    args = EngineArgs.of(**{**engine, "model": model})
    sock = bound_socket(host, port)
    if restart_engine and sys.platform == "win32":
        need = "0 on Windows, where the engine has no process of its own"
        raise ConfigError("--restart-engine", need, restart_engine)
    pooled = find_pooling_model(args)
    for name, value in (
        ("--profile-dir", options.profile_dir),
        ("--restart-engine", restart_engine),
        ("--operator-paths", options.operator_paths),
        ("--otlp-traces-endpoint", options.otlp_traces_endpoint),
    ):
        if value and pooled is not None:
            raise ConfigError(name, "a model that generates text", f"{args.model}, which is pooled", f"leave {name} out")
    _check_at_once(options)
    _listen(args, pooled, options, host, sock, restart_engine)


def _check_at_once(options: ServerOptions) -> None:
    """Check the tracing libraries and the files folder before loading the model. :raises ConfigError: if the libraries or the
    folder cannot be used."""
    if options.otlp_traces_endpoint is not None:
        from headway.server.operators.tracing import find_exporter

        find_exporter(options.otlp_traces_endpoint)
    if options.files_dir is not None:
        from headway.server.openai.batches.store import open_stores

        open_stores(options.files_dir)


def _model(context: typer.Context, argument: str, option: str | None) -> str:
    """Return MODEL or --model, from the command line or --config. :raises ConfigError: if both are given and differ."""
    stated = [name for name in ("model", "model_option") if on_command_line(context, name)]
    if len(stated) == 2 and argument != option:
        hint = "--served-model-name is repeated for each name of the model"
        raise ConfigError("MODEL and --model", "one model", f"{argument!r} and {option!r}", hint)
    return argument if stated == ["model"] else option or argument


def _origins(given: Sequence[str]) -> tuple[str, ...]:
    """Return the values of --allowed-origins, with JSON lists expanded. :raises ConfigError: if a list is invalid."""
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
    args: EngineArgs, pooled: PoolingModel | None, options: ServerOptions, host: str, sock: socket.socket, restart_engine: int
) -> None:
    """Load the model and serve it until a signal arrives. sock: a socket bound to the host."""
    from headway.hosting.process_messages import spawn_engine

    model = args.model
    # The child imports its modules while this process imports its own. Windows cannot pass sockets to children, so there the
    # engine runs in a thread. A pooling model also runs in a thread, since its texts do not wait for another process.
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
    llm: AsyncLLM | AsyncPooling
    with err.status(f"loading {model}"):
        if pooled is None:
            llm, found = _load(args, spawned, restart_engine, options)
        else:
            from headway.pooling.assembly import AsyncPooling, PoolingClient, assemble_pooling

            assembly = assemble_pooling(args, pooled)
            llm, found = AsyncPooling(PoolingClient(assembly)), str(assembly.engine.selector.selection)
    err.print(f"{model}: loaded in {time.perf_counter() - started:.1f} s; attention: {found}")
    from headway.hosting.host import EngineDeadError

    try:
        listen(llm, options, host, sock, lambda url: err.print("\n".join(ready_lines(url, llm, options))))
    except EngineDeadError as error:
        err.print(f"headway: the server has ended with its engine: {error}")
        raise typer.Exit(1) from error


def _with_parsers(options: ServerOptions, args: EngineArgs) -> ServerOptions:
    """Add the chat parsers of plugins to the options. :raises HeadwayError: if a plugin or a parser name is invalid."""
    from headway.core.chat.builtin import BUILTIN
    from headway.requests.chats import check_names

    brought = tuple(info for info in args.make_registry().chat_parsers.values() if info not in BUILTIN)
    check_names(options.tool_call_parser, options.reasoning_parser, brought)
    return replace(options, chat_parsers=brought)


def _load(args: EngineArgs, spawned: SpawnedEngine | None, restarts: int, options: ServerOptions) -> tuple[AsyncLLM, str]:
    """Load the model in the engine's process or in this one. Return the engine and a text that names its backends and chat
    format."""
    from headway.async_llm import AsyncLLM
    from headway.hosting.driver import driver_of
    from headway.hosting.host import EngineHost, EngineThread, add_adapter
    from headway.hosting.process_host import EngineProcess
    from headway.server.service import chat_format_of

    make = partial(driver_of, args)
    host: EngineHost = EngineThread(make()) if spawned is None else EngineProcess(make, spawned, restarts)
    for adapter in options.lora_modules:
        add_adapter(host, adapter)
    llm = AsyncLLM.over(host)
    chats = chat_format_of(llm, options)
    lines = llm.facts.selection, f"chats: {chats.why}" if chats.template else "", llm.facts.rounding
    return llm, "\n".join(filter(None, lines))
