"""Measured times of GEMM and GEMV kernels for linear layers with quantized weights, for each number of rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from headway.core.contract.errors import BackendError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.support import Support
from headway.kernels.linear.choice import KERNEL, ROW_COUNTS, ROWS, LinearChoice
from headway.registry import Registry
from headway.tuning.measure.contender import captured
from headway.tuning.measure.counted_layer import INTERLEAVED, TRIED, CountedLayer, max_error
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.find_table import find_table
from headway.tuning.measure.points import counted_points
from headway.tuning.measure.timing import InterleavedTimer, SharedBudget, on_device
from headway.tuning.table.schema import DeviceIdentity, LinearRecord

if TYPE_CHECKING:
    from headway.kernels.linear.linear import Linear

_LAYERS, _FEW_LAYERS = 16, 2
"""Number of layers in the timed CUDA graph: `_LAYERS` for up to `_DECODED` rows, where reading weights dominates, and
`_FEW_LAYERS` for more rows."""
_DECODED = 128
_COMPARED = 64
"""Number of rows that are compared at the start of the answer and at its end."""
_EXACT, _ROUNDED = 3e-2, 8e-2
"""Maximum error relative to the answer's norm, with 16-bit inputs and with FP8 inputs."""
_SHARE = 0.4
"""Fraction of the free memory that the repacked weights of one kind of layer may use. The KV cache and the other kinds of layers
need the remaining memory."""
log = logging.getLogger("headway")


def choose_linear_kernels(
    kinds: Sequence[LinearChoice],
    budget: float,
    ahead: CompileAhead | None = None,
    timer: InterleavedTimer = INTERLEAVED,
    registry: Registry | None = None,
) -> None:
    """Select the GEMM kernels of each kind of linear layer by measured times: times stored for this device, or new measurements.

    budget: seconds that may be spent on measuring, without compiling. If 0, nothing is measured. Without a stored table a
    heuristic then chooses, and the log says so. ahead: context manager in which kernels are compiled in parallel; None compiles
    each kernel at its first launch. registry: registry of third-party kernels.
    """
    if not kinds:
        return
    device = kinds[0].layers[0].device
    identity = identify_device(device)
    every = [linear_layer(kind, identity, ahead, timer, registry) for kind in kinds]
    layers = [layer for layer in every if not layer.kind.fixed]
    shared = SharedBudget(budget, len(layers))
    with ExitStack() as trials:
        for kind in kinds:
            trials.enter_context(kind.on_trial())
        if ahead is not None and budget > 0:
            with on_device(device), torch.inference_mode(), ahead():
                for layer in layers:
                    layer.compile([point.batch for point in layer.wanted if layer.stored is None])
        for layer in sorted(layers, key=lambda layer: layer.stored is None):  # a stored table leaves its share to the others
            with shared.part() as share:
                layer.obey(0.0 if layer.kind.is_decided else share)  # times of a requested kernel alone would mislead auto
        with on_device(device), torch.inference_mode():
            for layer in every:
                settle(layer)
    for kind in kinds:
        log.info("linear %s: %s", kind.name, kind.describe())


def settle(sample: LinearLayer) -> None:
    """Prepare all layers for the chosen kernels; exclude a kernel for which memory is too small or whose answer is wrong.

    Third-party kernels and libraries are checked at each start, because they may have changed since the times were stored.
    """
    kind, fit = sample.kind, set[str]()
    while True:
        untried = [item for item in kind.serving().items() if _is_tried(kind, item[0]) and item[0] not in fit]
        if not untried:
            break
        name, rows = untried[0]
        why = _unfit(sample, name, rows)
        if why is None:
            fit.add(name)
            continue
        log.warning("linear %s: excluding %s: %s", kind.name, name, why)
        kind.leave_out(name, Support.no("its trial at the start", "room and a right answer", why))
    for name in kind.serving():
        if not _is_tried(kind, name):  # uses memory before the engine measures the free memory
            for layer in kind.layers:
                layer.prepared_for(kind.kernels[name])
    for layer in kind.layers:
        layer.settle()


def _is_tried(kind: LinearChoice, name: str) -> bool:
    """Return whether a kernel is checked at each start."""
    return kind.is_third_party(name) or getattr(kind.kernels[name], "library", False)


def _copies(kind: LinearChoice, name: str) -> bool:
    """Return whether a kernel's repacked copy may be as large as the weight."""
    return kind.is_third_party(name) or getattr(kind.kernels[name], "copies", False)


def _unfit(sample: LinearLayer, name: str, rows: int) -> str | None:
    """Prepare a kernel's layers. Return None if the kernel can be used; else release the prepared layers and return the reason.

    :raises BackendError: if the user requested the kernel and it cannot be used.
    """
    kind = sample.kind
    kernel, layers = kind.kernels[name], kind.layers
    try:
        if getattr(kernel, "copies", False):
            needed, room = sum(layer.held_bytes for layer in layers), _room(layers[0].device)
            if needed > _SHARE * room:
                raise MemoryError(f"it needs {needed / 1e9:.1f} GB of its own, and of {room / 1e9:.1f} GB may take {_SHARE:.0%}")
        taken = sum(layer.prepare(kernel) for layer in layers)
        for count in sorted({rows, *(TRIED if kind.is_third_party(name) else ())}):
            if kernel.runs(1 << max(count - 1, 0).bit_length()):
                sample.check(name, count)
    except Exception as raised:
        for layer in layers:
            layer.release(kernel)
        why = f"{type(raised).__name__}: {raised}"
        if kind.is_named(name):
            raise BackendError(f"linear kernel {name}: needs a right answer for {kind.name}, got {why}") from raised
        return why
    if taken:
        log.info("linear %s: %s uses %.1f MB of its own for %d layers", kind.name, name, taken / 1e6, len(layers))
    return None


def _room(device: torch.device) -> float:
    """Return a GPU's free memory in bytes, including memory that torch has reserved but does not use."""
    if device.type != "cuda":
        return math.inf
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


@dataclass(frozen=True)
class LinearLayer(CountedLayer):
    """A kind of linear layer, measured at several numbers of rows.

    Random rows pass through the model's own layers one after another, so that weights are read from memory as in a step.
    """

    kind: LinearChoice
    ahead: CompileAhead | None
    _drawn: dict[int, Tensor] = field(default_factory=dict)
    _answers: dict[int, Tensor] = field(default_factory=dict)

    def obey(self, seconds: float) -> None:
        """Select kernels of this kind by measured times, if any times exist. seconds: time that may be spent on measuring."""
        table = find_table(self, seconds)
        if table is not None:
            self.kind.use_times(self.times(table, ROWS))

    def able(self, count: int) -> list[str]:
        return self.kind.able(count)

    def sampled(self, rows: int) -> list[Linear]:
        """Return the layers that one call runs."""
        return self.kind.layers[: _LAYERS if rows <= _DECODED else _FEW_LAYERS]

    def layers(self, count: int) -> int:
        return len(self.sampled(count))

    def gets_slower(self, name: str) -> bool:
        return name.startswith(KERNEL)

    @contextmanager
    def ready(self, counts: Collection[int]) -> Iterator[None]:
        """Prepare layers for every kernel that copies weights. A kernel that cannot be prepared fails its check."""
        kernels = [kernel for name, kernel in self.kind.kernels.items() if _copies(self.kind, name)]
        try:
            for kernel in kernels:
                with suppress(Exception):
                    taken = sum(layer.prepare(kernel) for layer in self.sampled(1))
                    log.info("linear %s: trying %s with %.1f MB of its own", self.kind.name, kernel.label, taken / 1e6)
            if self.ahead is not None:
                with self.ahead():
                    self.compile(counts)  # nothing to do if the kernels of all kinds were compiled together before
            yield
        finally:
            for kernel in kernels:
                for layer in self.kind.layers:
                    layer.release(kernel)
        if self.on.type == "cuda":
            torch.cuda.empty_cache()  # frees graphs and large answers

    def compile(self, counts: Collection[int]) -> None:
        """Launch the kernels with each of the given numbers of rows, so that they are compiled. Must be called while launches are
        suppressed."""
        for rows in counts:
            for name in self.kind.able(rows):
                if _copies(self.kind, name):  # compiled at its first launch
                    continue
                with suppress(Exception):  # the check meets the same error and reports it
                    self.kind.compute(name, self.x(rows), self.kind.layers[0])

    def call(self, name: str, count: int) -> Callable[[], object]:
        """Return a call that runs the layers. On a GPU, the call replays a CUDA graph, as in an engine, so that host time is not
        measured."""
        x, layers = self.x(count), self.sampled(count)

        def all_layers() -> None:
            for layer in layers:
                self.kind.compute(name, x, layer)

        return captured(all_layers) if self.on.type == "cuda" else all_layers

    def x(self, rows: int) -> Tensor:
        """Return random rows [rows, in_features]. Only the result for the most recent number of rows is cached."""
        if rows not in self._drawn:
            layer = self.kind.layers[0]
            self._drawn.clear()
            generator = torch.Generator(self.on).manual_seed(rows)
            x = torch.empty(rows, layer.in_features, dtype=layer.dtype, device=self.on)
            self._drawn[rows] = x.normal_(generator=generator)
        return self._drawn[rows]

    def expected(self, rows: int) -> Tensor:
        """Return the first and last rows of the answer, computed by torch's operations in float32."""
        if rows not in self._answers:
            layer, x = self.kind.layers[0], _ends(self.x(rows)).float()
            weight = layer.weight
            x = rms_norm(x, x.shape[1:], eps=1e-6) if self.kind.gated else x
            y = x @ (weight.float() if isinstance(weight, Tensor) else weight.dequantized(torch.float32)).t()
            y = y if layer.bias is None else y + layer.bias
            gate, up = y.chunk(2, dim=1) if self.kind.gated else (y, y)
            self._answers.clear()
            self._answers[rows] = silu(gate) * up if self.kind.gated else y
        return self._answers[rows]

    def check(self, name: str, count: int) -> None:
        found, expected = _ends(self.kind.compute(name, self.x(count), self.kind.layers[0])).float(), self.expected(count)
        error = float((found - expected).norm() / expected.norm())
        kernel, third_party = self.kind.kernels[name], self.kind.is_third_party(name)
        if not error < max_error(kernel, self.kind.layers[0].dtype, _ROUNDED if kernel.rounds_input else _EXACT, third_party):
            raise ArithmeticError(f"its answer is off by {error:.1e} with {count} rows")


def linear_layer(
    kind: LinearChoice,
    device: DeviceIdentity,
    ahead: CompileAhead | None = None,
    timer: InterleavedTimer = INTERLEAVED,
    registry: Registry | None = None,
) -> LinearLayer:
    """Return a kind of linear layer as a layer that can be measured."""
    record, wanted, layers = LinearRecord(layer=kind.name), counted_points("rows", ROW_COUNTS), kind.layers
    on = layers[0].device if layers else torch.device(device.type)
    return LinearLayer(record, device, list(kind.kernels), wanted, on, timer, registry, kind, ahead)


def _ends(rows: Tensor) -> Tensor:
    return rows if len(rows) <= 2 * _COMPARED else torch.cat([rows[:_COMPARED], rows[-_COMPARED:]])
