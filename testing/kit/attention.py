"""Attention backends in the kit: a backend's cells, a cell's session, and the backends that run the parts of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, wraps
from itertools import chain, count, islice, product

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.core.oracle.cells import CACHE_TYPES, NEEDLE, PHASES, CheckCell, Finding, Skipped, check_refusal
from headway.core.oracle.inputs import MOST_QUICK_WORK, MOST_WORK, deal, possible
from headway.core.oracle.steps import FINITE_POISON, Lens, SequencePart, StepTensors, StepWork, Tokens, blocks_for, first_step
from headway.testing.kit.cover import DTYPES, Claimed, ModelLayer, layer_cells
from headway.testing.kit.session import Session, SessionRoom
from headway.testing.kit.stage import Stage
from headway.testing.kit.subject import BASELINE, AttentionSubject

ODD_HEAD_DIMS = (24, 72, 77, 80, 576)
"""Additional head dimensions for layout tests."""


class AttentionStage(Stage[AttentionSubject, CheckCell]):
    """Attention backend under test, with the layers that it claims and its sessions."""

    cell = CheckCell

    def __init__(self, subject: AttentionSubject, layers: Mapping[str, ModelLayer]) -> None:
        """layers: name -> layer of the model with which the subject is tested. Empty means the kit's own layers."""
        super().__init__(subject)
        self._layers = layers

    @property
    def layouts(self) -> Mapping[str, CacheLayout]:
        """All registered layouts, keyed by name."""
        return self.subject.layouts

    @cached_property
    def claimed(self) -> Claimed:
        """All layers that the subject accepts."""
        return Claimed(self.subject, self._layers)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Block sizes to test, the simplest first."""
        return tuple(int(size) for size in self.claimed.usual["block_size"])

    @property
    def poison(self) -> float:
        """Value of slots without a token: NaN, or a large finite number if the subject declares that it multiplies the contents
        of these slots by zero."""
        return FINITE_POISON if self.subject.claims.reads_whole_blocks else math.nan

    def backend(self, cell: CheckCell, name: str = "") -> AttentionBackend:
        """Return an instance of the subject, or of the backend `name`, for a cell's layer."""
        return self.subject.make(self.claimed.spec(cell), cell.layout, cell.block_size, name)

    def session(
        self,
        cell: CheckCell,
        lens: Sequence[Lens],
        *,
        poison: float | None = None,
        layers: int = 2,
        extra_tokens: int = 0,
        spec: AttentionSpec | None = None,
    ) -> Session:
        """Return a session with room for steps of these lengths. The subject runs the parts that it supports, and the baseline
        runs all other parts.

        spec: layer that replaces the cell's layer.

        :raises Skipped: if the subject correctly refuses the cell's cache.
        """
        subject, spec = self.subject, spec or self.claimed.spec(cell)
        prefill, decode = self.parts(cell)
        made = {name: subject.make(spec, cell.layout, cell.block_size, name) for name in dict.fromkeys((prefill, decode))}
        room = SessionRoom(
            num_blocks=sum(blocks_for(each, cell.block_size) for each in lens) + 2 + extra_tokens // cell.block_size,
            max_tokens=max(sum(query_len for query_len, _, _ in each) for each in lens) + 16,
            layers=1 if cell.memory == "far" or cell.check == "long" or cell.work in ("many", "deep") else layers,
        )
        poison = self.poison if poison is None else poison
        session = Session(subject, cell, spec, (made[prefill], made[decode]), room, poison)
        session.guesses = self.guesses
        session.errors = self.errors
        self._accepted(cell, session)
        return session

    def parts(self, cell: CheckCell) -> tuple[str, str]:
        """Return the backend's name for each of a step's two parts: the subject if it claims the layer, else the baseline."""
        spec = self.claimed.spec(cell)
        prefills = PHASES[cell.phase] - {Phase.DECODE} if cell.phase in PHASES else {Phase.PREFILL, Phase.EXTEND}
        first = all(self.subject.supports(spec, cell.layout, cell.block_size, phase) for phase in prefills)
        second = bool(self.subject.supports(spec, cell.layout, cell.block_size, Phase.DECODE))
        return self.subject.name if first else BASELINE, self.subject.name if second else BASELINE

    def _accepted(self, cell: CheckCell, session: Session) -> None:
        support = self.subject.backend.accepts(session.layers.given[0].cache)
        if support:
            return
        if cell.memory == "own":
            raise Finding(f"accepts() must take a cache that layout {cell.layout} allocates: {support}")
        check_refusal(support, "accepts() must say what it needs and what it got")
        raise Skipped.refused(support)

    def cells(self, quick: bool = False) -> list[CheckCell]:
        """Return the cells of a backend. quick: True to cover each value once instead of each pair of values."""
        claimed = self.claimed
        if self._layers:
            sizes = self.block_sizes
            made = (layer_cells(each, claimed.subject, sizes, quick, self._many_steps) for each in self._layers.values())
            return list(dict.fromkeys(chain.from_iterable(made)))
        cells = [CheckCell("claims")]
        plain = [claimed.plainest(phase) for phase in PHASES]
        some = next((cell for cell in plain if cell is not None), None)
        if some is None:
            return cells
        cells += [cell.plain("cold", phase=phase) for phase, cell in zip(PHASES, plain, strict=True) if cell is not None]
        cells += claimed.refusals()
        cells.append(some.plain("options"))
        cells += [cell.plain("tolerance") for cell in _distinct(claimed.plainest(p, dtype=d) for d in DTYPES for p in PHASES)]
        single = claimed.with_others(claimed.cover(1))
        rows = single if quick else [*claimed.cover(2), *single]
        answers = [cell for phase in ("prefill", "mixed", "decode") for cell in claimed.around(phase)]
        answers += [cell.plain("answer", phase=phase) for cell, phases in rows for phase in PHASES if phase in phases]
        cells += deal(answers, MOST_QUICK_WORK if quick else MOST_WORK, self._accepts)
        cells += claimed.of_models()
        cells += claimed.many_heads(quick)
        cells += self._sums_of_many(quick)
        cells += self._siblings()
        cells += self._sharing()
        cells += self._at_a_distance()
        few = [(phase, claimed.plainest(phase)) for phase in ("verify", "extend")]
        cells += [replace(cell, phase=phase, kv_heads=32) for phase, cell in few if cell is not None and cell.feature != "latent"]
        cells += self._log_sums(single, quick)
        cells += self._keyless()
        cells += self._deep(single[:1] if quick else single[:4])
        return list(dict.fromkeys(cells))

    def answers(self, cell: CheckCell) -> list[Support]:
        """Return one `Support` for a cell's layer, which covers all phases of the cell's steps."""
        return [self.claimed.support(cell, cell.phase)]

    def once(self, cell: CheckCell) -> Callable[[], list[Tensor]]:
        """Return a function that repeats the first step of a cell and returns the outputs of all layers."""
        session, step = self._first_step(cell)

        def run() -> list[Tensor]:
            for given in step.inputs:
                given.guarded.fill_(torch.nan)
            session.run(step)
            return [given.out.clone() for given in step.inputs]

        return run

    def many(self, cell: CheckCell) -> Callable[[int], None]:
        """Return a function that runs N steps with changing lengths. If memory grows over these steps, the backend is the
        cause."""
        lens: Lens = [(8, 30, 0), (12, 0, 0), (1, 40, 0), (1, 20, 0)]
        session, numbers = self.session(cell, [lens] * 2, extra_tokens=4 * cell.block_size), count(1)

        def steps(more: int) -> None:
            for number in islice(numbers, more):
                shift = number % 19
                work = open_all(session, [(8, 11 + shift, 0), (2 + shift % 11, 0, 0), (1, 3 + shift, 0), (1, 2 * shift + 2, 0)])
                session.run(session.lay_out(work))
                close_all(session, [turn.seq for turn in work])

        return steps

    def launches(self, cell: CheckCell) -> tuple[str, Callable[[], object]]:
        """Return the names of the backend's calls, and a function that runs the layers of a planned step."""
        session, step = self._first_step(cell)
        session.run(step)  # compiles
        session.begin(step)
        return "prefill and decode", lambda: session.run_layers(step)

    def _first_step(self, cell: CheckCell) -> tuple[Session, StepTensors]:
        lens = first_step(cell.phase, cell.block_size)
        session = self.session(cell, [lens])
        return session, session.lay_out(open_all(session, lens))

    def layout_cells(self, name: str) -> list[CheckCell]:
        """Return the cells of a layout, which cover block sizes, odd head dimensions and every dtype."""
        sizes, dims = (1, 8, 16, 24, 256), (64, 128, *ODD_HEAD_DIMS)
        cells = [CheckCell("layout", layout=name, block_size=size) for size in sizes]
        cells += [
            CheckCell("layout", layout=name, head_dim=dim, dtype=dtype) for dim in dims for dtype in ("float32", "bfloat16")
        ]
        cells += [CheckCell("layout", layout=name, dtype="float16")]
        cells += [CheckCell("layout", layout=name, head_dim=dim, dtype="bfloat16", feature="fp8") for dim in dims]
        own = self.subject.layouts[name].dtypes.get("key")
        for feature, dtype in CACHE_TYPES.items():
            if dtype == own:  # a layout for one cache dtype
                cells = [cell.plain("layout", feature=feature) for cell in cells]
        return list(dict.fromkeys(cells))

    def _accepts(self, cell: CheckCell) -> bool:
        """Return whether the subject runs a part of the cell's steps; it may refuse the number of kv heads or the scale."""
        return self.subject.name in self.parts(cell)

    def _log_sums(self, rows: list[tuple[CheckCell, frozenset[str]]], quick: bool) -> list[CheckCell]:
        """Return the log-sum-exp cells of every dtype and feature, in every phase.

        quick: True for at most two phases per layer, one with several new tokens and one with a single token. The simplest layer
        is always tested in all phases.
        """
        if not self.subject.claims.lse:
            return []
        plain = [(cell, frozenset({phase})) for phase in PHASES if (cell := self.claimed.plainest(phase)) is not None]
        found = [cell.plain("lse", phase=phase) for cell, phases in plain for phase in phases]
        for number, (cell, phases) in enumerate(rows):
            for turns in (("extend", "mixed", "verify", "prefill"), ("decode", "ragged")):
                served = [phase for phase in turns if phase in phases]
                picked = served[number % len(served) :][:1] if quick and served else served
                found += [cell.plain("lse", phase=phase) for phase in picked]
        return deal(found, MOST_QUICK_WORK, self._accepts)

    def _keyless(self) -> list[CheckCell]:
        """Return cells of rows that see no key, in decode and with drafts, for layers whose scores or masks differ."""
        places = product(("decode", "verify"), ("none", "window", "softcap", "alibi", "sinks", "fp8", "latent"))
        cells = [(phase, self.claimed.plainest(phase, feature=feature)) for phase, feature in places]
        return [cell.plain("keyless", phase=phase) for phase, cell in cells if cell is not None]

    def _siblings(self) -> list[CheckCell]:
        """Return a `siblings` cell for a layer with the most features, and one for a layer with each cache dtype, in the phase
        that covers most other phases."""
        found, features = [], self.claimed.values["feature"]
        cached = [(f"{name}-together", name) for name in CACHE_TYPES]
        plain = [str(name) for name in features if name not in {*chain.from_iterable(cached)}]
        for kinds in (("together", "window", "softcap", "alibi", "sinks", "none", *plain), *cached):
            places = product(kinds, ("mixed", "decode", "extend", "prefill"))
            cells = [(phase, self.claimed.plainest(phase, feature=feature)) for feature, phase in places]
            found += [cell.plain("siblings", phase=phase) for phase, cell in cells if cell is not None][:1]
        return found

    def _sharing(self) -> list[CheckCell]:
        """Return cells of layers that share plans, in every phase: one layer with sinks and one with an FP8 cache."""
        if not self.subject.claims.shares_plans:
            return []
        places = product(("sinks", "fp8"), ("mixed", *PHASES))
        cells = [(phase, self.claimed.plainest(phase, feature=feature)) for feature, phase in places]
        return [cell.plain("shared", phase=phase) for phase, cell in cells if cell is not None]

    def _at_a_distance(self) -> list[CheckCell]:
        """Return cells for features that depend on the distance between query and key, at distances beyond 1,000 tokens."""
        features = ("alibi", "window-1024", "sinks", "softcap")
        plain = [(phase, self.claimed.plainest(phase, feature=name)) for name in features for phase in ("decode", "extend")]
        return [cell.plain("answer", phase=phase, work="tables") for phase, cell in plain if cell is not None]

    def _sums_of_many(self, quick: bool) -> list[CheckCell]:
        """Return cells with thousands of equal weights, and with one dominant key, in dtypes in which sums lose small terms."""
        shorts = [name for name in DTYPES if name != "float32"]
        plain = [(phase, self.claimed.plainest(phase, dtype=dtype)) for dtype in shorts for phase in ("decode", "extend")]
        cells = [cell.plain("answer", phase=phase, work="deep") for phase, cell in plain if cell is not None]
        found = [[replace(cell, scores=scores) for cell in cells] for scores in ("equal", NEEDLE)]
        return [cell for each in found for cell in [cell for cell in each if possible(cell)][: 1 if quick else None]]

    def _deep(self, rows: list[tuple[CheckCell, frozenset[str]]]) -> list[CheckCell]:
        """Return cells of checks with many steps: for the simplest layer first, then for layers that cover every value."""
        claimed = self.claimed
        cells: list[CheckCell] = []
        plain = {phase: claimed.plainest(phase) for phase in PHASES}
        whole = plain["mixed"] or plain["decode"] or plain["extend"] or plain["prefill"]
        assert whole is not None
        for phase, cell in plain.items():
            if cell is not None:
                cells += [cell.plain("repeat", phase=phase), cell.plain("sync", phase=phase)]
        for cell, phases in [(whole, frozenset(p for p in PHASES if plain[p])), *rows]:
            cells += self._many_steps(cell, phases)
        return [*cells, whole.plain("thousand"), whole.plain("memory")]

    def _many_steps(self, cell: CheckCell, phases: frozenset[str]) -> list[CheckCell]:
        """Return the cells of checks with many steps for one layer. phases: phases (names in PHASES) that the subject
        supports."""
        said, backend = self.subject.claims, self.subject.backend
        graph_phases = ("decode", "verify") if backend.captures(2) else ("decode",)
        cells = [cell.plain("graph", phase=phase) for phase in graph_phases if phase in phases]
        if cell.memory != "own":
            return cells
        cells += [cell.plain("prompt", phase="prefill")] if "prefill" in phases else []
        cells += [cell.plain("bounds", phase="decode")] if "decode" in phases and not said.exact_host_lengths else []
        modelled = cell.dtype in DTYPES or bool(cell.layer)  # the engine and the baseline support no other dtypes
        if phases & {"decode", "extend"}:
            mixed = cell.plain("steps")
            cells += [mixed, mixed.plain("turns")] if modelled else [mixed]
            cells += [] if cell.layer else [mixed.plain("long", phase="long")]  # would take minutes for a large layer
        cells += [cell.plain("engine")] if modelled and phases & {"decode", "extend"} else []
        cells += [cell.plain("invariant")] if said.invariance_level and cell.feature in ("none", *CACHE_TYPES) else []
        return cells


def _distinct(cells: Iterable[CheckCell | None]) -> list[CheckCell]:
    return list({cell.dtype: cell for cell in cells if cell is not None}.values())


def open_all(session: Session, lens: Lens, like: Sequence[SequencePart] = ()) -> list[SequencePart]:
    """Return the sequences of a step with cached contexts. The first sequence with a context longer than a block shares blocks
    with the next two such sequences.

    like: parts with open sequences. Each new sequence shares every full context block with the sequence in the same row, as after
    a prefix cache hit.
    """
    work: list[SequencePart] = []
    first: Tokens | None = None
    sharing = 0
    for number, (query_len, context, drafts) in enumerate(lens):
        share = like[number].seq if like else first if context > session.block_size and sharing < 2 else None
        seq = session.open(context, share)
        sharing += share is not None
        if first is None and context > session.block_size:
            first = seq
        work.append(SequencePart(seq, query_len, drafts))
    return work


def close_all(session: Session, seqs: Sequence[Tokens]) -> None:
    """Free all blocks of some sequences; a shared block is freed once."""
    session.close(Tokens(sorted({block for seq in seqs for block in seq.blocks})))


def sequences(work: StepWork) -> list[Tokens]:
    """Return the sequences of a step's parts."""
    return [turn.seq for turn in work]


def without_stray_reads(run: Callable[[AttentionStage, CheckCell, float], None]) -> Callable[[AttentionStage, CheckCell], str]:
    """Return a check made from `run`, a function that takes the poison value. If the result is NaN, the check runs again with
    zeros in slots without a token, and the finding reports the difference."""

    @wraps(run)
    def check(stage: AttentionStage, cell: CheckCell) -> str:
        try:
            run(stage, cell, stage.poison)
        except Finding as finding:
            if not finding.guess.startswith("NaN"):
                raise
            try:
                run(stage, cell, 0.0)
            except Finding as clean:
                if clean.guess.startswith("NaN"):
                    finding.guess += ", whatever the unused slots hold"
                else:
                    reads = "reads slots that hold no token of the sequence (and is wrong with zeros there, too)"
                    finding.guess = clean.guess or reads
            else:
                past = "past a sequence's end or of another block (right once they hold zeros)"
                finding.guess = f"reads slots that hold no token, {past}"
            raise
        return ""

    return check
