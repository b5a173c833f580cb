"""Whether a change of the reference's text changes any result: its bits beside the reference's, over random steps.

A mutant that the kit lets pass may be no mistake at all (a start value that cancels, a clamp that never clamps). Nobody can
decide that in general, so the steps are drawn from all that the reference claims, wider than the kit's cells, and what agrees in
every bit of each is called equivalent: such mutants are neither caught nor missed.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from headway.bench.studies.mutants.reference import TiledAttention
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import LayerCache
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case
from headway.core.oracle.steps import bits
from headway.testing.kit.subject import Subject, subject_of

STEPS = 300
"""Random steps after which nothing has differed."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def changes_nothing(made: type[AttentionBackend], steps: int = STEPS) -> bool:
    """Whether a mutant of `TiledAttention` left the same bits as it in `out`, `lse` and the cache of every step."""
    subject = subject_of(TiledAttention, torch.device("cpu"))
    return all(_same(made, subject, seed) for seed in range(steps))


def _same(made: type[AttentionBackend], subject: Subject, seed: int) -> bool:
    drawn = random.Random(seed)
    spec, layout, block_size = _layer(drawn), drawn.choice(["nhd", "hnd"]), drawn.choice([1, 3, 8, 16, 40])
    decodes = drawn.random() < 0.5
    new = [drawn.choice([1, 1, 2, 3, 40]) if not decodes else 1 for _ in range(drawn.randint(1, 5))]
    lens = [(n, n + drawn.choice([0, 1, 7, 31, 64, 90]) + decodes) for n in new]
    lens.sort(key=lambda each: each[0] == 1 and each[1] > 1)
    case = make_case(
        lens,
        spec,
        subject.layouts[layout],
        block_size,
        subject.writer(layout),
        seed=seed,
        poison=torch.nan,
        padding_rows=drawn.choice([0, 0, 2]) if decodes else 0,
    )
    try:
        found = [_results(each(spec, subject.layouts[layout], block_size), case) for each in (TiledAttention, made)]
    except Exception:
        return False
    return all(torch.equal(bits(right.contiguous()), bits(other.contiguous())) for right, other in zip(*found, strict=True))


def _layer(drawn: random.Random) -> AttentionSpec:
    kv_heads, group, dim = drawn.choice([1, 2, 3, 8]), drawn.choice([1, 2, 4, 7]), drawn.choice([8, 20, 64])
    heads = kv_heads * group

    def maybe(value: object, chance: float = 0.3) -> object:
        return value if drawn.random() < chance else None

    fp8 = drawn.random() < 0.3
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=drawn.choice([dim**-0.5, 0.3, 1.0, 4.0]),
        dtype=drawn.choice(_DTYPES),
        sliding_window=maybe(drawn.choice([1, 5, 32, 33, 64])),  # type: ignore[arg-type]
        softcap=maybe(drawn.choice([0.7, 20.0])),  # type: ignore[arg-type]
        alibi_slopes=maybe(tuple(drawn.random() for _ in range(heads))),  # type: ignore[arg-type]
        sinks=maybe(tuple(drawn.gauss(0.0, 2.0) for _ in range(heads))),  # type: ignore[arg-type]
        kv_dtype=torch.float8_e4m3fn if fp8 else None,
        k_scale=drawn.choice([0.003, 0.02, 1.5]) if fp8 else 1.0,
        v_scale=drawn.choice([0.003, 0.05, 1.5]) if fp8 else 1.0,
        v_head_dim=drawn.choice([0, 0, dim // 2, dim + 12]),
    )


def _results(backend: AttentionBackend, case: Case) -> list[Tensor]:
    """Everything that a step leaves and somebody reads: `out` and `lse` but for padding rows, and the tensors of the cache,
    which a decode may write by itself."""
    out = torch.full((len(case.q), case.spec.num_heads, case.spec.v_head_dim), torch.nan, dtype=case.spec.dtype)
    lse = torch.full((case.spec.num_heads, len(case.q)), torch.nan)
    prefill, decode, first = case.metadata.prefill, case.metadata.decode, case.metadata.num_prefill_tokens
    read = case.metadata.slot_mapping >= 0
    left: list[Tensor] = []
    with torch.inference_mode():
        if prefill is not None:
            given = case.q[:first], case.k[:first], case.v[:first]
            backend.prefill(*given, case.cache, backend.plan(prefill), out[:first], lse[:, :first])
        if decode is not None:
            backend.decode(case.q[first:], case.cache, backend.plan(decode), out[first:], lse[:, first:])
        if decode is not None and prefill is None:
            unwritten = _without(case, decode.slot_mapping)
            again = torch.full_like(out, torch.nan)
            backend.write_and_decode(case.q, case.k, case.v, unwritten, backend.plan(decode), again)
            left += [again[read], *unwritten.tensors.values()]
    return [out[read], lse[:, read], *left]


def _without(case: Case, slots: Tensor) -> LayerCache:
    """The case's cache before its new rows were written, as far as the step can tell."""
    cache = replace(case.cache, tensors={name: tensor.clone() for name, tensor in case.cache.tensors.items()})
    kept = slots[slots >= 0]
    for logical in (cache.logical_key, cache.logical_value):
        bits(logical)[kept // cache.block_size, kept % cache.block_size] = 0
    return cache
