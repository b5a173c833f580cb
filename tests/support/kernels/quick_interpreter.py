"""Triton's interpreter without repeated work that takes two thirds of its time. Kernels compute the same.

`tests/conftest.py` applies this in processes whose interpreter is on. Other releases of Triton run at their own speed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken() -> None:
    """Change Triton's modules in this process."""
    with suppress(AttributeError):  # of a part that is not there
        interpreter._patch_lang = _patched_once(interpreter._patch_lang, interpreter._LangPatchScope)
    with suppress(AttributeError):
        TritonSemantic.binary_op_sanitize_overflow_impl = _if_asserted(TritonSemantic.binary_op_sanitize_overflow_impl)
    with suppress(AttributeError):
        interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)


def _patched_once(patch: Callable[..., Any], nothing: Callable[[], Any]) -> Callable[..., Any]:
    """A launch puts the interpreter's functions in the language's place; each function called by a kernel would do so anew."""

    @wraps(patch)
    def patch_what_is_not(fn: Any) -> Any:
        unpatched = [each for each in (tl, tl.core) if tl.core.is_builtin(each.load)]
        missing = any(value is each for each in unpatched for value in fn.__globals__.values())
        return patch(fn) if missing else nothing()

    return patch_what_is_not


def _if_asserted(check: Callable[..., None]) -> Callable[..., None]:
    """The check of each sum for an overflow computes a condition for an assertion, which without debug is not made."""

    @wraps(check)
    def check_if_asserted(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            check(self, *arguments)

    return check_if_asserted


def _kept_by_name(dtype_of: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """Triton makes a table of all types to look one up."""
    found: dict[str, np.dtype[Any]] = {}

    @wraps(dtype_of)
    def kept(of: Any) -> np.dtype[Any]:
        if of.name not in found:
            found[of.name] = dtype_of(of)
        return found[of.name]

    return kept
