"""The shapes of a warm-up reach every kernel that a later step takes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.backends.hopper import backend as attention
from headway.backends.hopper.backend import HopperKernels
from headway.core.contract.backend import StepLimits, lattice
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec

pytest.importorskip("cuda.bindings")

CPU = torch.device("cpu")


class Silent:
    """A kernel that is asked for and does nothing."""

    def allow_shared(self, shared_bytes: int) -> None:
        """As much as wanted."""

    def __call__(self, *launch: object) -> None:
        """Launch."""


LIMITS = StepLimits(max_num_tokens=4096, max_num_seqs=64, max_model_len=16384)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 1, 256)])
def test_no_step_takes_a_kernel_that_the_warm_up_has_not_met(
    monkeypatch: pytest.MonkeyPatch, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    met: set[Any] = set()

    def load(variant: Any, *rest: object) -> Silent:
        met.add(variant)
        return Silent()

    monkeypatch.setattr(attention, "load", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    layer = HopperKernels(AttentionSpec(num_heads, num_kv_heads, head_dim, 0.1, torch.bfloat16, CPU), 16)

    def plan(query_lens: list[int], context_lens: list[int]) -> None:
        ends = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        tables = [list(range(-(-end // 16))) for end in ends]
        step = AttentionMetadata.build(query_lens, context_lens, tables, 16, CPU)
        for view in filter(None, (step.prefill, step.decode)):
            layer.plan(view)

    for phase in (Phase.PREFILL, Phase.EXTEND):
        for step in lattice(phase, LIMITS):
            plan([each.query_len for each in step], [each.context_len for each in step])
    warmed = set(met)
    assert len(warmed) == 4, "wide and narrow tiles, with and without a cache"
    draw = random.Random(3)
    for _ in range(60):
        count = draw.choice((1, 2, 5, 30))
        lengths = [draw.randint(2, LIMITS.max_num_tokens // count) for _ in range(count)]
        plan(lengths, [draw.choice((0, draw.randint(1, 12000))) for _ in lengths])
    assert met == warmed
