"""Graphs with adapters: captured beside those without, fed the slots of a step's rows, and taken only where a row has one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graph_backend import Again, Wide
from graph_stub import Tape
from headway.core.contract.adapters import LoRARequest, rows_with
from headway.core.contract.model import Attention, AttentionFunctions
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.graph_set import PiecewiseGraphs
from headway.core.engine.execution.local_executor import LocalExecutor
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from made_engine import made_engine
from proposer_stub import Told, told_of
from registries import registering
from run_engine import drain
from tiny_model import TinyModel

NUMBERS = {"one": 1, "two": 2, "three": 3}


class Shift(NamedTuple):
    digest: bytes
    row: Tensor


class Shifts:
    """Slots of which each adds a row of its own to every hidden state, by operators that a graph holds."""

    def __init__(self) -> None:
        self.num_slots = 2
        self.table = torch.zeros(3, 32)
        self.slots: Tensor | None = None

    def read(self, request: LoRARequest) -> Shift:
        draw = torch.Generator().manual_seed(request.lora_int_id)
        return Shift(request.lora_path.encode(), 5 * torch.randn(32, generator=draw))

    def put(self, slot: int, adapter: Shift) -> None:
        self.table[slot] = adapter.row

    def begin(self, slots: Tensor | None) -> None:
        self.slots = slots


class ShiftedModel(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = Shifts()
        self.calls: Counter[bool] = Counter()

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        hidden = super().__call__(input_ids, positions, attention)
        slots = self.adapters.slots
        self.calls[slots is not None] += 1
        return hidden if slots is None else hidden + self.adapters.table[slots.long().remainder(3)]


def engine_of(graphs: bool, proposer: Told | None = None) -> tuple[EngineLoop, ShiftedModel]:
    config = EngineConfig(
        attn_backend="wide",
        block_size=8,
        kv_cache_memory=2**20,
        max_num_seqs=4,
        max_model_len=64,
        enable_lora=True,
        max_loras=2,
        async_scheduling=False,
        enforce_eager=not graphs,
    )
    model = ShiftedModel()
    engine = made_engine(model, registering(wide=Wide), config, proposer=proposer, measured=False)
    assert isinstance(engine.executor, LocalExecutor)
    if graphs:
        engine.executor.capture(Again())
    return engine, model


def texts(engine: EngineLoop, names: Sequence[str] = ("plain", "one", "two", "three")) -> dict[str, list[int]]:
    """What requests write, each with an adapter of its own but for "plain"; slots are too few for all of them."""
    for name in names:
        adapter = None if name == "plain" else LoRARequest(name, NUMBERS[name], name)
        prompt = [7, 3, 9, len(name), *([5] * 9 if name == "two" else [])]
        params = SamplingParams(temperature=0, max_tokens=12)
        engine.add_request(name, engine.limits.checked(prompt, params, lora_request=adapter))
    return {name: end.token_ids for (name, _), end in drain(engine).items()}


def test_graphs_with_adapters_write_what_single_launches_do() -> None:
    expected = texts(engine_of(graphs=False)[0])
    engine, _ = engine_of(graphs=True)
    assert texts(engine) == expected
    assert engine.stats.num_graph_steps > 5
    assert len({tuple(tokens) for tokens in expected.values()}) == 4


def test_verifications_in_graphs_have_adapters() -> None:
    expected = texts(engine_of(graphs=False)[0])
    known = [[7, 3, 9, len(name), *([5] * 9 if name == "two" else []), *tokens] for name, tokens in expected.items()]
    engine, _ = engine_of(graphs=True, proposer=told_of(known))
    assert texts(engine) == expected
    assert engine.stats.num_accepted_tokens > 5
    assert engine.stats.num_graph_steps > 5


def test_steps_without_adapters_run_graphs_that_hold_nothing_of_them() -> None:
    engine, model = engine_of(graphs=True)
    for names, with_adapters in ((["plain"], False), (["one"], True), (["plain"], False)):
        before, steps = model.calls.copy(), engine.stats.num_graph_steps
        texts(engine, names)
        ran = model.calls - before
        assert set(ran) == {with_adapters}
        assert engine.stats.num_graph_steps - steps >= 10


def test_a_prompt_alone_has_its_adapter_in_a_graph() -> None:
    graphed, _ = engine_of(graphs=True)
    assert texts(graphed, ["two"]) == texts(engine_of(graphs=False)[0], ["two"])
    assert not graphed.stats.steps_without_graph


@torch.inference_mode()
def test_pieces_between_attentions_have_the_adapters_of_their_rows() -> None:
    model = ShiftedModel()
    model.adapters.table[:2] = torch.randn(2, 32)
    attention = AttentionFunctions(lambda layer, q, k, v: q)
    ids, positions = torch.arange(5), torch.arange(5)
    slots = torch.tensor([1, -1, 0, 0, 1], dtype=torch.int32)
    # Of as many rows as are captured: some processors' products of five rows have other bits than those of eight.
    padded = [torch.cat([each, each.new_full((3,), fill)]) for each, fill in ((ids, 0), (positions, 0), (slots, -1))]
    with rows_with(model.adapters, padded[2]):
        expected = model(padded[0], padded[1], attention)[:5]
    pieces = PiecewiseGraphs(model, Passing(), torch.device("cpu"), adapters=model.adapters)  # type: ignore[arg-type]
    pieces.capture([8], Tape())
    for turn in (slots, slots.flip(0), slots):
        found = pieces.run(ids, positions, turn)
    assert found is not None
    assert torch.equal(found, expected)
    assert model.adapters.slots is None


class Passing:
    """Attention that returns its queries."""

    value_head_dims = (8, 8)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        out.copy_(q)
