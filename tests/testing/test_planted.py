"""Every planted backend is caught, and the kit names its mistake; the backend they are made from is not blamed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.backends.sdpa import SDPAMath
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import HND, LATENT, NHD, NHD_INT8, VLLM_5D, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.core.oracle.cells import CheckCell
from headway.testing.broken.attention import PLANTED, PlainBackend, PlainPlan
from headway.testing.kit.cover import MANY_HEADS
from headway.testing.kit.kit import Kit
from headway.testing.kit.report import CellResult
from headway.testing.kit.subject import load_subject, subject_of

NAMED = {
    "wrong-scale": ("answer", "none", "scale 1/sqrt(head_dim)"),
    "ignores-the-context": ("answer", "none", "ignores the context"),
    "causal-off-by-one": ("answer", "none", "causal mask off by one (a query sees the next token)"),
    "window-off-by-one": ("answer", "window", "window off by one (one key too many)"),
    "wrong-gqa-map": ("answer", "none", "GQA map h % kv_heads"),
    "drops-softcap": ("answer", "softcap", "without the soft-cap"),
    "drops-sinks": ("answer", "sinks", "without the sinks"),
    "reads-past-the-end": ("answer", "none", "reads the rest of the last block"),
    "writes-padding-rows": ("answer", "none", "writes padding rows"),
    "assumes-contiguous-blocks": ("answer", "none", "assumes contiguous blocks"),
    "changes-q": ("answer", "none", "changes q"),
    "stale-plan-on-replay": ("graph", "none", "stale lengths"),
    "non-deterministic": ("repeat", "none", "non-deterministic"),
    "nan-for-one-sequence": ("answer", "none", "NaN for one sequence"),
    "claims-a-layout-it-cannot-read": ("answer", "none", "hnd cache read as nhd"),
    "shares-its-sinks": ("shared", "sinks", "its plan holds sinks or scales"),
    "shares-a-maximum": ("answer", "none", "exponentials that are not relative to the largest score"),
    "takes-lengths-for-sequences": ("answer", "none", "queries at the positions of the first sequence"),
    "takes-the-first-tile-of-heads": ("answer", "none", "all of which take the queries of the first tile"),
}
"""Name -> the check that finds it, the feature of the layer it is found on, and words of the guess."""
MANY = "takes-the-first-tile-of-heads"
INPUTS = {"shares-a-maximum": {"scores": "uneven"}, "takes-lengths-for-sequences": {"work": "level"}}
"""Name -> the inputs that bring a mistake out."""


@cache
def kit(target: str) -> Kit:
    return Kit(load_subject(target, torch.device("cpu")))


def cells_for(name: str) -> list[CheckCell]:
    check, feature, _ = NAMED[name]
    layout = "hnd" if name == "claims-a-layout-it-cannot-read" else "nhd"
    plain = CheckCell(check, layout=layout, block_size=8, head_dim=32, group=2, feature=feature)
    plain = replace(plain, group=71, kv_heads=1) if name == MANY else plain
    plain = replace(plain, **INPUTS.get(name, {}))
    phases = ("decode",) if check == "graph" else ("extend", "decode", "ragged")
    return [plain.plain(check, phase=phase) for phase in phases]


def test_there_are_nineteen_of_them() -> None:
    assert set(NAMED) == set(PLANTED)
    assert len(NAMED) == 19


@pytest.mark.sampled(5, 1)
@pytest.mark.parametrize("name", NAMED)
def test_a_planted_mistake_is_caught_and_named(name: str) -> None:
    results = [kit(f"broken:{name}").run(cell) for cell in cells_for(name)]
    guesses = [result.guess for result in results if result.status == "failed"]
    assert any(NAMED[name][2] in guess for guess in guesses), results


@pytest.mark.slow
@pytest.mark.parametrize("feature", [pytest.param("latent", marks=pytest.mark.slow), "none"])
def test_what_shows_from_the_65th_query_head_on_is_found_by_the_cells_of_many_heads_alone(feature: str) -> None:
    own = kit(f"broken:{MANY}")
    cells = [cell for cell in own.cells() if (cell.check, cell.phase, cell.feature) == ("answer", "decode", feature)]
    many = [cell for cell in cells if cell.group > 64]
    for result in map(own.run, many):
        assert result.status == "failed", result
        assert NAMED[MANY][2] in result.guess, result
    few = [cell for cell in cells if cell.group <= 64 and cell.work in ("few", "edges")]
    assert {result.status for result in map(own.run, few[:4])} == {"passed"}
    assert {cell.group for cell in many} == set(MANY_HEADS[feature]) - {64}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMED)
def test_nothing_is_found_where_nothing_is_wrong(name: str) -> None:
    right = Kit(subject_of(PlainBackend, torch.device("cpu")))
    results: list[CellResult] = [right.run(cell) for cell in cells_for(name)]
    assert [result.status for result in results] == ["passed"] * len(results), results


class _InPadding(PlainBackend):
    """Writes `value` to the output of padding rows."""

    value = math.nan

    def decode(self, q: Tensor, cache: LayerCache, plan: PlainPlan, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q, cache, plan, out)
        for number, kv_len in enumerate(plan.metadata.seq_lens.tolist()):
            if not kv_len:
                start, end = plan.metadata.query_start_loc[number : number + 2].tolist()
                out[start:end] = self.value


class _LogSums(SDPAMath):
    """Writes +inf as the log-sum-exp of padding rows, as FlashAttention 2 does."""

    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q, cache, plan, out, lse)
        if lse is not None:
            lse[lse == -torch.inf] = torch.inf


_CLAIMED = {"capabilities": replace(PlainBackend.capabilities, zeroes_padding=True)}
KEYLESS: list[tuple[type[PlainBackend] | type[SDPAMath], dict[str, object], str]] = [
    (PlainBackend, {}, ""),
    (_InPadding, {"value": 0.0, **_CLAIMED}, ""),
    (SDPAMath, {}, ""),
    (PlainBackend, _CLAIMED, "out of a row that sees no key (kv_len 0): needs zeros; got 192"),
    (_InPadding, {}, "out of a row that sees no key (kv_len 0): needs zeros, or no write; got nan"),
    (_InPadding, {"value": 1.5}, "out of a row that sees no key (kv_len 0): needs zeros, or no write; got 1.5"),
    (_LogSums, {}, "lse of a row that sees no key (kv_len 0): needs -inf, or the sink; got inf"),
]


@pytest.mark.parametrize("phase", ["decode", "verify"])
@pytest.mark.parametrize(("base", "changes", "words"), KEYLESS)
def test_rows_that_see_no_key_are_zeros_or_left_alone(
    base: type[Any], changes: dict[str, object], words: str, phase: str
) -> None:
    tried = Kit(subject_of(type("Tried", (base,), {"name": "tried", "__module__": __name__, **changes}), torch.device("cpu")))
    plain = CheckCell("keyless", layout="nhd", block_size=8, head_dim=32, group=2)
    result = tried.run(plain.plain("keyless", phase=phase))
    assert (result.status, result.reason if words else "") == ("failed" if words else "passed", words)


def test_rows_that_see_no_key_have_quick_cells_of_both_phases() -> None:
    cells = Kit(subject_of(PlainBackend, torch.device("cpu"))).cells(True)
    found = {(cell.feature, cell.phase) for cell in cells if cell.check == "keyless"}
    assert found >= {(feature, phase) for feature in ("none", "sinks") for phase in ("decode", "verify")}


@pytest.mark.parametrize("stale", [False, True], ids=["keeps its tensors", "copies them"])
def test_a_captured_prompt_finds_its_blocks_where_they_were_planned(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Uniform(PlainBackend):
        graph_level = GraphLevel.UNIFORM

        def plan(self, metadata: AttentionMetadata) -> PlainPlan:
            if not stale:
                return PlainPlan(metadata)
            return PlainPlan(replace(metadata, block_table=metadata.block_table.clone()))

    monkeypatch.setitem(PLANTED, "uniform", Uniform)
    tried = Kit(load_subject("broken:uniform", torch.device("cpu")))
    result = tried.run(
        CheckCell("prompt", layout="nhd", block_size=8, head_dim=32, group=2, feature="none").plain("prompt", phase="prefill")
    )
    assert result.status == ("failed" if stale else "passed"), result


class FillsPaddingRows(PlainBackend):
    """A right backend but for padding rows, which it fills with NaN."""

    def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
        super().decode(q, cache, plan, out, lse)
        starts = plan.metadata.query_start_loc_cpu.tolist()
        for number, length in enumerate(plan.metadata.seq_lens.tolist()):
            if not length:
                out[starts[number] : starts[number + 1]] = math.nan


def test_nan_in_padding_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANTED, "made", FillsPaddingRows)
    cell = CheckCell("answer", layout="nhd", block_size=8, head_dim=32, group=2, feature="none").plain("answer", phase="ragged")
    result = Kit(load_subject("broken:made", torch.device("cpu"))).run(cell)
    assert result.status == "failed"
    assert "left alone or zero" in result.reason


class ServesOneShape(PlainBackend):
    """A right backend for seven query heads per kv head and blocks of 48 alone."""

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        fits = YES if (spec.group_size, block_size) == (7, 48) else Support.no("layer", "groups of 7, blocks of 48", "another")
        return super().supports(spec, layout, block_size, phase) & fits


@pytest.mark.slow
def test_a_layer_is_found_for_a_backend_that_serves_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANTED, "made", ServesOneShape)
    made = Kit(load_subject("broken:made", torch.device("cpu")))
    cell = next(each for each in made.cells(quick=True) if (each.check, each.phase) == ("answer", "decode"))
    assert (cell.group, cell.block_size) == (7, 48)
    assert made.run(cell).status == "passed"


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
@pytest.mark.sampled(7, 1, then="soak")
@pytest.mark.parametrize("odd", KINDS, ids=lambda odd: odd.name)
def test_a_right_backend_passes_every_quick_cell(odd: Odd) -> None:
    kit = kit_of(odd)
    results = [kit.run(cell) for cell in kit.cells(quick=True)]
    assert not [(result.cell, result.reason) for result in results if result.status == "failed"]
    assert sum(result.status == "passed" for result in results if result.check == "answer") > 10
