"""The one function a model calls: `attention(layer, q, k, v) -> out`, a torch.library op so that compilers leave it alone."""

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
from headway.core.engine.execution.states import LayersWithState
from headway.core.select.request import LayerSpecs
from headway.core.system.logs import blame


class HostBlockTables:
    """The block tables of all rows, in host memory; each step brings them up to date."""

    def __init__(self, max_num_seqs: int, max_blocks: int, groups: Sequence[CacheGroup]) -> None:
        """max_blocks: of the longest sequence."""
        shape = max_num_seqs + 1, max_blocks
        self.tables: list[NDArray[numpy.int32]] = [numpy.zeros(shape, dtype=numpy.int32) for _ in groups]
        """The block table of each row, per cache group, with old entries beyond its blocks; the last row is padding and zero."""
        self.num_updates = self.last_change = 0
        """How many updates there have been, and the number of the last one that has changed a table."""
        self.updated: NDArray[numpy.int64] = numpy.zeros(max_num_seqs + 1, dtype=numpy.int64)
        """[rows]: the number of the update that has changed each table last."""
        self._groups = tuple(groups)

    def update(self, step: StepInput) -> None:
        """Take in the pages that a step gives to rows."""
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
        """The block tables of some rows, by group: [num_seqs, blocks of the longest], 0 past a sequence's own blocks."""
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
        """Slots of one position of each row in the caches of a group: where its key and value are written."""
        blocks = self.tables[group][rows, positions // block_size].astype(numpy.int64)
        slots: NDArray[numpy.int64] = blocks * block_size + positions % block_size
        return slots


class MirroredTables:
    """Block tables in a host buffer; only those that have changed since the last step are written again."""

    def __init__(self, mirror: NDArray[numpy.int32]) -> None:
        """mirror: [groups, batch, blocks], of the buffer; whatever it holds is void."""
        mirror.fill(0)
        self._mirror = mirror
        self._rows: NDArray[numpy.int64] = numpy.full(mirror.shape[1], -1, dtype=numpy.int64)
        """[batch]: the row whose block table each entry of the mirror holds; -1: none yet."""
        self._num_updates = 0  # `HostBlockTables.num_updates` when the mirror was filled last

    def fill(self, rows: NDArray[numpy.int64], tables: HostBlockTables) -> int:
        """Write the block table of `rows[i]` to entry i of each group; return how many. tables: always the same object."""
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
    """Copy the first slots of pages in the groups' layers, in a few launches. No page is both source and target."""
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
                rows = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows  # torch cannot index fp8
                rows[target, slot] = rows[source, slot]


Plans = dict[AttentionSpec, Plan]
GroupMetadata = AttentionMetadata | Sequence[AttentionMetadata]
"""A step, as all layers see it or, in the order of the cache groups, as the layers of each do."""


class _Part(NamedTuple):
    """A part of a step: the tokens that one backend serves in one phase. Its instances and plans are by kind of layer."""

    phase: Phase
    tokens: slice
    backends: list[AttentionBackend]
    plans: list[Plan]


class PagedAttention:
    """Cache and backends of all layers of one model. `begin` sets a step up, then each layer calls it once.

    Layers with equal specs share one plan, and where the backend says so all layers of a kind (`Capabilities.shares_plans`):
    planning is paid once a step, not per layer.
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
        """writer: of every layer's cache, or one for each, where their layouts differ.

        groups: the cache groups of the layers, in the order in which a step's metadata come; none: one of all.
        latents: the latent layers by their numbers; gathering: see `Selector.gathering`. states: the layers that keep a state,
        whose step is set up apart; None: the model has none.
        """
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
        """For each distinct spec, which is the first of its kind: they differ in sinks and scales."""
        self._kind_of = [self._kinds.index(spec) for spec in specs]  # Each layer's index in `_kinds`: a spec's hash takes longer
        self.caches = list(caches)
        self._writers = list(writer) if isinstance(writer, Sequence) else [writer] * len(specs)
        group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        self.groups = [group_of.get(self.specs.index(spec), 0) for spec in self._kinds]
        """Cache group of each distinct spec: what groups differ in, specs differ in."""
        self._slots: list[Tensor] = []  # For each kind, where k and v of the step set up last go
        self._parts: list[_Part] = []
        self._decode_writes: list[bool] = []  # For each kind, whether its backend writes k and v itself in the step set up last
        self.debug = os.environ.get("HEADWAY_DEBUG") == "1"
        self.first_nan: str | None = None
        """With HEADWAY_DEBUG=1: what made the first NaN of the last step."""
        self._handle = next(_HANDLES)
        _LIVE[self._handle] = self

    def begin(self, metadata: GroupMetadata, prefill: Backends, decode: Backends) -> None:
        """Plan one step: `prefill` serves its first part (prefill and extend), `decode` the rest."""
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
        """The plans of all layers; views: for each distinct spec. plan: makes one."""
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
        """Plan a decode step that is captured; the plans are kept for its replays. See AttentionBackend.plan_for_capture."""
        views = self._views(metadata)
        plans = self._plan_all(views, decode, lambda spec, view, backends: backends[spec].plan_for_capture(view))
        self.resume_graph(metadata, decode, plans)
        return plans

    def begin_prefill_graph(self, metadata: GroupMetadata, prefill: Backends) -> Plans:
        """Plan a step of prompts that is captured and replayed at the same lengths; see GraphLevel.UNIFORM."""
        plans = self._plan_all(self._views(metadata), prefill, self._plan)
        self.resume_graph(metadata, prefill, plans)
        return plans

    def resume_graph(self, metadata: GroupMetadata, backends: Backends, plans: Plans) -> None:
        """Set up the step of `begin_graph` or `begin_prefill_graph` once more, after others."""
        step = self._set_up(metadata, backends)
        self._parts = [self._part(first.phase, slice(0, first.num_tokens), backends, plans) for first in step[:1]]

    def num_blocks(self, group: CacheGroup) -> int:
        """Number of blocks of a group's caches; 0 if no layer has a cache."""
        return self.caches[group.layers[0]].geometry.num_blocks if group.layers else 0

    def _views(self, metadata: GroupMetadata) -> list[AttentionMetadata]:
        if isinstance(metadata, AttentionMetadata):
            return [metadata] * len(self._kinds)
        return [metadata[group] for group in self.groups]

    def _set_up(self, metadata: GroupMetadata, decode: Backends) -> list[AttentionMetadata]:
        """Note where a step's k and v go, and who writes them. Returns the metadata of each kind; none if no layer attends."""
        step = self._views(metadata)
        self._slots = [each.slot_mapping for each in step]
        self._decode_writes = self._writing(step[0], decode) if step else []
        return step

    def _part(self, phase: Phase, tokens: slice, backends: Backends, plans: Plans) -> _Part:
        serving = [backends[self.layers.in_phase(spec, phase)] for spec in self._kinds]
        return _Part(phase, tokens, serving, [plans[spec] for spec in self._kinds])

    def _writing(self, metadata: AttentionMetadata, decode: Backends) -> list[bool]:
        """For each kind, whether its backend writes k and v itself: none in a step that is more than decode of one token each."""
        plain = not metadata.num_prefills and metadata.max_query_len == 1
        return [plain and decode[spec].decode_writes for spec in self._kinds]

    @property
    def serving(self) -> tuple[str, ...]:
        """Names of the backends that serve the step set up last."""
        firsts = [(part.backends[0], part.plans[0]) for part in self._parts]
        names = [(plan.backend if isinstance(plan, latent.Gathered) else backend).name for backend, plan in firsts]
        return tuple(dict.fromkeys(names))

    @property
    def step_kind(self) -> Hashable | None:
        """The backends of the step set up last, where it is a decode of one token each: what else differs between two such steps
        is in their plans. See `core.contract.model.WatchedAttention`."""
        if len(self._parts) != 1 or self._parts[0].phase is not Phase.DECODE or not all(self._decode_writes) or self.debug:
            return None
        return self._handle, *map(id, self._parts[0].backends)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k, v [num_tokens, num_kv_heads, head_dim] to the layer's cache; attend with q of num_heads."""
        out = q.new_empty((*q.shape[:2], self.value_head_dims[layer]))
        torch.ops.headway.attention(q, k, v, out, self._handle, layer)
        return out

    def compute(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same without the op, so that who watches torch's operations sees those of the backend."""
        out = q.new_empty((*q.shape[:2], self.value_head_dims[layer]))
        self.run(layer, q, k, v, out)
        return out

    def state(self, layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """See `Attention.state`."""
        assert self.states is not None, "the model has no layers with a state"
        return self.states(layer, x, gates)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Body of the op `headway::attention`."""
        assert self._slots, "begin() a step first"
        cache, kind = self.caches[layer], self._kind_of[layer]
        if self.debug:
            self._look_for_nan(layer, "the model's operations before", q, k, v)
        decode_writes = self._decode_writes[kind]
        if not decode_writes:
            self._writers[layer](k, v, cache, self._slots[kind])
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
            self._look_for_nan(layer, f"{' or '.join(self.serving)}, in", out)

    def _look_for_nan(self, layer: int, where: str, *tensors: Tensor) -> None:
        """Remember where a step's first NaN came from; waits for the device."""
        if self.first_nan is None and any(bool(tensor.isnan().any()) for tensor in tensors):
            self.first_nan = f"the first came from {where} attention layer {layer}"


# torch's op registry is global, and an op takes tensors and numbers only: a number finds the live object again.
_HANDLES = count()
_LIVE: WeakValueDictionary[int, PagedAttention] = WeakValueDictionary()

_library = torch.library.Library("headway", "FRAGMENT")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int handle, int layer) -> ()")


def _attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, handle: int, layer: int) -> None:
    _LIVE[handle].run(layer, q, k, v, out)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention", lambda *given: None, "Meta")
