"""Runs the studies one after the other, and keeps what each has found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from headway.bench.studies.requests.engines import Engines, Sizes
from headway.bench.studies.requests.memory import overload, second_turn
from headway.bench.studies.requests.results import RequestsCell, RequestsReport, Study
from headway.bench.studies.requests.sampling import sampling
from headway.bench.studies.requests.speculation import speculation
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin
from headway.tuning.measure.device import crowding, describe_device
from headway.tuning.measure.timing import Timer

STUDIES: Final[tuple[Study, ...]] = ("sampling", "speculation", "second-turn", "overload")


def run_requests_bench(
    studies: Sequence[Study],
    engines: Engines,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    command: str = "",
    output: Path | None = None,
    tell: Callable[[RequestsCell], None] = lambda cell: None,
) -> RequestsReport:
    """Run the studies. output: written anew after each cell. tell: told of each.

    :raises HeadwayError: a model that cannot be loaded, or a request that does not write what it is to write.
    """
    makers: dict[Study, Callable[[], Iterator[RequestsCell]]] = {
        "sampling": lambda: sampling(engines, sizes),
        "speculation": lambda: speculation(engines, sizes, device, dtype),
        "second-turn": lambda: second_turn(engines, sizes),
        "overload": lambda: overload(engines, sizes),
    }
    report = RequestsReport(
        command=command,
        origin=Origin.here(),
        busy=crowding(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model=engines.model,
        dtype=DTYPE_NAMES[dtype],
        device=describe_device(device, dtype, Timer()),
        cells=[],
    )
    for study in studies:
        for cell in makers[study]():
            report.cells.append(cell)
            report.busy = report.busy or crowding()
            if output is not None:
                write_json(report, output)
            tell(cell)
    return report
