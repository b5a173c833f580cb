"""Steps of the conformance kit: lengths, tensors, and caches as allocated by an engine or by foreign code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import SCALES, CacheGeometry, CacheLayout, CacheWriter, LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import Finding, Skipped
from headway.core.oracle.oracle import StepSequence

FINITE_POISON = 3e4
"""Poison value that is finite in every 16-bit dtype, and far from any number in a case."""
_FAR = 1 << 15
"""Number of slots (and of blocks, if they fit) before the first used slot in far memory. The number exceeds a signed 16-bit
integer."""
_FAR_ELEMENTS = 1 << 31
_PAD = 16
"""Number of foreign elements after each part of an interleaved tensor, if the tensor is not packed with other tensors."""


def first_far(spec: AttentionSpec, block_size: int) -> int:
    """Return the first used block of far memory. On a CPU, an address costs nothing until it is accessed. There, block numbers of
    usual sizes also exceed 16 bits, not only slot numbers."""
    block = block_size * spec.num_kv_heads * max(spec.head_dim, spec.v_head_dim)
    room = _FAR_ELEMENTS // (2 * block) if spec.device.type == "cpu" else 0
    return max(_FAR // block_size, min(_FAR, room))


class Foreign:
    """Cache tensors of one layer, and the memory of which they are views."""

    def __init__(
        self, spec: AttentionSpec, layout: CacheLayout, num_blocks: int, block_size: int, memory: str, first: int = 0
    ) -> None:
        """memory: one of MEMORIES. first: first block that is used. Earlier blocks are not compared.

        :raises Skipped: if blocks cannot be packed because they are not the layout's outermost axis, or if far memory does not
        fit.
        """
        geometry = CacheGeometry.of(spec, num_blocks, block_size)
        cache = layout.allocate(geometry, spec.k_scale, spec.v_scale)
        if memory == "own":
            self.cache = cache
            self.bases = _from(cache, first)
            return
        if memory in ("spaced", "far"):
            apart, bases = _apart(cache, first_far(spec, block_size) if memory == "far" else 0)
            self.cache = apart
            self.bases = _from(self.cache, first) if first else bases
            return
        if any(axes[0] != "block" for axes in layout.tensors.values()):
            raise Skipped(f"layout {layout.name}: its outermost axis is not the block, so K and V are not packed by block")
        leading = 1 if memory == "packed" else 2
        shapes = {name: tensor.shape for name, tensor in cache.tensors.items()}
        together = len({shapes[name][:leading] for name in SCALES if name in shapes}) == 1
        self.bases = []
        tensors = {}
        groups = _by_type(cache, [list(shapes)] if together else [[name] for name in shapes])
        for names in groups:
            sizes = [math.prod(shapes[name][leading:]) for name in names]
            width = sum(sizes) + (_PAD if len(names) == 1 else 0)
            base = torch.zeros((*shapes[names[0]][:leading], width), dtype=cache.tensors[names[0]].dtype, device=geometry.device)
            self.bases.append(base)
            first = 0
            for name, size in zip(names, sizes, strict=True):
                tensors[name] = torch.unflatten(base[..., first : first + size], -1, shapes[name][leading:])
                first += size
        self.cache = LayerCache(tensors, layout, geometry, spec.k_scale, spec.v_scale)

    def fill(self, value: float) -> None:
        """Fill all memory with a value, including foreign memory."""
        for base in self.bases:
            fill(base, value)

    def fill_blocks(self, blocks: Sequence[int], value: float) -> None:
        """Fill every slot of some blocks with a value."""
        for name, tensor in self.cache.tensors.items():
            one = torch.empty((), dtype=tensor.dtype)
            fill(one, value)
            at = torch.tensor(blocks, dtype=torch.int64, device=tensor.device)
            bits(tensor).index_fill_(self.cache.layout.tensors[name].index("block"), at, int(bits(one)))

    def differs(self, other: Foreign) -> bool:
        """Return whether any bit of the memory differs between this object and `other`."""
        return not all(torch.equal(bits(a), bits(b)) for a, b in zip(self.bases, other.bases, strict=True))

    def differing_slots(self, other: Foreign) -> set[int]:
        """Return the slots in which any bit differs between this object's cache and the cache of `other`."""
        found: set[int] = set()
        for name in self.cache.tensors:
            ours, theirs = (bits(side.cache.by_slot(name)) for side in (self, other))
            found |= set((ours != theirs).flatten(2).any(-1).flatten().nonzero().flatten().tolist())
        return found


def _by_type(cache: LayerCache, groups: list[list[str]]) -> list[list[str]]:
    """Return the groups of tensor names, each split by dtype and by whether the tensors contain scales."""
    found: dict[tuple[object, ...], list[str]] = {}
    for number, names in enumerate(groups):
        for name in names:
            found.setdefault((number, cache.tensors[name].dtype, name in SCALES), []).append(name)
    return list(found.values())


def _apart(cache: LayerCache, far: int) -> tuple[LayerCache, list[Tensor]]:
    """Return a cache whose blocks are spaced apart in any layout, and the tensors that own its memory.

    far: first block whose element offsets exceed a signed 32-bit integer. 0 means no such block is needed.
    """
    tensors, bases = {}, []
    for name, tensor in cache.tensors.items():
        axis, count = cache.layout.tensors[name].index("block"), cache.geometry.num_blocks
        shape = [count, *tensor.shape[:axis], *tensor.shape[axis + 1 :]]  # blocks are the outermost axis in memory
        size = math.prod(shape[1:])
        stride = max(2 * size, -(-_FAR_ELEMENTS // far) if far else 0)
        try:
            base = torch.empty((count - 1) * stride + 2 * size, dtype=tensor.dtype, device=tensor.device)
        except (RuntimeError, MemoryError):  # torch.OutOfMemoryError is a RuntimeError
            gib = count * stride * tensor.itemsize / 2**30
            raise Skipped(f"memory: no room for a cache tensor that spans {gib:.0f} GiB of addresses") from None
        inner = [math.prod(shape[place + 1 :]) for place in range(1, len(shape))]
        tensors[name] = base.as_strided(shape, (stride, *inner)).movedim(0, axis)
        bases.append(base)
    return LayerCache(tensors, cache.layout, cache.geometry, cache.k_scale, cache.v_scale), bases


def _from(cache: LayerCache, first: int) -> list[Tensor]:
    """Return views of a cache's tensors without the blocks before `first`. These blocks are not accessed, because in far memory
    each access might take megabytes."""
    axes = {name: cache.layout.tensors[name].index("block") for name in cache.tensors}
    return [tensor.narrow(axes[name], first, cache.geometry.num_blocks - first) for name, tensor in cache.tensors.items()]


class Layers:
    """Caches of layers with a common block table: the caches given to a backend, and copies with the expected content."""

    def __init__(
        self,
        spec: AttentionSpec,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        writer: CacheWriter,
        *,
        memory: str = "own",
        layers: int = 2,
        poison: float = math.nan,
    ) -> None:
        """poison: value of every slot without a token."""
        self.poison = poison
        near, first = ("own", first_far(spec, block_size)) if memory == "far" else (memory, 0)
        self.right = [Foreign(spec, layout, num_blocks, block_size, near, first) for _ in range(layers)]
        self.given = [Foreign(spec, layout, num_blocks, block_size, memory, first) for _ in range(layers)]
        self._writer = writer
        for foreign in (*self.given, *self.right):
            foreign.fill(self.poison)

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor, *, given: bool) -> None:
        """Write keys and values to a copy with the expected content, using the layout's writer. given: True to write them also to
        the backend's cache."""
        self._writer(k, v, self.right[layer].cache, slots)
        if given:
            self._writer(k, v, self.given[layer].cache, slots)

    def forget(self, blocks: Sequence[int]) -> None:
        """Fill blocks that no longer belong to a sequence with the poison value."""
        for foreign in (*self.given, *self.right):
            foreign.fill_blocks(blocks, self.poison)


def fill(tensor: Tensor, value: float) -> None:
    """Fill a tensor with a value, limited to the dtype's maximum. For NaN, integer dtypes use their maximum."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(min(value, torch.finfo(tensor.dtype).max) if math.isfinite(value) else value)
    else:
        tensor.fill_(int(min(value, torch.iinfo(tensor.dtype).max)) if math.isfinite(value) else torch.iinfo(tensor.dtype).max)


def bits(tensor: Tensor) -> Tensor:
    """Return a view of a tensor as integers, in which NaN equals itself."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, including those of NaN."""
    return torch.equal(bits(one), bits(other))


Lens = list[tuple[int, int, int]]
"""(query_len, context, num_draft_tokens) of each sequence, decodes last."""
LONG = 1031
"""Length in tokens of a long sequence: a prime just above 1,024."""
TABLE_BLOCKS = 130
"""Number of blocks of a sequence with a long table."""


def first_step(phase: str, block_size: int) -> Lens:
    """Return the lengths of a step. phase: a name in cells.PHASES, or "long"."""
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
    """Return the number of rows of length 0 at a step's end, as in a captured graph."""
    return 3 if phase == "ragged" else 0


def second_step(lens: Lens) -> Lens:
    """Return lengths for a second step at the same addresses: different lengths in a different order, with the same total number
    of tokens."""
    queries = [entry for entry in lens if not entry[1]]
    cached = [entry for entry in lens if entry[1]]
    contexts = [context for _, context, _ in cached]
    rotated = [(query, context, drafts) for (query, _, drafts), context in zip(cached, contexts[1:] + contexts[:1], strict=True)]
    return sorted([*queries[1:], *queries[:1], *reversed(rotated)], key=_decodes)


def blocks_for(lens: Lens, block_size: int) -> int:
    """Return the total number of blocks that sequences of these lengths need."""
    return sum(-(-(query_len + context) // block_size) for query_len, context, _ in lens)


def _decodes(entry: tuple[int, int, int]) -> bool:
    query_len, context, drafts = entry
    return context > 0 and (query_len == 1 or drafts > 0)


UNWRITTEN = {torch.float64: 0x7FFADA5A5A5A5A5A, torch.float32: 0x7FDA5A5A, torch.bfloat16: 0x7FDA, torch.float16: 0x7E5A}
"""Bit pattern, for each dtype, of the NaN in `out` before a step. No arithmetic results in this NaN."""
GUARD = 3
"""Number of foreign rows before and after `out`."""


@dataclass(eq=False)
class Tokens:
    """Blocks and number of cached tokens of one sequence."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class SequencePart(NamedTuple):
    """One sequence's part of a step."""

    seq: Tokens
    query_len: int = 1
    """Number of new tokens."""
    num_draft_tokens: int = 0
    """Number of draft tokens among the new tokens. A sequence with draft tokens decodes."""


StepWork = Sequence[SequencePart]
"""The parts of a step, decodes last."""


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
        """[num_tokens, num_heads, v_head_dim]: output of the layer."""
        return self.guarded[GUARD:-GUARD]

    @classmethod
    def allocate(cls, spec: AttentionSpec, tokens: int, *, merged: bool) -> StepInputs:
        """Return memory for steps of up to `tokens` tokens. merged: True to slice q, k and v from one tensor, like a merged
        projection."""
        dims = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.v_head_dim]

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=spec.dtype, device=spec.device)

        flat = list(torch.split(zeros(tokens, sum(dims)), dims, dim=1)) if merged else [zeros(tokens, dim) for dim in dims]
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = (torch.unflatten(part, 1, (count, -1)) for part, count in zip(flat, heads, strict=True))
        if spec.value_in_key:
            v = k[..., : spec.v_head_dim]
        out = zeros(tokens + 2 * GUARD, spec.num_heads, spec.v_head_dim)
        return cls(q, k, v, out)

    def first(self, tokens: int) -> StepInputs:
        """Return the part of the memory for a step of `tokens` tokens. Its output is filled with NaN, which reveals missed
        rows."""
        part = StepInputs(self.q[:tokens], self.k[:tokens], self.v[:tokens], self.guarded[: tokens + 2 * GUARD])
        bits(part.guarded).fill_(UNWRITTEN[part.guarded.dtype])
        return part

    def unwritten(self, tokens: slice) -> bool:
        """Return whether any output element of these tokens still has the value that it had before the step."""
        return bool((bits(self.out[tokens]) == UNWRITTEN[self.out.dtype]).any())


@dataclass
class StepTensors:
    """A step with its metadata and tensors."""

    metadata: AttentionMetadata
    inputs: list[StepInputs]
    rows: list[list[StepSequence]]
    """Each layer's sequences, without padding rows."""
    tokens: list[slice]
    """Range of each sequence in the packed tokens."""
    padding: slice
    """Range of the padding rows in the packed tokens."""


class Before:
    """Copy of a step's tensors that a backend may read but must not change."""

    def __init__(self, step: StepTensors) -> None:
        self._inputs = [(given.q.clone(), given.k.clone(), given.v.clone()) for given in step.inputs]
        self._metadata = {
            each.name: value.clone()
            for each in fields(step.metadata)
            if isinstance(value := getattr(step.metadata, each.name), Tensor)
        }

    def compare(self, step: StepTensors) -> None:
        """Compare the step with the copy. :raises Finding: if a tensor has changed."""
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


@dataclass
class CellErrors:
    """Record of a cell's largest error, relative to the tolerance."""

    error: float | None = None
    tolerance: float | None = None

    def note(self, error: float, tolerance: float) -> None:
        """Record an error if its ratio to its tolerance is the largest so far. NaN is ignored, because findings report it."""
        if error * (self.tolerance or 1.0) >= (self.error or 0.0) * tolerance:
            self.error = error
            self.tolerance = tolerance
