"""Correctness check and timing of one backend on one case. A backend that gives a wrong answer is not timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Plan
from headway.core.contract.errors import BackendError
from headway.core.contract.layout import CacheWriter
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.engine.execution.captured_step import CudaGraphRecorder
from headway.core.oracle.cases import Case
from headway.core.speculation.proposers import is_captured
from headway.tuning.measure.timing import Timer, Timing, host_us


class InputsChangedError(RuntimeError):
    """Error: a backend wrote to its inputs, which have been restored."""


class GuardedInputs:
    """Copies and checksums of a step's inputs, to detect writes to them.

    A backend may write its output. It may also write the new tokens into the cache slots that already hold these tokens.
    """

    def __init__(
        self, small: Mapping[str, Tensor], large: Mapping[str, Tensor], rebuild: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """small: tensors to copy. large: tensors to checksum. rebuild: function that makes the large tensors again, in other
        memory."""
        self._small = small
        self._large = large
        self._rebuild = rebuild
        self._copies = {name: tensor.clone() for name, tensor in small.items()}
        self._sums = {name: _bits(tensor) for name, tensor in large.items()}

    @classmethod
    def of(cls, case: Case, rebuild: Callable[[], Case]) -> Self:
        """Guard an attention step with copies of q, k, v and the metadata, and with checksums of the cache. rebuild: function
        that creates the same case again."""
        metadata = {f"metadata.{field.name}": getattr(case.metadata, field.name) for field in fields(case.metadata)}
        small = {"q": case.q, "k": case.k, "v": case.v} | metadata
        tensors = {name: value for name, value in small.items() if isinstance(value, Tensor)}
        return cls(tensors, _named(case), lambda: _named(rebuild()))

    def check(self, with_cache: bool = True) -> None:
        """Compare the inputs with their copies and checksums. with_cache: False skips the check of the cache, which must read the
        entire cache.

        :raises InputsChangedError: if inputs differ. The message names these inputs, which have been restored.
        """
        changed = [name for name, tensor in self._small.items() if not torch.equal(tensor, self._copies[name])]
        large = [name for name, tensor in self._large.items() if (with_cache or changed) and _bits(tensor) != self._sums[name]]
        for name in changed:
            self._small[name].copy_(self._copies[name])
        if large:
            for name, was in self._rebuild().items():
                self._large[name].copy_(was)
        if found := changed + large * with_cache:
            raise InputsChangedError(f"it changed its inputs, of which a backend may write `out` alone: {', '.join(found)}")


def _named(case: Case) -> dict[str, Tensor]:
    return {f"cache.{name}": tensor for name, tensor in case.cache.tensors.items()}


def _bits(tensor: Tensor) -> int:
    """Return a checksum of a tensor: its memory is read as integers, which are summed modulo 2**64. The checksum changes if any
    one element changes, even if there are NaNs."""
    flat = tensor.reshape(-1)
    wide = flat.numel() * flat.element_size() % 4 == 0
    return int(flat.view(torch.int32 if wide else torch.uint8).sum(dtype=torch.int64))


Status = Literal["ok", "unsupported", "incorrect", "error"]
_REASON_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Contender:
    """A backend prepared for one case, ready to be checked and timed."""

    call: Callable[[], Tensor]
    """Function that runs only the kernel and returns the output."""
    error: Callable[[Tensor], float]
    """Function that returns the relative error of an output; NaN if the output contains NaN."""
    tolerance: float
    poison: Callable[[], object] = lambda: None
    """Function that fills the output with invalid values, so that unwritten rows are detected."""
    plan: Callable[[], object] | None = None
    step: Callable[[], object] | None = None
    """Function that runs `plan` and `call`, as an engine with one layer does. None means `call`."""
    kernel: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Result of measuring one backend on one case. `timing` is set if and only if the status is ok."""

    status: Status
    reason: str = ""
    timing: Timing | None = None
    plan_us: float | None = None
    host_us: float | None = None
    relative_error: float | None = None
    tolerance: float | None = None
    kernel: str = ""


def measure(
    prepare: Callable[[], Contender], device: torch.device, timer: Timer, check: Callable[[], object] = lambda: None
) -> Measurement:
    """Prepare, check and time a contender, then check it again: an answer that changes over repeated calls is a race.

    Exceptions of the backend are not raised: they become the reason of the result.

    check: `GuardedInputs.check` of the case. It is called after the backend's calls, and after an exception.
    """
    try:
        contender = prepare()
        before = checked(contender)
        check()
        if not before <= contender.tolerance:
            return incorrect(before, contender)
        timing = timer.time(contender.call, device)
        after = checked(contender)
        check()
        if not after <= contender.tolerance:
            return incorrect(after, contender, " after repeated calls, right at the first")
        return Measurement(
            "ok",
            timing=timing,
            plan_us=host_us(contender.plan, device) if contender.plan else None,
            host_us=host_us(contender.step or contender.call, device) if device.type != "cpu" else None,
            relative_error=max(before, after),
            tolerance=contender.tolerance,
            kernel=contender.kernel,
        )
    except Exception as error:  # the exception of a kernel or its wrapper becomes the result
        with suppress(InputsChangedError):
            check()
        return Measurement("incorrect", reason=str(error)) if isinstance(error, InputsChangedError) else failed(error)


def failed(error: Exception) -> Measurement:
    """Return the measurement for an exception."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    text = " ".join(str(error).split())
    shown = text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."
    return Measurement("error", reason=f"{type(error).__name__}: {shown}")


def run_layer(backend: AttentionBackend, case: Case, plan: Plan, out: Tensor, writer: CacheWriter | None = None) -> None:
    """Run a case of one phase through one backend, as an engine layer calls it.

    writer: cache writer of the layout, which writes the new tokens to slots that already hold these tokens. It is not called in
    decode if the backend writes the new tokens.
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


def backend_contender(
    backend: AttentionBackend, case: Case, error: Callable[[Tensor], float], writer: CacheWriter | None = None
) -> Contender:
    """Return a contender for a Headway backend, called as in the engine, with a separate output. writer: as in `run_layer`."""
    view = case.metadata.decode if case.metadata.num_decodes else case.metadata.prefill
    assert view is case.metadata, "a cell has one phase"
    out = case.q.new_empty((*case.q.shape[:2], case.spec.v_head_dim))
    plan = backend.plan(view)

    def run(current: object) -> Tensor:
        run_layer(backend, case, current, out, writer)
        return out

    found = _contender(backend, case, error, out)
    return replace(found, call=lambda: run(plan), plan=lambda: backend.plan(view), step=lambda: run(backend.plan(view)))


def _contender(backend: AttentionBackend, case: Case, error: Callable[[Tensor], float], out: Tensor) -> Contender:
    tolerance, kernel = backend.tolerance[case.spec.dtype], type(backend).kernel(case.spec, case.metadata.phase)
    return Contender(lambda: out, error, tolerance, poison=lambda: out.fill_(math.nan), kernel=kernel)


def writer_contender(writer: CacheWriter, case: Case) -> Contender:
    """Return a contender for a layout's cache writer. It is correct if every row reads back as written and no other slot
    changed."""
    cache, slots = case.cache, case.metadata.slot_mapping

    def write() -> Tensor:
        writer(case.k, case.v, cache, slots)
        return slots

    def spoil() -> None:
        for tensor in cache.tensors.values():
            tensor.zero_()

    def error(_: Tensor) -> float:
        k, v = cache.gather(slots)
        wrong = max(_distance(k, case.k, cache.k_scale), _distance(v, case.v, cache.v_scale))
        for name, tensor in cache.tensors.items():
            cache.by_slot(name).view(_BYTES[tensor.dtype.itemsize])[slots // cache.block_size, slots % cache.block_size] = 0
        stray = any(bool(tensor.view(torch.uint8).any()) for tensor in cache.tensors.values())
        return math.inf if stray else wrong

    same = case.spec.cache_dtype == case.spec.dtype
    # e4m3 has three mantissa bits: a relative error of at most 2^-4, about half of that over random rows. int8 values up to 127
    # have an error of at most 0.5, a hundredth of a random row.
    return Contender(write, error, 0.0 if same else 0.05, spoil, kernel=writer_name(writer))


def writer_name(writer: CacheWriter) -> str:
    """Return the name of a cache writer: the name of its function."""
    return getattr(writer, "__name__", type(writer).__name__)


_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _distance(stored: Tensor, rows: Tensor, scale: float) -> float:
    return float((stored.double() * scale - rows.double()).norm() / rows.double().norm())


def checked(contender: Contender) -> float:
    """Return the relative error of a call whose output was first filled with invalid values. NaN means that a row was not
    written."""
    contender.poison()
    return contender.error(contender.call())


def incorrect(error: float, contender: Contender, when: str = "") -> Measurement:
    """Return the measurement for a wrong answer. when: text that names the run with the wrong answer, if it was not the first."""
    reason = f"relative error {error:.2g}, tolerance {contender.tolerance:.2g}{when}"
    shown = error if math.isfinite(error) else None
    return Measurement("incorrect", reason, relative_error=shown, tolerance=contender.tolerance, kernel=contender.kernel)


_WARM_UPS = 2
"""Number of warm-up runs of a layer before it is captured."""


def captures(backend: AttentionBackend, case: Case) -> bool:
    """Return whether an engine would run this step by CUDA graph replay."""
    metadata = case.metadata
    if metadata.phase is not Phase.DECODE or metadata.query_start_loc.device.type != "cuda":
        return False
    longest = metadata.max_query_len
    return (longest == 1 or is_captured(metadata.num_seqs, longest)) and bool(backend.captures(longest))


def graph_contender(
    backend: AttentionBackend, case: Case, error: Callable[[Tensor], float], graph_len: int, writer: CacheWriter | None = None
) -> Contender:
    """Capture one layer's decode for sequences of up to `graph_len` tokens. A call replays the graph at the case's own lengths.

    writer: as in `run_layer`.
    """
    step = case.metadata
    static = worst_case(step, max(graph_len, step.max_seq_len))
    out = case.q.new_empty((*case.q.shape[:2], case.spec.v_head_dim))
    plan = backend.plan_for_capture(static)

    def layer() -> None:
        run_layer(backend, case, plan, out, writer)

    replay_graph = captured(layer)
    current = _loaded(static, step)
    backend.plan_for_replay(plan, current)

    def replay() -> Tensor:
        replay_graph()
        return out

    return replace(_contender(backend, case, error, out), call=replay, plan=lambda: backend.plan_for_replay(plan, current))


def captured(layer: Callable[[], object]) -> Callable[[], None]:
    """Capture one call in a CUDA graph, after warm-up calls. Return a function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            layer()
    return CudaGraphRecorder().record(layer)


def worst_case(step: AttentionMetadata, graph_len: int) -> AttentionMetadata:
    """Return the step that an engine captures. Its tensors are static and contain padding rows, its block table has room for
    `graph_len` tokens, and each length on the host is `graph_len`."""
    rows, width = step.block_table.shape[0], -(-graph_len // step.block_size)
    return replace(
        step,
        seq_lens=torch.zeros_like(step.seq_lens),
        context_lens=torch.zeros_like(step.context_lens),
        block_table=torch.zeros((rows, width), dtype=torch.int32, device=step.block_table.device),
        slot_mapping=torch.full_like(step.slot_mapping, -1),
        block_table_cpu=torch.zeros((rows, width), dtype=torch.int32),
        seq_lens_cpu=torch.full_like(step.seq_lens_cpu, graph_len),
        max_seq_len=graph_len,
    )


def _loaded(static: AttentionMetadata, step: AttentionMetadata) -> AttentionMetadata:
    """Copy a step into the static tensors, and return the metadata that an engine passes to `plan_for_replay`. The metadata has
    the static tensors, the step's lengths on the host, and the maximum length of the capture."""
    columns = step.block_table.shape[1]
    static.seq_lens.copy_(step.seq_lens)
    static.context_lens.copy_(step.context_lens)
    static.slot_mapping.copy_(step.slot_mapping)
    static.block_table[:, :columns] = step.block_table
    table = torch.zeros_like(static.block_table_cpu)
    table[:, :columns] = step.block_table_cpu
    return replace(static, seq_lens_cpu=step.seq_lens_cpu, block_table_cpu=table)
