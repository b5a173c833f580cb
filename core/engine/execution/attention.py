"""The function `attention(layer, q, k, v) -> out` that models call, as a torch.library op, which compilers do not trace into."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Backends, Plan
from headway.core.contract.kernel import upload
from headway.core.contract.layout import CacheWriter, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import LatentLayer
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.groups import CacheGroup
from headway.core.engine.data.step import PageCopy, StepInput
from headway.core.engine.execution import latent
from headway.core.engine.execution.states import LayersWithState, Watch
from headway.core.select.request import LayerSpecs
from headway.core.system.logs import blame


class HostBlockTables:
    """Block tables of all rows in host memory, updated before each step."""

    def __init__(self, max_num_seqs: int, max_blocks: int, groups: Sequence[CacheGroup]) -> None:
        """max_blocks: number of blocks of the longest sequence."""
        shape = max_num_seqs + 1, max_blocks
        self.tables: list[NDArray[numpy.int32]] = [numpy.zeros(shape, dtype=numpy.int32) for _ in groups]
        """int32 [rows, blocks] per cache group, with stale entries beyond a row's blocks. The last row is padding and contains
        zeros."""
        self.num_updates = self.last_change = 0
        """Number of updates so far, and index of the last update that changed a table."""
        self.updated: NDArray[numpy.int64] = numpy.zeros(max_num_seqs + 1, dtype=numpy.int64)
        """int64 [rows]: index of the update that last changed each table."""
        self._groups = tuple(groups)

    def update(self, step: StepInput) -> None:
        """Add the pages that a step assigns to rows."""
        self.num_updates += 1
        if step.new_pages:
            self.last_change = self.num_updates
        for row, start, pages, number in step.new_pages:
            self.updated[row] = self.num_updates
            group, table = self._groups[number], self.tables[number]
            if group.page_stride == 1:  # a page is a block
                table[row, start : start + len(pages)] = pages
            else:
                first, blocks = start * group.blocks_per_page, group.blocks_of(pages)
                table[row, first : first + len(blocks)] = blocks[: table.shape[1] - first]

    def of_step(self, rows: NDArray[numpy.int32], seq_lens: NDArray[numpy.int32], block_size: int) -> list[NDArray[numpy.int32]]:
        """Return some rows' block tables per group: [num_seqs, blocks of the longest sequence], 0 beyond a sequence's blocks."""
        counts = -(-seq_lens // block_size)
        longest = int(counts.max())
        beyond = numpy.arange(longest) >= counts[:, None]
        found = []
        for tables in self.tables:
            table = numpy.take(tables, rows, axis=0)[:, :longest]
            table[beyond] = 0
            found.append(table)
        return found

    def slots(
        self, rows: NDArray[numpy.int32], positions: NDArray[numpy.int32], block_size: int, group: int
    ) -> NDArray[numpy.int64]:
        """Return the slot of one position per row in a group's caches, to which its key and value are written."""
        blocks = self.tables[group][rows, positions // block_size].astype(numpy.int64)
        slots: NDArray[numpy.int64] = blocks * block_size + positions % block_size
        return slots


class MirroredTables:
    """Block tables in a host buffer. Only tables that changed since the last step are written again."""

    def __init__(self, mirror: NDArray[numpy.int32]) -> None:
        """mirror: int32 [groups, batch, blocks] view of the buffer; its content is discarded."""
        mirror.fill(0)
        self._mirror = mirror
        self._rows: NDArray[numpy.int64] = numpy.full(mirror.shape[1], -1, dtype=numpy.int64)
        """int64 [batch]: row whose block table is in each entry of the mirror. -1 means none yet."""
        self._num_updates = 0  # `HostBlockTables.num_updates` at the last fill of the mirror

    def fill(self, rows: NDArray[numpy.int64], tables: HostBlockTables) -> int:
        """Write the block table of `rows[i]` to entry i of each group. Returns the number of tables written. tables: the same
        object in every call."""
        if tables.last_change <= self._num_updates and (self._rows == rows).all():
            return 0
        stale = numpy.flatnonzero((self._rows != rows) | (tables.updated[rows] > self._num_updates))
        if len(stale):
            for mirror, known in zip(self._mirror, tables.tables, strict=True):
                blocks = min(mirror.shape[1], known.shape[1])
                mirror[stale, :blocks] = known[rows[stale], :blocks]
        self._rows[:] = rows
        self._num_updates = tables.num_updates
        return len(stale)


def copy_slots(caches: Sequence[LayerCache], groups: Sequence[CacheGroup], copies: Sequence[PageCopy]) -> None:
    """Copy the first slots of pages in all layers of the groups, in a few launches. No page may be both source and target."""
    for number, group in enumerate(groups):
        own = [copy[1:] for copy in copies if copy.group == number]
        if not own or not group.layers:
            continue
        cache = caches[group.layers[0]]
        sources, targets, counts = numpy.array(own, dtype=numpy.int64).T
        tokens = numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        blocks, slots = numpy.divmod(tokens, cache.block_size)
        within = blocks * group.block_stride
        source_blocks, target_blocks = (numpy.repeat(each, counts) * group.page_stride + within for each in (sources, targets))
        indices = numpy.stack([source_blocks, target_blocks, slots])
        source, target, slot = upload(torch.from_numpy(indices), cache.key.device)
        for layer in group.layers:
            cache = caches[layer]
            for name in cache.tensors:
                rows = cache.by_slot(name)
                rows = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows  # torch cannot index FP8
                rows[target, slot] = rows[source, slot]


Plans = dict[AttentionSpec, Plan]
GroupMetadata = AttentionMetadata | Sequence[AttentionMetadata]
"""Metadata of a step: one for all layers, or one per cache group, in the order of the groups."""


class _Part(NamedTuple):
    """A part of a step: the tokens that one backend computes in one phase. Backends and plans have one entry per distinct layer
    spec."""

    phase: Phase
    tokens: slice
    backends: list[AttentionBackend]
    plans: list[Plan]


class PagedAttention:
    """Caches and backends of all layers in one model. `begin` sets a step up, then the model calls each layer, once or more.

    Layers with equal specs share one plan. If the backend sets `Capabilities.shares_plans`, all layers of a kind share one plan.
    Planning thus runs once per step, not once per layer.
    """

    def __init__(
        self,
        layers: LayerSpecs,
        caches: Sequence[LayerCache],
        writer: CacheWriter | Sequence[CacheWriter],
        groups: Sequence[CacheGroup] = (),
        latents: Mapping[int, LatentLayer] | None = None,
        gathering: Backends | None = None,
        states: LayersWithState | None = None,
    ) -> None:
        """writer: writer of every layer's cache, or one per layer if their layouts differ.
        groups: cache groups of the layers, in the order of a step's metadata; empty means one group. latents: latent layers by
            index. gathering: see `Selector.gathering`. states: layers with a state, whose steps are set up separately; None if
            the model has none."""
        self.states = states
        specs = layers.cached
        assert len(specs) == len(caches)
        self.layers = layers
        self.specs = specs
        self.value_head_dims = layers.value_head_dims
        self._latents = [(latents or {}).get(layer) for layer in range(len(specs))]
        self._gathering = gathering or {}
        self._kinds = layers.distinct
        alike = [spec.kind for spec in self._kinds]
        self._alike = [alike.index(each) for each in alike]
        """For each distinct spec, index of the first spec of its kind. Specs of one kind differ only in sinks and scales."""
        self._kind_of = [self._kinds.index(spec) for spec in specs]  # Index in `_kinds` per layer: hashing a spec takes longer
        self.caches = list(caches)
        self.writers = list(writer) if isinstance(writer, Sequence) else [writer] * len(specs)
        """Writer of each layer's cache."""
        group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self.groups = [group_of.get(self.specs.index(spec), 0) for spec in self._kinds]
        """Cache group of each distinct spec. Layers of different groups have different specs."""
        self._slots: list[Tensor] = []  # Slots to which the current step's k and v are written, per kind
        self._parts: list[_Part] = []
        self._decode_writes: list[bool] = []  # True, per kind, if the backend writes k and v itself in the current step
        self.debug = os.environ.get("HEADWAY_DEBUG") == "1"
        self.watch: Watch | None = None
        """Function called after each layer has run, with its index, q and output. None calls nothing."""
        self.first_nan: str | None = None
        """Source of the last step's first NaN, if HEADWAY_DEBUG=1 and there was one."""
        self._handle = next(_HANDLES)
        _LIVE[self._handle] = self

    def begin(self, metadata: GroupMetadata, prefill: Backends, decode: Backends) -> None:
        """Plan one step: `prefill` runs the sequences in prefill or extend, `decode` the rest."""
        step = self._set_up(metadata, decode)
        self.first_nan = None
        self._parts = []
        if not step:
            return
        start = 0
        for views, backends in (([each.prefill for each in step], prefill), ([each.decode for each in step], decode)):
            view = views[0]
            if view is None:
                continue
            try:
                plans = self._plan_all([each for each in views if each is not None], backends, self._plan)
            except (Exception, SystemExit) as error:
                name = next(iter(backends.values())).name
                raise blame(
                    error, f"backend {name}", view.phase, f"plan of {view.num_seqs} sequences, {view.num_tokens} tokens"
                ) from error
            self._parts.append(self._part(view.phase, slice(start, start + view.num_tokens), backends, plans))
            start += view.num_tokens

    def _plan_all(
        self,
        views: Sequence[AttentionMetadata],
        backends: Backends,
        plan: Callable[[AttentionSpec, AttentionMetadata, Backends], Plan],
    ) -> Plans:
        """Return the plans of all layers. views: metadata for each distinct spec. plan: function that makes one plan."""
        plans: Plans = {}
        for number, (spec, first, view) in enumerate(zip(self._kinds, self._alike, views, strict=True)):
            if first < number and backends[self.layers.in_phase(spec, view.phase)].capabilities.shares_plans:
                plans[spec] = plans[self._kinds[first]]
            else:
                plans[spec] = plan(spec, view, backends)
        return plans

    def _plan(self, spec: AttentionSpec, view: AttentionMetadata, backends: Backends) -> Plan:
        gathering = self._gathering.get(spec) if view.phase is Phase.EXTEND else None
        if gathering is not None and latent.gathers(view, spec, self.layers.expanded[spec]):
            return latent.plan_gathered(view, gathering)
        return backends[self.layers.in_phase(spec, view.phase)].plan(view)

    def begin_graph(self, metadata: GroupMetadata, decode: Backends) -> Plans:
        """Plan a decode step for capture. Its replays reuse the plans. See `AttentionBackend.plan_for_capture`."""
        views = self._views(metadata)
        plans = self._plan_all(views, decode, lambda spec, view, backends: backends[spec].plan_for_capture(view))
        self.resume_graph(metadata, decode, plans)
        return plans

    def begin_prefill_graph(self, metadata: GroupMetadata, prefill: Backends) -> Plans:
        """Plan a prompt step for capture. It is replayed at the same lengths; see `GraphLevel.UNIFORM`."""
        plans = self._plan_all(self._views(metadata), prefill, self._plan)
        self.resume_graph(metadata, prefill, plans)
        return plans

    def resume_graph(self, metadata: GroupMetadata, backends: Backends, plans: Plans) -> None:
        """Set up the step of `begin_graph` or `begin_prefill_graph` again, after other steps."""
        step = self._set_up(metadata, backends)
        self._parts = [self._part(first.phase, slice(0, first.num_tokens), backends, plans) for first in step[:1]]

    def num_blocks(self, group: CacheGroup) -> int:
        """Return the number of blocks in each cache of a group, or 0 if no layer has a cache."""
        return self.caches[group.layers[0]].geometry.num_blocks if group.layers else 0

    def _views(self, metadata: GroupMetadata) -> list[AttentionMetadata]:
        if isinstance(metadata, AttentionMetadata):
            return [metadata] * len(self._kinds)
        return [metadata[group] for group in self.groups]

    def _set_up(self, metadata: GroupMetadata, decode: Backends) -> list[AttentionMetadata]:
        """Set the slots and the writers of a step's k and v. Returns the metadata for each distinct spec."""
        step = self._views(metadata)
        self._slots = [each.slot_mapping for each in step]
        plain = bool(step) and not step[0].num_prefills and step[0].max_query_len == 1  # a decode of one token per sequence
        self._decode_writes = [plain and decode[spec].decode_writes for spec in self._kinds]
        return step

    def _part(self, phase: Phase, tokens: slice, backends: Backends, plans: Plans) -> _Part:
        serving = [backends[self.layers.in_phase(spec, phase)] for spec in self._kinds]
        return _Part(phase, tokens, serving, [plans[spec] for spec in self._kinds])

    @property
    def serving(self) -> tuple[str, ...]:
        """Names of the backends that run the current step, one for each phase; joined if kinds of layers differ."""

        def names_of(part: _Part) -> str:
            pairs = zip(part.backends, part.plans, strict=True)
            found = ((plan.backend if isinstance(plan, latent.Gathered) else backend).name for backend, plan in pairs)
            return "+".join(dict.fromkeys(found))

        return tuple(dict.fromkeys(map(names_of, self._parts)))

    @property
    def watched(self) -> bool:
        """True if each layer's results are read on the host after it has run, so that steps run kernel by kernel."""
        return self.debug or self.watch is not None

    def slots(self, layer: int) -> Tensor:
        """Return int64 [num_tokens]: slots of a layer's cache to which the current step writes."""
        return self._slots[self._kind_of[layer]]

    @property
    def step_kind(self) -> Hashable | None:
        """Key of the current step's backends if the step is a decode of one token per sequence and its backends write k and v,
        else None. Steps with equal keys differ only in their plans. See `core.contract.model.WatchedAttention`."""
        if len(self._parts) != 1 or self._parts[0].phase is not Phase.DECODE or not all(self._decode_writes) or self.watched:
            return None
        return self._handle, *map(id, self._parts[0].backends)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, writes: bool = True) -> Tensor:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to the layer's cache, and return the attention output of q."""
        out = q.new_empty((*q.shape[:2], self.value_head_dims[layer]))
        torch.ops.headway.attention(q, k, v, out, self._handle, layer, writes)
        return out

    def again(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output of another q, after a call has written k and v in this step."""
        return self(layer, q, k, v, writes=False)

    def compute(self, layer: int, q: Tensor, k: Tensor, v: Tensor, writes: bool = True) -> Tensor:
        """Return the attention output like `__call__`, but without the op, so that torch can trace the backend's operations."""
        out = q.new_empty((*q.shape[:2], self.value_head_dims[layer]))
        self.run(layer, q, k, v, out, writes)
        return out

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """Run a layer with a state; see `Attention.state`."""
        assert self.states is not None, "the model has no layers with a state"
        return self.states(layer, x, gates)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, writes: bool = True) -> None:
        """Run one layer. This is the body of the op `headway::attention`. writes: False if the cache already has k and v."""
        assert self._slots, "begin() a step first"
        cache, kind = self.caches[layer], self._kind_of[layer]
        if self.debug:
            self._look_for_nan(layer, "the model's operations before", q, k, v)
        decode_writes = writes and self._decode_writes[kind]
        if writes and not decode_writes:
            self.writers[layer](k, v, cache, self._slots[kind])
        mixed = len(self._parts) > 1
        for phase, tokens, backends, plans in self._parts:
            backend, plan = backends[kind], plans[kind]
            queries, result = (q[tokens], out[tokens]) if mixed else (q, out)
            heads = self._latents[layer]
            try:
                if heads is not None:
                    slots = self._slots[kind][tokens]
                    latent.attend(heads, phase, backend, plan, (queries, k[tokens], result), cache, slots, decode_writes)
                elif decode_writes:
                    backend.write_and_decode(queries, k, v, cache, plan, result)
                elif phase is Phase.DECODE:
                    backend.decode(queries, cache, plan, result)
                elif mixed:
                    backend.prefill(queries, k[tokens], v[tokens], cache, plan, result)
                else:
                    backend.prefill(queries, k, v, cache, plan, result)
            except (Exception, SystemExit) as error:
                shapes = f"layer {layer}, q {list(queries.shape)}, cache {list(cache.key.shape)} in {cache.layout.name}"
                raise blame(error, f"backend {backend.name}", phase, shapes) from error
        if self.debug:
            rule = self.specs[layer].rule
            sources = self.serving if rule is None else (*self.serving, f"attention rule {rule.name}")
            self._look_for_nan(layer, f"{' or '.join(sources)}, in", out)
        if self.watch is not None:
            self.watch("attention", layer, [q], out)

    def _look_for_nan(self, layer: int, where: str, *tensors: Tensor) -> None:
        """Record these tensors as the source of the step's first NaN if they contain one. The check waits for the device."""
        if self.first_nan is None and any(bool(tensor.isnan().any()) for tensor in tensors):
            self.first_nan = f"the first came from {where} attention layer {layer}"


# torch's op registry is global, and an op takes only tensors and numbers: the handle finds the live object.
_HANDLES = count()
_LIVE: WeakValueDictionary[int, PagedAttention] = WeakValueDictionary()

_library = torch.library.Library("headway", "FRAGMENT")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int handle, int layer, bool writes) -> ()")


def _attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, handle: int, layer: int, writes: bool) -> None:
    _LIVE[handle].run(layer, q, k, v, out, writes)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention", lambda *given: None, "Meta")
