"""Plans of a step: which backend computes which part, chosen anew in every step unless a CUDA graph has fixed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headway.contract import AttentionBackend, AttentionSpec, LayerCache, Phase, Plan
from headway.core.contract.backend import Backends
from headway.core.contract.layout import CacheWriter
from headway.core.select.costs import Shape
from headway.core.select.selector import Selector
from headway_vllm.metadata import CommonMetadata, Part, Parts, Rows, parts_of


class Work(NamedTuple):
    """The backends and plans of one part of a step, by kind of layer."""

    backends: list[AttentionBackend]
    plans: list[Plan]


class Step(NamedTuple):
    """A step as the layers of one group see it: the metadata that vLLM hands them."""

    num_tokens: int
    """Tokens of the step; vLLM's tensors may have more rows, of padding."""
    num_decode_tokens: int
    """Tokens of decodes, which are the first in the step."""
    slot_mapping: Tensor
    """int64 [num_tokens]"""
    decode: Work | None
    prefill: Work | None
    decode_writes: list[bool]
    """For each kind of layer, whether the backend of decodes writes k and v itself, as it may in a step of nothing else."""


class _Captured(NamedTuple):
    """A decode that vLLM has captured in a CUDA graph."""

    addresses: tuple[int, ...]
    step: Step


class Planner:
    """Makes the steps of one group of layers, which share block tables."""

    def __init__(
        self,
        kinds: Sequence[AttentionSpec],
        selector: Selector,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        may_write: bool = True,
        upper_bound_lens: bool = False,
    ) -> None:
        """kinds: the distinct specs of the layers. may_write: whether decodes may write k and v by position, not by slot_mapping.
        upper_bound_lens: see `parts_of`.
        """
        self.kinds = list(kinds)
        self._selector, self._block_size, self._max_model_len = selector, block_size, max_model_len
        self._may_write, self._upper_bound_lens = may_write, upper_bound_lens
        self._rows = Rows(max_num_seqs, self.kinds[0].device)
        self._captured: dict[int, _Captured] = {}
        """Number of rows -> plan; graphs of one size share it, since they replay one after the other."""

    def step(self, common: CommonMetadata) -> Step:
        """Plan a step. One whose decode was captured takes the captured plan, which then says what this step's lengths are."""
        parts = parts_of(common, self._block_size, self._rows, self._upper_bound_lens)
        decode, prefill = parts.decode, parts.prefill
        if decode is not None and prefill is None:
            captured = self._captured.get(decode.num_decodes)
            if captured is not None and captured.addresses == _addresses(decode):
                assert captured.step.decode is not None
                for backend, plan in zip(*captured.step.decode, strict=True):
                    backend.plan_for_replay(plan, decode)
                return captured.step._replace(slot_mapping=common.slot_mapping[: parts.num_tokens])
        return self._of(common, parts, self._work(decode), self._work(prefill))

    def captured_step(self, common: CommonMetadata) -> Step:
        """Plan a decode that vLLM captures, for all lengths that may come."""
        parts = parts_of(common, self._block_size, self._rows, self._upper_bound_lens)
        decode = parts.decode
        if decode is None or parts.prefill is not None:  # only a graph of decodes was promised: this one is run, not replayed
            return self.step(common)
        decode.seq_lens.fill_(1)  # contexts of garbage would only make the capture slow
        longest = torch.full((decode.num_decodes,), self._max_model_len, dtype=torch.int32)
        decode = replace(decode, seq_lens_cpu=longest, max_seq_len=self._max_model_len, upper_bound_lens=True)
        backends = self._for_graph(decode.num_decodes)
        chosen = [backends[kind] for kind in self.kinds]
        work = Work(chosen, [backend.plan_for_capture(decode) for backend in chosen])
        step = self._of(common, parts, work, None)
        self._captured[decode.num_decodes] = _Captured(_addresses(decode), step)
        return step

    def _for_graph(self, size: int) -> Backends:
        """The fastest backend over all lengths that can be captured."""
        return self._selector.instances[graph_backend(self._selector, size) or self._selector.selection.names[Phase.DECODE]]

    def _work(self, part: Part | None) -> Work | None:
        if part is None:
            return None
        shape = Shape.of(part.phase, part.query_lens, part.kv_lens)
        backends = self._selector.backends_of(shape)
        chosen = [backends[kind] for kind in self.kinds]
        return Work(chosen, [backend.plan(part) for backend in chosen])

    def _of(self, common: CommonMetadata, parts: Parts, decode: Work | None, prefill: Work | None) -> Step:
        writes = [False] * len(self.kinds)
        if decode is not None and prefill is None and self._may_write:
            writes = [backend.decode_writes for backend in decode.backends]
        return Step(parts.num_tokens, parts.num_decode_tokens, common.slot_mapping[: parts.num_tokens], decode, prefill, writes)


def graph_backend(selector: Selector, size: int) -> str | None:
    """The backend whose decode of `size` sequences a CUDA graph may hold: the fastest over all lengths; None: none can."""
    names = selector.decode_candidates(size)
    return next((name for name in names if all(each.captures(1) for each in selector.instances[name].values())), None)


def attend(
    step: Step, kind: int, tensors: tuple[Tensor, Tensor, Tensor], cache: LayerCache, writer: CacheWriter | None, out: Tensor
) -> None:
    """Attention of one layer, whose k and v are written to the cache on the way.

    kind: the layer's, in the planner's `kinds`. tensors: q [rows, num_heads, head_dim], k and v [rows, num_kv_heads, head_dim];
    rows past the step's tokens are padding. writer: None where another layer has filled the cache (k and v are not looked at).
    out: [rows, num_heads, head_dim].
    """
    count, first = step.num_tokens, step.num_decode_tokens
    q, k, v = tensors if len(tensors[0]) == count else [tensor[:count] for tensor in tensors]
    out = out if len(out) == count else out[:count]
    decode, prefill = step.decode, step.prefill
    if writer is None:
        if prefill is not None:  # which may read this step's k and v instead of the cache
            k, v = cache.gather(step.slot_mapping)
    elif step.decode_writes[kind] and decode is not None:
        decode.backends[kind].write_and_decode(q, k, v, cache, decode.plans[kind], out)
        return
    else:
        writer(k, v, cache, step.slot_mapping)
    if decode is not None:
        both = prefill is not None
        decode.backends[kind].decode(q[:first] if both else q, cache, decode.plans[kind], out[:first] if both else out)
    if prefill is not None:
        if first:
            q, k, v, out = q[first:], k[first:], v[first:], out[first:]
        prefill.backends[kind].prefill(q, k, v, cache, prefill.plans[kind], out)


def _addresses(part: Part) -> tuple[int, ...]:
    """Where the tensors lie that a captured plan reads."""
    return part.seq_lens.data_ptr(), part.block_table.data_ptr()
