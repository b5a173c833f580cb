"""Entry point of `headway` and `python -m headway`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from typing import Final

from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.system.logs import log_traceback
from headway.core.system.system_errors import (
    drop_unwritten,
    escape_unencodable,
    open_closed_streams,
    outlive_stderr,
    system_error_text,
)
from headway.machine.process import collect_seldom, handle_sigint, interrupt_command

_NARROWEST: Final = 20  # Minimum number of columns to accept from the environment
_BROKEN_PIPE: Final = 141  # Exit code by which shells report SIGPIPE
_INTERRUPTED: Final = 130  # Exit code by which shells report SIGINT


def main() -> None:
    """Run the command line.

    A user's mistake or a system error (full disk, out of memory) ends with one message and exit code 2. Ctrl-C ends the process
    with exit code 130 or by SIGINT. Only a bug in Headway shows a traceback.
    """
    open_closed_streams()
    outlive_stderr()
    escape_unencodable(sys.stdout, sys.stderr)
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < _NARROWEST:  # some terminals report 0, and no output fits a few columns
        os.environ["COLUMNS"] = str(_NARROWEST)
    try:
        try:
            with handle_sigint(interrupt_command, instead_of=signal.default_int_handler):
                run_command_line()
        finally:
            sys.stdout.flush()  # report a full device here; at exit Python can only complain
            # Nothing needs saving during interpreter exit, so Ctrl-C ends the process without a library's traceback.
            atexit.register(_stop_handling_sigint, os.getpid())
    except BrokenPipeError:
        drop_unwritten(sys.stdout)
        sys.exit(_BROKEN_PIPE)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer converts it to an exit
            drop_unwritten(sys.stdout)
            sys.exit(_BROKEN_PIPE)
        raise
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except Exception as error:
        message = error.on_command_line or str(error) if isinstance(error, HeadwayError) else system_error_text(error)
        drop_unwritten(sys.stdout)
        if message is None:
            traceback.print_exception(error)
            _say("fault: ", "the lines above show a bug in Headway; please report it with them and the command")
            sys.exit(1)
        log_traceback("the command", error)
        _say("error: ", message)
        sys.exit(2)


def _stop_handling_sigint(process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_command_line() -> None:
    """Import the commands and run the one that sys.argv names."""
    collect_seldom()
    try:
        os.getcwd()
    except FileNotFoundError:  # libraries would end the process without a message
        raise ConfigError("the working folder", "one that exists", "one that was removed", "cd into another") from None
    from headway.cli.app import command_for

    command_for(sys.argv[1:])()


def _say(kind: str, text: str) -> None:
    from rich.text import Text

    from headway.core.system.terminal import Terminal

    if sys.stderr is not None:
        Terminal(stderr=True, soft_wrap=True).print(Text(f"headway: {kind}", "bold red").append(text, "default"))


if __name__ == "__main__":
    main()
