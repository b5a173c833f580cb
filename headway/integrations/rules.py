"""transformers' own rules of who sees whom, told by how they are written, since trying one out costs more than a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

Rule = Callable[..., Tensor]
"""(batch, head, query, key) -> whether the query sees the key; the last two are positions and may be tensors."""

_DEPTH = 6
"""Functions in functions that are looked at."""


def known(rule: Rule, window: int | None) -> bool:
    """Whether a rule is the one that transformers makes for causal attention, or for that within a window, which was tried."""
    if torch.compiler.is_dynamo_compiling():  # which would look through what is kept
        return False
    causal = _causal(window)
    return causal is not None and bool(_written(rule) == causal)


def shows(rule: Rule, query: int, window: int | None) -> bool:
    """Whether a rule shows a query the keys before it and its own, within the window, and no other ones up to its position."""
    keys, zero = torch.arange(query + 1), torch.tensor(0)
    expected = keys <= query
    if window is not None:
        expected &= keys > query - window
    try:
        seen = rule(zero, zero, torch.tensor(query), keys)
    except (RuntimeError, IndexError, TypeError):  # it looks at the tokens themselves
        return False
    return torch.equal(seen.expand(query + 1).cpu(), expected)


@cache
def _causal(window: int | None) -> Any:
    """How this transformers writes the rule; None: it has none of that name, or one that does not do what the name says."""
    name = "causal_mask_function" if window is None else "sliding_window_causal_mask_function"
    rule = getattr(masking_utils, name, None)
    if rule is not None and window is not None:
        rule = rule(window)
    around = 64 if window is None else window
    tried = (0, 1, around - 1, around, around + 1, 2 * around + 1)
    return _written(rule) if rule is not None and all(shows(rule, max(query, 0), window) for query in tried) else None


def _written(part: Any, depth: int = 0) -> Any:
    """A function's code and what it has closed over: equal ones compute the same. What may change is equal to itself alone."""
    if isinstance(part, FunctionType) and depth < _DEPTH:
        held = tuple(_written(cell.cell_contents, depth + 1) for cell in part.__closure__ or ())
        plain = part.__defaults__ is None and part.__kwdefaults__ is None
        return (part.__code__, id(part.__globals__), held) if plain else object()
    if isinstance(part, tuple) and depth < _DEPTH:
        return tuple(_written(each, depth + 1) for each in part)
    return (type(part), part) if part is None or isinstance(part, (bool, int, float, str)) else object()
