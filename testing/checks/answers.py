"""Answers held to float64: one instance over two steps, layers that share a plan, shared prefixes, padding, poison everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.spec import AttentionSpec
from headway.testing.cells import PHASES, CheckCell, Finding, Skipped, sibling_of
from headway.testing.inputs import steps_of
from headway.testing.oracle import StepSequence, attend, distance
from headway.testing.stage import Stage, close_all, open_all, sequences, without_stray_reads
from headway.testing.steps import Before, Lens, Turn, first_step, padding_rows

_LSE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 3e-3}
"""How far a log-sum-exp may be from the right one, which is about 4: sums of 16-bit inputs are kept in float32."""
_DATA = {torch.float32: 64.0, torch.bfloat16: 12.0, torch.float16: 12.0}
"""How many times the error that plain arithmetic of a dtype reaches a declared tolerance may be."""


def answer(stage: Stage, cell: CheckCell) -> str:
    """The steps of one kind of work, in one phase."""

    def run(poison: float) -> None:
        steps = steps_of(cell.work, cell.phase, cell.block_size) or [first_step(cell.phase, cell.block_size)]
        session = stage.session(cell, steps, poison=poison)
        kept: list[Turn] = []
        for number, lens in enumerate(steps):
            work = open_all(session, lens, like=kept)
            session.step(work, padding_rows(cell.phase))
            if cell.work == "again" and number == 2:  # the step after it has its lengths, and all but the last blocks
                kept = work
            else:
                close_all(session, sequences([*kept, *work]))

    without_stray_reads(run, stage.poison)
    return ""


def siblings(stage: Stage, cell: CheckCell) -> str:
    """Layers that differ in numbers alone, by turns in one process: what is kept for one must not be taken for the other."""
    own = stage.claimed.spec(cell)
    other = sibling_of(own)
    for phase in PHASES[cell.phase]:
        if not (support := stage.subject.supports(other, cell.layout, cell.block_size, phase)):
            raise Skipped.refused(support)
    lens = first_step(cell.phase, cell.block_size)
    sessions = [stage.session(cell, [lens] * 2, spec=spec) for spec in (other, own)]
    for session in (*sessions, sessions[0]):
        work = open_all(session, lens)
        try:
            session.step(work)
        except Finding as finding:
            if not finding.guess or finding.guess.startswith("wrong in"):
                finding.guess = "keeps something of one layer for another that differs in numbers alone"
            raise
        close_all(session, sequences(work))
    return ""


def bounds(stage: Stage, cell: CheckCell) -> str:
    """Decode where the host knows upper bounds of the lengths alone."""
    without_stray_reads(lambda poison: _bounds(stage, cell, poison), stage.poison)
    return ""


def _bounds(stage: Stage, cell: CheckCell, poison: float) -> None:
    lens: Lens = [(1, length, 0) for length in (3, 17, cell.block_size, 2 * cell.block_size + 1, 40, 1)]
    session = stage.session(cell, [lens], poison=poison, extra_tokens=len(lens) * (cell.block_size + 8))
    work = open_all(session, lens)
    slack = min(8, cell.block_size - 1)
    for turn in work:  # an engine gives room for what may come, so the table is as long as the bound says
        session.reserve(turn.seq, turn.seq.length + 1 + slack)
    step = session.lay_out(work)
    exact = step.metadata
    step.metadata = replace(
        exact, seq_lens_cpu=exact.seq_lens_cpu + slack, max_seq_len=exact.max_seq_len + slack, upper_bound_lens=True
    )
    before = Before(step)
    with torch.inference_mode():
        session.attention.begin(step.metadata, *session.backends)
        session.run(step)
    session.previous = exact.seq_lens_cpu.add(slack).tolist()
    session.finish(step, work, before)


def tolerance(stage: Stage, cell: CheckCell) -> str:
    """The declared tolerance, against what plain arithmetic of the dtype reaches."""
    spec = stage.claimed.spec(cell)
    declared = float(stage.subject.backend.tolerance[spec.dtype])
    reached = _plain_error(spec)
    most = _DATA[spec.dtype] * reached
    if not 0 < declared <= most:
        raise Finding(
            f"tolerance for {cell.dtype} must be at most {most:.2g}: plain arithmetic of that type reaches {reached:.2g}; "
            f"declared is {declared:.2g}",
            guess="a tolerance that would let wrong answers pass",
        )
    return f"declared {declared:.2g}, plain arithmetic reaches {reached:.2g}"


def _plain_error(spec: AttentionSpec) -> float:
    """Relative error of a softmax in float32 whose weights and output are rounded to the layer's dtype."""
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


def lse(stage: Stage, cell: CheckCell) -> str:
    """The log-sum-exp of every query, where a backend declares it."""
    lens = (steps_of(cell.work, cell.phase, cell.block_size) or [first_step(cell.phase, cell.block_size)])[0]
    session = stage.session(cell, [lens])
    work = open_all(session, lens)
    step = session.lay_out(work)
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
    if session.spec.cache_dtype != session.spec.dtype:  # a key may be rounded to the layer's type once its scale is in it
        allowed += (8 + abs(session.numbers.lift)) * torch.finfo(session.spec.dtype).eps
    answers = [attend(row.spec, row.q, *row.kv(), row.context) for row in step.rows[0]]
    for number, (row, tokens) in enumerate(zip(step.rows[0], step.tokens, strict=True)):
        out, right = answers[number]
        apart = float((sums[:, tokens].double() - right).abs().nan_to_num(torch.inf).max())
        if apart > allowed + session.numbers.slack:
            raise Finding(
                f"lse of sequence {number} (query_len {row.query_len}, kv_len {row.kv_len}): expected {float(right[0, 0]):.5g}, "
                f"got {float(sums[0, tokens][0]):.5g}; apart by up to {apart:.2g}, allowed {allowed:.2g}",
                guess=_looks_of_lse(sums[:, tokens].double(), right)
                or _looks_of_sums(sums.double(), [sums for _, sums in answers], step.rows[0], allowed + session.numbers.slack),
            )
        limit = 8 * float(session.backends[0][session.spec].tolerance[session.spec.dtype]) + session.numbers.slack
        if not distance(given.out[tokens], out) <= limit:
            raise Finding(f"with lse the output of sequence {number} is another than without")
    return ""


def _looks_of_lse(got: torch.Tensor, right: torch.Tensor) -> str:
    ratio = float(got.norm() / right.norm())
    if abs(ratio - 1.442695) < 1e-2:
        return "a logarithm to base 2 where the natural one is asked for"
    if not bool(got.isfinite().all()):
        return "lse is not written for every query"
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if torch.equal(got, got.to(dtype).double()):
            return f"lse is rounded to {name}"
    return ""


def _looks_of_sums(got: torch.Tensor, right: list[torch.Tensor], rows: Sequence[StepSequence], allowed: float) -> str:
    """A guess about a step's sums, [num_heads, num_tokens], as a whole."""
    count = sum(sums.shape[1] for sums in right)
    got = got[:, :count]
    if torch.allclose(got.reshape(count, -1).T, torch.cat(right, 1), rtol=0.0, atol=allowed):
        return "lse in the order [num_tokens, num_heads]; it is [num_heads, num_tokens]"
    if rows[0].spec.sinks is not None:
        plain = [attend(replace(row.spec, sinks=None), row.q, *row.kv(), row.context)[1] for row in rows]
        if torch.allclose(got, torch.cat(plain, 1), rtol=0.0, atol=allowed):
            return "lse without the sinks"
    return ""
