"""What is here: functions of libraries, found by importing them and never by a version, and the GPU's capability."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from headway.core.contract.support import YES, Support

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""What tensor-core attention libraries take."""


def find(module: str, name: str, hint: str, parameters: Collection[str] = ()) -> tuple[Any, Support]:
    """Import one function and look at its signature; (None, why not) if it is not there.

    The function itself, not the package: a package without its compiled part still lists as installed, and flash-attn-4 leaves a
    folder `flash_attn` that is no flash-attn 2.
    """
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # a library may raise anything while it loads
        text = " ".join(str(error).split())
        return None, Support.no(f"{module}.{name}", "to be importable", f"{type(error).__name__}: {text}", hint)
    missing = sorted(set(parameters) - set(signature(found).parameters)) if parameters else []
    if missing:
        return None, Support.no(f"{module}.{name}", f"the parameters {', '.join(missing)}", "a function without them", hint)
    return found, YES


def has_gpu() -> Support:
    """Whether torch sees a CUDA device."""
    if torch.cuda.is_available():
        return YES
    return Support.no("device", "a CUDA GPU", "none")


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None where there is none to ask."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def at_least(needed: tuple[int, int], device: torch.device) -> Support:
    """Whether the device's compute capability is new enough."""
    found = capability(device)
    if found is None or found >= needed:
        return YES
    return Support.no("compute capability", "{}.{} or newer".format(*needed), "{}.{}".format(*found))
