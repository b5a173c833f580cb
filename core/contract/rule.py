"""`AttentionRule`: a variant of attention as a few lines of torch, which every backend either computes or refuses."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, dataclass_transform, get_type_hints

import torch
from torch import Tensor

PerHead = tuple[float, ...]
"""Type of a parameter with one number for each query head. A rule's functions get the number of their head."""


@dataclass_transform(frozen_default=True, eq_default=False)
class AttentionRule:
    """Base class of attention rules. Subclasses override `score`, `mask`, `gate` or `blocks`, and declare parameters as fields.

    The functions get positions and heads as integer tensors that broadcast against each other, and return a tensor that
    broadcasts with them. They must be elementwise: one element may depend only on the same element of each argument and on the
    parameters. The parameters are attributes of `params`: numbers as they are, `PerHead` as the number of the head, and tensors
    to be indexed, such as `params.table[q_pos - k_pos]`.
    """

    name: ClassVar[str] = ""
    """Name in messages and tables. Default: the name of the class."""
    causal: ClassVar[bool] = True
    """True if a query sees no later keys, whatever the mask says."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__dict__.get("name") or cls.__name__
        dataclass(frozen=True, eq=False)(cls)

    def score(self, score: Tensor, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        """Return the changed score. score: float32 q.k * scale."""
        return score

    def mask(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        """Return a bool tensor: True where the query sees the key."""
        return (k_pos <= q_pos) | (not self.causal)

    def gate(self, q_pos: Tensor, k_pos: Tensor, head: Tensor, params: Any) -> Tensor:
        """Return the factor of a key's value. It multiplies the weight after the softmax, and so does not change its sum."""
        return torch.ones_like(k_pos, dtype=torch.float32)

    @property
    def parts(self) -> frozenset[str]:
        """Names of the functions that the rule overrides, out of "score", "mask", "gate" and "blocks"."""
        names = ("score", "mask", "gate")
        return frozenset(name for name in names if getattr(type(self), name) is not getattr(AttentionRule, name))

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of SHA-256 over the source of the class and the parameters. Rules with equal digests are equal."""
        hashed = hashlib.sha256(textwrap.dedent(inspect.getsource(type(self))).encode())
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            shape = f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            hashed.update(f"{field.name}={shape}".encode())
            if isinstance(value, Tensor):
                hashed.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()[:16]

    def params(self, head: Tensor) -> Any:
        """Return the object that the rule's functions get as `params`. head: integer tensor of query heads."""
        types: Mapping[str, Any] = get_type_hints(type(self))
        found = SimpleNamespace()
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if types[field.name] == PerHead:
                value = torch.tensor(value, dtype=torch.float32, device=head.device)[head]
            elif isinstance(value, Tensor):
                value = value.to(head.device)
            setattr(found, field.name, value)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionRule) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
