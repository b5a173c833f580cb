"""A first start with a shipped table: it is named, checked at a few points, and measured where it is wrong here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_json
from headway.tuning.measure.points import Point
from headway.tuning.measure.prior_check import adopt, check_points
from headway.tuning.table.files import TableError
from headway.tuning.table.identity import DeviceIdentity
from headway.tuning.table.priors import Prior, find_prior
from headway.tuning.table.schema import CrossoverTable, SpecRecord

log = logging.getLogger("headway")

Measure = Callable[[Sequence[Point], float, CrossoverTable | None], CrossoverTable | None]
"""(points, seconds, the table at the path that they are added to, or None for a new one) -> the table; None where nothing could
be measured."""


def prior_for(device: DeviceIdentity, spec: SpecRecord, owners: Mapping[str, tuple[str, str]]) -> Prior | None:
    """The shipped table of a kind of layer on a kind of device; None where there is none that can be read.

    What was other where it was measured is logged. owners: as in `find_prior`.
    """
    try:
        prior = find_prior(device, spec, owners)
    except TableError as error:
        log.warning("shipped table not used: %s", error)
        return None
    if prior is not None:
        differs = f"; it differs in {'; '.join(prior.differs)}" if prior.differs else ""
        log.info("auto: %s: found the %s%s", spec, prior.record().made, differs)
    return prior


def check_prior(
    prior: Prior, wanted: Sequence[Point], available: Collection[str], path: Path, budget: float, measure: Measure
) -> CrossoverTable | None:
    """Measure a few points of a shipped table, take what agrees with them, and measure the rest as far as time allows.

    wanted: all points of the grid. available: the backends that can run here. path: where the table is kept, each time that
    `measure` adds to it, too. budget: seconds.
    """
    asked = check_points(prior.table, wanted, available)
    if not asked:
        log.warning("auto: %s has no times of what can run here: it is not used", prior.path.name)
        return measure(wanted, budget, None)
    text = "auto: checking the shipped table for %s at %d points, some seconds, once; --no-autotune does without"
    log.warning(text, prior.table.spec, len(asked))
    began = time.perf_counter()
    here = measure(asked, budget, None)
    took = time.perf_counter() - began
    if here is None:
        return None
    table = adopt(prior, here, asked, wanted)
    try:
        write_json(table, path)
    except ConfigError as error:
        log.warning("auto: the crossover table is not kept: %s", error)
        return table
    assert table.prior is not None
    for line in table.prior.disagreed:
        log.info("auto: the shipped table is not used around %s", line)
    for line in table.prior.corrected:
        log.info("auto: the shipped table is corrected around %s", line)
    known = {cell.point for cell in table.cells}
    missing = [point for point in wanted if (point.phase, point.case) not in known]
    taken = len({cell.point for cell in table.cells if cell.prior})
    log.info("auto: %d points are the shipped table's, %d were measured here, %d lack", taken, len(known) - taken, len(missing))
    # What is missing of a whole measurement takes its part of the time of one, or all that the check has left.
    left = max(budget * len(missing) / len(wanted), budget - took)
    return measure(missing, left, table) if missing else table
