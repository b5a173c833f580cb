"""One step as a session lays it out: what goes in, what must come out, and what must stay as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.testing.findings import Finding
from headway.testing.oracle import Row
from headway.testing.pool import bits

UNWRITTEN = {torch.float32: 0x7FDA5A5A, torch.bfloat16: 0x7FDA, torch.float16: 0x7E5A}
"""Bits of the NaN that `out` holds before a step: no arithmetic leaves this one."""
GUARD = 3
"""Rows before and after `out` that belong to somebody else."""


@dataclass(eq=False)
class Tokens:
    """One sequence: how many of its tokens are cached, and where."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class Turn(NamedTuple):
    """What a step does for one sequence."""

    seq: Tokens
    query_len: int = 1
    """New tokens."""
    num_draft_tokens: int = 0
    """Of them, guesses of a speculator that this step verifies: the sequence then decodes."""


Work = Sequence[Turn]
"""The turns of a step, those that decode last."""


@dataclass
class Inputs:
    """One layer's tensors of a step."""

    q: Tensor
    k: Tensor
    v: Tensor
    guarded: Tensor
    """`out` with GUARD rows before and after it."""

    @property
    def out(self) -> Tensor:
        """[num_tokens, num_heads, v_head_dim]"""
        return self.guarded[GUARD:-GUARD]

    @classmethod
    def allocate(cls, spec: AttentionSpec, tokens: int, *, merged: bool) -> Inputs:
        """Memory for steps of up to `tokens`. merged: q, k and v are slices of one tensor, as a merged projection leaves them."""
        dims = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim]
        place = {"dtype": spec.dtype, "device": spec.device}
        if merged:
            flat = list(torch.zeros(tokens, sum(dims), **place).split(dims, dim=1))  # type: ignore[call-overload]
        else:
            flat = [torch.zeros(tokens, dim, **place) for dim in dims]  # type: ignore[call-overload]
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = (part.unflatten(1, (count, -1)) for part, count in zip(flat, heads, strict=True))
        if spec.value_in_key:
            v = k[..., : spec.v_head_dim]
        out = torch.zeros(tokens + 2 * GUARD, spec.num_heads, spec.v_head_dim, **place)  # type: ignore[call-overload]
        return cls(q, k, v, out)

    def first(self, tokens: int) -> Inputs:
        """The same memory for a step of `tokens`; the output holds NaN, so that a missed row shows."""
        part = Inputs(self.q[:tokens], self.k[:tokens], self.v[:tokens], self.guarded[: tokens + 2 * GUARD])
        bits(part.guarded).fill_(UNWRITTEN[part.guarded.dtype])
        return part

    def unwritten(self, tokens: slice) -> bool:
        """Whether any element of these tokens' output still holds what it held before the step."""
        return bool((bits(self.out[tokens]) == UNWRITTEN[self.out.dtype]).any())


@dataclass
class Step:
    """A step that is laid out."""

    metadata: AttentionMetadata
    inputs: list[Inputs]
    rows: list[list[Row]]
    """Of each layer, its sequences; padding rows are left out."""
    tokens: list[slice]
    """The packed tokens of each sequence."""
    padding: slice
    """The packed tokens of the padding rows."""


class Before:
    """Everything of a step that a backend may read and must not change."""

    def __init__(self, step: Step) -> None:
        self._inputs = [(given.q.clone(), given.k.clone(), given.v.clone()) for given in step.inputs]
        self._metadata = {
            each.name: value.clone()
            for each in fields(step.metadata)
            if isinstance(value := getattr(step.metadata, each.name), Tensor)
        }

    def compare(self, step: Step) -> None:
        """:raises Finding: something was changed."""
        for layer, (given, was) in enumerate(zip(step.inputs, self._inputs, strict=True)):
            for name, old in zip("qkv", was, strict=True):
                new = getattr(given, name)
                if not torch.equal(bits(new.contiguous()), bits(old.contiguous())):
                    count = int((bits(new.contiguous()) != bits(old.contiguous())).sum())
                    raise Finding(
                        f"layer {layer}: {name} must stay as it was; {count} of {old.numel()} elements are changed",
                        guess=f"changes {name}",
                    )
        for name, old in self._metadata.items():
            if not torch.equal(getattr(step.metadata, name), old):
                raise Finding(
                    f"metadata.{name} must stay as it was: {old.tolist()[:8]} became {getattr(step.metadata, name).tolist()[:8]}",
                    guess=f"changes metadata.{name}",
                )
