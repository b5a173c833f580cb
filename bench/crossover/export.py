"""A table or picture of it in a file, in the form that the file's name ends with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headway.bench.crossover.report import to_csv, to_markdown
from headway.bench.crossover.view import View
from headway.core.contract.errors import ConfigError
from headway.testing.json_files import write_bytes, write_json


def _json(view: View, path: Path) -> None:
    write_json(view.table, path)


def _csv(view: View, path: Path) -> None:
    write_bytes(to_csv(view.table).encode(), path)


def _markdown(view: View, path: Path) -> None:
    write_bytes(to_markdown(view).encode(), path)


def _html(view: View, path: Path) -> None:
    from headway.bench.crossover.html import to_html

    write_bytes(to_html(view).encode(), path)


def _png(view: View, path: Path) -> None:
    from headway.bench.crossover.plot import to_png

    write_bytes(to_png(view), path)


FORMS: dict[str, Callable[[View, Path], None]] = {
    ".json": _json,
    ".csv": _csv,
    ".md": _markdown,
    ".html": _html,
    ".png": _png,
}
"""By suffix. JSON and CSV hold every layout and block size, the others the view's."""


def check_target(path: Path, table: Path | None) -> None:
    """Check before anything slow is done for it. table: file of the table that is to be shown.

    :raises ConfigError: a form that nobody writes, or the file of the table itself, whose cells would be lost.
    """
    if table is not None and path.resolve() == table.resolve():
        raise ConfigError("--export", "another file than the table's", str(path))
    check_suffix(path)


def check_suffix(path: Path) -> None:
    """:raises ConfigError: a form that nobody writes."""
    if path.suffix.lower() not in FORMS:
        raise ConfigError("--export", f"a file name that ends in {' or '.join(FORMS)}", str(path))


def export(view: View, path: Path) -> None:
    """Write the view, whole or not at all.

    :raises ConfigError: a form that nobody writes, a library it needs is missing, or the folder cannot be written to.
    """
    check_suffix(path)
    FORMS[path.suffix.lower()](view, path)
