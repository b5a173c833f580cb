"""State of the whole process that no plugin may change: a snapshot before, and what differs after."""

from __future__ import annotations

import builtins
import locale
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch.nn import functional

_SHARED = ("builtins", "json", "logging", "os", "pickle", "signal", "socket", "subprocess", "sys", "threading", "time", "torch")
"""Shared modules that nobody may replace."""
_OPERATIONS: tuple[tuple[object, str], ...] = (
    *((functional, name) for name in ("scaled_dot_product_attention", "linear", "softmax", "embedding")),
    *((torch, name) for name in ("matmul", "mm", "bmm", "addmm", "softmax", "cat", "empty")),
    *((torch.Tensor, name) for name in ("__matmul__", "matmul", "to", "mul_")),
)
"""Functions that other backends and the model compute with."""


def modules() -> dict[str, ModuleType]:
    """Return the loaded modules of Headway, and those that everybody shares."""
    return {name: module for name, module in sys.modules.items() if name in _SHARED or name.startswith("headway.")}


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


STATE: dict[str, Callable[[], object]] = {
    "the working folder": os.getcwd,
    "the mask of new files' modes": _umask,
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "torch's switch for gradients": torch.is_grad_enabled,
    "torch's switch for deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "torch's precision of products": torch.get_float32_matmul_precision,
    "torch's seed": torch.initial_seed,  # which drawing numbers leaves as it is
    "torch's operations": lambda: [getattr(owner, name) for owner, name in _OPERATIONS],
    "what Ctrl-C does": lambda: signal.getsignal(signal.SIGINT),
    "what SIGTERM does": lambda: signal.getsignal(signal.SIGTERM),
    "sys.stdout": lambda: sys.stdout,
    "sys.stderr": lambda: sys.stderr,
    "sys.excepthook": lambda: sys.excepthook,
    "the switch interval of threads": sys.getswitchinterval,
    "print": lambda: builtins.print,
    "the handlers of the root logger": lambda: tuple(logging.getLogger().handlers),
}
"""Name of each part of the state -> how it is read."""


class ProcessSnapshot:
    """The state of the process when a plugin's trial began."""

    def __init__(self) -> None:
        self._before = {what: read() for what, read in STATE.items()}
        self._modules = modules()
        self._variables = set(os.environ)

    def changed(self) -> str:
        """Name the first part of the state that has changed, in words; empty if nothing has."""
        for name, read in STATE.items():
            now, before = read(), self._before[name]
            if now != before:
                return name if isinstance(now, list) else f"{name} from {before} to {now}"
        if gone := sorted(self._variables - set(os.environ)):
            return f"the environment: {gone[0]} is gone"
        present = modules()
        other = next((name for name, module in self._modules.items() if present.get(name) is not module), "")
        return f"the module {other} for another" if other else ""
