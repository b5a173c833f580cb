"""Times of the kernels of linear layers for each number of rows: measured once on each device, and kept."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from headway.core.contract.errors import BackendError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.support import Support
from headway.core.system.files import cache_folder
from headway.kernels.linear.choice import KERNEL, ROW_COUNTS, ProductTimes
from headway.tuning.measure.device import identify_device
from headway.tuning.measure.graph_replay import captured
from headway.tuning.measure.kept import KeptPlace, KeptTimes, Us, cells_to_check, times_with, unchecked
from headway.tuning.measure.timing import Budget, InterleavedTimer, Timing, on_device
from headway.tuning.table.files import file_name, slug
from headway.tuning.table.schema import DeviceIdentity

if TYPE_CHECKING:
    from headway.kernels.linear.choice import LinearChoice
    from headway.kernels.linear.linear import Linear

SCHEMA = "headway.products/1"
_TURNS = InterleavedTimer(rounds=2, round_ms=2.0)
_LAYERS, _FEW_LAYERS = 16, 2
"""Layers in the CUDA graph that is timed: of few rows, whose time is that of reading weights, and of more than _DECODED."""
_DECODED = 128
_COMPARED = 64
"""First and last rows whose answers are compared."""
_EXACT, _ROUNDED = 3e-2, 8e-2
"""Error of a right answer relative to its norm: of x in half precision, and of x in floats of 8 bits."""
_BEHIND = 3.0
"""Times as slow as the fastest: our kernel, so far behind, takes no part for more rows, where it falls behind further."""
_SHARE = 0.4
"""Part of the free memory that the arrangements of one kind may take: the cache comes after them, and other kinds."""
log = logging.getLogger("headway")


class ProductsFile(KeptTimes):
    """The times of one kind of product on one device."""

    file_schema: str = SCHEMA
    product: str
    """Form, shape and element type, in words."""
    rows: list[int]
    """A way that was far behind with fewer rows has no time."""


def choose_products(
    kinds: Sequence[LinearChoice], budget: float, ahead: CompileAhead | None = None, timer: InterleavedTimer = _TURNS
) -> None:
    """Have each kind of product choose by measured times: those that are kept for this device, or new ones.

    budget: seconds that may be measured, compiling not counted; 0: nothing is, and where nothing is kept a rule chooses, which
    the log says. ahead: what kernels are compiled in, many at a time; None: each at its first launch.
    """
    if not kinds:
        return
    identity = identify_device(kinds[0].layers[0].device)
    missing = [kind for kind in kinds if not kind.is_decided and not obey_kept(kind, identity)]
    if missing and budget > 0:
        _measure(missing, identity, budget, ahead, timer)
    else:
        for kind in missing:
            obey_shipped(kind, identity)
    with on_device(kinds[0].layers[0].device), torch.inference_mode():
        for kind in kinds:
            settle(kind)
    for kind in kinds:
        log.info("products %s: %s", kind.name, kind.describe())


def settle(kind: LinearChoice) -> None:
    """Prepare all layers for the kernels that serve; one without room, or with a wrong answer, serves no longer.

    Third parties' kernels and libraries are tried at each start, since they may have changed since times were stored.
    """
    fit = set[str]()
    while True:
        untried = [item for item in kind.serving().items() if _is_tried(kind, item[0]) and item[0] not in fit]
        if not untried:
            break
        name, rows = untried[0]
        why = _unfit(kind, name, rows)
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
    return kind.is_guest(name) or getattr(kind.kernels[name], "library", False)


def _copies(kind: LinearChoice, name: str) -> bool:
    """Whether a kernel's arrangement may be as large as the weight."""
    return kind.is_guest(name) or getattr(kind.kernels[name], "copies", False)


def _unfit(kind: LinearChoice, name: str, rows: int) -> str | None:
    """Return why a kernel cannot serve, after trying it; its layers are prepared if it can, else nothing is left of that.

    :raises BackendError: the user asked for the kernel.
    """
    kernel, layers = kind.kernels[name], kind.layers
    try:
        if getattr(kernel, "copies", False):
            needed, room = sum(layer.held_bytes for layer in layers), _room(layers[0].device)
            if needed > _SHARE * room:
                raise MemoryError(f"it needs {needed / 1e9:.1f} GB of its own, and of {room / 1e9:.1f} GB may take {_SHARE:.0%}")
        taken = sum(layer.prepare(kernel) for layer in layers)
        SampleProduct(kind).check(name, rows)
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


def obey_kept(kind: LinearChoice, device: DeviceIdentity) -> bool:
    """Have a kind choose by the times that are kept for a device; False: there are none."""
    place = _place(kind, device)
    return _obey(kind, place.read(), place.path)


def obey_shipped(kind: LinearChoice, device: DeviceIdentity) -> bool:
    """Have a kind choose by the times that ship with Headway, unchecked; False: there are none of all its ways."""
    place = _place(kind, device)
    return _obey(kind, unchecked(place.shipped(), kind.kernels), place.path)


def _obey(kind: LinearChoice, found: ProductsFile | None, path: Path) -> bool:
    if found is not None:
        kind.obey(ProductTimes(found.us, found.source(path)))
    return found is not None


def _place(kind: LinearChoice, device: DeviceIdentity) -> KeptPlace[ProductsFile]:
    path = cache_folder() / "products" / file_name(device, slug(kind.name), kind.name)
    return KeptPlace("products", ProductsFile, path, device, {"product": kind.name, "rows": list(ROW_COUNTS)}, kind.kernels)


def _measure(
    kinds: Sequence[LinearChoice], identity: DeviceIdentity, budget: float, ahead: CompileAhead | None, timer: InterleavedTimer
) -> None:
    """Time the ways of all kinds within a budget, each kind with an equal share of what is left, and keep the times."""
    device, clock = kinds[0].layers[0].device, Budget(budget)
    log.warning("products: measuring the kernels of %d kinds of linear layers, some seconds, once", len(kinds))
    with on_device(device), torch.inference_mode():
        samples = {SampleProduct(kind): _place(kind, identity).shipped() for kind in kinds}
        if ahead is not None:
            with ahead():
                for sample, shipped in samples.items():
                    sample.compile(range(len(ROW_COUNTS)) if shipped is None else cells_to_check(shipped.us))
        clock.begin()
        for place, (sample, shipped) in enumerate(samples.items()):
            left = clock.left or 0.0
            share = Budget(left / (len(samples) - place))
            with sample.arranged():
                measure = partial(_compiled_times, sample, share, timer, ahead)
                times, prior = times_with(shipped, f"products {sample.kind.name}", sample.kind.kernels, len(ROW_COUNTS), measure)
            kept = _place(sample.kind, identity)
            _obey(sample.kind, kept.keep(times, prior), kept.path)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # graphs and answers of many rows


def _compiled_times(
    sample: SampleProduct, budget: Budget, timer: InterleavedTimer, ahead: CompileAhead | None, cells: Collection[int]
) -> Us:
    """Microseconds of each way for some of ROW_COUNTS, for which nothing is compiled one by one."""
    if ahead is not None:
        began = time.perf_counter()
        with ahead():
            sample.compile(cells)  # found at once where all kinds' kernels were compiled together
        budget.compiling += time.perf_counter() - began
    return _times(sample, budget, timer, cells)


def _times(sample: SampleProduct, budget: Budget, timer: InterleavedTimer, cells: Collection[int]) -> Us:
    """Microseconds of each way for some of ROW_COUNTS, fewest first."""
    kind, out = sample.kind, set[str]()
    us: Us = {name: [None] * len(ROW_COUNTS) for name in kind.kernels}
    for cell in cells:
        rows = ROW_COUNTS[cell]
        if (budget.left or 0.0) <= 0.0:
            log.warning("products %s: the time did not suffice for %d rows and more, where a rule chooses", kind.name, rows)
            break
        calls: dict[str, Callable[[], object]] = {}
        for name in kind.able(rows):
            if name in out:
                continue
            try:
                sample.check(name, rows)
                calls[name] = sample.call(name, rows)
            except Exception as raised:
                why = f"{type(raised).__name__}: {raised}"
                log.warning("products %s: %s is left out from %d rows on: %s", kind.name, name, rows, why)
                out.add(name)
        found = dict(zip(calls, timer.time(list(calls.values()), sample.device), strict=True))
        for name, timing in found.items():
            if isinstance(timing, Timing):
                us[name][cell] = timing.median_us / len(sample.layers(rows))
            else:
                log.warning("products %s: %s with %d rows is left out: %s", kind.name, name, rows, timing)
        known = {name: us_here for name, times in us.items() if (us_here := times[cell]) is not None}
        slow = _BEHIND * min(known.values(), default=0.0)
        out |= {name for name, us_here in known.items() if us_here > slow and name.startswith(KERNEL)}
    return us


class SampleProduct:
    """Random rows, and a model's own layers of one kind, one after the other: so weights come from memory as in a step."""

    def __init__(self, kind: LinearChoice) -> None:
        self.kind = kind
        self._layers = kind.layers
        self.device = self._layers[0].device
        self._generator = torch.Generator(self.device).manual_seed(0)
        self._x = torch.empty(0, 0)
        self._expected: tuple[int, Tensor] | None = None

    def layers(self, rows: int) -> list[Linear]:
        """Return the layers that one call computes."""
        return self._layers[: _LAYERS if rows <= _DECODED else _FEW_LAYERS]

    def x(self, rows: int) -> Tensor:
        """Random rows [rows, in_features]; those of one number are kept."""
        if len(self._x) != rows:
            layer = self._layers[0]
            self._x = torch.empty(rows, layer.in_features, dtype=layer.dtype, device=self.device)
            self._x.normal_(generator=self._generator)
        return self._x

    @contextmanager
    def arranged(self) -> Iterator[None]:
        """Prepare the layers inside for every kernel that copies weights; for one that cannot, its trial will say why."""
        kernels = [kernel for name, kernel in self.kind.kernels.items() if _copies(self.kind, name)]
        try:
            for kernel in kernels:
                with suppress(Exception):
                    taken = sum(layer.prepare(kernel) for layer in self.layers(1))
                    log.info("products %s: %s is tried with %.1f MB of its own", self.kind.name, kernel.label, taken / 1e6)
            yield
        finally:
            for kernel in kernels:
                for layer in self._layers:
                    layer.release(kernel)

    def compile(self, cells: Collection[int]) -> None:
        """Launch whatever is compiled for some of ROW_COUNTS, to be called where nothing is launched."""
        for rows in (ROW_COUNTS[cell] for cell in cells):
            for name in self.kind.able(rows):
                if _copies(self.kind, name):  # by a launch
                    continue
                with suppress(Exception):  # the trial will meet it again, and name it
                    self.kind.compute(name, self.x(rows), self._layers[0])

    def call(self, name: str, rows: int) -> Callable[[], object]:
        """All layers by one way: on a GPU as a CUDA graph, as an engine runs its steps, so that the host is not timed."""
        x, layers = self.x(rows), self.layers(rows)

        def all_layers() -> None:
            for layer in layers:
                self.kind.compute(name, x, layer)

        return captured(all_layers).replay if self.device.type == "cuda" else all_layers

    def expected(self, rows: int) -> Tensor:
        """The first and last rows of the answer, by torch's operations in float32."""
        if self._expected is None or self._expected[0] != rows:
            layer, x = self._layers[0], _ends(self.x(rows)).float()
            weight = layer.weight
            x = rms_norm(x, x.shape[1:], eps=1e-6) if self.kind.gated else x
            y = x @ (weight.float() if isinstance(weight, Tensor) else weight.dequantized(torch.float32)).t()
            y = y if layer.bias is None else y + layer.bias
            gate, up = y.chunk(2, dim=1) if self.kind.gated else (y, y)
            self._expected = rows, silu(gate) * up if self.kind.gated else y
        return self._expected[1]

    def check(self, name: str, rows: int) -> None:
        """Check a kernel's answer against that of torch's operations.

        :raises ArithmeticError: it is another; or whatever the kernel raises.
        """
        found, expected = _ends(self.kind.compute(name, self.x(rows), self._layers[0])).float(), self.expected(rows)
        error = float((found - expected).norm() / expected.norm())
        if not error < (_ROUNDED if self.kind.kernels[name].rounds_input else _EXACT):
            raise ArithmeticError(f"its answer is off by {error:.1e}")


def _ends(rows: Tensor) -> Tensor:
    return rows if len(rows) <= 2 * _COMPARED else torch.cat([rows[:_COMPARED], rows[-_COMPARED:]])
