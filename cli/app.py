"""The command line: `headway generate`, `headway chat`, `headway backends`, `headway doctor`, `headway bench ...` and others."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from headway.compat.vllm_words import ANY_VALUE, FLAGS, SHORT_FLAGS
from headway.core.contract.errors import ConfigError
from headway.core.system.logs import log_to_stderr
from headway.core.system.text import shown

_MAX_ERROR_LENGTH = 400  # Maximum number of characters of an error


def _bounded(parameter: Any) -> bool:
    """Return whether a parameter has a minimum or maximum; the engine checks the other options."""
    places = parameter, getattr(parameter, "type", None)
    return any(getattr(place, end, None) is not None for place in places for end in ("min", "max"))


class Command(TyperCommand):
    """A command whose error for an unknown option names the nearest known option."""

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """:raises ConfigError: if an option does not exist, or a number exceeds 64 bits or is not finite."""
        words = [each.partition("=")[0] for each in arguments]
        try:
            left = super().parse_args(context, arguments)
            self._check_numbers(context)
            return left
        except Exception as error:
            if not hasattr(error, "possibilities"):  # click's NoSuchOption; some releases of typer bundle their own click
                parse_message = getattr(error, "message", "")
                if len(parse_message) > _MAX_ERROR_LENGTH:  # the message repeats the argument
                    error.message = f"{parse_message[: _MAX_ERROR_LENGTH // 2]}...{parse_message[-_MAX_ERROR_LENGTH // 2 :]}"  # type: ignore[attr-defined]
                raise
            option: str = error.option_name  # type: ignore[attr-defined]
            short = next((word for word in words if word in SHORT_FLAGS and word.startswith(option)), "")
            near = [SHORT_FLAGS[short]] if short else [name for name in error.possibilities or () if name.startswith("--")]
            name = option.lstrip("-").replace("-", "_")
            hint = FLAGS.get(name) or ("leave it out: it changes no answer here" if name in ANY_VALUE else "")
            hint = hint or (f"did you mean {near[0]}?" if near else f"{context.command_path} --help lists them")
            option = short or option
            raise ConfigError(option, f"an option of {context.command_path}", f"{option!r}", hint) from error

    def _check_numbers(self, context: Any) -> None:
        parameters: list[Any] = list(self.params)
        for parameter in parameters:
            given = context.params.get(parameter.name)
            for value in given if isinstance(given, list | tuple) else [given]:
                if isinstance(value, int) and not -(2**63) <= value < 2**63:
                    raise ConfigError(max(parameter.opts, key=len), "a whole number of at most 64 bits", shown(value))
                if _bounded(parameter) and isinstance(value, float) and not math.isfinite(value):
                    raise ConfigError(max(parameter.opts, key=len), "a finite number", value)


_EXAMPLE = 'Example: headway generate --chat "What is the capital of France?"'
RUN, CHOOSE = "Run a model", "Choose a backend"
MEASURE, WRITE = "Measure and check", "Write a backend"
"""Panels of `headway --help`."""

_COMMANDS: Final = {
    "generate": ("run.generate", RUN),
    "chat": ("run.chat", RUN),
    "serve": ("run.serve", RUN),
    "batch": ("run.batch", RUN),
    "doctor": ("look.doctor", CHOOSE),
    "plan": ("measure.plan", CHOOSE),
    "warm": ("run.warm", CHOOSE),
    "build": ("run.warm", CHOOSE),
    "diff": ("measure.diff", MEASURE),
    "replay": ("measure.replay", MEASURE),
    "new-backend": ("look.plugins", WRITE),
    "new-kernel": ("look.plugins", WRITE),
    "check": ("measure.check", WRITE),
    "plugins": ("look.plugins", WRITE),
}
"""Command name -> (module that contains the function of this name, help panel of the command). Excludes command groups."""


def make_app(names: Iterable[str] = _COMMANDS, groups: bool = True) -> typer.Typer:
    """Return the command line. names: commands to include. groups: whether to add `backends`, `bench` and `table`."""
    app = typer.Typer(
        name="headway",
        help="Run LLMs with the attention kernels that are fastest on this machine.",
        epilog=_EXAMPLE,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(common)
    for name in names:
        module, panel = _COMMANDS[name]
        function = getattr(import_module(f"headway.cli.{module}"), name.replace("-", "_"))
        app.command(name, cls=Command, rich_help_panel=panel)(function)
    if groups:
        _add_groups(app)
    return app


def _add_groups(app: typer.Typer) -> None:
    from headway.cli.look.backends import backends
    from headway.cli.look.explain import explain
    from headway.cli.look.table import table
    from headway.cli.measure.bench_crossover import crossover
    from headway.cli.measure.bench_kernel import kernel
    from headway.cli.measure.bench_serve import serve
    from headway.cli.measure.bench_throughput import throughput

    listing = typer.Typer(invoke_without_command=True, callback=backends)
    listing.command(cls=Command)(explain)
    app.add_typer(listing, name="backends", rich_help_panel=CHOOSE)
    bench = typer.Typer(help="Measure speed: generation, kernels, crossover tables, servers.", no_args_is_help=True)
    app.add_typer(bench, name="bench", rich_help_panel=MEASURE)
    app.add_typer(table, name="table", rich_help_panel=MEASURE)
    for each in (throughput, kernel, crossover, serve):
        bench.command(cls=Command)(each)


def command_for(arguments: Sequence[str]) -> Any:
    """Return the typer app with only the command that the first argument names, since importing all commands takes a tenth of the
    start time."""
    named = bool(arguments) and arguments[0] in _COMMANDS
    return typer.main.get_command(make_app(arguments[:1], groups=False) if named else make_app())


def _version(wanted: bool) -> None:
    if wanted:
        from headway.version import __version__

        print(f"headway {__version__}")
        raise typer.Exit


def common(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log the engine's choices.")] = False,
    wanted: Annotated[
        str | None, typer.Option("--plugins", help="Installed plugins to use: all, none, allow=A,B or block=A,B.")
    ] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options of every command."""
    log_to_stderr(logging.INFO if verbose else logging.WARNING)
    if wanted is not None:
        from headway.registry.records import VARIABLE, PluginPolicy

        PluginPolicy.parse(wanted, "--plugins")
        os.environ[VARIABLE] = wanted  # child processes inherit it
