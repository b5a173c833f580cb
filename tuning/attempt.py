"""One contender on one case: first whether its answer is right, then how long it takes. A wrong answer gets no time."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Plan
from headway.core.contract.errors import BackendError
from headway.core.contract.layout import CacheWriter
from headway.core.contract.metadata import Phase
from headway.testing.cases import Case
from headway.tuning.inputs import InputsChangedError
from headway.tuning.timing import Timer, Timing, host_us

Status = Literal["ok", "unsupported", "incorrect", "error"]
_REASON_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Attempt:
    """A contender made ready for one case."""

    call: Callable[[], Tensor]
    """The kernel's work and nothing else; returns the output."""
    error: Callable[[Tensor], float]
    """Relative error of an output; NaN if it has one."""
    tolerance: float
    poison: Callable[[], object] = lambda: None
    """Spoils the output, so that a row left unwritten shows."""
    plan: Callable[[], object] | None = None
    step: Callable[[], object] | None = None
    """`plan` and `call` together, as an engine with one layer would; None: `call`."""
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came of it. `timing` is there if and only if the status is ok."""

    status: Status
    reason: str = ""
    timing: Timing | None = None
    plan_us: float | None = None
    host_us: float | None = None
    relative_error: float | None = None
    tolerance: float | None = None
    kernel: str = ""


def measure(
    prepare: Callable[[], Attempt], device: torch.device, timer: Timer, check: Callable[[], object] = lambda: None
) -> Measurement:
    """Prepare, check, time, and check again: an answer that changes under repetition is a race, not a result.

    Never raises for what the contender does; its exception becomes the reason.

    check: `Inputs.check` of the case, called after the contender's calls, also after one that raised.
    """
    try:
        attempt = prepare()
        before = checked(attempt)
        check()
        if not before <= attempt.tolerance:
            return incorrect(before, attempt)
        timing = timer.time(attempt.call, device)
        after = checked(attempt)
        check()
        if not after <= attempt.tolerance:
            return incorrect(after, attempt, " after repeated calls, right at the first")
        return Measurement(
            "ok",
            timing=timing,
            plan_us=host_us(attempt.plan, device) if attempt.plan else None,
            host_us=host_us(attempt.step or attempt.call, device) if device.type != "cpu" else None,
            relative_error=max(before, after),
            tolerance=attempt.tolerance,
            kernel=attempt.kernel,
        )
    except Exception as error:  # whatever a kernel or its wrapper raises belongs into the result
        with suppress(InputsChangedError):
            check()
        return Measurement("incorrect", reason=str(error)) if isinstance(error, InputsChangedError) else failed(error)


def failed(error: Exception) -> Measurement:
    """A measurement that ended in an exception."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    text = " ".join(str(error).split())
    shown = text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."
    return Measurement("error", reason=f"{type(error).__name__}: {shown}")


def run_layer(backend: AttentionBackend, case: Case, plan: Plan, out: Tensor, writer: CacheWriter | None = None) -> None:
    """A case of one phase through one backend, as a layer of the engine calls it.

    writer: of the layout; the new tokens are written (where they are already), by the backend if it does that in decode.
    """
    step = case.metadata
    try:
        if writer is not None:
            if step.phase is Phase.DECODE and step.max_query_len == 1 and backend.decode_writes:
                backend.write_and_decode(case.q, case.k, case.v, case.cache, plan, out)
                return
            writer(case.k, case.v, case.cache, step.slot_mapping)
        if step.phase is Phase.DECODE:
            backend.decode(case.q, case.cache, plan, out)
        else:
            backend.prefill(case.q, case.k, case.v, case.cache, plan, out)
    except SystemExit as error:
        raise BackendError(f"{backend.name} asked the program to end (SystemExit: {error})") from error


def backend_attempt(
    backend: AttentionBackend, case: Case, error: Callable[[Tensor], float], writer: CacheWriter | None = None
) -> Attempt:
    """A Headway backend, called as the engine calls it, into an output that is its own.

    writer: as for `run_layer`.
    """
    view = case.metadata.decode if case.metadata.num_decodes else case.metadata.prefill
    assert view is case.metadata, "a cell has one phase"
    out = case.q.new_empty((*case.q.shape[:2], case.spec.v_head_dim))
    plan = backend.plan(view)

    def run(current: object) -> Tensor:
        run_layer(backend, case, current, out, writer)
        return out

    return Attempt(
        call=lambda: run(plan),
        error=error,
        tolerance=backend.tolerance[case.spec.dtype],
        poison=lambda: out.fill_(math.nan),
        plan=lambda: backend.plan(view),
        step=lambda: run(backend.plan(view)),
        kernel=type(backend).kernel(case.spec, view.phase),
    )


def writer_attempt(writer: CacheWriter, case: Case) -> Attempt:
    """A layout's cache writer. Right means: every row reads back as it was written, and no other slot was touched."""
    cache, slots = case.cache, case.metadata.slot_mapping

    def write() -> Tensor:
        writer(case.k, case.v, cache, slots)
        return slots

    def spoil() -> None:
        cache.key.zero_()
        cache.value.zero_()

    def error(_: Tensor) -> float:
        k, v = cache.gather(slots)
        wrong = max(_distance(k, case.k, cache.k_scale), _distance(v, case.v, cache.v_scale))
        cache.logical_key.view(_BYTES[k.dtype.itemsize])[slots // cache.block_size, slots % cache.block_size] = 0
        cache.logical_value.view(_BYTES[v.dtype.itemsize])[slots // cache.block_size, slots % cache.block_size] = 0
        stray = cache.key.view(torch.uint8).any() or cache.value.view(torch.uint8).any()
        return math.inf if stray else wrong

    same = case.spec.cache_dtype == case.spec.dtype
    # e4m3 keeps three bits after the leading one: a relative error of 2^-4 at most, about half of that over random rows.
    return Attempt(write, error, 0.0 if same else 0.05, spoil, kernel=writer_name(writer))


def writer_name(writer: CacheWriter) -> str:
    """A writer has no name of its own but its function's."""
    return getattr(writer, "__name__", type(writer).__name__)


_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _distance(stored: Tensor, rows: Tensor, scale: float) -> float:
    return float((stored.double() * scale - rows.double()).norm() / rows.double().norm())


def checked(attempt: Attempt) -> float:
    """Relative error of a call into a poisoned output; NaN if a row was left out."""
    attempt.poison()
    return attempt.error(attempt.call())


def incorrect(error: float, attempt: Attempt, when: str = "") -> Measurement:
    """What a wrong answer comes to. when: in which run it was wrong, if not the first."""
    return Measurement(
        "incorrect",
        reason=f"relative error {error:.2g}, tolerance {attempt.tolerance:.2g}{when}",
        relative_error=error if math.isfinite(error) else None,
        tolerance=attempt.tolerance,
        kernel=attempt.kernel,
    )
