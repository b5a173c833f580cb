"""Cases that every backend must pass: shapes, features, layouts."""

from __future__ import annotations

import math
from typing import Any

import torch

from headway.core.contract.layout import HND, NHD, VLLM_5D, CacheLayout, write_rows
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case

LAYOUTS = (NHD, HND, VLLM_5D)

CASES = {
    "prefill": "1q17_2q5_1q33",
    "one token": "1q1",
    "extend": "1q7s20_1q1_1q16s33",
    "decode": "5q1s40",
    "decode ragged": "1q1s2_1q1s15_1q1s16_1q1s17_1q1s49",
    "mixed": "1q9_1q6s22_1q1s33_2q1s8",
    "verify": "2q4s21_1q2s9",
}

VERIFY = {"verify": 8}
"""Cases in which several query tokens count as DECODE: the most there may be."""


def spec(**changes: object) -> AttentionSpec:
    """A small layer whose scale is not 1/sqrt(head_dim), with what a test changes."""
    base = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "scale": 0.21}
    return AttentionSpec(**{**base, **changes})


SPECS = {
    "gqa 2": spec(),
    "mha": spec(num_heads=3, num_kv_heads=3),
    "mqa": spec(num_heads=7, num_kv_heads=1),
    "gqa 8, head_dim 80": spec(num_heads=8, num_kv_heads=1, head_dim=80),
    "head_dim 24": spec(head_dim=24),
    "window": spec(sliding_window=5),
    "window 1": spec(sliding_window=1),
    "softcap": spec(softcap=1.5),
    "alibi": spec(alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
    "sinks": spec(sinks=(0.3, -1.0, 2.0, 0.0)),
    "window softcap alibi": spec(sliding_window=9, softcap=2.0, alibi_slopes=(0.5, 0.25, 0.125, 0.0625)),
}

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def case_of(
    name: str, layer: AttentionSpec, layout: CacheLayout = NHD, block_size: int = 16, verify: int = 1, **options: Any
) -> Case:
    """A step of CASES, or of the grammar, over a cache that is NaN, or as options say, where it holds nothing."""
    verify, options = VERIFY.get(name, verify), {"poison": math.nan, **options}
    lens = parse_case(CASES.get(name, name), verify)
    return make_case(lens, layer, layout, block_size, write_rows, decode_query_len=verify, **options)
