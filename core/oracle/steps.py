"""The steps of the kit: their lengths (edges of blocks, ones, primes, many rows, over a thousand tokens), and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import Finding
from headway.core.oracle.oracle import StepSequence
from headway.core.oracle.pool import bits

Lens = list[tuple[int, int, int]]
"""(query_len, context, num_draft_tokens) of each sequence, those that decode last."""
LONG = 1031
"""A prime just above 1,024."""
TABLE_BLOCKS = 130
"""Blocks of a sequence whose table is long."""


def first_step(phase: str, block_size: int) -> Lens:
    """The lengths of a step of one kind (a name of cells.PHASES, or "long")."""
    b = block_size
    prompts = [1, 2, 3, 5, 7, 13, 17, 31, 33, 36, 37, 38, 61, b - 1, b, b + 1, 2 * b - 1, 19]
    extends = [(5, b), (7, 2 * b), (3, b - 1), (b, b), (2, b + 1), (33, 1), (17, 30), (13, 2 * b + 3), (2, 37), (20, 17)]
    kv_lens = [2, 3, 15, 16, 17, 31, 33, 36, 37, 38, 63, 64, 65, 97, b - 1, b, b + 1, 2 * b - 1, 2 * b, 2 * b + 1, 3 * b + 1]
    decodes = [(1, length - 1, 0) for length in (kv_lens + kv_lens[::-2] + [29])[:33] if length > 1]
    steps: dict[str, Lens] = {
        "prefill": [(n, 0, 0) for n in prompts if n > 0],
        "extend": [(n, context, 0) for n, context in extends if n > 1 and context > 0],
        "decode": decodes,
        "mixed": [(9, 0, 0), (6, b, 0), (b + 3, 0, 0), (40, 2 * b - 1, 0), (3, 19, 0), *decodes[1:8], (1, 3 * b - 1, 0)],
        "verify": [(4, 17, 3), (2, b, 1), (8, b - 3, 7), (3, 2, 2), (5, 2 * b + 1, 4), (7, 36, 6), (6, 1, 5), (4, 63, 3)],
        "ragged": [(1, 1, 0), (1, LONG + 70, 0), (1, b, 0), (1, 40, 0), (1, 7, 0), (1, 190, 0)],
        "long": [(LONG, 0, 0), (5, LONG, 0), (70, LONG + 300, 0), (1, LONG - 8, 0), (1, 2 * LONG, 0), (1, 1024, 0), (1, 20, 0)],
    }
    if phase not in steps:
        raise ConfigError("--cell", f"a phase out of {', '.join(steps)}", repr(phase))
    return steps[phase]


def padding_rows(phase: str) -> int:
    """Rows of length 0 at a step's end, as a captured graph has them."""
    return 3 if phase == "ragged" else 0


def second_step(lens: Lens) -> Lens:
    """As many tokens of other lengths in another order, for a second step of the same instance at the same addresses."""
    queries = [turn for turn in lens if not turn[1]]
    cached = [turn for turn in lens if turn[1]]
    contexts = [context for _, context, _ in cached]
    rotated = [(query, context, drafts) for (query, _, drafts), context in zip(cached, contexts[1:] + contexts[:1], strict=True)]
    return sorted([*queries[1:], *queries[:1], *reversed(rotated)], key=_decodes)


def blocks_for(lens: Lens, block_size: int) -> int:
    """Blocks that these sequences take."""
    return sum(-(-(query_len + context) // block_size) for query_len, context, _ in lens)


def _decodes(turn: tuple[int, int, int]) -> bool:
    query_len, context, drafts = turn
    return context > 0 and (query_len == 1 or drafts > 0)


UNWRITTEN = {torch.float64: 0x7FFADA5A5A5A5A5A, torch.float32: 0x7FDA5A5A, torch.bfloat16: 0x7FDA, torch.float16: 0x7E5A}
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
    """How many of the new tokens are a speculator's guesses, which this step verifies: the sequence then decodes."""


StepTurns = Sequence[Turn]
"""The turns of a step, those that decode last."""


@dataclass
class StepInputs:
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
    def allocate(cls, spec: AttentionSpec, tokens: int, *, merged: bool) -> StepInputs:
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

    def first(self, tokens: int) -> StepInputs:
        """The same memory for a step of `tokens`; the output holds NaN, so that a missed row shows."""
        part = StepInputs(self.q[:tokens], self.k[:tokens], self.v[:tokens], self.guarded[: tokens + 2 * GUARD])
        bits(part.guarded).fill_(UNWRITTEN[part.guarded.dtype])
        return part

    def unwritten(self, tokens: slice) -> bool:
        """Whether any element of these tokens' output still holds what it held before the step."""
        return bool((bits(self.out[tokens]) == UNWRITTEN[self.out.dtype]).any())


@dataclass
class StepTensors:
    """A step that is laid out."""

    metadata: AttentionMetadata
    inputs: list[StepInputs]
    rows: list[list[StepSequence]]
    """Each layer's sequences; padding rows are left out."""
    tokens: list[slice]
    """The packed tokens of each sequence."""
    padding: slice
    """The packed tokens of the padding rows."""


class Before:
    """Everything of a step that a backend may read and must not change."""

    def __init__(self, step: StepTensors) -> None:
        self._inputs = [(given.q.clone(), given.k.clone(), given.v.clone()) for given in step.inputs]
        self._metadata = {
            each.name: value.clone()
            for each in fields(step.metadata)
            if isinstance(value := getattr(step.metadata, each.name), Tensor)
        }

    def compare(self, step: StepTensors) -> None:
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


@dataclass(frozen=True)
class Unlike:
    """What a session may have simpler than an engine has it, so that a right answer shows what a mistake depends on."""

    blocks_in_order: bool = False
    """A sequence's blocks follow one another."""
    zero_unused: bool = False
    """Block 0 is in no table."""
    out_of_zeros: bool = False
    """`out` holds zeros before a step."""
    without_guesses: bool = False
    """A failure says what is wrong, and not what it looks like."""


@dataclass
class CellErrors:
    """The measured error of a cell that came nearest to its tolerance, or went farthest beyond it."""

    error: float | None = None
    tolerance: float | None = None

    def note(self, error: float, tolerance: float) -> None:
        """Keep an error if its share of its tolerance is the largest; NaN is left to the finding."""
        if error * (self.tolerance or 1.0) >= (self.error or 0.0) * tolerance:
            self.error = error
            self.tolerance = tolerance


AS_IN_AN_ENGINE = Unlike()
