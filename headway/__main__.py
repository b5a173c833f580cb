"""`headway` and `python -m headway`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from typing import Final

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.faults import end_quietly, in_words, never_refuse_a_character, open_what_is_closed, trace
from headway.interrupts import never_lost

_NARROWEST: Final = 20
"""Columns."""
_BROKEN_PIPE: Final = 141
"""As shells report SIGPIPE."""


def main() -> None:
    """Run the command line.

    A mistake of the user's and an error of the world (a full disk, a folder in a file's place, too little memory) end with one
    message and exit code 2. Only a fault of Headway's own shows a traceback.
    """
    open_what_is_closed()
    never_refuse_a_character(sys.stdout, sys.stderr)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < _NARROWEST:  # some terminals say 0; nothing can be shown in a few columns
        os.environ["COLUMNS"] = str(_NARROWEST)
    try:
        try:
            with never_lost():
                _run()
        finally:
            sys.stdout.flush()  # a full device shows here, and not when Python ends and can only complain
            # Once Python ends nothing is left to save, and Ctrl-C shall end it without a traceback of some library's.
            atexit.register(_let_go, os.getpid())
    except BrokenPipeError:
        end_quietly(sys.stdout)
        sys.exit(_BROKEN_PIPE)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # which typer has made an exit of
            end_quietly(sys.stdout)
            sys.exit(_BROKEN_PIPE)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        said = str(error) if isinstance(error, HeadwayError) else in_words(error)
        end_quietly(sys.stdout)
        if said is None:
            traceback.print_exception(error)
            _say("fault: ", "the lines above tell of a fault of Headway's own; please report it with them and the command")
            sys.exit(1)
        trace("the command", error)
        _say("error: ", said)
        sys.exit(2)


def _let_go(process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries end the process without a word about it
        raise ConfigError("the working folder", "one that exists", "one that was removed", "cd into another") from None
    from headway.cli.app import app

    app()


def _say(kind: str, text: str) -> None:
    from rich.text import Text

    from headway.core.system.terminal import Terminal

    if sys.stderr is not None:
        Terminal(stderr=True, soft_wrap=True).print(Text(f"headway: {kind}", "bold red").append(text, "default"))


if __name__ == "__main__":
    main()
