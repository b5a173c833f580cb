"""The values of the grid's axes: what a phase and a feature mean in lengths and layers, short on a CPU, long on a GPU."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import torch

from grid import CASES as SMALL
from headway.core.contract.layout import CacheLayout, CacheWriter
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.testing.cases import Case, make_case, parse_case

PHASES = {
    "prefill": {Phase.PREFILL},
    "extend": {Phase.EXTEND},
    "decode": {Phase.DECODE},
    "mixed": {Phase.EXTEND, Phase.DECODE},
    "verify": {Phase.DECODE},
    "ragged": {Phase.DECODE},
}
"""Name of a case -> the phases a backend must serve for it."""
CASES = {
    "cpu": {**{name: SMALL[name] for name in PHASES if name in SMALL}, "ragged": SMALL["decode ragged"]},
    "cuda": {
        "prefill": "1q130_1q513_1q64_1q1_1q33",
        "extend": "1q7s20_1q100s1000_1q257s300_1q64s128_1q1",
        "decode": "4q1s1000",
        "mixed": "1q100_1q50s1170_1q1s33_2q1s99",
        "verify": "2q4s200_1q8s1030_1q3s5",
        "ragged": "1q1s2_1q1s15_1q1s16_1q1s17_1q1s4097_2q1s63_1q1s9000",
    },
}
VERIFY_TOKENS = 8
"""Most query tokens that count as DECODE in the case "verify"."""
PADDING_ROWS = {"ragged": 3}
MERGED = frozenset({"mixed", "ragged"})
"""Cases whose q, k and v are slices of one tensor, as a merged projection leaves them."""
HEAD_DIMS = (64, 80, 96, 128, 256)
NUM_KV_HEADS = 2
FP8 = torch.float8_e4m3fn
WINDOWS = {"cpu": 5, "cuda": 70}
FEATURES = ("none", "scale", "window", "window 1", "softcap", "alibi", "sinks", "together", "fp8 cache")
"""together: every feature that the backend claims, in one layer."""
OPTIONS = ("scale", "window", "softcap", "alibi", "sinks")
"""Features that must change the output where they are accepted."""
FINITE_POISON = 3e4
"""Finite in every 16-bit type, and far from anything a case holds."""


@cache
def make_spec(head_dim: int, group: int, dtype: str, feature: str, device: str, claims: frozenset[str]) -> AttentionSpec:
    """The layer of a cell. claims: Capabilities.features of the backend, for "together"."""
    heads = group * NUM_KV_HEADS
    features: dict[str, object] = {
        "sliding_window": WINDOWS[device],
        "softcap": 1.5,
        "alibi_slopes": tuple(2.0 ** -(1 + 8 * head / heads) for head in range(heads)),
        "sinks": tuple((0.3, -1.0, 2.0, 0.0, 1.0)[head % 5] for head in range(heads)),
    }
    changes: dict[str, dict[str, object]] = {
        "none": {},
        "scale": {"scale": 0.21},
        "window": {"sliding_window": features["sliding_window"]},
        "window 1": {"sliding_window": 1},
        "softcap": {"softcap": features["softcap"]},
        "alibi": {"alibi_slopes": features["alibi_slopes"]},
        "sinks": {"sinks": features["sinks"]},
        "together": {name: features[name] for name in sorted(claims)},
        "fp8 cache": {"kv_dtype": FP8, "k_scale": 0.02, "v_scale": 0.05},
    }
    base = {"num_heads": heads, "num_kv_heads": NUM_KV_HEADS, "head_dim": head_dim, "scale": head_dim**-0.5}
    place = {"dtype": getattr(torch, dtype), "device": torch.device(device, 0) if device == "cuda" else torch.device(device)}
    return AttentionSpec(**{**base, **place, **changes[feature]})


def make_grid_case(
    phase: str,
    spec: AttentionSpec,
    layout: CacheLayout,
    block_size: int,
    writer: CacheWriter,
    whole_blocks: bool,
    *,
    lens: list[tuple[int, int]] | None = None,
    decode_query_len: int | None = None,
) -> Case:
    """A filled cache and a step. lens, decode_query_len: in place of those of the phase, without its padding rows.

    whole_blocks: a reader declares that it multiplies what lies in block tails by zero, so they hold a large number, not NaN.
    """
    most = decode_query_len or (VERIFY_TOKENS if phase == "verify" else 1)
    poison = min(FINITE_POISON, torch.finfo(spec.cache_dtype).max) if whole_blocks else math.nan
    padding = PADDING_ROWS.get(phase, 0) if lens is None else 0
    lens = parse_case(CASES[spec.device.type][phase], most) if lens is None else lens
    case = make_case(lens, spec, layout, block_size, writer, poison=poison, padding_rows=padding, decode_query_len=most)
    if phase not in MERGED or decode_query_len:
        return case
    q, k, v = torch.cat([case.q, case.k, case.v], dim=1).split([t.shape[1] for t in (case.q, case.k, case.v)], dim=1)
    return dataclasses.replace(case, q=q, k=k, v=v)
