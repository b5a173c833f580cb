"""Flight recorder: the last steps of an engine in a ring of host data, from which it writes records for `headway replay`.

A step adds a few references to the ring. Queries, outputs and cached rows are read when a record is written: the steps of
sequences whose blocks are intact run again, kernel by kernel, and each sequence is computed from its tokens in float64.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase
from headway.core.contract.model import AttentionFunctions, latent_layers, state_layers
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.groups import NULL_PAGE
from headway.core.engine.data.sequence import Sequence as EngineSequence
from headway.core.engine.data.step import NEWEST, StepInput
from headway.core.engine.execution.host_rows import Launched
from headway.core.engine.execution.local_executor import LocalExecutor
from headway.core.engine.record import (
    FACTOR,
    STATE_PARTS,
    WEIGHTS,
    HeldRows,
    Record,
    RecordedCall,
    RecordedLayer,
    RecordedSequence,
    RecordedStep,
    RecordMeta,
    plain_spec,
    row_digest,
)
from headway.core.oracle.oracle import attend
from headway.core.oracle.state_reference import SequenceState, advance
from headway.core.system.files import cache_folder, make_private, write_whole
from headway.core.system.provenance import Origin

log = logging.getLogger("headway")

_MOST_BYTES = 2**30  # Maximum host memory for each of these: tensors in the ring, calls, cached rows
_MOST_CALLS = 4096  # Number of calls of a sequence in a layer after which no further step runs again: seconds
_MOST_WORK = {"cpu": 2**36, "cuda": 2**42}  # Maximum multiply-adds to compute a sequence again: seconds
_MOST_FILES = 32  # Maximum number of records in a folder; the oldest are removed


@dataclass(eq=False)
class _Owner:
    """The sequence in a row of the executor, and the pages that the scheduler has assigned to it, by cache group."""

    seq: EngineSequence
    pages: list[list[int]]


class _Call(NamedTuple):
    """One call of a layer: its kind and index, q or x and the gates, and out."""

    layer: tuple[str, int]
    given: Sequence[Tensor]
    out: Tensor

    @property
    def num_bytes(self) -> int:
        return self.out.nbytes + sum(each.nbytes for each in self.given)


class _Entry(NamedTuple):
    """A step in the ring."""

    number: int
    step: StepInput
    owners: Mapping[int, _Owner]
    backends: tuple[str, ...]
    graph: bool
    calls: list[_Call]


@dataclass
class _Taken:
    """A sequence of a record."""

    index: int
    row: int
    owner: _Owner
    num_tokens: int
    state_at: int
    """Number of tokens before the sequence's last step. -1 if the tokens of this step are not known."""
    clean: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Attention layer -> keys and values of all tokens, as the reference computes them."""
    before: dict[int, SequenceState] = field(default_factory=dict)
    """Layer with a state -> the reference's state after `state_at` tokens."""


class Recorder:
    """The last steps of an engine. Only the thread that steps the engine calls it: `add` at each launch."""

    def __init__(self, executor: LocalExecutor, config: EngineConfig, model: Any, name: str) -> None:
        """name: name of the model, for readers of a record."""
        self._runner = executor.runner
        self._attention = executor.attention
        self._states = executor.attention.states
        self._config = config
        self._model = model
        self._name = name
        self._latents = latent_layers(model)
        self._groups = executor.capacity.pool.page_format.groups
        self._block_size = executor.capacity.pool.page_format.block_size
        self._device = executor.attention.layers.device
        self._ring: deque[_Entry] = deque(maxlen=config.record_steps)
        self._owners: dict[int, _Owner] = {}
        self._assigned: dict[int, int] = {}  # Page -> number of the step that last assigned it to a sequence
        self._number = 0
        self._calls: list[_Call] = []
        if config.record_tensors:
            self._watch(self._seen)

    def add(self, step: StepInput, seqs: Sequence[EngineSequence], launched: Launched | None) -> None:
        """Add a step. launched: None if its launch has failed."""
        self._number += 1
        if step.started:
            owners, rows = dict(self._owners), step.rows.tolist()
            for started in step.started:
                owners[started.row] = _Owner(seqs[rows.index(started.row)], [[] for _ in self._groups])
            self._owners = owners
        for row, start, pages, group in step.new_pages:
            if (owner := self._owners.get(row)) is not None:
                owner.pages[group][start : start + len(pages)] = pages
            self._assigned.update(dict.fromkeys(pages, self._number))
        backends, graph = ((), False) if launched is None else (launched.backends, launched.graph)
        self._ring.append(_Entry(self._number, step, self._owners, backends, graph, self._calls))
        if self._config.record_tensors:
            self._calls = []
            left = _MOST_BYTES
            for entry in reversed(self._ring):
                left -= sum(call.num_bytes for call in entry.calls)
                if left < 0:
                    entry.calls.clear()

    def write(self, reason: str) -> Path:
        """Write the ring's steps to a new file, and return its path. :raises ConfigError: if the folder cannot be written to."""
        record = self._record(reason)
        folder = Path(self._config.record_folder or cache_folder() / "records")
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**9:09d}-{os.getpid()}.headway"
        try:
            make_private(folder)
            write_whole(path, record.to_bytes(), private=True)
            for old in sorted(folder.glob("*.headway"))[:-_MOST_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            got = f"{folder} ({error.strerror or error})"
            raise ConfigError("record_folder", "a folder that can be written to", got) from error
        log.warning("recorder: %s: wrote %d steps to %s", reason, len(record.meta.steps), path)
        return path

    @torch.inference_mode()
    def _record(self, reason: str) -> Record:
        ring = list(self._ring)
        taken = self._intact(ring)
        entries = [*(prompt for each in taken if (prompt := self._prompt(each, ring))), *ring]
        index = {id(each.owner): each.index for each in taken}
        dtypes = [*(spec.dtype for spec in self._attention.specs), *(layer.spec.dtype for layer in state_layers(self._model))]
        meta = RecordMeta(
            origin=Origin.here(),
            torch=torch.__version__,
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type,
            model=self._name,
            dtype=str(dtypes[0]).removeprefix("torch."),
            block_size=self._block_size,
            reason=reason,
            time=time.strftime("%Y-%m-%d %H:%M:%S"),
            sequences=[self._sequence(each) for each in taken],
            steps=[self._plain(entry, index) for entry in entries],
        )
        record = Record(meta, device=self._device)
        tables = {
            f"table.{group}.{each.index}": torch.from_numpy(table)
            for each in taken
            for group, table in enumerate(self._tables(each))
        }
        record.tensors = dict(tables)
        try:
            self._fill(record, entries, taken)
        except Exception as error:  # after a fault of the device, only plain data is left
            meta.notes.append(f"no tensors: {type(error).__name__}: {str(error)[:300]}")
            record.tensors = tables
            meta.calls = []
            meta.held = []
        return record

    def _fill(self, record: Record, entries: list[_Entry], taken: list[_Taken]) -> None:
        """Add the layers, calls and cached rows, check them, and keep as many tensors as record_bytes allows."""
        meta = record.meta
        meta.notes += [f"sequence {each.index}: no reference: {why}" for each in taken if (why := self._compute(each))]
        left = _MOST_BYTES
        for number, entry in reversed(list(enumerate(entries))):
            known = self._known(entry, taken)
            if known and left > 0 and len(meta.calls) < _MOST_CALLS:
                try:
                    calls = entry.calls or self._again(entry, known)
                except Exception as error:  # the step may have failed before, too
                    meta.notes.append(f"step {number} does not run again: {type(error).__name__}: {str(error)[:300]}")
                    continue
                left -= sum(call.num_bytes for call in calls)
                meta.layers = meta.layers or [self._layer(*each) for each in dict.fromkeys(call.layer for call in calls)]
                self._add_calls(record, number, entry, calls, known)
        for place, layer in enumerate(meta.layers):
            record.tensors |= self._weights(layer.layer, place) if layer.kind == "state" else {}
            for each in taken if layer.kind == "attention" else ():
                self._hold(record, place, layer, each)
        checked, first = record.judge()
        meta.checked = checked
        record.shorten(first, int(self._config.record_bytes))

    def _intact(self, entries: list[_Entry]) -> list[_Taken]:
        """Return the ring's sequences whose row and pages no other sequence has got since, the latest up to a limit of bytes."""
        last: dict[int, tuple[_Entry, int]] = {}
        for entry in entries:
            rows = enumerate(entry.step.rows.tolist())
            last |= {row: (entry, at) for at, row in rows if entry.owners.get(row) is self._owners.get(row)}
        found, left = [], _MOST_BYTES
        for row, (entry, at) in sorted(last.items(), key=lambda each: -each[1][0].number):
            owner, drafts = self._owners[row], bool(entry.step.num_draft_tokens[at])
            context, known = int(entry.step.context_lens[at]), len(owner.seq.token_ids) - drafts  # a draft may follow
            end = context + int(entry.step.query_lens[at])
            groups = zip(self._groups, owner.pages, strict=True)
            pages = {page for group, own in groups for page in own if page != NULL_PAGE or group.window is None}
            left -= sum(spec.cache_row_bytes for spec in self._attention.specs) * end
            left -= 0 if self._states is None else 4 * self._states.slots.bytes_per_slot
            if left > 0 and min(end, known) > 0 and all(self._assigned[page] <= entry.number for page in pages):
                found.append(_Taken(0, row, owner, min(end, known), context if end <= known and not drafts else -1))
        found.sort(key=lambda each: each.row)
        return [replace(each, index=index) for index, each in enumerate(found)]

    def _prompt(self, taken: _Taken, ring: list[_Entry]) -> _Entry | None:
        """Return the prompt of a sequence as one step, if its first step is older than the ring; None if no step can hold it."""
        seq, row = taken.owner.seq, taken.row
        count = min(seq.num_prompt_tokens, taken.num_tokens)
        begun = any(
            context == 0 and entry.owners.get(row) is taken.owner
            for entry in ring
            for row, context in zip(entry.step.rows.tolist(), entry.step.context_lens.tolist(), strict=True)
        )
        freed = any(self._first_held(taken, group) for group in range(len(self._groups)))
        if begun or freed or seq.embedded is not None or seq.adapter is not None or count > self._config.step_tokens:
            return None
        if seq.num_cached_tokens:  # in one step, the prompt has other rounding errors than the cached rows of other steps
            return None
        step = StepInput(
            rows=numpy.array([row], dtype=numpy.int32),
            query_lens=numpy.array([count], dtype=numpy.int32),
            context_lens=numpy.zeros(1, dtype=numpy.int32),
            num_draft_tokens=numpy.zeros(1, dtype=numpy.int32),
            samples=numpy.ones(1, dtype=numpy.bool_),
            token_ids=numpy.array(seq.token_ids[:count]),
            continues=False,
            state_indices=None if self._states is None else numpy.zeros(1, dtype=numpy.int32),
        )
        return _Entry(0, step, {row: taken.owner}, ("",), False, [])

    def _tables(self, taken: _Taken) -> list[NDArray[numpy.int32]]:
        """Return, for each cache group, the blocks that the scheduler has assigned to the sequence's tokens."""
        count = -(-taken.num_tokens // self._block_size)
        pairs = zip(self._groups, taken.owner.pages, strict=True)
        return [group.blocks_of(pages)[: count if group.layers else 0].copy() for group, pages in pairs]

    def _first_held(self, taken: _Taken, group: int) -> int:
        """Return the first position after all pages that have left the window and were freed."""
        pages = taken.owner.pages[group] if self._groups[group].window is not None else ()
        return self._groups[group].page_size * max((at + 1 for at, page in enumerate(pages) if page == NULL_PAGE), default=0)

    def _sequence(self, taken: _Taken) -> RecordedSequence:
        seq, wrong = taken.owner.seq, None
        lens = numpy.array([taken.num_tokens], dtype=numpy.int32)
        used = self._runner.tables.of_step(numpy.array([taken.row], dtype=numpy.int32), lens, self._block_size)
        for group, (own, assigned) in enumerate(zip(used, self._tables(taken), strict=True)):
            start = self._first_held(taken, group) // self._block_size
            for at in (start + numpy.flatnonzero(own[0, start : len(assigned)] != assigned[start:])[:1]).tolist():
                wrong = wrong or (group, at, int(own[0, at]), int(assigned[at]))
        return RecordedSequence(
            request_id=seq.request_id,
            completion=seq.index,
            seed=seq.seed,
            row=taken.row,
            num_tokens=taken.num_tokens,
            wrong_block=wrong,
            token_ids=seq.token_ids[: taken.num_tokens] if self._config.record_text else [],
        )

    def _plain(self, entry: _Entry, index: Mapping[int, int]) -> RecordedStep:
        step = entry.step
        return RecordedStep(
            sequences=[index.get(id(entry.owners.get(row)), -1) for row in step.rows.tolist()],
            rows=step.rows.tolist(),
            query_lens=step.query_lens.tolist(),
            context_lens=step.context_lens.tolist(),
            num_draft_tokens=step.num_draft_tokens.tolist(),
            state_slots=[] if step.state_indices is None else self._slots(step).tolist(),
            backends=list(entry.backends),
            graph=entry.graph,
        )

    def _slots(self, step: StepInput) -> NDArray[numpy.int64]:
        """Return int64 [num_seqs]: slots of the states before a step, by the scheduler's numbers."""
        assert self._states is not None
        assert step.state_indices is not None
        return step.rows.astype(numpy.int64) * self._states.slots.per_row + step.state_indices

    def _layer(self, kind: str, layer: int) -> RecordedLayer:
        if kind == "state":
            assert self._states is not None
            memory = self._states.memory.caches[layer]
            return RecordedLayer(kind="state", layer=layer, spec=plain_spec(memory.spec), layout=memory.layout.name)
        latent = self._latents.get(layer)
        spec = self._attention.specs[layer] if latent is None else replace(latent.expanded, dense=False)
        group = next(number for number, each in enumerate(self._groups) if layer in each.layers)
        name = self._attention.caches[layer].layout.name
        return RecordedLayer(kind="attention", layer=layer, spec=plain_spec(spec), layout=name, group=group)

    def _known(self, entry: _Entry, taken: list[_Taken]) -> dict[int, _Taken]:
        """Return index in the step -> sequence, for sequences whose tokens, window and states before the step are known."""
        of, found = {id(each.owner): each for each in taken}, {}
        for at, (row, context) in enumerate(zip(entry.step.rows.tolist(), entry.step.context_lens.tolist(), strict=True)):
            each = of.get(id(entry.owners.get(row)))
            if each is not None and context < len(each.owner.seq.token_ids):
                seen = all(
                    group.window is None or max(context - group.window + 1, 0) >= self._first_held(each, number)
                    for number, group in enumerate(self._groups)
                )
                if (seen or entry.calls) and (self._states is None or context in (0, each.state_at)):
                    found[at] = each
        return found

    def _part(self, step: StepInput, known: Mapping[int, _Taken]) -> StepInput:
        """Return the part of a step with the known sequences and tokens, without changes of rows, pages and checkpoints."""
        at, starts = list(known), numpy.cumsum(step.query_lens) - step.query_lens
        tokens = numpy.concatenate([numpy.arange(starts[each], starts[each] + step.query_lens[each]) for each in at])
        newest = [known[each].owner.seq.token_ids[int(step.context_lens[each])] for each in at]
        ids = numpy.where(step.token_ids[tokens] == NEWEST, numpy.repeat(newest, step.query_lens[at]), step.token_ids[tokens])
        places = {token: number for number, token in enumerate(tokens.tolist())}
        return StepInput(
            rows=step.rows[at],
            query_lens=step.query_lens[at],
            context_lens=step.context_lens[at],
            num_draft_tokens=step.num_draft_tokens[at],
            samples=step.samples[at],
            token_ids=ids,
            continues=False,
            state_indices=None if step.state_indices is None else step.state_indices[at],
            embedded=tuple((places[first], rows) for first, rows in step.embedded if first in places),
            adapters=None if step.adapters is None else step.adapters[at],
        )

    def _watch(self, seen: Any) -> None:
        self._attention.watch = seen
        if self._states is not None:
            self._states.watch = seen

    def _seen(self, kind: str, layer: int, given: Sequence[Tensor], out: Tensor) -> None:
        self._calls.append(_Call((kind, layer), [each.to("cpu", copy=True) for each in given], out.to("cpu", copy=True)))

    def _again(self, entry: _Entry, known: Mapping[int, _Taken]) -> list[_Call]:
        """Return the calls of the known sequences in a step, which runs again with the same backends."""
        step, kept, found = self._part(entry.step, known), self._calls, list[_Call]()
        self._calls = found
        self._runner.begin(step, entry.backends)
        try:
            with self._restored(step):
                for layer, memory in enumerate(() if self._states is None else self._states.memory.caches):
                    for slot, each, context in zip(self._slots(step), known.values(), step.context_lens, strict=True):
                        if context == each.state_at and layer in each.before:
                            for name in memory.tensors:
                                own = getattr(memory, f"logical_{name}")[int(slot)]
                                own.copy_(getattr(each.before[layer], name))
                self._watch(self._seen)
                self._runner.forward(step, eager=True)
        finally:
            self._calls = kept
            self._watch(self._seen if self._config.record_tensors else None)
        return found

    @contextmanager
    def _restored(self, step: StepInput) -> Iterator[None]:
        """Restore, at the end of the context, the cached rows and states that a step writes."""
        saved: list[tuple[Tensor, tuple[Tensor, ...], Tensor]] = []
        for layer, cache in enumerate(self._attention.caches):
            slots = self._attention.slots(layer)
            for name in cache.tensors:
                rows, at = cache.by_slot(name), (slots // cache.block_size, slots % cache.block_size)
                rows = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows  # torch cannot index FP8
                saved.append((rows, at, rows[at].clone()))
        if self._states is not None:
            every = torch.tensor(
                [slot for row in step.rows.tolist() for slot in self._states.slots.of_row(row)], device=self._device
            )
            for memory in self._states.memory.caches:
                saved += [(each, (every,), each[every].clone()) for each in memory.tensors.values()]
        try:
            yield
        finally:
            for written, places, content in saved:
                written[places] = content

    def _compute(self, taken: _Taken) -> str:
        """Compute a sequence from its tokens with float64 attention and states. Return the reason if it cannot be computed."""
        seq, count = taken.owner.seq, taken.num_tokens
        work = sum(spec.num_heads * (spec.head_dim + spec.v_head_dim) for spec in self._attention.specs) * count**2
        if seq.embedded is not None or seq.adapter is not None:
            return "it has an adapter or embeddings"
        if work > _MOST_WORK.get(self._device.type, 0):
            return "it is too long"
        states: dict[int, SequenceState] = {}

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            latent = self._latents.get(layer)
            spec, rows = self._attention.specs[layer], (k, v)
            if latent is not None:
                spec, rows = latent.expanded, latent.expand(k)
            taken.clean.setdefault(layer, rows)
            return attend(spec, q, rows[0].double(), rows[1].double(), 0)[0].to(q.dtype)

        def state(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
            spec, parameters = state_layers(self._model)[layer]
            now, outs = states.setdefault(layer, SequenceState.zeros(spec)), []
            for row, (given, *opened) in enumerate(zip(x.cpu().double(), *(gate.cpu().double() for gate in gates), strict=True)):
                if row == taken.state_at:
                    taken.before[layer] = now.copy()
                outs.append(advance(spec, parameters, given, opened, now))
            return torch.stack(outs).to(x)

        ids = torch.tensor(seq.token_ids[:count], device=self._device)
        try:
            self._model(ids, torch.arange(count, device=self._device), AttentionFunctions(attention, state))
        except Exception as error:  # such as too little memory
            return f"{type(error).__name__}: {str(error)[:300]}"
        return ""

    def _add_calls(self, record: Record, number: int, entry: _Entry, calls: Sequence[_Call], known: Mapping[int, _Taken]) -> None:
        """Add the rows of each known sequence in the calls of a step."""
        step, seen = entry.step, dict[tuple[str, int], int]()
        places: dict[tuple[str, int], int] = {(layer.kind, layer.layer): place for place, layer in enumerate(record.meta.layers)}
        ends = numpy.cumsum(step.query_lens if entry.calls else step.query_lens[list(known)])  # of the sequences in the calls
        for call in calls:
            again = seen[call.layer] = seen.get(call.layer, -1) + 1
            for part, (at, taken) in enumerate(known.items()):
                length, context = int(step.query_lens[at]), int(step.context_lens[at])
                end = int(ends[at if entry.calls else part])
                phase = Phase.of(length, context, int(step.num_draft_tokens[at]) + 1)
                backend, allowed = self._allowed(call.layer, entry.backends, phase)
                found = RecordedCall(
                    place=places[call.layer],
                    step=number,
                    again=again,
                    sequence=taken.index,
                    context=context,
                    phase=phase,
                    backend=backend,
                    allowed=allowed,
                )
                record.meta.calls.append(found)
                rows = [each[end - length : end] for each in (*call.given, call.out)]
                state = call.layer[0] == "state"
                names = ["x", *(f"gate{n}" for n in range(len(rows) - 2))] if state else ["q"]
                tensors = dict(zip([*names, "out"], rows, strict=True))
                tensors |= self._state_of(call.layer[1], taken, context) if state else {}
                record.tensors |= {f"{found.key}.{name}": each for name, each in tensors.items()}

    def _allowed(self, layer: tuple[str, int], backends: Sequence[str], phase: Phase) -> tuple[str, float]:
        """Return the name of a layer's backend, and the maximum error of a row of a head."""
        if layer[0] == "state":
            assert self._states is not None
            state = self._states.serving_in(self._states.memory.caches[layer[1]].spec, phase)
            return state.name, FACTOR * float(state.tolerance[self._states.memory.caches[layer[1]].spec.dtype])
        spec = self._attention.specs[layer[1]]
        backend = self._runner.backends_of(phase, backends)[self._attention.layers.in_phase(spec, phase)]
        factor = FACTOR**2 if layer[1] in self._latents else FACTOR
        return backend.name, factor * float(backend.tolerance[spec.dtype])

    def _weights(self, layer: int, place: int) -> dict[str, Tensor]:
        parameters = state_layers(self._model)[layer].parameters
        weights = {name: value for name in WEIGHTS if (value := getattr(parameters, name)) is not None}
        return {f"{place}.weight.{name}": value.cpu() for name, value in weights.items()}

    def _state_of(self, layer: int, taken: _Taken, context: int) -> dict[str, Tensor]:
        """Return the reference's state before a step and, for the sequence's last step, the state that the engine holds."""
        assert self._states is not None
        memory, last = self._states.memory.caches[layer], context == taken.state_at
        before = taken.before.get(layer) if last else None
        before = before or SequenceState.zeros(memory.spec)
        found = {f"before.{name}": part for name in STATE_PARTS if (part := getattr(before, name)) is not None}
        slot = taken.row * self._states.slots.per_row + taken.owner.seq.state_index
        for name in memory.tensors if last else ():
            found[f"found.{name}"] = getattr(memory, f"logical_{name}")[slot].to("cpu", copy=True)
        return found

    def _hold(self, record: Record, place: int, layer: RecordedLayer, taken: _Taken) -> None:
        """Add a sequence's cached rows, read through the scheduler's table, and digests of the reference's rows."""
        cache, latent = self._attention.caches[layer.layer], self._latents.get(layer.layer)
        first = self._first_held(taken, layer.group)
        at = numpy.arange(first, taken.num_tokens)
        slots = self._tables(taken)[layer.group][at // self._block_size].astype(numpy.int64) * self._block_size
        rows = cache.gather(torch.from_numpy(slots + at % self._block_size).to(self._device))
        if latent is not None:
            rows = latent.expand((rows[0].float() * cache.k_scale).to(self._attention.specs[layer.layer].dtype))
        held = HeldRows(place=place, sequence=taken.index, first=first)
        record.meta.held.append(held)
        for name, found, right in zip(("key", "value"), rows, taken.clean.get(layer.layer, (None, None)), strict=True):
            record.tensors[f"{held.key}.{name}"] = found.to("cpu", copy=True)
            if right is not None:
                record.tensors[f"{held.key}.{name}_digest"] = row_digest(right[first:]).cpu()
