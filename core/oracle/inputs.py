"""Inputs of the conformance kit: tensors, lengths of sequences, and their assignment to layers.

No backend can refuse an input, because a model may have any number of KV heads and any scale, and a step may have any scores and
lengths. So each layer of the covering set gets one value of every input. The values are assigned so that all pairs of values
occur in every phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import (
    AXES,
    BIDIRECTIONAL,
    CACHE_TYPES,
    FEW,
    INPUTS,
    KV_HEADS,
    MODEL_WINDOWS,
    NEEDLE,
    PLAIN_INPUTS,
    RULE_LAYERS,
    SCALE,
    SCALES,
    SCORES,
    WINDOWS,
    WORKS,
    CheckCell,
)
from headway.core.oracle.steps import TABLE_BLOCKS, Lens, first_step, second_step

_KEY = 4.0
"""First element of a lifted key. The value is exact in every dtype, including the dtypes of 8-bit caches."""
_LIFT = {"high": 200.0, "low": -200.0, "dominant": 30.0, "alternating": 30.0, "uneven": 100.0, NEEDLE: 10.0}
"""Regime -> amount added to the scores of lifted keys."""
_KINDS, _PEAKED = 5, 8.0
"""Number of kinds of query rows in uneven scores, and the factor that multiplies the queries in rows with one dominant key."""
_NEEDLE_AT = 7
_MEAN = 100.0
_MEAN_8_BITS = 10.0
_BEYOND = 1.5
_SHORT = 40
"""Maximum number of cached tokens of a short sequence."""
_ROUNDINGS = 64
"""Number of roundings, each of half a unit in the last place of a lifted score, that a correct sum over head_dim elements may
accumulate."""
MOST_WORK, MOST_QUICK_WORK = 6e7, 2e7
"""Maximum work per cell (number of multiplications and moved elements) in the whole kit and in the quick kit. On one core, this
takes about 1 to 2 s and 0.5 s."""
_SEQUENCE_WORK = 3e4
"""Work added for each sequence that is checked, regardless of its length."""
_PRICE = 7.0
"""Number of new pairs of values that justifies the time of a cell with the maximum work."""
PLAIN_BLOCK_SIZE = 16
_WIDEST_FAR = 256
"""Maximum number of key elements per token, over all KV heads, in far memory."""
_VALUES: dict[str, tuple[str | int, ...]] = {"work": WORKS, "kv_heads": KV_HEADS, "scores": SCORES, "scale": tuple(SCALES)}


@dataclass(frozen=True)
class Numbers:
    """Random queries, keys and values of a layer, with scores of one regime in SCORES."""

    spec: AttentionSpec
    scores: str
    generator: torch.Generator

    def queries(self, *shape: int) -> Tensor:
        """Return float32 [num_tokens, num_heads, head_dim], scaled so that scores have the same size for any layer's scale."""
        if self.scores == "equal":
            return torch.zeros(shape)
        size = SCALE / (self.spec.scale * math.sqrt(self.spec.head_dim))
        q = torch.randn(shape, generator=self.generator) * size
        if self.scores == "uneven":
            return self._uneven(q)
        if self.scores == NEEDLE:
            q.zero_()
        if self.scores in _LIFT:
            q[..., 0] = _LIFT[self.scores] / (_KEY * self.spec.scale)
        return q

    def _uneven(self, q: Tensor) -> Tensor:
        """Return queries of several kinds; neighbouring tokens and heads have different kinds."""
        kind = (torch.arange(q.shape[0])[:, None] + torch.arange(q.shape[1])) % _KINDS
        q *= torch.tensor([1.0, 1.0, 1.0, 0.0, _PEAKED])[kind][..., None]
        q[..., 0] = torch.tensor([0.0, 1.0, -1.0, 0.0, 0.0])[kind] * _LIFT["uneven"] / (_KEY * self.spec.scale)
        return q

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [num_tokens, num_kv_heads, head_dim] and values [num_tokens, num_kv_heads, v_head_dim] at positions."""
        spec, count = self.spec, len(positions)
        k = torch.randn(count, spec.num_kv_heads, spec.head_dim, generator=self.generator)
        v = torch.randn(count, spec.num_kv_heads, spec.v_head_dim, generator=self.generator)
        if self.scores in _LIFT:
            k[..., 0] = _KEY * self._lifted(positions)[:, None]
        if self.scores == "mean":
            v += _MEAN if spec.cache_dtype == spec.dtype else _MEAN_8_BITS
        if (
            spec.cache_dtype == CACHE_TYPES["fp8"]
        ):  # one number in a row of five exceeds the 8-bit range, where a writer saturates
            for rows, scale in ((k, spec.k_scale), (v, spec.v_scale)):
                rows[positions % 5 == 2, 0, -1] = _BEYOND * torch.finfo(spec.cache_dtype).max * scale
        k, v = (rows.to(spec.device, spec.dtype) for rows in (k, v))
        return k, k[..., : spec.v_head_dim] if spec.value_in_key else v

    @property
    def is_sensitive(self) -> bool:
        """True if the regime can reveal errors. False if scores of this regime saturate a soft-cap, or give a sink all the
        weight."""
        return self.scores not in ("high", "low") or not {"softcap", "sinks"} & self.spec.features

    @property
    def lift(self) -> float:
        """Amount that the regime adds to the scores of lifted keys."""
        return _LIFT.get(self.scores, 0.0)

    @property
    def slack(self) -> float:
        """Relative error that rounding lifted scores to float32 may cause, in addition to the declared tolerance."""
        return _ROUNDINGS * abs(self.lift) * 2.0**-24

    def _lifted(self, positions: Tensor) -> Tensor:
        """Return the fraction of the lift that applies to the key at each position."""
        if self.scores == "dominant":
            return (positions % 61 == 7).float()
        if self.scores == NEEDLE:
            return (positions == _NEEDLE_AT).float()
        return 1.0 - 2.0 * (positions % 2) if self.scores == "alternating" else torch.ones(len(positions))


@cache
def steps_of(work: str, phase: str, block_size: int) -> list[Lens]:
    """Return the lengths of each step. work: kind of sequence lengths. phase: name in cells.PHASES. Empty if the kind has no
    steps in the phase."""
    first = first_step(phase, block_size)
    if work == "edges":
        # Ragged: then the same number of short ones, which leftovers of longer steps must not affect, and only padding rows.
        return [first, second_step(first), *([_shortened(first), []] if phase == "ragged" else [])]
    if work == "level":
        return [level for level in (_level(phase, 37), _level(phase, 2 * block_size)) if level]
    if work == FEW:
        return [few] if (few := _few(phase, block_size)) else []
    if work == "again":
        shared = [sizes for sizes in first if sizes[1] >= block_size]
        return [first, first, *([shared, shared] if shared else [])]
    if work == "many":
        return [_many(phase, 65), _many(phase, 300)] if phase != "ragged" else []
    length = TABLE_BLOCKS * block_size + 3 if work == "tables" else 16383
    found: dict[str, Lens] = {
        "extend": [(5, length, 0), (2, 30, 0)],
        "decode": [(1, length, 0), (1, length // 4, 0), (1, length - 7, 0), (1, 40, 0)],
        "mixed": [(3, 0, 0), (4, length // 2, 0), (1, length, 0), (1, 9, 0)],
        "verify": [(4, length, 3), (3, 20, 2)],
    }
    if phase not in found:
        return []
    if work == "deep":  # only long ones: next to a short sequence's large results their errors would not count
        return [[sizes for sizes in found[phase] if sizes[1] > _SHORT]]
    few = [sizes for sizes in found[phase] if sizes[1] <= _SHORT]
    return [few, found[phase], _shortened(found[phase])]  # reveals a backend that keeps the width of the first or second step


def _few(phase: str, block_size: int) -> Lens:
    """Return the lengths of three or four sequences. They include short sequences, sequences that end near the end of a block,
    and a sequence of three tiles of 64 keys."""
    b = block_size
    kinds: dict[str, Lens] = {
        "prefill": [(1, 0, 0), (b + 1, 0, 0), (37, 0, 0)],
        "extend": [(5, b, 0), (2, 37, 0), (3, 130, 0)],
        "decode": [(1, 1, 0), (1, b - 1, 0), (1, 37, 0), (1, 130, 0)],
        "mixed": [(5, 0, 0), (3, b, 0), (1, 37, 0), (1, 130, 0)],
        "verify": [(4, 17, 3), (2, b, 1), (3, 130, 2)],
    }
    return kinds.get(phase, [])


def _level(phase: str, length: int) -> Lens:
    """Return the lengths of sequences with equal total length, whose new tokens follow contexts of different lengths."""
    kinds: dict[str, Lens] = {
        "prefill": [(length, 0, 0)] * 3,
        "extend": [(count, length - count, 0) for count in (length - 1, 2, 9, 5)],
        "decode": [(1, length - 1, 0)] * 5,
        "mixed": [(length, 0, 0), (2, length - 2, 0), (9, length - 9, 0), *[(1, length - 1, 0)] * 3],
        "verify": [(count, length - count, count - 1) for count in (4, 2, 7, 3)],
    }
    return kinds.get(phase, [])


def _shortened(lens: Lens) -> Lens:
    """Return lengths with the same sequences and new tokens, but short contexts."""
    return [(query_len, min(context, 1 + context % _SHORT), drafts) for query_len, context, drafts in lens]


def _many(phase: str, count: int) -> Lens:
    """Return the lengths of many short sequences, as on a server."""
    numbers = range(count)
    kinds: dict[str, Lens] = {
        "prefill": [(1 + n % 9, 0, 0) for n in numbers],
        "extend": [(2 + n % 3, 1 + n % 23, 0) for n in numbers],
        "decode": [(1, 1 + n % 40, 0) for n in numbers],
        "mixed": [(2 + n % 3, n % 23, 0) for n in numbers[: count // 2]] + [(1, 1 + n % 40, 0) for n in numbers[count // 2 :]],
        "verify": [(2 + n % 4, 1 + n % 30, 1 + n % 4) for n in numbers],
    }
    return kinds[phase]


def possible(cell: CheckCell, most_work: float = MOST_WORK) -> bool:
    """Return whether a cell's layer and inputs take at most `most_work`, and give results that rounding does not dominate."""
    steps = steps_of(*_place(cell))
    if not steps:
        return False
    latent = cell.feature == "latent"
    if latent and (cell.scores == "mean" or (not cell.layer and cell.kv_heads != PLAIN_INPUTS["kv_heads"])):
        return False
    if cell.scores == NEEDLE and cell.work != "deep":
        return False
    if cell.scores in ("high", "low") and (cell.feature in ("softcap", "sinks") or cell.feature.endswith("together")):
        return False  # saturated, or the sink has all the weight
    if cell.feature in RULE_LAYERS and cell.scores not in ("normal", "mean", *(("equal", "dominant") * (cell.feature == "rule"))):
        return False  # a rule may magnify the rounding of lifted scores; equal scores leave a choice of blocks open
    if cell.feature.startswith("int8") and cell.dtype != "float32" and cell.scores in _LIFT:
        return False  # each key has its own scale: rounding one to 16 bits moves a lifted score by much
    if _hides(cell, steps):
        return False
    kv_width = _kv_width(cell)
    if cell.memory == "far" and (kv_width > _WIDEST_FAR or cell.work not in ("edges", "again")):
        return False
    if cell.work == "deep" and cell.dtype == "float32":
        return False
    if cell.work == "tables" and cell.block_size > 64:
        return False
    if all(getattr(cell, name) == PLAIN_INPUTS[name] for name in _dealt_inputs(cell)):
        return True
    if cell.layer:  # a layer of any size may take as much as its plainest cell
        most_work = max(most_work, _work(cell, kv_width, steps_of("edges", cell.phase, PLAIN_BLOCK_SIZE)))
    return _work(cell, kv_width, steps) <= most_work


def _kv_width(cell: CheckCell) -> int:
    return cell.head_dim * (1 if cell.feature == "latent" else cell.kv_heads)


def _place(cell: CheckCell) -> tuple[str, str, int]:
    return cell.work, cell.phase, cell.block_size


def _hides(cell: CheckCell, steps: Sequence[Lens]) -> bool:
    """Return whether the inputs hide errors in a window, because no sequence of `many` exceeds the window or every query sees a
    dominant key."""
    window = (WINDOWS | MODEL_WINDOWS | BIDIRECTIONAL).get(cell.feature)
    if window is None:
        return False
    longest = max(query_len + context for lens in steps for query_len, context, _ in lens)
    return (cell.work == "many" and longest <= window) or (cell.scores == "dominant" and cell.feature in BIDIRECTIONAL)


def _work(cell: CheckCell, kv_width: int, steps: Sequence[Lens]) -> float:
    """Return the number of multiplications and moved elements of a cell's steps."""
    keys = sum(query_len + context for lens in steps for query_len, context, _ in lens)
    scores = sum(query_len * (query_len + context) for lens in steps for query_len, context, _ in lens)
    return kv_width * (4.0 * keys + cell.group * scores) + _SEQUENCE_WORK * sum(map(len, steps))


def _dealt_inputs(cell: CheckCell) -> tuple[str, ...]:
    """Return the names of the inputs that the kit chooses. For a model's layer, the numbers of heads and the scale are given."""
    return ("work", "scores") if cell.layer else tuple(_VALUES)


def deal(
    cells: Iterable[CheckCell], most_work: float = MOST_WORK, accepts: Callable[[CheckCell], bool] = lambda cell: True
) -> list[CheckCell]:
    """Return the cells, each with a value for every input. The kit chooses accepted values that form the most new pairs with
    other values, relative to their time."""
    met: set[tuple[object, ...]] = set()
    return [_dealt(cell, met, most_work, accepts) for cell in cells]


def _dealt(cell: CheckCell, met: set[tuple[object, ...]], most_work: float, accepts: Callable[[CheckCell], bool]) -> CheckCell:
    for name in _dealt_inputs(cell):
        tried = [cell.having({name: value}) for value in _VALUES[name]]
        tried = sorted(
            (each for each in tried if possible(each, most_work)),
            key=lambda each: _loss(each, most_work) - _gain(each, name, met),
        )
        cell = next((each for each in tried if accepts(each)), cell)
    if cell.work == "edges" and not cell.layer and _work(cell, _kv_width(cell), steps_of(*_place(cell))) > most_work:
        smaller = replace(cell, work=FEW)
        cell = smaller if steps_of(*_place(smaller)) else cell
    for name in INPUTS:
        met |= _pairs(cell, name)
    return cell


def _loss(cell: CheckCell, most_work: float) -> float:
    """Return the number of new pairs that a cell must add to justify its time."""
    return _PRICE * _work(cell, _kv_width(cell), steps_of(*_place(cell))) / most_work


def _gain(cell: CheckCell, name: str, met: set[tuple[object, ...]]) -> int:
    """Return the number of new pairs that a cell's value of one input adds. A value that is new in the phase counts as 100
    additional pairs."""
    pairs = _pairs(cell, name)
    return len(pairs - met) + (100 if (cell.phase, name, getattr(cell, name)) not in met else 0)


def _pairs(cell: CheckCell, name: str) -> set[tuple[object, ...]]:
    """Return an input's value in the phase, and its pairs with the values of each axis and of each other input."""
    value = cell.phase, name, getattr(cell, name)
    others: Sequence[str] = (*AXES, *(other for other in INPUTS if other != name))
    return {value, *((*value, other, getattr(cell, other)) for other in others)}
