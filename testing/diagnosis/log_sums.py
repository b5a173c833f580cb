"""A guess at why log-sum-exps are wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.oracle import StepSequence, attend

_DISTINCT = 4
_BASES = {
    "a logarithm to base 2 where the natural one is asked for": 1 / math.log(2),
    "a natural logarithm of a sum of powers of two": math.log(2),
    "lse of the wrong sign": -1.0,
}
_SPECS: dict[str, Callable[[AttentionSpec], AttentionSpec]] = {
    "lse without the sinks": lambda spec: replace(spec, sinks=None),
    "lse without the soft-cap": lambda spec: replace(spec, softcap=None),
    "lse without ALiBi": lambda spec: replace(spec, alibi_slopes=None),
    "lse without the sliding window": lambda spec: replace(spec, sliding_window=None),
    "lse of scores without a scale": lambda spec: replace(spec, scale=1.0),
    "lse of scores with scale 1/sqrt(head_dim)": lambda spec: replace(spec, scale=spec.head_dim**-0.5),
}


def looks_of_lse(got: Tensor, right: Sequence[Tensor], rows: Sequence[StepSequence], wrong: int, allowed: float) -> str:
    """Say what a step's log-sum-exps look like; empty where nothing explains them.

    got: float64 [num_heads, num_tokens]; right: [num_heads, query_len] of each sequence; wrong: the number of one that is wrong;
    allowed: how far a right one may be.
    """
    count = sum(sums.shape[1] for sums in right)
    got, whole = got[:, :count], torch.cat(list(right), 1)
    first = sum(sums.shape[1] for sums in right[:wrong])
    own = got[:, first : first + right[wrong].shape[1]]

    def near(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-6, atol=allowed)

    if near(got.reshape(count, -1).T, whole):
        return "lse in the order [num_tokens, num_heads]; it is [num_heads, num_tokens]"
    if not bool(own.isfinite().all()):
        return "lse is not written for every query"
    for text, factor in _BASES.items():
        if near(got / factor, whole):
            return text
    nearest = torch.cdist(got, whole).argmin(1)
    if bool((nearest != torch.arange(len(nearest), device=got.device)).any()) and near(got, whole[nearest]):
        moved = [f"row {at} holds that of head {of}" for at, of in enumerate(nearest.tolist()) if at != of]
        return f"lse of other heads: {', '.join(moved[:3])}{', ...' if len(moved) > 3 else ''}"
    for text, changed in _SPECS.items():
        spec = changed(rows[0].spec)
        if spec != rows[0].spec and near(got, torch.cat([attend(spec, row.q, *row.kv(), row.context)[1] for row in rows], 1)):
            return text
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if torch.equal(got, got.to(dtype).double()) and len(torch.unique(got)) > _DISTINCT:
            return f"lse is rounded to {name}"
    lengths = torch.cat([torch.full((sums.shape[1],), float(row.kv_len + 1)) for sums, row in zip(right, rows, strict=True)])
    most = lengths.log().to(got.device)
    if bool(((got > -allowed) & (got <= most + allowed)).all()) and not bool(
        ((whole > -allowed) & (whole <= most + allowed)).all()
    ):
        return "lse without the largest score: the logarithm of the sum relative to it"
    return _added(own, right[wrong], rows[wrong])


def _added(own: Tensor, right: Tensor, row: StepSequence) -> str:
    """What was added to one sequence's sums, or the largest score left out of them."""
    spec, added = row.spec, own.exp() - right.exp()
    telling = (own - right).abs() > 1e-4
    if spec.sinks is not None:
        times = added / torch.tensor(spec.sinks, dtype=torch.float64, device=own.device).exp()[:, None]
        if _whole(times[telling]):
            return "lse counts the sink more than once: as often as a sequence has parts"
    if _whole(added[telling]):
        return "lse counts weights of 1 that no key brings: empty parts whose log-sum-exp is 0, or zeros for keys"
    apart = own - right
    if own.shape[1] > 1 and bool((apart - apart.mean()).abs().max() < 1e-3):
        return f"lse is off by the same number everywhere, {float(apart.mean()):+.4g}"
    return ""


def _whole(numbers: Tensor) -> bool:
    """Whether these are one whole number above zero, but for rounding."""
    number = numbers.median().round()
    return bool((number > 0) & ((numbers - number).abs() < 0.2 * number).all())
