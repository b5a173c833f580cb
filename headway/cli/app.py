"""The command line: `headway generate`, `headway backends`, `headway diff`, `headway doctor`, `headway bench ...`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from headway.cli.backends import backends
from headway.cli.bench_crossover import crossover
from headway.cli.bench_kernel import kernel
from headway.cli.bench_throughput import throughput
from headway.cli.build import build
from headway.cli.check import check
from headway.cli.diff import diff
from headway.cli.doctor import doctor
from headway.cli.explain import explain
from headway.cli.generate import generate
from headway.cli.table import table
from headway.version import __version__

app = typer.Typer(
    name="headway",
    help="LLM inference on whichever attention kernel is fastest here, now, for this batch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure, and compare with others.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(table, name="table")
listing = typer.Typer(invoke_without_command=True, callback=backends)
listing.command()(explain)
app.add_typer(listing, name="backends")
app.command()(generate)
app.command()(diff)
app.command()(doctor)
app.command()(build)
app.command()(check)
bench.command()(throughput)
bench.command()(kernel)
bench.command()(crossover)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def common(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine chooses.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options of every command."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="headway: %(message)s")
    # Libraries stay quiet: their warnings are not about anything a user of this command did.
    for library in ("transformers", "torch", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.ERROR)
