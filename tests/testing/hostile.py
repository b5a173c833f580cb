"""Hostile backends for the kit's own tests: what a child process and the slower checks must find."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import ClassVar

import torch

from headway.backends.sdpa import SDPAMath
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.capabilities import Capabilities
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.testing.broken.attention import PlainBackend as _Plain

ROWS = ("slot", "block", "head", "dim")
SLOTS_FIRST = CacheLayout("slots_first", {"key": ROWS, "value": ROWS})
_KEPT: list[torch.Tensor] = []


class Crashes(_Plain):
    name = "crashes"

    def decode(self, q, cache, plan, out, lse=None):
        os.kill(os.getpid(), 11)


class ReadsFarAway(SDPAMath):
    """Its decode leaves a fault behind, after which the process can use its GPU no more."""

    name = "reads_far_away"

    def decode(self, q, cache, plan, out, lse=None):
        super().decode(q, cache, plan, out, lse)
        q.flatten()[torch.full((1,), 1 << 40, device=q.device)]


class Exits(_Plain):
    name = "exits"

    def plan(self, metadata):
        os._exit(3)


class Hangs(_Plain):
    name = "hangs"

    def decode(self, q, cache, plan, out, lse=None):
        time.sleep(600)


class HangsAndTells(_Plain):
    name = "hangs_and_tells"

    def decode(self, q, cache, plan, out, lse=None):
        open(f"hangs-{os.getpid()}", "w").close()  # in the folder of the command
        time.sleep(600)


class MasksCausally(SDPAMath):
    name = "masks_causally"

    def __init__(self, spec, *rest):
        super().__init__(replace(spec, causal=True), *rest)


class WiderWindow(SDPAMath):
    name = "wider_window"

    def __init__(self, spec, *rest):
        super().__init__(replace(spec, sliding_window=spec.sliding_window and spec.sliding_window + 1), *rest)


class Raises(_Plain):
    name = "raises"

    def decode(self, q, cache, plan, out, lse=None):
        raise ValueError("no kernel for this")


class Prints(_Plain):
    name = "prints"

    def plan(self, metadata):
        print("hello from the kernel")
        return super().plan(metadata)


class NoGpu(_Plain):
    name = "no-gpu"

    def decode(self, q, cache, plan, out, lse=None):
        raise RuntimeError("0 active drivers ([]). There should only be one.")  # Triton's words


class Leaks(_Plain):
    name = "leaks"

    def plan(self, metadata):
        _KEPT.append(torch.zeros(4096))
        return super().plan(metadata)


class AnyOption(_Plain):
    name = "any-option"
    options: ClassVar = {"splits": "how many"}

    @classmethod
    def check_options(cls, options):
        pass


class LooseTolerance(_Plain):
    name = "loose-tolerance"
    tolerance: ClassVar = {torch.float32: 1.0, torch.bfloat16: 1.0, torch.float16: 1.0}


class WrongBeyond(_Plain):
    name = "wrong-beyond-1024"

    def sequence(self, q, keys, values, context, number, metadata):
        return super().sequence(q, keys[:1024], values[:1024], min(context, 1024 - len(q)), number, metadata)


class MutatesMetadata(_Plain):
    name = "mutates-metadata"

    def plan(self, metadata):
        metadata.seq_lens_cpu.add_(0)
        metadata.block_table.add_(1).sub_(1)
        metadata.slot_mapping.clamp_min_(0).add_(1)
        return super().plan(metadata)


class CachesByAddress(_Plain):
    name = "caches-by-address"
    _seen: ClassVar = {}

    def decode(self, q, cache, plan, out, lse=None):
        key = (q.data_ptr(), tuple(q.shape))
        if key not in self._seen:
            super().decode(q, cache, plan, out)
            self._seen[key] = out.clone()
        out.copy_(self._seen[key])


class DenseAsOne(_Plain):
    """Reads k and v of a prompt by address, as if they were tensors of their own."""

    name = "ignores-strides"
    capabilities = replace(_Plain.capabilities, dense_prefill=True)

    def prefill(self, q, k, v, cache, plan, out, lse=None):
        if plan.metadata.phase is not Phase.PREFILL:
            return self.decode(q, cache, plan, out)
        start = 0
        own = v.as_strided(v.shape, (v.shape[1] * v.shape[2], v.shape[2], 1), v.storage_offset())
        for number, n in enumerate(plan.metadata.query_lens):
            tokens = slice(start, start + n)
            out[tokens] = self.sequence(q[tokens], k[tokens], own[tokens], 0, number, plan.metadata)
            start += n


class LeaksBetweenLayers(_Plain):
    """Keeps the first layer's rows in the plan, which all layers share."""

    name = "leaks-between-layers"

    def decode(self, q, cache, plan, out, lse=None):
        plan.first = getattr(plan, "first", cache)
        super().decode(q, plan.first, plan, out)


class DecodeOnly(AttentionBackend):
    name = "decode-only"
    capabilities = Capabilities(phases=frozenset({Phase.DECODE}), devices=("cpu",), dtypes=(torch.float32,))

    def plan(self, metadata):
        return metadata

    def decode(self, q, cache, plan, out, lse=None):
        plain = _Plain(self.spec, self.layout, self.block_size)
        plain.decode(q, cache, plain.plan(plan), out)


class NoPrompts(_Plain):
    """Serves tokens after a context alone, and leaves prompts to others."""

    name = "no-prompts"
    capabilities = replace(_Plain.capabilities, phases=frozenset({Phase.EXTEND, Phase.DECODE}), dtypes=(torch.float32,))


class OwnLayout(_Plain):
    name = "own-layout"
    capabilities = replace(_Plain.capabilities, layouts=(SLOTS_FIRST,), dtypes=(torch.float32,))


class FewHeads(_Plain):
    name = "few-heads"
    capabilities = replace(_Plain.capabilities, max_group_size=16, dtypes=(torch.float32,))


class ChangesTheUmask(_Plain):
    name = "changes-the-umask"

    def decode(self, q, cache, plan, out, lse=None):
        os.umask(0o000)
        super().decode(q, cache, plan, out)
