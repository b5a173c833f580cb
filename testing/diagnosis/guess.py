"""A guess at why an answer is wrong: the float64 answer computed with one mistake after another, until one matches.

A mistake must give what every wrong sequence holds, and leave the right ones as they are; where two do, both are said.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.core.oracle.oracle import attend, distance
from headway.testing.diagnosis import misreads, mistakes, solved, tiled
from headway.testing.diagnosis.mistakes import Answers, Reading, Wrong, reading_of
from headway.testing.diagnosis.some_heads import of_heads

_ROUNDED_TO_11, _ROUNDED_TO_8 = 7e-4, 1e-2
"""Relative errors below these come of factors with 11 and with 8 significant bits (half a unit is 2.4e-4 and 2.0e-3)."""
_CLEARLY = 0.25
"""A mistake explains an answer if it lies nearer than this share of its distance from the right one."""
_NUMBER = re.compile(r"[\d,]*\d")
_LONG = 600
"""Tokens of a sequence with which every mistake is tried in little time."""
_PATIENCE = 3.0
"""Seconds that a step's mistakes are tried for."""
_QUIET = 0.1
"""Share of the median error below which a row is not wrong by rounding."""
_SAID = 2
"""Mistakes that are said where several give the same answers."""
Concept = Callable[[Reading], Answers]
STAGES: tuple[tuple[Concept, ...], ...] = (
    (
        *(mistakes.heads, tiled.empties, mistakes.scores, mistakes.window, mistakes.scales, mistakes.positions),
        *(misreads.lengths, misreads.places, misreads.strides, misreads.other_sequences, mistakes.weights),
    ),
    (mistakes.heads_read, misreads.displaced, misreads.rearranged, tiled.masks, tiled.merges),
)
"""The mistakes that are tried, by concept, the likeliest first. A stage is for answers that no mistake before it explains."""


@dataclass(frozen=True)
class Candidate:
    """A mistake that gives the answer of one wrong sequence."""

    name: str
    concept: Concept
    error: float


def answers_of(concept: Concept, wrong: Wrong) -> Iterator[tuple[str, Tensor]]:
    """Pairs of a mistake's text and the answer it gives; mistakes that change nothing are left out."""
    for name, answer in concept(reading_of(wrong)):
        if answer is not None and answer.shape == wrong.right.shape and not distance(answer, wrong.right) < 1e-9:
            yield name.format(row=wrong.row), answer


def guess(wrong: Sequence[Wrong], fine: Sequence[Wrong], tolerance: float, shared: str = "") -> str:
    """What the wrong sequences of a step have in common; empty if no mistake explains them all.

    fine: sequences of the step that are right, which a mistake must leave alone; shared: what exactly the wrong ones share.
    """
    if not wrong:
        return ""
    first = max(wrong, key=_telling)
    others = [each for each in (*wrong[:3], *wrong[-2:]) if each is not first]
    if not fine and all(bool(each.out.isnan().all()) for each in (first, *others)):
        return ""  # NaN everywhere says too little
    search = _Search(first, others, fine, tolerance, time.monotonic() + _PATIENCE)
    for stage in STAGES:
        search.try_all(stage)
        if search.exact:
            break
    if search.found and (search.exact or first.row.spec.dtype != torch.float32):
        return _listed(search.found)
    if said := _of_some_heads(wrong, fine, tolerance, shared):
        return said
    if any(each.error <= 2 * tolerance for each in search.elsewhere) and not bool(first.out.isnan().all()):
        return search.said_elsewhere(shared)
    weighed = "" if any(bool(each.out.isnan().any()) for each in wrong) else solved.weighed([first, *others])
    if weighed and weighed != solved.OTHER_VALUES:
        return f"{weighed}{f'; in exactly {shared}' if shared and any(each.row.kv_len > 4 for each in fine) else ''}"
    if search.found:
        return _listed(search.found)
    if said := _sums(wrong) or _precision(wrong) or rounding(first):
        return said
    if search.elsewhere and not bool(first.out.isnan().all()):
        return search.said_elsewhere(shared)
    return solved.where(wrong[:8]) or weighed or (_ROWS if all(_sum(each) for each in wrong[:3]) else "")


def _of_some_heads(wrong: Sequence[Wrong], fine: Sequence[Wrong], tolerance: float, shared: str) -> str:
    """The mistake of those query heads that are wrong alone; empty where there are none, or it is none that has a name."""
    if any(bool(each.out.isnan().any()) for each in wrong) or not (heads := solved.wrong_alone(wrong, 1)):
        return ""
    parts, right = ([part for each in some if (part := of_heads(each, heads))] for some in (wrong, fine))
    said = guess(parts, right, tolerance, shared)
    if not said or not names_a_mistake(said):
        return ""
    return f"{said}; in heads {solved.spans(heads)} alone, of {wrong[0].row.spec.num_heads}"


def names_a_mistake(said: str) -> bool:
    """Whether a guess says what is done wrongly, and not only where or in what way it shows."""
    return solved.NO_WEIGHT not in said and not said.startswith(
        (misreads.ANOTHER_ORDER, solved.OTHER_VALUES, solved.ONLY_IN, _ROWS, _ROUNDED)
    )


def _telling(wrong: Wrong) -> tuple[bool, int]:
    """What makes a sequence one to learn from: numbers in its output, and as many keys as take little time."""
    row = wrong.row
    little = row.kv_len < _LONG and row.kv_len * row.query_len * row.spec.num_heads < _LONG**2
    return wrong.rows_wrong > 0, row.kv_len if little else -row.kv_len * row.query_len


@dataclass
class _Search:
    """The mistakes that explain all wrong sequences of a step."""

    first: Wrong
    others: Sequence[Wrong]
    fine: Sequence[Wrong]
    tolerance: float
    until: float
    found: list[Candidate] = field(default_factory=list)
    """Mistakes that leave the right sequences as they are, the nearest of them."""
    elsewhere: list[Candidate] = field(default_factory=list)
    """Mistakes that would show in right sequences, too."""

    @property
    def exact(self) -> bool:
        """Whether a mistake was found that leaves no more than rounding."""
        return any(each.error <= 2 * self.tolerance for each in self.found)

    def said_elsewhere(self, shared: str) -> str:
        """Words for mistakes that would show in right sequences, with what the wrong ones share."""
        return f"{_listed(self.elsewhere)}; {f'in exactly {shared}' if shared else 'others of the step are right'}"

    def try_all(self, stage: Sequence[Concept]) -> None:
        """Try the mistakes of a stage."""
        missed = distance(self.first.out, self.first.right)
        most = max(4 * self.tolerance, min(_CLEARLY * missed, 0.05) if math.isfinite(missed) else 0.0)
        for concept in stage:
            for name, answer in answers_of(concept, self.first):
                if time.monotonic() > self.until:
                    return
                error = _apart(self.first, answer)
                candidate = Candidate(name, concept, error)
                if error <= most and all(_explains(candidate, other, self.tolerance) for other in self.others):
                    contradicted = any(_changes(candidate, other, self.tolerance) for other in self.fine)
                    (self.elsewhere if contradicted else self.found).append(candidate)
        for kept in self.found, self.elsewhere:
            least = min((each.error for each in kept), default=0.0)
            kept[:] = [each for each in kept if each.error <= max(2 * least, self.tolerance)]


def _listed(found: Sequence[Candidate]) -> str:
    """Names of mistakes, those that differ in a number alone as one."""
    kinds: dict[str, list[list[str]]] = {}
    for name in dict.fromkeys(each.name for each in found):
        kinds.setdefault(_NUMBER.sub("{}", name), []).append(_NUMBER.findall(name))
    said = []
    for kind, numbers in kinds.items():
        columns = [list(dict.fromkeys(each)) for each in zip(*numbers, strict=True)]
        said.append(kind.format(*(" or ".join(each[:_SAID] + (["..."] if len(each) > _SAID else [])) for each in columns)))
    more = ", or another of its kind" if len(said) > _SAID else ""
    return ", or: ".join(said[:_SAID]) + more


def _apart(wrong: Wrong, answer: Tensor) -> float:
    """The distance between an output and a mistake's answer; NaN and zeros are alike for rows where the mistake finds no key."""
    out = wrong.out.double()
    empty, nan = (answer == 0.0).all(-1), out.isnan().any(-1)
    if not bool(nan.any()):  # what float32 cannot hold may be zero
        size = max(float(answer.norm()), 1e-6 * float(wrong.right.norm()))
        return float((out - answer).norm()) / size if bool(answer.any()) else math.inf
    if bool((nan & ~empty).any()) or bool((empty & ~nan & (out != 0.0).any(-1)).any()):
        return math.inf
    kept = ~nan & ~empty
    return distance(out[kept], answer[kept]) if bool(kept.any()) else 0.0


def _same(candidate: Candidate, name: str) -> bool:
    """Whether two names are of one mistake; where it is read off the output, what it says of a short sequence may be less."""
    if candidate.concept in (mistakes.heads_read, misreads.rearranged):
        return candidate.name.partition(":")[0] == name.partition(":")[0]
    return candidate.name == name


def _explains(candidate: Candidate, wrong: Wrong, tolerance: float) -> bool:
    """Whether a mistake gives this sequence's answer too; zeros, where a mistake finds no key, count here."""
    missed = distance(wrong.out, wrong.right)
    within = max(4 * tolerance, _CLEARLY * missed if math.isfinite(missed) else 0.0)
    return any(
        _same(candidate, name) and (_apart(wrong, answer) if answer.any() else float(wrong.out.nan_to_num(0.0).norm())) <= within
        for name, answer in answers_of(candidate.concept, wrong)
    )


def _changes(candidate: Candidate, fine: Wrong, tolerance: float) -> bool:
    """Whether a mistake would show in a sequence that is right."""
    return any(
        _same(candidate, name) and not distance(answer, fine.right) <= 16 * tolerance
        for name, answer in answers_of(candidate.concept, fine)
    )


def _sums(wrong: Sequence[Wrong]) -> str:
    """A guess about answers whose rows are the right ones, each times a number: what was added to the sum of weights."""
    found = [_sum(each) for each in wrong[:6]]
    for kind in _FACTOR, _SINKS, _EMPTY, _OTHERS:
        numbers = {each.get(kind, "") for each in found}
        if "" not in numbers and (len(numbers) == 1 or kind in (_SINKS, _EMPTY)):
            return kind.format(numbers.pop() if len(numbers) == 1 else "as many as a sequence has parts")
    return ""


_FACTOR = "matches the right answer times {}"
_SINKS = "counts the sink more than once: {} more"
_OTHERS = "matches other sinks than the layer's: {}"
_EMPTY = "counts a weight of 1 that no key brings, {} times: empty parts whose log-sum-exp is 0, or zeros for keys"
_ROWS = "matches the right answer but for the sum of the weights: each row is the right one times a number"


def _sum(wrong: Wrong) -> dict[str, str]:
    """What may have been added to the sum of a sequence's weights, with how much of it."""
    spec, out, right = wrong.row.spec, wrong.out.double(), wrong.right
    factor = (out * right).sum(-1) / right.square().sum(-1)  # [query_len, num_heads]
    if not bool(factor.isfinite().all()) or bool((factor <= 0).any()):
        return {}
    if distance(out, factor[..., None] * right) > min(1e-3, 0.1 * distance(out, right)):
        return {}
    found = {"": "each row is the right one times a number"}
    median = float(factor.median())
    if bool(((factor - median).abs() < 2e-3 * median).all()):
        found[_FACTOR] = f"{median:.3g}"
    reading = reading_of(wrong)
    sums = attend(spec, wrong.row.q, reading.keys, reading.values, wrong.row.context)[1].T.exp()  # [query_len, num_heads]
    added, telling = sums * (1 / factor - 1), (1 / factor - 1).abs() > 1e-3
    if spec.sinks is not None:
        found[_OTHERS] = _other_sinks(spec.sinks, added)
        found[_SINKS] = _whole((added / torch.tensor(spec.sinks, dtype=torch.float64, device=out.device).exp())[telling])
    found[_EMPTY] = _whole(added[telling])
    return found


def _other_sinks(sinks: Sequence[float], added: Tensor) -> str:
    """The sinks that each head would have had, if they are the same for every query. added: [query_len, num_heads]."""
    own = torch.tensor(sinks, dtype=torch.float64).exp()
    read = (own + added).sort(0).values
    middle = read[len(read) // 2]
    if not bool(((read - middle).abs() < 0.02 * middle.abs()).double().mean() > 0.5) or bool((middle <= 0).any()):
        return ""
    said = [(f"{one:.2g}", f"{other:.2g}") for one, other in zip(middle.log().tolist(), sinks, strict=True)]
    wrong = [f"{one} in head {head}, where its own is {other}" for head, (one, other) in enumerate(said) if one != other]
    return ", ".join(wrong[:_SAID]) + (", ..." if len(wrong) > _SAID else "")


def _whole(numbers: Tensor) -> str:
    """The whole number above zero that all of these are; empty where they are none."""
    number = round(float(numbers.median())) if len(numbers) else 0
    return str(number) if number > 0 and bool(((numbers - number).abs() < 0.05 * number).all()) else ""


_ROUNDED = "float32 rounded to"


def _noisy(wrong: Sequence[Wrong]) -> bool:
    """Whether all rows are wrong by about as much, as rounding does it, and none is right."""
    rows = [(each.out.double() - each.right).norm(dim=-1) / each.right.norm(dim=-1) for each in wrong if each.row.kv_len > 4]
    apart = torch.cat([each.flatten() for each in rows]) if rows else torch.ones(1)
    return float(apart.quantile(0.1)) > _QUIET * float(apart.median()) if len(apart) < 2**20 else True


def _precision(wrong: Sequence[Wrong]) -> str:
    """A guess about float32 answers that are all nearly right: how many bits of the products' factors were kept."""
    errors = [float((each.out - each.right).norm() / (each.right - each.right.mean()).norm()) for each in wrong]
    if wrong[0].row.spec.dtype != torch.float32 or not max(errors) < _ROUNDED_TO_8 or not _noisy(wrong):
        return ""
    if sorted(errors)[len(errors) // 2] < _ROUNDED_TO_11:
        return f"{_ROUNDED} 11 bits on the way: TF32 (tl.dot without input_precision='ieee') or float16"
    return f"{_ROUNDED} 8 bits on the way: bfloat16"


def rounding(first: Wrong) -> str:
    """The type in which something is kept on the way, if an answer with that rounding lies clearly nearer than the right one."""
    missed = distance(first.out, first.right)
    if not missed < 1.0:
        return ""
    near = [(_apart(first, answer), name) for name, answer in answers_of(tiled.roundings, first)]
    error, name = min(near, default=(math.inf, ""))
    return name if error < 0.4 * missed else ""
