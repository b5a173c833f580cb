"""Measured times of the ways that multiply over a quantised weight, by the number of rows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from headway.core.contract.errors import BackendError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.support import Support
from headway.kernels.linear.choice import KERNEL, ROW_COUNTS, ROWS
from headway.registry import Registry
from headway.tuning.measure.contender import captured
from headway.tuning.measure.counted_layer import TURNS, CountedLayer
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.find_table import find_table, first_points
from headway.tuning.measure.points import counted_points
from headway.tuning.measure.timing import InterleavedTimer, SharedBudget, on_device
from headway.tuning.table.schema import DeviceIdentity, LinearRecord

if TYPE_CHECKING:
    from headway.kernels.linear.choice import LinearChoice
    from headway.kernels.linear.linear import Linear

_LAYERS, _FEW_LAYERS = 16, 2
"""Layers in the CUDA graph that is timed: of few rows, whose time is that of reading weights, and of more than _DECODED."""
_DECODED = 128
_COMPARED = 64
"""First and last rows whose answers are compared."""
_EXACT, _ROUNDED = 3e-2, 8e-2
"""Error of a right answer relative to its norm: of x in half precision, and of x in floats of 8 bits."""
_SHARE = 0.4
"""Part of the free memory that the arrangements of one kind may take: the cache comes after them, and other kinds."""
log = logging.getLogger("headway")


def choose_products(
    kinds: Sequence[LinearChoice],
    budget: float,
    ahead: CompileAhead | None = None,
    timer: InterleavedTimer = TURNS,
    registry: Registry | None = None,
) -> None:
    """Have each kind of product choose by measured times: those that are stored for this device, or new ones.

    budget: seconds that may be measured, compiling not counted; 0: nothing is, and where nothing is stored a rule chooses, which
    the log says. ahead: what kernels are compiled in, many at a time; None: each at its first launch. registry: where third
    parties' kernels are registered.
    """
    if not kinds:
        return
    device = kinds[0].layers[0].device
    identity = identify_device(device)
    every = [linear_layer(kind, identity, ahead, timer, registry) for kind in kinds]
    layers = [layer for layer in every if not layer.kind.fixed]
    if ahead is not None and budget > 0:
        with on_device(device), torch.inference_mode(), ahead():
            for layer in layers:
                layer.compile([point.batch for point in first_points(layer)])
    shared = SharedBudget(budget, len(layers))
    for layer in sorted(layers, key=lambda layer: layer.stored is None):  # a stored table leaves its share to the others
        with shared.part() as share:
            layer.obey(share)
    with on_device(device), torch.inference_mode():
        for layer in every:
            settle(layer)
    for kind in kinds:
        log.info("products %s: %s", kind.name, kind.describe())


def settle(sample: LinearLayer) -> None:
    """Prepare all layers for the kernels that serve; one without room, or with a wrong answer, serves no longer.

    Third parties' kernels and libraries are tried at each start, since they may have changed since times were stored.
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
        log.warning("products %s: %s serves no longer: %s", kind.name, name, why)
        kind.leave_out(name, Support.no("its trial at the start", "room and a right answer", why))
    for name in kind.serving():
        if not _is_tried(kind, name):  # which takes little: before an engine asks how much memory is free
            for layer in kind.layers:
                layer.prepared_for(kind.kernels[name])
    for layer in kind.layers:
        layer.settle()


def _is_tried(kind: LinearChoice, name: str) -> bool:
    """Whether a kernel is tried at each start."""
    return kind.is_third_party(name) or getattr(kind.kernels[name], "library", False)


def _copies(kind: LinearChoice, name: str) -> bool:
    """Whether a kernel's arrangement may be as large as the weight."""
    return kind.is_third_party(name) or getattr(kind.kernels[name], "copies", False)


def _unfit(sample: LinearLayer, name: str, rows: int) -> str | None:
    """Return why a kernel cannot serve, after trying it; its layers are prepared if it can, else nothing is left of that.

    :raises BackendError: the user asked for the kernel.
    """
    kind = sample.kind
    kernel, layers = kind.kernels[name], kind.layers
    try:
        if getattr(kernel, "copies", False):
            needed, room = sum(layer.held_bytes for layer in layers), _room(layers[0].device)
            if needed > _SHARE * room:
                raise MemoryError(f"it needs {needed / 1e9:.1f} GB of its own, and of {room / 1e9:.1f} GB may take {_SHARE:.0%}")
        taken = sum(layer.prepare(kernel) for layer in layers)
        sample.check(name, rows)
    except Exception as raised:
        for layer in layers:
            layer.release(kernel)
        why = f"{type(raised).__name__}: {raised}"
        if kind.is_named(name):
            raise BackendError(f"linear kernel {name}: needs a right answer for {kind.name}, got {why}") from raised
        return why
    if taken:
        log.info("products %s: %s keeps %.1f MB of its own for %d layers", kind.name, name, taken / 1e6, len(layers))
    return None


def _room(device: torch.device) -> float:
    """Bytes that are free on a GPU, those included that torch holds and does not use."""
    if device.type != "cuda":
        return math.inf
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


@dataclass(frozen=True)
class LinearLayer(CountedLayer):
    """A kind of product, measured by the number of rows.

    Random rows pass a model's own layers one after the other, so that weights come from memory as in a step.
    """

    kind: LinearChoice
    ahead: CompileAhead | None
    _drawn: dict[int, Tensor] = field(default_factory=dict)
    _answers: dict[int, Tensor] = field(default_factory=dict)

    def obey(self, seconds: float) -> None:
        """Have the kind choose by measured times, if there are any. seconds: how long may be measured."""
        table = find_table(self, seconds)
        if table is not None:
            self.kind.use_times(self.times(table, ROWS))

    def able(self, count: int) -> list[str]:
        return self.kind.able(count)

    def sampled(self, rows: int) -> list[Linear]:
        """Return the layers that one call computes."""
        return self.kind.layers[: _LAYERS if rows <= _DECODED else _FEW_LAYERS]

    def layers(self, count: int) -> int:
        return len(self.sampled(count))

    def falls_behind(self, name: str) -> bool:
        return name.startswith(KERNEL)

    @contextmanager
    def ready(self, counts: Collection[int]) -> Iterator[None]:
        """See `CountedLayer`: layers are prepared for every kernel that copies weights; one that cannot fails its check."""
        kernels = [kernel for name, kernel in self.kind.kernels.items() if _copies(self.kind, name)]
        try:
            for kernel in kernels:
                with suppress(Exception):
                    taken = sum(layer.prepare(kernel) for layer in self.sampled(1))
                    log.info("products %s: %s is tried with %.1f MB of its own", self.kind.name, kernel.label, taken / 1e6)
            if self.ahead is not None:
                with self.ahead():
                    self.compile(counts)  # found at once where all kinds' kernels were compiled together
            yield
        finally:
            for kernel in kernels:
                for layer in self.kind.layers:
                    layer.release(kernel)
        if self.on.type == "cuda":
            torch.cuda.empty_cache()  # graphs and answers of many rows

    def compile(self, counts: Collection[int]) -> None:
        """Launch what is compiled for some numbers of rows, to be called where nothing is launched."""
        for rows in counts:
            for name in self.kind.able(rows):
                if _copies(self.kind, name):  # by a launch
                    continue
                with suppress(Exception):  # the trial will meet it again, and name it
                    self.kind.compute(name, self.x(rows), self.kind.layers[0])

    def call(self, name: str, count: int) -> Callable[[], object]:
        """See `CountedLayer`: on a GPU a CUDA graph, as an engine runs its steps, so that the host is not timed."""
        x, layers = self.x(count), self.sampled(count)

        def all_layers() -> None:
            for layer in layers:
                self.kind.compute(name, x, layer)

        return captured(all_layers).replay if self.on.type == "cuda" else all_layers

    def x(self, rows: int) -> Tensor:
        """Return random rows [rows, in_features]; those of one number are kept."""
        if rows not in self._drawn:
            layer = self.kind.layers[0]
            self._drawn.clear()
            generator = torch.Generator(self.on).manual_seed(rows)
            x = torch.empty(rows, layer.in_features, dtype=layer.dtype, device=self.on)
            self._drawn[rows] = x.normal_(generator=generator)
        return self._drawn[rows]

    def expected(self, rows: int) -> Tensor:
        """Return the first and last rows of the answer, by torch's operations in float32."""
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
        if not error < (_ROUNDED if self.kind.kernels[name].rounds_input else _EXACT):
            raise ArithmeticError(f"its answer is off by {error:.1e}")


def linear_layer(
    kind: LinearChoice,
    device: DeviceIdentity,
    ahead: CompileAhead | None = None,
    timer: InterleavedTimer = TURNS,
    registry: Registry | None = None,
) -> LinearLayer:
    """Return a kind of product as a layer that is measured."""
    record, wanted, layers = LinearRecord(layer=kind.name), counted_points("rows", ROW_COUNTS), kind.layers
    on = layers[0].device if layers else torch.device(device.type)
    return LinearLayer(record, device, list(kind.kernels), wanted, on, timer, registry, kind, ahead)


def _ends(rows: Tensor) -> Tensor:
    return rows if len(rows) <= 2 * _COMPARED else torch.cat([rows[:_COMPARED], rows[-_COMPARED:]])
