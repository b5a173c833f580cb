"""Launches of compiled Triton kernels without Triton's argument analysis, which takes longer than a small kernel runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction, knobs
from triton.runtime import driver

from headway.core.contract.kernel import AHEAD
from headway.core.contract.support import YES, Support

INTERPRETED = bool(knobs.runtime.interpret)
"""True if kernels run under Triton's interpreter, that is, TRITON_INTERPRET=1 was set when triton was imported."""
PDL_CAPABILITY = (9, 0)
"""Minimum compute capability for programmatic dependent launch (PDL): a kernel may start before its predecessors have ended."""

Grid = tuple[int, int, int]


class Compiled:
    """One compiled kernel, whose launch takes little more host time than the driver itself needs (docs/kernels.md)."""

    def __init__(self, kernel: Any, constants: tuple[Any, ...]) -> None:
        self._kernel = kernel
        self._constants = constants

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launch on the current stream.

        arguments: all arguments in the kernel's order. Passing a tensor's address instead of the tensor saves the launcher a
        Python call and a pointer lookup in the driver.
        """
        kernel = self._kernel
        if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:  # a profiler is attached
            kernel[grid](*arguments, *self._constants)
            return
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments, *self._constants)


class BoundKernel:
    """A compiled kernel whose grid and arguments, except the first few, are bound. All layers of a step use the same object."""

    def __init__(self, compiled: Compiled, grid: Grid, rest: Sequence[Any]) -> None:
        """Bind the arguments that follow those of `__call__`. The caller must keep the tensors in `rest` alive."""
        self._compiled = compiled
        self._grid = grid
        self._rest = tuple(argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in rest)

    def __call__(self, *first: Any) -> None:
        """Launch the kernel. first: the kernel's first arguments, as addresses or tensors."""
        self._compiled(self._grid, *first, *self._rest)


def hash_helpers_first(kernel: Any) -> None:
    """Compute a kernel's hash after the hashes of all functions that it calls, so that every process computes the same hash.

    The hash of Triton 3.6 contains the constants of a called function only if that function was hashed before. It would depend
    on the kernels that were hashed earlier, and kernels in the cache on disk would not be found.
    """
    if not isinstance(kernel, JITFunction) or kernel.hash is not None:
        return
    for name in kernel.fn.__code__.co_names:
        called = kernel.fn.__globals__.get(name)
        if called is not kernel:
            hash_helpers_first(called)
    _ = kernel.cache_key


class Launcher:
    """A Triton kernel with a cache of its compiled variants, keyed by `key`.

    The caller guarantees that equal keys mean equal compile-time constants, equal integer arguments (except arguments that Triton
    does not specialise on) and equal pointer alignment. Triton compiles one variant for each combination of these.
    """

    def __init__(self, kernel: Any) -> None:
        hash_helpers_first(kernel)
        self._kernel = kernel
        self._compiled: dict[Hashable, Compiled] = {}
        self._ahead: set[Hashable] = set()
        """Keys of variants that were compiled ahead of their first launch."""

    def known(self, key: Hashable) -> Compiled | None:
        """Return the compiled variant for a key, or None if it is not compiled yet or kernels are being compiled ahead."""
        return self._compiled.get(key) if AHEAD.get() is None else None

    def bind(
        self, key: Hashable, grid: Grid, first: Sequence[Any], pointers: Sequence[Any], rest: Sequence[Any],
        constants: Mapping[str, Any], **options: int,
    ) -> BoundKernel | None:  # fmt: skip
        """Run the kernel like `__call__` and return a `BoundKernel`.

        Return None under the interpreter and while kernels are compiled ahead, because no compiled kernel is available to bind.
        first, rest: all arguments of the kernel. pointers: addresses of the tensors in `first`, with which a compiled kernel is
        launched.
        """
        known = self.known(key)
        if known is None:
            self(key, grid, (*first, *rest), constants, **options)
            known = self._compiled.get(key)
            return None if known is None else BoundKernel(known, grid, rest)
        bound = BoundKernel(known, grid, rest)
        bound(*pointers)
        return bound

    def __call__(self, key: Hashable, grid: Grid, arguments: Sequence[Any], constants: Mapping[str, Any], **options: int) -> None:
        """Run the kernel, compiling it first if needed.

        arguments: arguments in the kernel's order. constants: all compile-time constants, keyed by name. options: num_warps and
        num_stages.
        If the constant PDL is true, the kernel uses programmatic dependent launch and must itself wait for its predecessors. FMA
        fusion is always enabled, because Triton's default changes in release 3.10.
        """
        known = self.known(key)
        if known is not None:
            known(grid, *arguments)
            return
        options |= {"enable_fp_fusion": True, **({"launch_pdl": True} if constants.get("PDL") else {})}
        if (ahead := AHEAD.get()) is not None:
            if key not in self._ahead:
                self._ahead.add(key)
                ahead.num_new += 1
                self._kernel.warmup(*arguments, grid=grid, **constants, **options)
            return
        kernel = self._kernel[grid](*arguments, **constants, **options)
        if not INTERPRETED:
            names = self._kernel.arg_names[len(arguments) :]
            self._compiled[key] = Compiled(kernel, tuple(constants[name] for name in names))


class FixedLauncher:
    """A kernel with one set of compile-time constants, for one kind of layer.

    The kernel is compiled once for each combination of argument types and alignments. Its integer arguments, if any, must not be
    specialised.
    """

    def __init__(self, kernel: Any, num_warps: int, device: torch.device, constants: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self._launcher = Launcher(kernel)
        self._num_warps = num_warps
        self._constants = {**constants, "PDL": launches_early(device)}

    def __call__(self, grid: Grid, **arguments: Tensor | float) -> None:
        """Run the kernel. arguments: in the order of the kernel's first parameters and with their names. Later launches ignore
        the names."""
        values = arguments.values()
        key = (*arguments, *[(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else None for a in values])
        known = self._launcher.known(key)
        if known is not None:
            known(grid, *values)
            return
        assert [*arguments] == self.kernel.arg_names[: len(arguments)], "named as the kernel's first parameters, in their order"
        self._launcher(key, grid, tuple(values), self._constants, num_warps=self._num_warps)


class Launchers:
    """Launchers of kernels, by kernel and compile-time constants."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Hashable, FixedLauncher] = {}

    def get(self, kernel: Any, num_warps: int, constants: Mapping[str, Any]) -> FixedLauncher:
        """Return the launcher for a kernel and its constants. The kernel must not be freed before its module."""
        key = id(kernel), num_warps, *constants.values()
        launcher = self._known.get(key)
        if launcher is None:
            launcher = self._known[key] = FixedLauncher(kernel, num_warps, self._device, constants)
        return launcher


def shared_memory(device: torch.device) -> int:
    """Return the maximum shared memory of a thread block, in bytes."""
    if device.type != "cuda":
        return 128 * 1024  # only the interpreter runs without a GPU
    properties = torch.cuda.get_device_properties(device)
    num_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return num_bytes


def aligned(*pointers: int) -> bool | tuple[bool, ...]:
    """Return True if all addresses are 16-byte aligned, else a tuple with one bool per address. Triton specialises kernels on the
    alignment."""
    together = 0
    for pointer in pointers:
        together |= pointer
    return together % 16 == 0 or tuple(pointer % 16 == 0 for pointer in pointers)


def specialised(*numbers: int) -> tuple[object, ...]:
    """Return the properties of each integer that Triton specialises on: equality to 1, divisibility by 16, size in bits."""
    return tuple(number == 1 or (number % 16 == 0, -(2**31) <= number < 2**31) for number in numbers)


def can_launch() -> Support:
    """Return whether Triton can run kernels here: on a GPU with a driver, or in the interpreter."""
    if INTERPRETED or torch.cuda.is_available():
        return YES
    return Support.no("device", "a CUDA GPU", "none", "TRITON_INTERPRET=1 runs the kernels slowly on a CPU, for tests")


def launches_early(device: torch.device) -> bool:
    """Return whether a device supports programmatic dependent launch (constant PDL)."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= PDL_CAPABILITY


class Workspace:
    """Buffers for partial results, which grow on demand. Buffers that became too small stay allocated, because captured graphs
    may still use them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Tensor] = []
        self._floats = torch.empty(0, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)

    def floats(self, count: int) -> Tensor:
        """Return an uninitialised buffer of at least `count` float32 values."""
        if self._floats.numel() < count:
            self._kept.append(self._floats)
            self._floats = torch.empty(max(count, 2 * self._floats.numel()), device=self._device)
        return self._floats

    def counters(self, count: int) -> Tensor:
        """Return a buffer of at least `count` int32 counters, which are zero between launches."""
        if self._counters.numel() < count:
            self._kept.append(self._counters)
            size = max(count, 2 * self._counters.numel())
            self._counters = torch.zeros(size, dtype=torch.int32, device=self._device)
        return self._counters
