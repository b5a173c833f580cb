"""`headway new-backend`: a package around a backend that runs, for an author to put a kernel into."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer


def new_backend(
    name: Annotated[str, typer.Argument(help="The backend's name, as --attn-backend will take it: my_kernel.")],
    into: Annotated[Path | None, typer.Option(help="Folder to write. Default: headway-NAME, here.")] = None,
) -> None:
    """Write a package: a backend that runs, its conformance test, a README and a workflow. docs/tutorial-backend.md goes on."""
    from headway.new_backend import distribution_of
    from headway.new_backend import new_backend as write
    from headway.registry import create_registry

    folder = into or Path(distribution_of(name))
    files = write(name, folder, create_registry())
    module = next(path for path in files if path.suffix == ".py" and path.parent == Path())
    title = "".join(part.capitalize() for part in name.split("_"))
    written = f"{folder}: {', '.join(map(str, files))}"
    print(textwrap.fill(written, 79, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))
    print(f"It runs as it is. Your kernel replaces attend() in {module}. Next:\n")
    for line in (
        f"cd {folder}",
        f"headway check {module}:{title} --quick",
        f'headway generate --plugin {module} --attn-backend {name} "The capital of France is"',
    ):
        print(f"    {line}")
