"""Studies as commands, `python -m headway.bench.studies.NAME`. An error of Headway prints one line and exits with code 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from headway.core.contract.errors import HeadwayError
from headway.core.system.terminal import Terminal


def study_app(command: Callable[..., Any]) -> typer.Typer:
    """Return the command as a typer application that does not catch Headway's errors."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return app


def run_study(command: Callable[..., Any]) -> None:
    """Parse a command's options from the command line and run it."""
    try:
        study_app(command)()
    except HeadwayError as error:
        Terminal(stderr=True, soft_wrap=True).print(f"headway: error: {error}", highlight=False)
        raise SystemExit(2) from None
