"""Checks of steps that the engine captures: each step is planned once for the maximum lengths, then replayed with other lengths.

On a CPU, the calls are repeated one by one because no graph can be replayed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from headway.core.contract.backend import Plan
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cells import FEW, CheckCell, Skipped, placed
from headway.core.oracle.steps import GUARD, Before, Lens, StepInputs
from headway.testing.kit.attention import AttentionStage, close_all, open_all, without_stray_reads
from headway.testing.kit.checks.every import Recorded
from headway.testing.kit.session import Session

ROWS = 8
LONGEST = {"cpu": 700, "cuda": 2048}
_FEW_ON_A_CPU = 200
"""Maximum length in tokens of sequences on a CPU, for layers with many query heads, which are slow in an interpreter."""
PROMPT = 136
"""Number of tokens for which a prompt is captured."""
_ALIGN = 4


def _check_captured(stage: AttentionStage, tokens: int) -> None:
    """Skip the check if engines never capture steps with this number of tokens per sequence. tokens: number of tokens per
    sequence.

    :raises Skipped: if no engine captures such a step.
    """
    captures = stage.subject.backend.captures(tokens)
    if not captures:
        what, need, got, _ = captures.reasons[0]
        raise Skipped(f"{what}: needs {need}, got {got}, so no engine captures it")


@without_stray_reads
def graph(stage: AttentionStage, cell: CheckCell, poison: float) -> None:
    """Capture a step at the maximum length. Then replay it at the maximum length, at ragged lengths with padding rows, at short
    lengths, and at the maximum length again."""
    tokens = 4 if cell.phase == "verify" else 1
    _check_captured(stage, tokens)
    device = stage.subject.device.type
    longest = _FEW_ON_A_CPU if cell.work == FEW and device == "cpu" else LONGEST[device]
    turns = _turns(longest, cell.block_size, tokens)
    session = stage.session(cell, [turns[0]] * 2, poison=poison)
    captured = _Captured(session, longest, tokens)
    session.planned = longest
    for number, lens in enumerate(turns):
        work = open_all(session, lens)
        padding = 0 if tokens > 1 else ROWS - len(lens)
        step = session.lay_out(work, padding)
        step.metadata = captured.load(step.metadata)
        before = Before(step)
        captured.recorded.replay()
        with placed(f"replay {number + 1} of a decode that was planned at length {longest}"):
            session.finish(step, work, before)
        close_all(session, [turn.seq for turn in work])


def prompt(stage: AttentionStage, cell: CheckCell) -> str:
    """Capture a prompt of PROMPT tokens, and replay the capture with shorter, padded prompts, as an idle engine does."""
    _check_captured(stage, PROMPT)
    # In an engine's pool, slots without a token are finite, and padding may attend to them.
    session = stage.session(cell, [[(PROMPT, 0, 0)]], poison=0.0)
    captured = _CapturedPrompt(session)
    b = cell.block_size
    for number, count in enumerate((PROMPT, 1, b, b + 1, 2 * b - 1, PROMPT - 3)):
        count = min(count, PROMPT)
        work = open_all(session, [(count, 0, 0)])
        step = session.lay_out(work)
        before = Before(step)
        captured.load(step.metadata)
        captured.recorded.replay()
        for given in step.inputs:
            given.guarded[GUARD + count :].fill_(math.nan)  # the output of padding is unused, but the judge reads it
        with placed(f"replay {number + 1}, {count} tokens, of a prompt that was captured at {PROMPT}"):
            session.finish(step, work, before)
        close_all(session, [turn.seq for turn in work])
    return ""


def _turns(longest: int, block_size: int, tokens: int) -> list[Lens]:
    drafts = tokens - 1

    def lens(contexts: list[int]) -> Lens:
        return [(tokens, max(1, min(context, longest - tokens)), drafts) for context in contexts]

    b = block_size
    ragged = [1, 16, b, b - 1, 2 * b + 1, longest // 2, 63, 5]
    return [
        lens([longest] * ROWS),
        lens(ragged if tokens > 1 else ragged[:5]),
        lens([2, 3, 5, 7, 11, 13, 17, 19]),
        lens([longest, *ragged[1:]]),
    ]


class _Recorded:
    """Static tensors of a step, the layers that run on them and, on a GPU, the layers' CUDA graph."""

    def __init__(self, session: Session, count: int) -> None:
        """count: number of tokens of the static tensors."""
        self._session = session
        self._inputs: list[StepInputs] = [buffers.first(count) for buffers in session.buffers]

    def _record(self) -> None:
        self.recorded = Recorded(self._run, self._session.spec.device)

    def _run(self) -> None:
        for layer, given in enumerate(self._inputs):
            self._session.attention.run(layer, given.q, given.k, given.v, given.out)


class _Captured(_Recorded):
    """Static tensors, plans and, on a GPU, the CUDA graph of a decode step."""

    def __init__(self, session: Session, longest: int, tokens: int) -> None:
        super().__init__(session, ROWS * tokens)
        device = session.spec.device
        blocks = -(-longest // session.block_size)
        width = -(-blocks // _ALIGN) * _ALIGN
        starts = torch.arange(ROWS + 1, dtype=torch.int32) * tokens
        count = ROWS * tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.static = AttentionMetadata(
            num_prefills=0,
            num_decodes=ROWS,
            num_prefill_tokens=0,
            num_decode_tokens=count,
            query_start_loc=starts.to(device),
            seq_lens=zeros(ROWS),
            context_lens=zeros(ROWS),
            block_table=zeros(ROWS, width),
            slot_mapping=zeros(count, dtype=torch.int64) - 1,
            block_size=session.block_size,
            max_query_len=tokens,
            max_seq_len=longest,
            query_start_loc_cpu=starts,
            seq_lens_cpu=torch.full((ROWS,), longest, dtype=torch.int32),
            block_table_cpu=torch.zeros((ROWS, width), dtype=torch.int32),
            num_blocks=session.num_blocks,
            upper_bound_lens=True,
        )
        decode = session.backends[1]
        with torch.inference_mode():
            self._plans: dict[AttentionSpec, Plan] = session.attention.begin_graph(self.static, decode)
            self._record()

    def load(self, now: AttentionMetadata) -> AttentionMetadata:
        """Update the static tensors and the plans, and return the metadata passed to the plans."""
        static = self.static
        rows, width = now.block_table.shape
        static.block_table.zero_()
        static.block_table[:rows, :width].copy_(now.block_table)
        table = torch.zeros_like(static.block_table_cpu)
        table[:rows, :width] = now.block_table_cpu
        for name in ("seq_lens", "context_lens", "slot_mapping"):
            getattr(static, name).copy_(getattr(now, name))
        replayed = replace(static, seq_lens_cpu=now.seq_lens_cpu, block_table_cpu=table, upper_bound_lens=False)
        with torch.inference_mode():
            for spec, plan in self._plans.items():
                self._session.backends[1][spec].plan_for_replay(plan, replayed)
        return replayed


class _CapturedPrompt(_Recorded):
    """Static tensors, plans and, on a GPU, the CUDA graph of one prompt of PROMPT tokens."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, PROMPT)
        device = session.spec.device
        table = torch.zeros((1, -(-PROMPT // session.block_size)), dtype=torch.int32, device=device)
        slots = torch.full((PROMPT,), -1, dtype=torch.int64, device=device)
        self._static = AttentionMetadata.one_prompt(PROMPT, table, slots, session.block_size, session.num_blocks)
        with torch.inference_mode():
            session.attention.begin_prefill_graph(self._static, session.backends[0])
            self._record()

    def load(self, now: AttentionMetadata) -> None:
        """Update slots and blocks for a prompt; the remaining tokens are padding."""
        static = self._static
        static.slot_mapping.fill_(-1)
        static.slot_mapping[: now.num_tokens] = now.slot_mapping
        static.block_table.zero_()
        static.block_table[:, : now.block_table.shape[1]] = now.block_table
