"""Benefit of packed weights in kernels/linear/linear.py: F.linear compared with the packed GEMM, for decode and prefill row
counts.

python -m headway.bench.studies.linear_layers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import torch
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from headway.core.contract.spec import DTYPE_NAMES
from headway.core.system.terminal import Terminal
from headway.kernels.linear.linear import Linear
from headway.machine.process import set_threads
from headway.tuning.measure.timing import Timer

SHAPES = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}
"""(out_features, in_features) of SmolLM2-135M."""
ROWS = (1, 4, 16, 64, 256)
_COPIES = 12
"""Number of weights used in rotation, so that each weight is read from memory as in a model."""


def main() -> None:
    """Print a table for each element type."""
    threads = set_threads()
    for dtype in (torch.float32, torch.bfloat16):
        Terminal().print(measure(dtype, threads))


def measure(dtype: torch.dtype, threads: int) -> Table:
    """Return a table of GEMM times in one element type."""
    cpu, timer = torch.device("cpu"), Timer()
    table = Table(
        title=f"{DTYPE_NAMES[dtype]} GEMM, ms (F.linear / packed), {threads} threads, torch {torch.__version__}",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("layer")
    for rows in ROWS:
        table.add_column(f"{rows} rows", justify="right")
    for name, (out_features, in_features) in track(SHAPES.items(), "timing", console=Terminal(stderr=True), transient=True):
        weights = [torch.randn(out_features, in_features).to(dtype) for _ in range(_COPIES if out_features < 10000 else 1)]
        row = []
        for rows in ROWS:
            x = torch.randn(rows, in_features).to(dtype)
            plain = timer.time(_cycle_layers([partial(linear, weight=w) for w in weights], x), cpu)
            packed = timer.time(_cycle_layers([Linear(w) for w in weights], x), cpu)
            row.append(f"{1e-3 * plain.median_us:.2f} / {1e-3 * packed.median_us:.2f}")
        table.add_row(name, *row)
    return table


def _cycle_layers(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Callable[[], Tensor]:
    layer_cycle = cycle(layers)
    return lambda: next(layer_cycle)(x)


if __name__ == "__main__":
    main()
