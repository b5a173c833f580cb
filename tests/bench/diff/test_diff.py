"""`headway diff` finds where a backend is wrong, and nothing where it is right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.backends.sdpa import SDPA
from headway.bench.diff.results import DiffReport, PhaseDiff, SideReport, verdict
from headway.bench.diff.run import BATCH, NextTokens, compare, num_steps
from headway.bench.diff.sides import SideOptions, make_side
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.attention import PagedAttention
from headway.core.sampling.params import SamplingParams
from headway.registry import Registry
from headway.tuning.measure.device import identify_device
from tiny_engine import TinyModel, made_engine, registering

PROMPTS = [[1, 2, 3], list(range(20)), [7], list(range(20, 45)), [5] * 11]
MAX_TOKENS = 4


def run(registry: Registry, a: str, b: str, wish: SideOptions | None = None, **options: Any) -> dict[Phase, PhaseDiff]:
    model = TinyModel()
    sides = [make_side(name, registry, model.attention_specs, wish or SideOptions()) for name in (a, b)]
    return {phase.phase: phase for phase in compare(model, *sides, PROMPTS, MAX_TOKENS, **options)}


def report(phases: dict[Phase, PhaseDiff]) -> DiffReport:
    side = SideReport(name="x", kv_layout="nhd", block_size=16)
    device = identify_device(torch.device("cpu"))
    sizes = {"model": "m", "dtype": "float32", "prompts": 5, "max_tokens": 4}
    return DiffReport(command="headway diff", device=device, a=side, b=side, phases=[*phases.values()], **sizes)


def test_a_backend_does_not_differ_from_itself(registry: Registry) -> None:
    phases = run(registry, "sdpa", "sdpa")
    tokens = {phase: diff.tokens for phase, diff in phases.items()}
    assert tokens == {Phase.PREFILL: 1 + 10 + 1 + 12 + 5, Phase.EXTEND: 2 + 10 + 13 + 6, Phase.DECODE: 5 * MAX_TOKENS}
    for diff in phases.values():
        assert [layer.heads for layer in diff.layers] == [[0.0] * 4] * 2
        assert {layer.free_running for layer in diff.layers} == {0.0}
        assert (diff.hidden_error, diff.logits_error, diff.flip_rate, diff.kl_mean, diff.kl_max) == (0, 0, 0, 0, 0)
        assert diff.first_beyond is None
    assert report(phases).within_tolerance
    assert [str(line) for line in verdict(report(phases))] == ["within tolerance in every layer and phase"]


@pytest.mark.parametrize(("name", "layout"), [("sdpa", "nhd"), ("sdpa.math", "hnd"), ("prefill=sdpa,decode=sdpa.math", "nhd")])
def test_a_right_backend_is_near_the_reference_and_within_its_tolerance(registry: Registry, name: str, layout: str) -> None:
    phases = run(registry, name, "reference", SideOptions(layout, 8))
    assert set(phases) == set(Phase)
    for diff in phases.values():
        assert diff.tolerance == SDPA.tolerance[torch.float32]
        assert all(0 < (layer.relative_error or 0) < diff.tolerance for layer in diff.layers)
        assert diff.flip_rate == 0
        assert 0 <= (diff.kl_mean or 0) <= (diff.kl_max or 0) < 1e-9


class Wrong(SDPA):
    """Right but for one head of one layer in one phase; the layer is known by counting a step's calls."""

    name = "wrong"
    phase, layer, head, factor = Phase.DECODE, 1, 2, 1.5

    def plan(self, metadata: AttentionMetadata) -> Any:
        self.planned, self.calls = metadata.phase, 0  # a backend may keep its plan to itself
        return super().plan(metadata)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, plan: Any, out: Tensor) -> None:
        super().prefill(q, k, v, cache, plan, out)
        self._spoil(out)

    def decode(self, q: Tensor, cache: Any, plan: Any, out: Tensor) -> None:
        super().decode(q, cache, plan, out)
        self._spoil(out)

    def _spoil(self, out: Tensor) -> None:
        if (self.planned, self.calls) == (self.phase, self.layer):
            out[:, self.head] *= self.factor
        self.calls += 1


def with_wrong(**where: Any) -> Registry:
    return registering(wrong=type("Wrong", (Wrong,), where))


@pytest.mark.parametrize("phase", Phase, ids=lambda phase: phase.value)
@pytest.mark.parametrize(("layer", "head"), [(0, 3), (1, 2)])
@pytest.mark.parametrize("other", ["reference", "sdpa.math"])
def test_the_wrong_layer_head_and_phase_are_found(phase: Phase, layer: int, head: int, other: str) -> None:
    phases = run(with_wrong(phase=phase, layer=layer, head=head), "wrong", other)
    assert {found: diff.first_beyond for found, diff in phases.items()} == {p: layer if p is phase else None for p in Phase}
    wrong = phases[phase].layers[layer]
    assert wrong.worst_head == head
    assert wrong.heads[head] == pytest.approx(0.5, rel=1e-5)
    assert all((error or 0) < 1e-6 for number, error in enumerate(wrong.heads) if number != head)
    right = phases[phase].layers[1 - layer]
    assert (right.relative_error or 0) < 1e-6, "on the same q, k and v an error stays in its layer"
    assert (phases[phase].hidden_error or 0) > 1e-3
    if layer == 0:
        assert (right.free_running or 0) > 1e-3, "free-running it is handed on"
    (line,) = verdict(report(phases))
    assert f"{phase.value}, first in layer {layer}:" in str(line)
    assert f"worst head {head}, 1 of 4 heads" in str(line)


def test_a_wrong_backend_flips_tokens_and_the_other_side_writes_them() -> None:
    phases = run(with_wrong(layer=1, factor=-20.0), "wrong", "sdpa")
    decode = phases[Phase.DECODE]
    assert decode.flip_rate > 0
    assert 0.01 < decode.kl_mean <= decode.kl_max
    assert len(decode.flips) == round(decode.flip_rate * decode.tokens)
    assert all(flip.token_a != flip.token_b and flip.gap is not None and flip.gap >= 0 for flip in decode.flips)
    assert all(flip.position >= len(PROMPTS[flip.prompt]) for flip in decode.flips)
    assert phases[Phase.PREFILL].flip_rate == phases[Phase.EXTEND].flip_rate == 0


class Spy(TinyModel):
    """Remembers what it was fed in decode."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: list[list[int]] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Any) -> Tensor:
        self.fed.append(input_ids.tolist())
        return super().__call__(input_ids, positions, attention)


def test_both_sides_are_fed_the_greedy_tokens_of_side_b(registry: Registry) -> None:
    engine = made_engine(TinyModel(), registry, EngineConfig(kv_cache_memory=2**20))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), engine.limits.checked(prompt, SamplingParams(temperature=0, max_tokens=4)))
    written: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_unfinished:
        for delta in engine.step():
            written[int(delta.request_id)] += delta.new_token_ids
    spy = Spy()
    wrong = with_wrong(factor=-20.0)
    sides = [make_side(name, wrong, spy.attention_specs, SideOptions()) for name in ("wrong", "sdpa")]
    compare(spy, *sides, PROMPTS, MAX_TOKENS)
    decodes = spy.fed[-2 * MAX_TOKENS :]
    assert decodes[::2] == decodes[1::2], "A runs on the tokens of B"
    assert [list(step) for step in zip(*decodes[::2], strict=True)] == written


def test_an_answer_without_numbers_is_beyond_every_tolerance() -> None:
    phases = run(with_wrong(factor=math.nan), "wrong", "reference")
    decode = phases[Phase.DECODE]
    assert (decode.first_beyond, decode.layers[1].worst_head, decode.layers[1].heads[2]) == (1, 2, None)
    assert decode.layers[1].mean is None
    assert decode.kl_mean is decode.kl_max is decode.logits_error is None
    assert "no number" in str(verdict(report(phases))[0])
    again = DiffReport.model_validate_json(report(phases).model_dump_json(by_alias=True))
    assert again == report(phases)
    assert not again.within_tolerance


def test_more_prompts_than_a_batch_are_all_compared(registry: Registry) -> None:
    model = TinyModel()
    sides = [make_side("sdpa", registry, model.attention_specs, SideOptions()) for _ in range(2)]
    prompts = [[n % 50, 1, 2, 3] for n in range(BATCH + 3)]
    steps = []
    phases = compare(model, *sides, prompts, 2, extend=False, advance=lambda: steps.append(1))
    assert [(diff.phase, diff.tokens) for diff in phases] == [(Phase.PREFILL, 4 * len(prompts)), (Phase.DECODE, 2 * len(prompts))]
    assert len(steps) == num_steps(prompts, 2, extend=False) == 2 * 3


def test_next_tokens_are_compared_position_by_position() -> None:
    b = torch.tensor([[0.0, 0.0], [1.0, 3.0], [2.0, 0.0]])
    a = torch.tensor([[0.0, 0.0], [2.0, 1.0], [2.0, 0.0]])
    tokens = NextTokens()
    tokens.add(a[:1], b[:1], [(0, 0)])
    tokens.add(a[1:], b[1:], [(0, 1), (3, 7)])
    (flip,) = tokens.flips
    assert (flip.prompt, flip.position, flip.token_a, flip.token_b, flip.gap) == (0, 1, 0, 1, 2.0)
    assert tokens.flip_rate == pytest.approx(1 / 3)
    p, q = (1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2)))  # of token 0
    kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert tokens.kl_max == pytest.approx(kl)
    assert tokens.kl_mean == pytest.approx(kl / 3)


def test_the_reference_side_shares_no_attention_with_a_backend(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: object) -> None:
        raise AssertionError("a backend ran")

    monkeypatch.setattr(PagedAttention, "run", attend)
    assert all(layer.relative_error == 0 for diff in run(registry, "reference", "reference").values() for layer in diff.layers)
