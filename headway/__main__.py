"""`headway` and `python -m headway`."""

from __future__ import annotations

import sys

from headway.core.contract.errors import HeadwayError


def main() -> None:
    """Run the command line. The user's own mistakes end with one message and exit code 2, never a traceback."""
    from headway.cli.app import app

    try:
        app()
    except HeadwayError as error:
        from rich.text import Text

        from headway.core.system.terminal import Terminal

        Terminal(stderr=True, soft_wrap=True).print(Text("headway: error: ", "bold red").append(str(error), "default"))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
