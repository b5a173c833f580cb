"""Checks of attention outputs against float64: two steps per instance, shared plans and prefixes, padding, poisoned slots.

Other checks run one instance for many steps, or test batch invariance if the backend claims batch invariance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import CacheLayout, CacheWriter
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, run_backend
from headway.core.oracle.cells import PHASES, CheckCell, Finding, Skipped, placed, sibling_of
from headway.core.oracle.inputs import steps_of
from headway.core.oracle.oracle import attend, distance, expected
from headway.core.oracle.steps import Before, Lens, SequencePart, Tokens, first_step, padding_rows
from headway.testing.kit.attention import AttentionStage, close_all, open_all, sequences, without_stray_reads
from headway.testing.kit.session import PADDING_VALUE, Session
from headway.testing.kit.stage import synchronize
from headway.testing.kit.subject import BASELINE

STEPS = 50
_WATCHED = frozenset({0, 1, 2, 3, 4, 5, 9, 19, 33, 48, 49})
THOUSANDTH = 1_003


def thousand(stage: AttentionStage, cell: CheckCell) -> str:
    """Check that the thousandth step is as correct as the first step. Errors in counters, and in buffers that fill up, appear
    only late."""
    lens: Lens = [(5, 0, 0), (1, 20, 0), (1, cell.block_size, 0)]
    session = stage.session(cell, [lens] * 4, extra_tokens=4 * cell.block_size, layers=1)
    done = 0
    for number in (0, 299, 999, THOUSANDTH - 1):
        work = open_all(session, lens)
        if number > done:  # steps that are not judged, all the same
            idle = session.lay_out(work)
            before = Before(idle)
            for _ in range(number - done):
                session.run(idle)
            session.finish(idle, work, before, checked=False)
        with placed(f"step {number + 1} of one instance"):
            session.step(work)
        close_all(session, [turn.seq for turn in work])
        done = number + 1
    return ""


@without_stray_reads
def steps(stage: AttentionStage, cell: CheckCell, poison: float) -> None:
    """Run fifty steps in which sequences start, are prefilled in chunks, decode and end, and their blocks are reused."""
    room: list[Lens] = [[(1, 400, 0)] * 4, [(40, 0, 0)] * 4]
    session = stage.session(cell, room, poison=poison, extra_tokens=6 * (cell.block_size + STEPS))
    running: list[Tokens] = []
    for number in range(STEPS):
        work = [SequencePart(seq) for seq in running]
        if number % 7 == 0:
            work.insert(0, SequencePart(session.open(0), 5 + number % 3 * 9))
        elif number % 7 == 3:
            share = max(running, key=lambda seq: seq.length, default=None)
            context = max(cell.block_size, 1) if share is None or share.length <= cell.block_size else share.length - 1
            work.insert(0, SequencePart(session.open(min(context, 90), share), 3 + number % 4))
        with placed(f"step {number + 1} of one instance"):
            session.step(work, checked=number in _WATCHED)
        running = [turn.seq for turn in work]
        if len(running) > 5:
            gone = running.pop(0)
            shared = {block for seq in running for block in seq.blocks}
            session.close(Tokens([block for block in gone.blocks if block not in shared]))


@without_stray_reads
def turns(stage: AttentionStage, cell: CheckCell, poison: float) -> None:
    """Check that the subject and the baseline can alternate on one cache, both between steps and within a step."""
    lens: Lens = [(9, 0, 0), (20, 2 * cell.block_size, 0), (5, cell.block_size + 3, 0), (1, 33, 0), (1, cell.block_size, 0)]
    session = stage.session(cell, [lens], poison=poison, extra_tokens=6 * len(lens) * cell.block_size)
    subject = session.prefill, session.decode
    baseline = stage.backend(cell, BASELINE)
    work = open_all(session, lens)
    seqs = [turn.seq for turn in work]
    for prefill, decode in (subject, (baseline, subject[1]), (subject[0], baseline), (baseline, baseline), subject):
        session.prefill = prefill
        session.decode = decode
        session.step(work)
        work = [SequencePart(seq, 4 if number < 2 else 1) for number, seq in enumerate(seqs)]


def cold(stage: AttentionStage, cell: CheckCell) -> str:
    """Measure the time of the first step in a new process, including compilation, and of the second step."""
    lens = first_step(cell.phase, cell.block_size)
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        session = stage.session(cell, [lens])
        session.run(session.lay_out(open_all(session, lens)))
        synchronize(stage.subject.device)
        taken.append(time.perf_counter() - started)
    return f"first call {taken[0]:.2f} s, second {taken[1]:.3f} s"


_LSE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 3e-3}
"""Maximum error of a log-sum-exp for each dtype. The log-sum-exp is about 4, and sums of 16-bit inputs are computed in
float32."""
_DATA = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 12.0, torch.float16: 12.0}
"""Maximum declared tolerance for each dtype, as a multiple of the error of plain arithmetic in that dtype."""


@without_stray_reads
def answer(stage: AttentionStage, cell: CheckCell, poison: float) -> None:
    """Check the outputs of a cell's steps, which have one kind of work in one phase."""
    steps = cell_steps(cell)
    session = stage.session(cell, steps, poison=poison)
    kept: list[SequencePart] = []
    for number, lens in enumerate(steps):
        work = open_all(session, lens, like=kept)
        session.step(work, padding_rows(cell.phase))
        if cell.work == "again" and number == 2:  # the next step has the same lengths, and all but the last blocks
            kept = work
        else:
            close_all(session, sequences([*kept, *work]))


def cell_steps(cell: CheckCell) -> list[Lens]:
    """Return the lengths of each step of an answer cell."""
    return steps_of(cell.work, cell.phase, cell.block_size) or [first_step(cell.phase, cell.block_size)]


def siblings(stage: AttentionStage, cell: CheckCell) -> str:
    """Alternate layers that differ only in scalar parameters in one process. Data that is cached for one layer must not be used
    for the other layer."""
    own = stage.claimed.spec(cell)
    other = sibling_of(own)
    for phase in PHASES[cell.phase]:
        if not (support := stage.subject.supports(other, cell.layout, cell.block_size, phase)):
            raise Skipped.refused(support)
    lens = first_step(cell.phase, cell.block_size)
    sessions = [stage.session(cell, [lens] * 2, spec=spec) for spec in (other, own)]
    _run_alternating(sessions, lens, {1, 2}, "keeps something of one layer for another that differs in numbers alone")
    return ""


def _run_alternating(sessions: Sequence[Session], lens: Lens, telling: set[int], guess: str) -> None:
    """Run a step of each of two sessions, then a step of the first session again. If a step whose index is in `telling` has a
    finding, `guess` is the finding's likely cause."""
    for number, session in enumerate((*sessions, sessions[0])):
        work = open_all(session, lens)
        try:
            session.step(work)
        except Finding as finding:
            finding.guess = guess if number in telling else finding.guess
            raise
        close_all(session, sequences(work))


def shared(stage: AttentionStage, cell: CheckCell) -> str:
    """Run a second layer of the same kind with the plans of the first layer, as the engine does if `shares_plans` is declared."""
    own = stage.claimed.spec(cell)
    other = replace(sibling_of(own), scale=own.scale, sliding_window=own.sliding_window, softcap=own.softcap)
    other = replace(other, alibi_slopes=own.alibi_slopes)
    assert other != own
    assert other.kind == own.kind
    lens = first_step(cell.phase, cell.block_size)
    sessions = [stage.session(cell, [lens] * 2, spec=spec) for spec in (own, other)]
    for planning, using in zip(sessions[0].instances, sessions[1].instances, strict=True):
        using.plan = planning.plan  # type: ignore[method-assign]
    # The first session, with its own plans, was correct.
    _run_alternating(sessions, lens, {1}, "declares shares_plans, and its plan holds sinks or scales")
    return ""


@without_stray_reads
def bounds(stage: AttentionStage, cell: CheckCell, poison: float) -> None:
    """Check decode steps in which the host knows only upper bounds of the lengths."""
    lens: Lens = [(1, length, 0) for length in (3, 17, cell.block_size, 2 * cell.block_size + 1, 40, 1)]
    session = stage.session(cell, [lens], poison=poison, extra_tokens=len(lens) * (cell.block_size + 8))
    work = open_all(session, lens)
    slack = min(8, cell.block_size - 1)
    for turn in work:  # an engine reserves blocks up to the bound, so the block table has that length
        session.reserve(turn.seq, turn.seq.length + 1 + slack)
    step = session.lay_out(work)
    exact = step.metadata
    step.metadata = replace(
        exact, seq_lens_cpu=exact.seq_lens_cpu + slack, max_seq_len=exact.max_seq_len + slack, upper_bound_lens=True
    )
    before = Before(step)
    session.run(step)
    session.previous.append(exact.seq_lens_cpu.add(slack).tolist())
    session.finish(step, work, before)


def tolerance(stage: AttentionStage, cell: CheckCell) -> str:
    """Compare the declared tolerance with the error of plain arithmetic in the dtype."""
    spec = stage.claimed.spec(cell)
    declared = float(stage.subject.backend.tolerance[spec.dtype])
    reached = _plain_error(spec)
    most = _DATA[spec.dtype] * reached
    stage.errors.note(reached, declared)
    if not 0 < declared <= most:
        raise Finding(
            f"tolerance for {cell.dtype} must be at most {most:.2g}: plain arithmetic of that type reaches {reached:.2g}; "
            f"declared is {declared:.2g}",
            guess="a tolerance that would let wrong answers pass",
        )
    return f"declared {declared:.2g}, plain arithmetic reaches {reached:.2g}"


def _plain_error(spec: AttentionSpec) -> float:
    """Return the relative error of float32 attention whose softmax weights and output are rounded to the layer's dtype."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(48, heads, spec.head_dim, generator=generator).to(spec.dtype)
        for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    right = attend(spec, q, k.double(), v.double(), 0)[0].cpu()
    heads = torch.arange(spec.num_heads) // spec.group_size
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()[:, heads]) * spec.scale
    scores = scores.masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1).to(spec.dtype).float()
    out = torch.einsum("hqk,khd->qhd", weights, v.float()[:, heads]).to(spec.dtype)
    return distance(out, right)


_WHOLE_SPLITS = 1024
"""kv_len of a sequence whose last split is full, for every power-of-two split size up to this length."""


def lse(stage: AttentionStage, cell: CheckCell) -> str:
    """Check the log-sum-exp of every query, if the backend declares that it returns log-sum-exps."""
    lens = cell_steps(cell)[0]
    if cell.phase == "decode":  # with power-of-two split sizes, a split ends where the sequence does
        lens = [*lens, (1, _WHOLE_SPLITS - 1, 0)]
    session = stage.session(cell, [lens])
    work = open_all(session, lens)
    step = session.lay_out(work, padding_rows(cell.phase))
    for layer, given in enumerate(step.inputs):
        session.layers.write(layer, given.k, given.v, step.metadata.slot_mapping, given=True)
    sums = torch.full((session.spec.num_heads, step.metadata.num_tokens), torch.nan, device=session.spec.device)
    given, cache, n = step.inputs[0], session.layers.given[0].cache, step.metadata.num_prefill_tokens
    prefill, decode = step.metadata.prefill, step.metadata.decode
    with torch.inference_mode():
        if prefill is not None:
            first: AttentionBackend = session.backends[0][session.spec]
            first.prefill(given.q[:n], given.k[:n], given.v[:n], cache, first.plan(prefill), given.out[:n], lse=sums[:, :n])
        if decode is not None:
            second: AttentionBackend = session.backends[1][session.spec]
            second.decode(given.q[n:], cache, second.plan(decode), given.out[n:], lse=sums[:, n:])
    allowed = _LSE[session.spec.dtype]
    if session.spec.cache_dtype != session.spec.dtype:  # a key may be rounded to the layer's dtype after scaling
        allowed += (8 + abs(session.numbers.lift)) * torch.finfo(session.spec.dtype).eps
    answers = [expected(row) for row in step.rows[0]]
    most = allowed + session.numbers.slack
    for number, (row, tokens) in enumerate(zip(step.rows[0], step.tokens, strict=True)):
        out, right = answers[number]
        found = sums[:, tokens].double()
        off = (found - right).abs().nan_to_num(torch.inf).masked_fill(found == right, 0.0)  # -inf in a row without keys
        apart = float(off.max())
        stage.errors.note(apart, most)
        if apart > most:
            query, head = torch.nonzero(off.T.gt(most))[0].tolist()
            raise Finding(
                f"lse of sequence {number} (query_len {row.query_len}, kv_len {row.kv_len}), query {query}, head {head}: "
                f"expected {float(right[head, query]):.5g}, got {float(sums[head, tokens][query]):.5g}; apart by up to "
                f"{apart:.2g}, allowed {allowed:.2g}",
            )
        limit = 8 * float(session.backends[0][session.spec].tolerance[session.spec.dtype]) + session.numbers.slack
        if not distance(given.out[tokens], out) <= limit:
            raise Finding(f"the output of sequence {number}, computed with lse, is wrong")
    return ""


def keyless(stage: AttentionStage, cell: CheckCell) -> str:
    """Check rows that see no key: padding rows, whose queries, keys and values are NaN. Their output must be zeros and their
    log-sum-exp -inf (or the sink). Unless the backend claims `zeroes_padding`, it may also leave these rows as they were."""
    query_len, claims = 4 if cell.phase == "verify" else 1, stage.subject.claims
    for lens in ([(query_len, context, query_len - 1) for context in (1, 40, cell.block_size)], []):
        session = stage.session(cell, [[*lens, *[(query_len, 0, 0)] * 3]], layers=1)
        step, spec = session.lay_out(open_all(session, lens), 3, query_len), session.spec
        given, cache, padding = step.inputs[0], session.layers.given[0].cache, step.padding
        session.layers.write(0, given.k, given.v, step.metadata.slot_mapping, given=True)
        for each in (given.q, given.k, given.v):
            each[padding] = torch.nan
        sums = torch.full((spec.num_heads, step.metadata.num_tokens), PADDING_VALUE, device=spec.device)
        backend = session.backends[1][spec]
        with torch.inference_mode():
            backend.decode(given.q, cache, backend.plan(step.metadata), given.out, **({"lse": sums} if claims.lse else {}))
        _judge_keyless("out", given.out[padding], 0.0, claims.zeroes_padding)
        empty = -torch.inf if spec.sinks is None else sums.new_tensor(spec.sinks)[:, None]
        _judge_keyless("lse", sums[:, padding], empty, claims.zeroes_padding and claims.lse)
        limit = 8 * float(backend.tolerance[spec.dtype]) + session.numbers.slack
        for number, (row, tokens) in enumerate(zip(step.rows[0], step.tokens, strict=True)):
            if not distance(given.out[tokens], expected(row)[0]) <= limit:
                raise Finding(f"the output of sequence {number}, next to rows that see no key, is wrong")
    return ""


def _judge_keyless(name: str, found: Tensor, right: float | Tensor, must_write: bool) -> None:
    """Check a result in rows that see no key. must_write: False if the rows may also be left as they were."""
    fits = torch.isclose(found.double(), torch.as_tensor(right, dtype=torch.float64, device=found.device), rtol=1e-5, atol=0.0)
    if not must_write:
        fits |= found == PADDING_VALUE
    if not bool(fits.all()):
        need = ("zeros" if name == "out" else "-inf, or the sink") + ("" if must_write else ", or no write")
        words = f"{name} of a row that sees no key (kv_len 0): needs {need}; got {float(found[~fits][0]):.5g}"
        raise Finding(words, guess="writes padding rows")


def invariant(stage: AttentionStage, cell: CheckCell) -> str:
    """Check that each sequence's output has the same bits in a batch as in a step without other sequences and, depending on the
    level that the backend declares, in chunks and in other phases."""
    subject = stage.subject
    case = invariance_case(
        stage.claimed.spec(cell), subject.layouts[cell.layout], cell.block_size, subject.writer(cell.layout), stage.poison
    )
    found = dependent(subject.make(case.spec, cell.layout, cell.block_size), case)
    if found:
        raise Finding(
            f"batch_invariant: a sequence's bits must not depend on its neighbours; {len(found)} do, such as {found[0]} "
            "(batch: (query_len, kv_len))",
            guess="not batch invariant",
        )
    level = subject.claims.invariance_level
    for needed, name, (sizes, decodes) in ((needed, name, parts) for needed, name, parts in PARTS if level >= needed):
        spec = replace(case.spec, invariance=level)
        whole = make_case([(sum(sizes),) * 2], spec, subject.layouts[cell.layout], cell.block_size, subject.writer(cell.layout))
        backend = subject.make(spec, cell.layout, cell.block_size)
        wanted, got = (in_parts(backend, whole, each, decodes) for each in ([sum(sizes)], sizes))
        if not torch.equal(wanted, got):
            row, head = torch.nonzero((wanted != got).any(2))[0].tolist()
            raise Finding(
                f"invariance {level.name.lower()}: a token's bits must be the same {name}; those of position {row}, head {head} "
                f"are not: {wanted[row, head][:3].tolist()} as a prompt, {got[row, head][:3].tolist()} {name}",
                guess=f"not {needed.name.lower()} invariant",
            )
    return level_text(level)


def level_text(level: Invariance) -> str:
    """Return the remark of a passed check of a level."""
    return f"level {level.name.lower()}"


PARTS: Sequence[tuple[Invariance, str, tuple[Sequence[int], bool]]] = (
    (Invariance.CHUNK, "in chunks", ([7, 16, 1, 33, 64, 29], False)),
    (Invariance.PHASE, "token by token", ([40, *[1] * 34], True)),
    (Invariance.PHASE, "in verification", ([5, 3, 8, 2, 8, 8, 8, 8, 1, 7, 8, 4], True)),
)
"""Level, description, and the numbers of tokens in successive steps of one sequence, with whether they decode after the first."""


def in_parts(backend: AttentionBackend, case: Case, sizes: Sequence[int], decodes: bool) -> Tensor:
    """Return the output of a case's only sequence, computed in successive steps of these numbers of tokens. decodes: True if
    steps with a context are in DECODE."""
    done, parts, table = 0, [], case.metadata.block_table_cpu[0].tolist()
    for size in sizes:
        at = slice(done, done + size)
        most = size if decodes else 0
        metadata = AttentionMetadata.build(
            [size], [done], [table], case.metadata.block_size, case.q.device, decode_query_len=most
        )
        parts.append(run_backend(backend, replace(case, metadata=metadata, q=case.q[at], k=case.k[at], v=case.v[at])))
        done += size
    return torch.cat(parts)


PROMPTS = [(17, 17), (1, 1), (40, 40), (5, 5), (33, 33), (64, 64)]
CHUNKS = [(7, 20), (16, 33), (30, 70), (2, 19)]
DECODES = [(1, kv) for kv in (2, 15, 16, 17, 49, 130, 33, 75)]
LENS = [*PROMPTS, *CHUNKS, *DECODES]
"""(query_len, kv_len) of each sequence: prompts without context, later chunks, decodes."""
P, C, D = (list(range(len(PROMPTS))), list(range(6, 10)), list(range(10, len(LENS))))
BATCHES = {
    "prompts": P,
    "prompts in reverse": P[::-1],
    "a prompt and a chunk": [2, 7],
    "prompts and chunks": [*C, *P],
    "decodes": D,
    "decodes in reverse": D[::-1],
    "two decodes": [D[1], D[5]],
    "64 decodes": D * 8,
    "mixed": [*P, *C, *D],
    "a prompt and decodes": [P[4], *D[2:]],
}
"""Name of a batch -> indices in LENS of the sequences in its step, decodes last."""


def invariance_case(
    spec: AttentionSpec, layout: CacheLayout, block_size: int, writer: CacheWriter, poison: float = float("nan")
) -> Case:
    """Return a case with all sequences of LENS over one filled cache, for a layer that requires batch invariance."""
    return make_case(LENS, replace(spec, invariance=Invariance.BATCH), layout, block_size, writer, poison=poison)


def outputs(backend: AttentionBackend, case: Case, rows: list[int]) -> list[Tensor]:
    """Return the outputs of some sequences of a case, computed in a step with only these sequences. rows: indices of the
    sequences in LENS."""
    starts = case.metadata.query_start_loc_cpu.tolist()
    lens = [LENS[row] for row in rows]
    tables = [case.metadata.block_table_cpu[row].tolist() for row in rows]
    metadata = AttentionMetadata.build(
        [q for q, _ in lens], [kv - q for q, kv in lens], tables, case.metadata.block_size, case.q.device
    )
    q, k, v = (torch.cat([t[starts[row] : starts[row + 1]] for row in rows]) for t in (case.q, case.k, case.v))
    out = run_backend(backend, replace(case, metadata=metadata, q=q, k=k, v=v))
    return list(torch.split(out, [q for q, _ in lens]))


def dependent(backend: AttentionBackend, case: Case) -> list[str]:
    """Return descriptions of the sequences whose output bits depend on other sequences, each with the name of a batch in which
    the bits differ."""
    served = {
        row
        for row, (query_len, kv_len) in enumerate(LENS)
        if Phase.of(query_len, kv_len - query_len) in backend.capabilities.phases
    }
    alone = {row: outputs(backend, case, [row])[0] for row in sorted(served)}
    assert all(bool(out.isfinite().all()) for out in alone.values())
    found = []
    for name, batch in BATCHES.items():
        rows = [row for row in batch if row in served]
        for row, out in zip(rows, outputs(backend, case, rows) if rows else [], strict=True):
            if not torch.equal(out, alone[row]):
                found.append(f"{name}: {LENS[row]}")
    return found
