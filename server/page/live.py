"""Data of the web UI: the state of a running engine, and the measured times by which backends are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from headway.core.contract.metadata import Phase
from headway.core.engine.execution.graph_set import as_run
from headway.core.engine.loop import Occupancy
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector
from headway.hosting.driver import EngineDriver

MOST_SEQUENCES: Final = 48
"""Most sequences that are listed; of the others, only the number is shown."""
_TOTALS: Final = (
    *("num_steps", "num_graph_steps", "num_output_tokens", "num_prompt_tokens", "num_cached_tokens", "num_preemptions"),
    *("num_draft_tokens", "num_accepted_tokens", "blocks_offloaded", "offload_hits"),
)


class Choices:
    """Explains what a selector chooses between, without changing the choices of the engine's steps."""

    def __init__(self, selector: Selector, device_type: str) -> None:
        self.selector = selector
        self._device_type = device_type

    @cached_property
    def reasons(self) -> Mapping[Phase, dict[str, list[str]]]:
        """Phase -> backend -> reasons why the backend cannot serve that phase; []: it can. Computed once."""
        return {
            phase: {name: [str(reason) for reason in found] for name, found in self.selector.why_not(phase).items()}
            for phase in Phase
        }

    def look_up(self, shape: Shape) -> dict[str, Any]:
        """The time of each backend for a step, fastest first, from the measurements that `auto` obeys.

        `backends`: those that the engine may use for the step, its usual one first. `ranking` is empty where nothing was
        measured. `covered`: whether the shape lies within the measured grid; beyond it the nearest measured edge decides.
        """
        shape = as_run(shape, self._device_type)
        costs, candidates = self.selector.costs, self.selector.candidates_for(shape.phase, shape.batch)
        ranking = [] if costs is None else costs.ranking(shape, dict.fromkeys([*candidates, *self._able(shape.phase)]))
        return {
            "phase": shape.phase.value,
            "batch": shape.batch,
            "query_len": shape.query_len,
            "kv_len": shape.kv_len,
            "backends": candidates,
            "ranking": [{"backend": name, "us": round(us, 2)} for name, us in ranking],
            "covered": costs is not None and costs.covers(shape),
        }

    def points(self, phase: Phase) -> list[dict[str, Any]]:
        """The measured points of a phase's grid; a time is None where a backend was not measured."""
        selection, costs = self.selector.selection, self.selector.costs
        if costs is None:
            return []
        names = dict.fromkeys([selection.names[phase], *selection.others.get(phase, ()), *self._able(phase)])
        return [
            {
                "batch": shape.batch,
                "query_len": shape.query_len,
                "kv_len": shape.kv_len,
                "us": {name: _us(costs.step_us(name, shape)) for name in names},
            }
            for shape in costs.shapes(phase)
        ]

    def _able(self, phase: Phase) -> list[str]:
        return [name for name, found in self.reasons[phase].items() if not found]


def state_of(driver: EngineDriver, now: Occupancy, queued: int) -> dict[str, Any]:
    """The engine's figures as plain data. queued: requests that the engine has not been handed yet. `totals` only grow."""
    engine = now.engine
    decode = None
    if now.num_decoding:
        decode = explained(driver, Shape(Phase.DECODE, now.num_decoding, 1, max(now.num_decoding_tokens // now.num_decoding, 1)))
    steps = sorted(engine.totals.steps_by_phase.items())
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
        "steps": [{"phase": phase, "backend": name, "steps": count} for (phase, name), count in steps],
        "decode": decode,
        "sequences": [each._asdict() for each in now.holdings],
        "num_sequences": now.num_holding,
    }


def choices_of(driver: EngineDriver) -> Choices:
    """The Choices of an engine, made at the first call."""
    found: Choices = driver.task_state.setdefault(
        "choices", Choices(driver.engine.executor.selector, driver.assembly.device.type)
    )
    return found


def explained(driver: EngineDriver, shape: Shape) -> dict[str, Any]:
    """See Choices.look_up."""
    return choices_of(driver).look_up(shape)


def table_of(driver: EngineDriver) -> dict[str, Any]:
    """The choice at start, why each other backend was not taken, and all measured points over the layout and block size."""
    choices = choices_of(driver)
    selection, costs = choices.selector.selection, choices.selector.costs
    return {
        "model": driver.assembly.model.name,
        "device": str(driver.assembly.device),
        "layout": selection.layout.name,
        "block_size": selection.block_size,
        "why": selection.why,
        "noise": None if costs is None else costs.noise,
        "layers": 0 if costs is None else sum(count for _, count in costs.parts),
        "phases": [
            {
                "phase": phase.value,
                "backends": [selection.names[phase], *selection.others.get(phase, ())],
                "refused": [{"backend": name, "reasons": why} for name, why in choices.reasons[phase].items() if why],
                "points": choices.points(phase),
            }
            for phase in Phase
        ],
    }


def _us(us: float) -> float | None:
    return round(us, 2) if math.isfinite(us) else None
