"""Why models/linear.py packs weights: F.linear beside the packed product, at the row counts of decode and prefill.

python -m headway.bench.linear
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from headway.bench.timing import Timer
from headway.models.linear import Linear
from headway.threads import set_threads

SHAPES = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536), "lm_head": (49152, 576)}
"""(out_features, in_features) of SmolLM2-135M."""
ROWS = (1, 4, 16, 64, 256)
_COPIES = 12
"""Weights taken in turn, so that each comes from memory as it does in a model."""


def main() -> None:
    """Print the table."""
    threads, cpu, timer = set_threads(), torch.device("cpu"), Timer()
    table = Table(
        title=f"float32 product of a linear layer, ms (F.linear / packed), {threads} threads, torch {torch.__version__}"
    )
    table.add_column("layer [out, in]")
    for rows in ROWS:
        table.add_column(f"{rows} rows", justify="right")
    for name, (out_features, in_features) in track(SHAPES.items(), "timing", console=Console(stderr=True), transient=True):
        weights = [torch.randn(out_features, in_features) for _ in range(_COPIES if out_features < 10000 else 1)]
        row = []
        for rows in ROWS:
            x = torch.randn(rows, in_features)
            calls = (_in_turn(weights, lambda w, x=x: linear(x, w)), _in_turn([Linear(w) for w in weights], lambda p, x=x: p(x)))
            plain, packed = (1e-3 * timer.time(call, cpu).median_us for call in calls)
            row.append(f"{plain:.2f} / {packed:.2f}")
        table.add_row(f"{name} [{out_features}, {in_features}]", *row)
    Console().print(table)


def _in_turn(items: list[Any], call: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    turn = cycle(items)
    return lambda: call(next(turn))


if __name__ == "__main__":
    main()
