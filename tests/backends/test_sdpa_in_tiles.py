"""Attention in tiles at fixed positions: right, and with the same bits however a sequence is divided into steps."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from headway.backends.sdpa import SDPA, SDPAMath, attend_in_tiles
from headway.contract import NHD, AttentionSpec, Invariance
from headway.core.contract.layout import write_rows
from headway.core.oracle.cases import make_case
from headway.core.oracle.oracle import attend
from headway.testing.kit.checks.answers import in_parts

PLAIN = AttentionSpec(6, 2, 24, 0.2, invariance=Invariance.PHASE)
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a window": {"sliding_window": 21},
    "a window of one": {"sliding_window": 1},
    "soft-capped": {"softcap": 3.0},
    "biased": {"alibi_slopes": (0.5, 0.25, 0.1, 0.05, 0.02, 0.01)},
    "sinks and a window": {"sinks": (0.3, -1.0, 2.0, 0.0, 5.0, -3.0), "sliding_window": 40},
    "bfloat16": {"dtype": torch.bfloat16},
    "an FP8 cache": {"kv_dtype": torch.float8_e4m3fn, "k_scale": 0.5, "v_scale": 0.25},
    "wide values": {"v_head_dim": 40},
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_are_the_same_in_one_step_and_in_many(name: str, seed: int) -> None:
    random, spec = Random(seed), replace(PLAIN, **LAYERS[name])
    length = random.randint(130, 300)
    case = make_case([(length, length)], spec, NHD, 16, write_rows, seed=seed)
    whole = in_parts(SDPA(spec, NHD, 16), case, [length], decodes=False)
    for decodes, most in ((False, 90), (True, 8), (True, 1)):
        sizes, left = list[int](), length
        while left:
            sizes.append(min(left, random.randint(1, most) if sizes or most > 1 else length - 20))
            left -= sizes[-1]
        for backend in (SDPA, SDPAMath):
            assert torch.equal(in_parts(backend(spec, NHD, 16), case, sizes, decodes), whole), (backend, sizes)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ("bfloat16", "an FP8 cache")])
def test_it_computes_what_the_oracle_computes(name: str) -> None:
    spec, torch_seed = replace(PLAIN, **LAYERS[name]), torch.Generator().manual_seed(3)
    query_len, kv_len = 37, 290
    q, k, v = (
        torch.randn(rows, heads, dim, generator=torch_seed)
        for rows, heads, dim in ((query_len, 6, 24), (kv_len, 2, 24), (kv_len, 2, spec.v_head_dim))
    )
    out, lse = attend_in_tiles(q, k, v, spec)
    expected, sums = attend(spec, q, k.double(), v.double(), kv_len - query_len)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=0, atol=2e-5)


def test_a_backend_that_divides_sequences_otherwise_has_other_bits() -> None:
    """Else the tests above would show nothing."""
    spec = replace(PLAIN, invariance=Invariance.NONE)
    case = make_case([(200, 200)], spec, NHD, 16, write_rows)
    backend = SDPA(spec, NHD, 16)
    assert not torch.equal(in_parts(backend, case, [150, *[1] * 50], decodes=True), in_parts(backend, case, [200], decodes=False))
