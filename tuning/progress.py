"""What every measurement runs under: its device made current, and a progress bar where somebody watches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import rich.progress as bars
import torch
from rich.console import Console

from headway.core.system.terminal import Terminal


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches, and times, on the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def progress_bar(console: Console | None) -> bars.Progress:
    """A bar with the time left; hidden where nobody watches a terminal."""
    hidden = console is None or not console.is_terminal
    return bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=console or Terminal(stderr=True),
        disable=hidden,
        transient=True,
    )
