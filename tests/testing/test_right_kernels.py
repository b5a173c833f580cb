"""Right backends with odd claims: the kit must try each of them, and must find nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from headway.backends.sdpa import SDPAMath
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.layout import HND, LATENT, NHD, NHD_INT8, VLLM_5D, CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.core.oracle.cells import CheckCell
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import subject_of

FP8, INT8 = torch.float8_e4m3fn, torch.int8
SMALL = Capabilities(phases=ALL_PHASES, layouts=(NHD,), dtypes=(torch.float32,), devices=("cpu",), exact_host_lengths=True)


@dataclass(frozen=True)
class Odd:
    """A right backend that claims little, or refuses what most accept."""

    name: str
    claims: dict[str, Any] = field(default_factory=dict)
    """Fields of Capabilities that differ from SMALL."""
    takes: Callable[[AttentionSpec, int], bool] = lambda spec, block_size: True
    """Return whether `supports` accepts a layer and a block size that the claims allow."""

    def made(self) -> type[SDPAMath]:
        """The backend."""
        takes = self.takes

        def supports(cls: type[SDPAMath], spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
            support: Support = super(made, cls).supports(spec, layout, block_size, phase)
            return support and (Support() if takes(spec, block_size) else Support.no("layer", "the one it is for", str(spec)))

        tolerance = {**SDPAMath.tolerance, torch.float64: 1e-12}
        body = {"name": self.name, "capabilities": replace(SMALL, **self.claims), "tolerance": tolerance}
        made = type("Right", (SDPAMath,), {**body, "supports": classmethod(supports)})
        return made


KINDS = [
    Odd("int8-only", {"layouts": (NHD_INT8,), "kv_dtypes": (INT8,), "batch_invariant": True}),
    Odd("fp8-only", {"kv_dtypes": (FP8,), "lse": True}, lambda spec, block_size: spec.cache_dtype is FP8),
    Odd("one-group", {"max_group_size": 1, "layouts": (HND,)}),
    Odd("nine-query-heads-a-kv-head", takes=lambda spec, block_size: spec.group_size == 9),
    Odd("one-head-size", {"head_dims": (40,), "lse": True}),
    Odd("decode-only", {"phases": frozenset({Phase.DECODE}), "layouts": (VLLM_5D,)}),
    Odd("extend-only", {"phases": frozenset({Phase.EXTEND})}),
    Odd("prompts-only", {"phases": frozenset({Phase.PREFILL}), "dense_prefill": True}),
    Odd("float64-only", {"dtypes": (torch.float64,)}),
    Odd("other-widths-only", {"head_dims": (), "v_head_dims": ((192, 128),)}),
    Odd("latent-only", {"layouts": (LATENT,), "value_in_key": True, "v_head_dims": ((576, 512),), "head_dims": ()}),
    Odd("one-kv-head", takes=lambda spec, block_size: spec.num_kv_heads == 1),
    Odd("usual-scale", {"lse": True}, lambda spec, block_size: spec.scale == spec.head_dim**-0.5),
    Odd("blocks-of-48", {"block_multiple": 48}),
    Odd("blocks-of-4", takes=lambda spec, block_size: block_size == 4),
    Odd(
        "encoders-only", {"phases": frozenset({Phase.PREFILL}), "dense_prefill": True, "non_causal": True},
        lambda spec, block_size: not spec.causal,
    ),
    Odd("windows-only", {"features": frozenset({"sliding_window"})}, lambda spec, block_size: spec.sliding_window is not None),
    Odd("everything-at-once", {"features": frozenset({"sliding_window", "softcap", "alibi_slopes", "sinks"}), "lse": True,
        "kv_dtypes": (FP8,), "shares_plans": True, "dtypes": (torch.bfloat16,)}),
]  # fmt: skip


def kit_of(odd: Odd) -> Kit:
    return Kit(subject_of(odd.made(), torch.device("cpu")))


def first_of_each(cells: list[CheckCell]) -> list[CheckCell]:
    """The first cell of each check, and of each phase of answers; no check that takes seconds."""
    slow = ("memory", "thousand", "long")
    return list(
        {(cell.check, cell.phase * (cell.check == "answer")): cell for cell in reversed(cells) if cell.check not in slow}.values()
    )


QUICK = ("int8-only", "other-widths-only", "one-kv-head", "encoders-only")
"""Kinds of which a few cells are run in every run of the tests; listing a kit's cells takes seconds."""


@pytest.mark.sampled(5, 3)
@pytest.mark.parametrize("odd", [odd for odd in KINDS if odd.name in QUICK], ids=lambda odd: odd.name)
def test_a_right_backend_passes_a_cell_of_each_check(odd: Odd) -> None:
    kit = kit_of(odd)
    cells = kit.cells(quick=True)
    results = [kit.run(cell) for cell in first_of_each(cells)]
    assert not [(result.cell, result.reason) for result in results if result.status == "failed"]
    checks = {cell.check for cell in cells}
    assert {"claims", "answer", "siblings", "repeat"} <= checks
    assert ("engine" in checks) is (odd.name != "encoders-only")
    assert any(result.status == "passed" for result in results if result.check == "answer")


@pytest.mark.slow
@pytest.mark.parametrize("odd", KINDS, ids=lambda odd: odd.name)
def test_a_right_backend_passes_every_quick_cell(odd: Odd) -> None:
    kit = kit_of(odd)
    results = [kit.run(cell) for cell in kit.cells(quick=True)]
    assert not [(result.cell, result.reason) for result in results if result.status == "failed"]
    assert sum(result.status == "passed" for result in results if result.check == "answer") > 10
