"""`headway warm` and `headway build`: compile the kernels of a model or a backend ahead of time."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from headway.cli.engine_options import takes_engine_options
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.system.files import kernel_folders
from headway.core.system.terminal import Terminal
from headway.engine_args import help_texts

_BACKEND = "vllm_paged"


def build(
    backend: Annotated[str, typer.Argument(help=f"Backend to compile. Only {_BACKEND} has kernels to compile ahead of time.")],
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Head dimension of the layers. Repeatable. Default: 64 and 128.")
    ] = None,
    block_size: Annotated[
        list[int] | None, typer.Option(help="Number of tokens per KV cache block. Repeatable. Default: 16.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Element type of queries and outputs. Repeatable. Default: bfloat16 and float16.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="Element type of the KV cache: auto (as --dtype) or fp8_e4m3.")] = "auto",
    arch: Annotated[str | None, typer.Option(help="GPU architecture, such as sm_90. Default: this machine's GPU.")] = None,
) -> None:
    """Compile kernels for the given layer shapes ahead of time.

    Each kernel takes about half a second. Without this command, kernels are compiled at their first use.
    """
    import torch

    from headway.backends.vllm_paged.backend import CSRC, VllmPagedAttention, cache_variant, variant_of
    from headway.core.contract.spec import DTYPES, KV_DTYPES
    from headway.kernels.runtime.nvrtc.compiler import Variant, architecture, find_compiler
    from headway.kernels.runtime.nvrtc.store import build_all

    if backend != _BACKEND:
        raise ConfigError("backend", f"one with kernels to compile ahead of time: {_BACKEND}", repr(backend))
    names = dtype or ["bfloat16", "float16"]
    for name in names:
        if name not in DTYPES:
            raise ConfigError("--dtype", f"one of {', '.join(DTYPES)}", repr(name))
    narrow = {known: each for known, each in KV_DTYPES.items() if each in VllmPagedAttention.capabilities.kv_dtypes}
    if kv_dtype != "auto" and kv_dtype not in narrow:
        raise ConfigError("--kv-dtype", f"auto or one of {', '.join(narrow)}", repr(kv_dtype))
    if arch is not None and not re.fullmatch(r"sm_[1-9][0-9]{1,2}[af]?", arch):
        raise ConfigError("--arch", "an architecture such as sm_90", repr(arch))
    compiler, support = find_compiler()
    if compiler is None:
        raise UnsupportedError(f"headway build {backend}", support.reasons)
    if arch is None and not torch.cuda.is_available():
        raise ConfigError("--arch", "an architecture such as sm_90, as there is no GPU here to ask", "none")
    target = arch or architecture(torch.device("cuda", torch.cuda.current_device()))
    variants = [Variant(CSRC, "blocks.cu")]
    for name, size, block in product(names, head_dim or [64, 128], block_size or [16]):
        cache_dtype = narrow.get(kv_dtype, DTYPES[name])
        variants.append(variant_of(DTYPES[name], cache_dtype, size, block, target))
        variants.append(cache_variant(DTYPES[name], cache_dtype, size, block))
    print(f"{backend}: {len(variants)} kernels for {target} with {compiler.name} ({compiler.version})")
    for number, (variant, built) in enumerate(build_all(variants, target, compiler, os.cpu_count() or 1), 1):
        print(f"[{number}/{len(variants)}] {variant}: {built.seconds:.1f} s", flush=True)
    print(f"saved in {built.path.parent}" if built.path else "not saved: the folder is not writable")


@takes_engine_options(
    *(name for name in help_texts() if name not in ("seed", "skip_tokenizer_init", "num_threads")), load_format="dummy"
)
def warm(engine: dict[str, Any]) -> None:
    """Compile every kernel that a model may need on this GPU.

    Later engine starts then take seconds.

    Use the options that the engine will be started with. By default (--load-format dummy) weights are random, so that only a
    config.json is needed.
    """
    import torch

    from headway.llm import LLM

    if not torch.cuda.is_available():
        hint = "headway build vllm_paged --arch sm_90 compiles CUDA C++ without one"
        raise ConfigError("headway warm", "a GPU of the kind that will serve", "none that torch can use", hint)
    model = engine["model"]
    columns = SpinnerColumn(), TextColumn("{task.completed:.0f} kernels"), TimeElapsedColumn()
    started: list[LLM] = []
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=None)
        warmed = watch_start(
            lambda: started.append(LLM(**{**engine, "skip_tokenizer_init": True})),
            lambda count: progress.update(task, completed=count),
        )
    show(warmed, model, Terminal())
    Terminal().print(f"the start took {started[0].start_times}", highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Kernels that the start of an engine compiled or loaded, and the folders of the kernel cache."""

    seconds: float
    """Seconds from the call until the engine is ready, including creating random weights."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Kernel's name -> number of its variants that were compiled, or loaded from the kernel cache."""
    compiled: int = 0
    """Number of variants that this start added to the kernel cache."""
    folders: dict[Path, int] = field(default_factory=dict)
    """Folder of the kernel cache -> total size of its files in bytes."""


def watch_start(start: Callable[[], object], on_count: Callable[[int], None] = lambda count: None) -> WarmStart:
    """Start an engine with `start`, calling `on_count` with the number of kernels compiled or loaded so far."""
    from headway.core.engine.execution.model_runner import CompilationWatch

    with suppress(ImportError):
        import headway.backends.triton  # noqa: F401 -- the watch only observes Triton if it is loaded
    folders = kernel_folders()
    before, kernels = _cubins(folders), Counter[str]()

    def note(name: str) -> None:
        kernels[name.split(" of ")[0]] += 1
        on_count(kernels.total())

    watch = CompilationWatch(note)
    began = time.perf_counter()
    start()
    seconds = time.perf_counter() - began
    del watch
    return WarmStart(seconds, kernels, len(_cubins(folders) - before), {folder: _bytes(folder) for folder in folders})


def show(warmed: WarmStart, model: str, console: Console) -> None:
    """Print the kernels as a table, and the folders of the kernel cache."""
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


def _cubins(folders: Iterable[Path]) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*.cubin")}


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
