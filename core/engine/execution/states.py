"""Layers with a state in a step: their caches, their backends, and the op through which the model calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.backend import Plan
from headway.core.contract.kernel import GraphLevel, Packed, upload
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import StateLayer
from headway.core.contract.state import StateBackend, StateBackends, StateMetadata, StateSpec
from headway.core.engine.data.state_slots import StateMemory
from headway.core.engine.data.step import StepInput
from headway.core.system.logs import blame

Watch = Callable[[str, int, Sequence[Tensor], Tensor], None]
"""Function (kind of layer, index among the layers of the kind, inputs, output) that reads the results of a layer."""


class StateStepPart(NamedTuple):
    """A part of a step: the tokens that one backend computes in one phase. Backend instances and plans are keyed by kind of state
    layer."""

    phase: Phase
    tokens: slice
    backends: list[StateBackend]
    plans: list[Plan]


class LayersWithState:
    """Memory and backends of all layers with a state in one model. `begin` sets a step up, then each layer is called once."""

    def __init__(self, layers: Sequence[StateLayer], memory: StateMemory, scan: StateBackends, step: StateBackends) -> None:
        """scan: backends for prefill and extend. step: backends for decode."""
        self._layers = layers
        self.memory = memory
        self.slots = memory.slots
        self._scan = scan
        self._step = step
        self.kinds: list[StateSpec] = list(dict.fromkeys(layer.spec for layer in layers))
        """The distinct specs, in the order of the layers."""
        self._kind_of = [self.kinds.index(layer.spec) for layer in layers]
        self._parts: list[StateStepPart] = []
        self.watch: Watch | None = None
        """Function called after each layer has run, with its index, x and gates, and output. None calls nothing."""
        self._handle = next(_HANDLES)
        _LIVE[self._handle] = self

    def not_captured(self, level: GraphLevel) -> str:
        """Return the name of a backend whose `step` method cannot run in a CUDA graph of this level. Empty if every backend's
        method can."""
        return next((each.name for each in self._step.values() if each.graph_level < level), "")

    def begin(self, metadata: StateMetadata) -> None:
        """Plan one step."""
        self._parts = []
        start = 0
        for view, backends in ((metadata.prefill, self._scan), (metadata.decode, self._step)):
            if view is None:
                continue
            tokens = slice(start, start + view.step.num_tokens)
            serving = [backends[kind] for kind in self.kinds]
            try:
                plans = [backend.plan(view) for backend in serving]
            except (Exception, SystemExit) as error:
                work = f"plan of {view.step.num_seqs} sequences, {view.step.num_tokens} tokens"
                raise blame(error, f"state backend {serving[0].name}", view.step.phase, work) from error
            self._parts.append(StateStepPart(view.step.phase, tokens, serving, plans))
            start = tokens.stop

    def begin_graph(self, metadata: StateMetadata) -> list[StateStepPart]:
        """Plan a decode or verification for capture. Returns the parts to pass to `resume` before a replay."""
        serving = [self._step[kind] for kind in self.kinds]
        plans = [backend.plan_for_capture(metadata) for backend in serving]
        self._parts = [StateStepPart(Phase.DECODE, slice(0, metadata.step.num_tokens), serving, plans)]
        return self._parts

    def resume(self, parts: list[StateStepPart]) -> None:
        """Set up the step that `begin_graph` planned again, after other steps have run."""
        self._parts = parts

    def out_channels(self, layer: int) -> int:
        """Return the number of elements in a layer's output per token."""
        return self._layers[layer].spec.out_channels

    def __call__(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        out = x.new_empty(x.shape[0], self.out_channels(layer))
        torch.ops.headway.state(x, list(gates), out, self._handle, layer)
        return out

    def run(self, layer: int, x: Tensor, gates: Sequence[Tensor], out: Tensor) -> None:
        """Run one layer. This is the body of the op `headway::state`."""
        assert self._parts, "begin() a step first"
        kind, parameters, cache = self._kind_of[layer], self._layers[layer].parameters, self.memory.caches[layer]
        mixed = len(self._parts) > 1
        for phase, tokens, backends, plans in self._parts:
            backend = backends[kind]
            rows, own, result = (x[tokens], [gate[tokens] for gate in gates], out[tokens]) if mixed else (x, gates, out)
            try:
                serve = backend.step if phase is Phase.DECODE else backend.scan
                serve(rows, own, parameters, cache, plans[kind], result)
            except (Exception, SystemExit) as error:
                raise blame(
                    error, f"state backend {backend.name}", phase, f"layer {layer} with a state, x {list(rows.shape)}"
                ) from error
        if self.watch is not None:
            self.watch("state", layer, [x, *gates], out)

    def first_of(self, kind: StateSpec) -> int:
        """Return the index of the first layer of a kind of state layer."""
        return self._kind_of.index(self.kinds.index(kind))

    def serving_in(self, kind: StateSpec, phase: Phase) -> StateBackend:
        """Return the backend for layers of a kind of state layer in a phase."""
        return (self._step if phase is Phase.DECODE else self._scan)[kind]

    def metadata_of_rows(self, lengths: AttentionMetadata, num_drafts: int) -> StateMetadata:
        """Return the state metadata of a warm-up step whose sequences use the first rows. num_drafts: maximum number of drafts
        per sequence."""
        first = torch.arange(lengths.num_seqs, dtype=torch.int32) * self.slots.per_row
        width = min(num_drafts, self.slots.per_row - 1) + 1
        out_slots = first[:, None] + torch.arange(width, dtype=torch.int32)
        device = lengths.query_start_loc.device
        return StateMetadata(
            step=lengths, slots=first.to(device), out_slots=out_slots.to(device), slots_cpu=first, out_slots_cpu=out_slots
        )

    def restore(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy checkpoints to rows, given as pairs (checkpoint slot, row)."""
        sources = torch.tensor([slot for slot, _ in copies])
        targets = torch.tensor([row * self.slots.per_row for _, row in copies])
        device = self.memory.stacks[0].device
        self.memory.copy(upload(sources, device), upload(targets, device))

    def slots_of(self, rows: NDArray[numpy.int32], indices: NDArray[numpy.int32] | numpy.int32) -> NDArray[numpy.int32]:
        """Return the int32 slots of the sequences' states. indices: for each row, the index of the slot in which the last step
        left the state."""
        slots: NDArray[numpy.int32] = rows * numpy.int32(self.slots.per_row) + indices
        return slots

    def slots_of_step(self, step: StepInput, width: int) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
        """Return `StateMetadata.slots` [num_seqs] and `out_slots` [num_seqs, width] of a step. width: must exceed the number of
        drafts of every sequence."""
        assert step.state_indices is not None
        slots, first = self.slots_of(step.rows, step.state_indices), self.slots_of(step.rows, numpy.int32(0))
        verifies = (step.num_draft_tokens > 0)[:, None]
        columns = numpy.arange(width, dtype=numpy.int32)
        out_slots = numpy.where(columns <= step.num_draft_tokens[:, None], first[:, None] + columns, -1)
        in_place = numpy.where(columns == 0, slots[:, None], -1)
        return slots, numpy.where(verifies, out_slots, in_place)

    def metadata(self, step: StepInput, lengths: AttentionMetadata) -> StateMetadata:
        """Return the state metadata of a step. lengths: attention metadata of the step, from any cache group."""
        width = int(step.num_draft_tokens.max(initial=0)) + 1
        slots, out_slots = self.slots_of_step(step, width)
        num_checkpoints = len(step.checkpoints)
        packed = Packed(slots=slots.size, out_slots=out_slots.size, checkpoints=3 * num_checkpoints)
        packed.host("slots")[:] = slots
        packed.host("out_slots")[:] = out_slots.ravel()
        packed.host("checkpoints").reshape(-1, 3)[:] = step.checkpoints
        packed.upload(lengths.query_start_loc.device)
        host = {name: torch.from_numpy(packed.host(name)) for name in ("slots", "out_slots", "checkpoints")}
        return StateMetadata(
            step=lengths,
            slots=packed.device("slots"),
            out_slots=packed.device("out_slots").view(-1, width),
            slots_cpu=host["slots"],
            out_slots_cpu=host["out_slots"].view(-1, width),
            checkpoints=packed.device("checkpoints").view(-1, 3) if num_checkpoints else None,
            checkpoints_cpu=host["checkpoints"].view(-1, 3) if num_checkpoints else None,
        )


# torch's op registry is global, and an op takes only tensors and numbers: the handle finds the live object.
_HANDLES = count()
_LIVE: WeakValueDictionary[int, LayersWithState] = WeakValueDictionary()

_library = torch.library.Library("headway", "FRAGMENT")
_library.define("state(Tensor x, Tensor[] gates, Tensor(a!) out, int handle, int layer) -> ()")


def _state(x: Tensor, gates: Sequence[Tensor], out: Tensor, handle: int, layer: int) -> None:
    _LIVE[handle].run(layer, x, gates, out)


_library.impl("state", _state, "CompositeExplicitAutograd")
_library.impl("state", lambda *given: None, "Meta")
