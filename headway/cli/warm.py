"""`headway warm`: compile and keep every kernel that a model may need, before it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headway.cli.engine_options import takes_engine_options
from headway.core.contract.errors import ConfigError
from headway.core.system.terminal import Terminal
from headway.engine_args import help_texts

if TYPE_CHECKING:
    from headway.warm import Warmed


@takes_engine_options(
    *(name for name in help_texts() if name not in ("seed", "skip_tokenizer_init", "num_threads")), load_format="dummy"
)
def warm(engine: dict[str, Any]) -> None:
    """Compile and keep every kernel that a model may need on this GPU, so that its engine is ready in seconds.

    Give the options that the engine will be started with. The weights are random unless --load-format says otherwise, so that a
    config.json is all it takes.
    """
    import torch

    from headway.llm import LLM
    from headway.warm import warm as make_ready

    if not torch.cuda.is_available():
        hint = "headway build vllm_paged --arch sm_90 compiles CUDA C++ without one"
        raise ConfigError("headway warm", "a GPU of the kind that will serve", "none that torch can use", hint)
    model = engine.pop("model")
    columns = SpinnerColumn(), TextColumn("{task.completed:.0f} kernels"), TimeElapsedColumn()
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=None)
        warmed = make_ready(
            lambda: LLM(model, skip_tokenizer_init=True, **engine), lambda count: progress.update(task, completed=count)
        )
    show(warmed, model, Terminal())


def show(warmed: Warmed, model: str, console: Console) -> None:
    """The table that a person reads, and where the kernels are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kernel", style="bold")
    table.add_column("variants", justify="right")
    for name, count in sorted(warmed.kernels.items()):
        table.add_row(name, str(count))
    console.print(table)
    total = warmed.kernels.total()
    counted = f"{total} kernels, {warmed.compiled} of them compiled, {total - warmed.compiled} found"
    console.print(f"{model}: ready in {warmed.seconds:.1f} s; {counted}", highlight=False, soft_wrap=True)
    for folder, size in warmed.folders.items():
        console.print(f"{size / 2**20:.1f} MiB in {folder}", highlight=False, soft_wrap=True)
