"""The Triton kernels of layers with a state against float64 under the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headway.backends.states.triton.backend import TritonStates
from headway.core.contract.metadata import Phase
from headway.core.contract.state import KEY_VALUE, STATE_KINDS, VALUE_KEY, StateLayout, StateSpec
from headway.core.oracle.state_cases import make_state_case
from headway.testing.diagnosis.states import Judge
from headway.testing.kit.kit import Kit
from headway.testing.kit.states import StateCell
from headway.testing.kit.subject import subject_of


def layer(kind: str, heads: int = 4, key_heads: int = 2, key_dim: int = 16, value_dim: int = 32, width: int = 4) -> StateSpec:
    """A small layer of a kind; of `mamba1`, `heads * value_dim` channels."""
    if kind == "conv":
        return StateSpec(kind, 0, 0, 0, 0, conv_channels=200, conv_width=width, activation="none")
    if kind == "mamba1":
        channels = heads * value_dim
        return StateSpec(kind, channels, 1, key_dim, 1, conv_channels=channels if width else 0, conv_width=width)
    channels = 2 * key_heads * key_dim + heads * value_dim if width else 0
    delta = kind in ("gated_delta", "kda")
    return StateSpec(kind, heads, key_heads, key_dim, value_dim, channels, width, scale=0.3, qk_norm=delta)


Lengths = tuple[int, int]
"""New tokens, and all with them."""


def check(
    spec: StateSpec, lens: list[Lengths], layout: StateLayout = KEY_VALUE, *, changes: dict[str, object] | None = None,
    bias: bool = True, padding_rows: int = 0, in_place: bool = True,
) -> None:  # fmt: skip
    backend = TritonStates(spec, layout)
    backend.tuning = replace(backend.tuning, **(changes or {}))
    case = make_state_case(lens, spec, layout, padding_rows=padding_rows, in_place=in_place)
    if not bias:
        case = replace(case, parameters=replace(case.parameters, conv_bias=None))
    for view in (case.metadata.prefill, case.metadata.decode):
        if view is not None:
            support = TritonStates.supports(spec, layout, view.step.phase)
            assert support, str(support)
    Judge.of(case).run(backend)


ONE: list[Lengths] = [(1, 21), (1, 2), (1, 301)]
DRAFTS: list[Lengths] = [(3, 23), (1, 10), (8, 308), (2, 7)]


def rare(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.slow)


def few(*kinds: str) -> list[object]:
    """Every kind of state, of which these are tried every day."""
    return [kind if kind in kinds else rare(kind) for kind in STATE_KINDS]


@pytest.mark.parametrize("lens", [rare(ONE), DRAFTS], ids=["one", "drafts"])
@pytest.mark.parametrize("kind", few("gated_delta", "mamba1", "conv"))
def test_a_step_is_right(kind: str, lens: list[Lengths]) -> None:
    check(layer(kind), lens, padding_rows=2)


@pytest.mark.parametrize("kind", few("mamba2"))
def test_a_step_reads_one_slot_and_writes_others(kind: str) -> None:
    check(layer(kind), DRAFTS, VALUE_KEY, in_place=False, bias=False)


@pytest.mark.parametrize("kind", ["gated_delta", rare("mamba2")])
def test_a_step_of_several_programs_a_key_head_is_right(kind: str) -> None:
    check(layer(kind), ONE, changes={"step_value": 16})


@pytest.mark.parametrize("kind", [rare("gated_delta"), "lightning", rare("mamba1")])
def test_a_step_without_a_convolution_is_right(kind: str) -> None:
    check(layer(kind, width=0), DRAFTS)


@pytest.mark.slow
def test_a_step_of_odd_sizes_is_right() -> None:
    check(layer("gated_delta", 3, 1, 24, 40, 3), DRAFTS)
    check(layer("conv", width=2), DRAFTS)


@pytest.mark.parametrize("kind", [rare("gated_delta"), "mamba1"])
def test_a_step_of_bfloat16_is_right(kind: str) -> None:
    check(replace(layer(kind), dtype=torch.bfloat16, state_dtype=torch.bfloat16), DRAFTS)


@pytest.mark.parametrize("kind", [rare("gated_delta"), "mamba1"])
def test_a_captured_step_follows_its_static_tensors(kind: str) -> None:
    """A plan that is made once serves other slots, padding rows, and sequences with fewer drafts than the graph is wide."""
    result = Kit(subject_of(TritonStates, torch.device("cpu"))).run(StateCell("graph", "verify", kind, heads="2/1"))
    assert result.status == "passed", result


def test_a_key_that_is_too_long_is_refused() -> None:
    support = TritonStates.supports(layer("gated_delta", key_dim=512), KEY_VALUE, Phase.DECODE)
    assert not support
    assert "key_dim: needs at most 256, got 512" in str(support)


PROMPTS: list[Lengths] = [(64, 64), (129, 169), (9, 11)]


@pytest.mark.parametrize("kind", few("gated_delta", "mamba1", "conv"))
def test_a_scan_is_right(kind: str) -> None:
    check(layer(kind, 2, 1), PROMPTS)


@pytest.mark.parametrize("kind", [rare("gated_delta"), "mamba2", rare("mamba1"), rare("conv")])
def test_a_scan_beside_a_step_is_right(kind: str) -> None:
    check(layer(kind, 2, 1), [(66, 69), *ONE], VALUE_KEY, in_place=False, bias=False)


@pytest.mark.parametrize("kind", [rare("gated_delta"), "lightning"])
def test_a_scan_without_a_convolution_is_right(kind: str) -> None:
    check(layer(kind, width=0), [(70, 70)])


@pytest.mark.parametrize("kind", [rare("gated_delta"), "kda"])
def test_a_scan_of_bfloat16_is_right(kind: str) -> None:
    check(replace(layer(kind), dtype=torch.bfloat16), [(70, 78)])


@pytest.mark.slow
def test_a_scan_of_odd_sizes_is_right() -> None:
    check(layer("gated_delta", 3, 1, 24, 40, 3), [(65, 73)], changes={"walk_value": 16, "rows": 16})
