"""The torch backend for layers with a state against a float64 oracle that goes token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.backends.states.torch_states import TorchStates
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.state import (
    CHECKPOINT_TOKENS,
    KEY_VALUE,
    STATE_KINDS,
    VALUE_KEY,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)
from headway.core.oracle.state_cases import StateCase, make_state_case, random_inputs, random_parameters, run_states
from headway.core.oracle.state_reference import StateAnswer, answer

RECURRENT = [kind for kind in STATE_KINDS if kind != "conv"]
TIME_FIRST = StateLayout("time_first", ("slot", "value", "head", "key"), ("slot", "time", "channel"))
BOUND = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def spec_of(kind: str, conv: bool = True, heads: int = 4, key_heads: int = 2, key: int = 7, value: int = 5, **rest) -> StateSpec:
    """A small layer with odd sizes."""
    if kind == "conv":
        return StateSpec(kind, 0, 0, 0, 0, 11, 4, **rest)
    if kind == "mamba1":
        key_heads, value = 1, 1
    channels = heads if kind == "mamba1" else 2 * key_heads * key + heads * value
    rest = {"conv_channels": channels, "conv_width": 4, **rest} if conv else rest
    if kind in ("gated_delta", "kda"):
        rest = {"qk_norm": True, "scale": key**-0.5, **rest}
    return StateSpec(kind, heads, key_heads, key, value, **rest)


def check(case: StateCase) -> StateAnswer:
    """Run a step and hold output, written states and foreign slots' bits to the oracle."""
    expected = answer(case)
    before = {name: tensor.clone() for name, tensor in case.cache.tensors.items()}
    out = run_states(TorchStates(case.spec, case.cache.layout), case)
    real = ~expected.out.isnan().any(1)
    assert error(out[real], expected.out[real]) <= BOUND[case.spec.dtype]
    bound = max(BOUND[case.spec.dtype], BOUND[case.spec.state_dtype])
    for slot, state in expected.written.items():
        if state.recurrent is not None:
            assert error(case.cache.logical_recurrent[slot], state.recurrent) <= bound
        if state.conv is not None:
            assert torch.equal(case.cache.logical_conv[slot].double(), state.conv)
    foreign = [slot for slot in range(case.cache.num_slots) if slot not in expected.written]
    for name, tensor in case.cache.tensors.items():
        assert torch.equal(tensor[foreign].view(torch.uint8), before[name][foreign].view(torch.uint8))
    return expected


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize("layout", [KEY_VALUE, VALUE_KEY, TIME_FIRST], ids=lambda layout: layout.name)
def test_a_mixed_step_is_that_of_the_oracle(kind: str, layout: StateLayout) -> None:
    """Prompts and extensions of many lengths with checkpoints, decodes with and without drafts, and padding rows."""
    lens = [(200, 200), (1, 1), (65, 300), (64, 64), (130, 131), (3, 3), (9, 40), (33, 33), (1, 12), (3, 9), (1, 2), (8, 20)]
    check(make_state_case(lens, spec_of(kind), layout, padding_rows=2, strided=True))


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize(("dtype", "state"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16")])
def test_every_element_type(kind: str, dtype: str, state: str) -> None:
    """Inputs and states in different types, without a convolution, out of place."""
    spec = spec_of(kind, conv=False, dtype=getattr(torch, dtype), state_dtype=getattr(torch, state))
    lens = [(70, 100), (20, 20), (1, 5), (4, 7)]
    check(make_state_case(lens, spec, VALUE_KEY, in_place=False, seed=3))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 31, 63, 64, 65, 127, 128, 129, 191])
@pytest.mark.parametrize("kind", RECURRENT)
def test_every_length(kind: str, length: int) -> None:
    check(make_state_case([(length, length), (length + 8, 300)], spec_of(kind, heads=3, key_heads=3, key=4, value=6), KEY_VALUE))


class Sequence:
    """One sequence in slot 0 of a pool of its own, fed by scans and steps."""

    def __init__(self, spec: StateSpec, parameters: StateParameters, inputs: list[Tensor]) -> None:
        self.backend = TorchStates(spec, KEY_VALUE)
        self.cache = KEY_VALUE.allocate(spec, 12)
        self.parameters, self.inputs, self.done = parameters, inputs, 0

    def feed(self, count: int, out_slots: list[int] | None = None, checkpoints: list[list[int]] | None = None) -> Tensor:
        """Run the next tokens: a step where out_slots are given, one for each token, else a scan."""
        drafts = None if out_slots is None else [count - 1]
        step = AttentionMetadata.build([count], [self.done], [[0]], 1024, decode_query_len=0, num_draft_tokens=drafts or [-1])
        slots, outs = torch.tensor([0], dtype=torch.int32), torch.tensor([out_slots or [0]], dtype=torch.int32)
        marks = None if checkpoints is None else torch.tensor(checkpoints, dtype=torch.int32)
        plan = self.backend.plan(StateMetadata(step, slots, outs, slots, outs, marks, marks))
        x, *gates = (part[self.done : self.done + count] for part in self.inputs)
        out = x.new_empty(count, self.backend.spec.out_channels)
        run = self.backend.scan if out_slots is None else self.backend.step
        run(x, gates, self.parameters, self.cache, plan, out)
        self.done += count
        return out


def fresh(kind: str, tokens: int, seed: int = 0, **sizes: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    spec = spec_of(kind, **sizes)
    return Sequence(spec, random_parameters(spec, generator), random_inputs(spec, tokens, generator))


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_cut_anywhere_a_prompt_is_the_same(kind: str) -> None:
    """A prompt in chunks, and the end of it in decodes with drafts of which the last is dropped."""
    whole = fresh(kind, 150).feed(150)
    for cuts in ([1, 149], [64, 86], [63, 65, 22], [3, 2, 100, 45]):
        sequence = fresh(kind, 150)
        assert error(torch.cat([sequence.feed(cut) for cut in cuts]), whole.double()) <= 2e-5
    sequence = fresh(kind, 150)
    parts = [sequence.feed(120)]
    while sequence.done < 147:
        verified = sequence.feed(3, out_slots=[3, 0, 4])  # the third is thrown away: the next step reads the second's slot
        parts.append(verified[:2])
        sequence.done -= 1
    assert error(torch.cat(parts), whole[: sequence.done].double()) <= 2e-5


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_a_checkpoint_is_the_state_of_a_shorter_run(kind: str) -> None:
    """A prefix hit goes on as the request would that stopped there."""
    sequence, shorter = fresh(kind, 200), fresh(kind, 200)
    sequence.feed(200, checkpoints=[[0, 2 * CHECKPOINT_TOKENS, 5], [0, CHECKPOINT_TOKENS, 7], [0, 64, -1]])
    shorter.feed(64)
    for reached, slot in ((64, 7), (128, 5)):
        for name, tensor in sequence.cache.tensors.items():
            assert error(tensor[slot], shorter.cache.tensors[name][0].double()) <= 1e-6, (reached, name)
        if reached == 64:
            shorter.feed(64)


@pytest.mark.parametrize("kind", RECURRENT)
def test_strong_and_weak_decays_beside_each_other(kind: str) -> None:
    """Decays of e^-300 and of nearly 1, token by token at random: nothing overflows, and no sum of them loses its last bits."""
    generator = torch.Generator().manual_seed(5)
    case = make_state_case(
        [(150, 150), (70, 90)], spec_of(kind, dt_limits=(0.001, 100.0)) if kind == "mamba2" else spec_of(kind), KEY_VALUE
    )
    for gate in case.gates[:1]:
        gate.copy_(torch.where(torch.rand(gate.shape, generator=generator) < 0.2, 300.0, -8.0))
    assert not check(case).out.isnan().any()


@pytest.mark.parametrize("kind", STATE_KINDS)
@pytest.mark.parametrize("width", [1, 3])
def test_a_captured_plan_follows_its_static_tensors(kind: str, width: int) -> None:
    """A plan for a graph serves later steps of other slots, and any number of padding rows, through the tensors alone."""
    spec = spec_of(kind)
    rows = 5
    static = make_state_case([(width, 9)] * rows, spec, VALUE_KEY).metadata
    backend = TorchStates(spec, VALUE_KEY)
    plan = backend.plan_for_capture(static)
    for real in (5, 2, 0):
        padding = rows - real if real else 0
        case = make_state_case([(width, 12)] * (rows - padding), spec, VALUE_KEY, padding_rows=padding, seed=real)
        if not real:  # nothing but padding
            case.metadata.slots.fill_(-1)
            case.metadata.out_slots.fill_(-1)
        expected = answer(case)
        static.slots.copy_(case.metadata.slots)
        static.out_slots.copy_(case.metadata.out_slots)
        static.step.context_lens.copy_(case.metadata.step.context_lens)
        before = {name: tensor.clone() for name, tensor in case.cache.tensors.items()}
        out = case.x.new_empty(rows * width, spec.out_channels)
        backend.step(case.x, case.gates, case.parameters, case.cache, plan, out)
        if real:
            assert error(out[: real * width], expected.out[: real * width]) <= 2e-5
        foreign = [slot for slot in range(case.cache.num_slots) if slot not in expected.written]
        for slot, state in expected.written.items():
            if state.recurrent is not None:
                assert error(case.cache.logical_recurrent[slot], state.recurrent) <= 2e-5
        for name, tensor in case.cache.tensors.items():
            assert torch.equal(tensor[foreign].view(torch.uint8), before[name][foreign].view(torch.uint8))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_large_layers_run_in_pieces(kind: str) -> None:
    """Where a step has more than is computed at once, blocks and segments follow each other, and the answer is the same."""
    sizes = {"heads": 512, "key": 16} if kind == "mamba1" else {"heads": 8, "key_heads": 4, "key": 64, "value": 256}
    spec = spec_of(kind, **({} if kind == "conv" else sizes))
    lens = [(193, 193), (130, 160), (1, 7), *[(2, 2)] * 2, *[(1, 3)] * 20]
    lens.sort(key=lambda each: each[1] > each[0] and each[0] <= 8)
    check(make_state_case(lens, spec, VALUE_KEY))


def test_gated_delta_is_that_of_transformers() -> None:
    """The other implementation that models are trained and published with."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    spec = spec_of("gated_delta", conv=False, heads=4, key_heads=4, key=16, value=8)
    case = make_state_case([(150, 150)], spec, KEY_VALUE, in_place=False)
    q, k, v = case.x.split([64, 64, 32], dim=-1)
    a, b = case.gates
    g = -case.parameters.A_log.exp() * torch.nn.functional.softplus(a + case.parameters.dt_bias)
    out, state = modeling.torch_chunk_gated_delta_rule(
        q.view(1, 150, 4, 16),
        k.view(1, 150, 4, 16),
        v.view(1, 150, 4, 8),
        g=g[None],
        beta=b.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    slot = int(case.metadata.out_slots[0, 0])
    assert error(run_states(TorchStates(spec, KEY_VALUE), case), out[0].flatten(1).double()) <= 2e-5
    assert error(case.cache.logical_recurrent[slot], state[0].double()) <= 2e-5
