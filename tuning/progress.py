"""What every measurement runs under: its device made current, and a progress bar where somebody watches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import rich.progress as bars
import torch
from rich.console import Console


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches, and times, on the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def progress_bar(console: Console | None) -> bars.Progress:
    """A bar with the time left; hidden where nobody watches a terminal."""
    shown = console if console is not None and console.is_terminal else None
    return bars.Progress(
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        console=shown or Console(quiet=True),  # rich before 14.3 ends a bar with an empty line, a hidden one too
        disable=shown is None,
        transient=True,
    )
