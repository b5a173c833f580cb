"""What a page shows of a running engine: its figures each second, and the measured times by which backends are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from headway.async_llm import AsyncLLM
from headway.core.contract.metadata import Phase
from headway.core.engine.occupancy import Occupancy
from headway.core.engine.stats import EngineStats
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector

MOST_SEQUENCES: Final = 48
"""Told of one by one; the others only as a number."""
_TOTALS: Final = (
    *("num_steps", "num_graph_steps", "num_output_tokens", "num_prompt_tokens", "num_cached_tokens", "num_preemptions"),
    *("num_draft_tokens", "num_accepted_tokens", "blocks_offloaded", "offload_hits"),
)


def state_of(now: Occupancy, queued: int, selector: Selector) -> dict[str, Any]:
    """The engine's figures as plain data. queued: requests that it has not been handed yet. `totals` only grow."""
    engine = now.engine
    return {
        "time": engine.time,
        "running": engine.num_running,
        "waiting": engine.num_waiting + queued,
        "blocks": {
            "total": engine.num_blocks,
            "used": engine.num_used_blocks,
            "cached": engine.num_cached_blocks,
            "offloaded": now.num_offloaded_blocks,
        },
        "totals": {name: getattr(engine.totals, name) for name in _TOTALS},
        "steps": _steps(engine.totals),
        "decode": _decode(now, selector),
        "sequences": [each._asdict() for each in now.holdings],
        "num_sequences": now.num_holding,
    }


def _steps(totals: EngineStats) -> list[dict[str, Any]]:
    counts = sorted(totals.steps_by_phase.items())
    return [{"phase": phase, "backend": name, "steps": count} for (phase, name), count in counts]


def _decode(now: Occupancy, selector: Selector) -> dict[str, Any] | None:
    """What `auto` thinks of the sequences that decode at this moment; None where none does."""
    if not now.num_decoding:
        return None
    shape = Shape(Phase.DECODE, now.num_decoding, 1, max(now.num_decoding_tokens // now.num_decoding, 1))
    return look_up(selector, shape)


def look_up(selector: Selector, shape: Shape) -> dict[str, Any]:
    """What each backend would take for a step, fastest first, by the times that `auto` obeys.

    `ranking` is empty where nothing was measured. `covered`: whether the shape lies within what was measured; beyond it the
    nearest measured edge decides.
    """
    costs = selector.costs
    names = selector.candidates_for(shape.phase, shape.batch)
    ranking = [] if costs is None else costs.ranking(shape, names)
    return {
        "phase": shape.phase.value,
        "batch": shape.batch,
        "query_len": shape.query_len,
        "kv_len": shape.kv_len,
        "usual": selector.selection.names[shape.phase],
        "ranking": [{"backend": name, "us": round(us, 2)} for name, us in ranking],
        "covered": costs is not None and costs.covers(shape),
    }


def table_of(llm: AsyncLLM, selector: Selector) -> dict[str, Any]:
    """The choice at start, why each other backend was not taken, and all measured points over the layout and block size."""
    selection, costs, pages = selector.selection, selector.costs, llm.engine.capacity.pool.page_format
    return {
        "model": llm.model.name,
        "device": str(llm.driver.assembly.device),
        "layout": selection.layout.name,
        "block_size": selection.block_size,
        "page_bytes": pages.page_bytes,
        "why": selection.why,
        "text": str(selection),
        "noise": None if costs is None else costs.noise,
        "layers": 0 if costs is None else sum(count for _, count in costs.parts),
        "phases": [_phase(selector, phase) for phase in Phase],
    }


def _phase(selector: Selector, phase: Phase) -> dict[str, Any]:
    selection, costs = selector.selection, selector.costs
    names = [selection.names[phase], *selection.others.get(phase, ())]
    reasons = {name: [str(reason) for reason in found] for name, found in selector.why_not(phase).items()}
    able = [name for name, found in reasons.items() if not found]
    points = []
    if costs is not None:
        for shape in costs.shapes(phase):
            times = {name: _us(costs.step_us(name, shape)) for name in dict.fromkeys([*names, *able])}
            points.append({"batch": shape.batch, "query_len": shape.query_len, "kv_len": shape.kv_len, "us": times})
    return {"phase": phase.value, "backends": names, "able": able, "refused": _refused(reasons), "points": points}


def _refused(reasons: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    return [{"backend": name, "reasons": found} for name, found in reasons.items() if found]


def _us(us: float) -> float | None:
    return round(us, 2) if math.isfinite(us) else None
