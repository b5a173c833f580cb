"""Capability checks for library functions and for the GPU. Functions are found by importing them, not by version numbers."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from headway.core.contract.support import YES, Support

HALF_DTYPES = (torch.bfloat16, torch.float16)
"""Element types that attention libraries on tensor cores support."""


def find(module: str, name: str, hint: str, parameters: Collection[str] = ()) -> tuple[Any, Support]:
    """Import a function and check its parameters. Return (function, support), or (None, the reason).

    The function is imported because an installed package does not prove that the function exists: a package without its compiled
    part is still listed as installed, and flash-attn-4 leaves a folder `flash_attn` that is not flash-attn 2.
    """
    try:
        found = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # a library may raise any exception while it loads
        text = " ".join(str(error).split())
        return None, Support.no(f"{module}.{name}", "to be importable", f"{type(error).__name__}: {text}", hint)
    support = _takes(module, name, hint, parameters, signature(found).parameters if parameters else ())
    return found if support else None, support


def declares(module: str, name: str, hint: str, parameters: Collection[str]) -> Support:
    """Return whether a module's source declares a function with these parameters, without importing the module.

    This function is for modules whose import is slow. For example, torch.nn.attention.varlen imports torch's compiler, which
    takes 0.5 to 1 s in each process.
    """
    if module in sys.modules:
        return find(module, name, hint, parameters)[1]
    try:
        spec = find_spec(module)
        source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")
        functions = {node.name: node.args for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    except (ImportError, OSError, ValueError) as error:
        return Support.no(f"{module}.{name}", "to be importable", f"{type(error).__name__}: {error}", hint)
    if name not in functions:
        return Support.no(f"{module}.{name}", "to be importable", "no such function", hint)
    taken = functions[name]
    return _takes(module, name, hint, parameters, [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)])


def _takes(module: str, name: str, hint: str, parameters: Collection[str], taken: Collection[str]) -> Support:
    missing = sorted(set(parameters) - set(taken))
    if not missing:
        return YES
    return Support.no(f"{module}.{name}", f"the parameters {', '.join(missing)}", "a function without them", hint)


def has_gpu() -> Support:
    """Return whether torch sees a CUDA device."""
    if torch.cuda.is_available():
        return YES
    return Support.no("device", "a CUDA GPU", "none")


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, or None for other devices or without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def at_least(needed: tuple[int, int], device: torch.device) -> Support:
    """Return whether the device's compute capability is at least `needed`. An unknown compute capability counts as sufficient."""
    found = capability(device)
    if found is None or found >= needed:
        return YES
    return Support.no("compute capability", "{}.{} or newer".format(*needed), "{}.{}".format(*found))
