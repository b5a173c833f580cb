"""What a library called bare, without Headway, is to the benchmark: a name, a version, and a call made ready."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from headway.core.contract.metadata import Phase
from headway.core.contract.support import YES, Support
from headway.testing.cases import Case
from headway.tuning.attempt import Attempt
from headway.tuning.work import PhaseName, Work

Call = Callable[[], Tensor]
"""One bare call; returns [num_tokens, num_heads, head_dim] under any leading shape."""

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Largest accepted relative error, by dtype; the dtypes peers take."""


class Peer(ABC):
    """One kernel of one library."""

    name: str
    distribution: str
    """What pip calls it."""
    package: str
    """Its top-level package."""
    block_size: int = 0
    """Of the paged cache it decodes from; 0 if it does not decode."""
    phases: frozenset[PhaseName] = frozenset({"decode", "prefill"})
    uniform_query_len: int = 1
    """Most query tokens a sequence in decode, the same for all."""
    extends: bool = False
    """Whether its prefill reads a context out of a cache of `block_size`."""

    @property
    def version(self) -> str:
        """Of the installed distribution; empty if there is none."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return ""

    def available(self, device: torch.device) -> Support:
        """Whether the functions it needs can be imported; nothing is on a CPU, where none of them has a kernel."""
        support = YES
        if find_spec(self.package) is None:
            support &= Support.no("package", self.distribution, "not installed", f"pip install {self.distribution}")
        if device.type != "cuda":
            support &= Support.no("device", "cuda", device.type)
        if not support:
            return support
        try:
            self.probe()
        except Exception as error:  # a library may raise anything while it loads
            return Support.no("import", f"what {self.name} calls", f"{type(error).__name__}: {error}")
        return YES

    def supports(self, work: Work) -> Support:
        """Whether the bare call can do this work."""
        spec, support = work.spec, YES
        if spec.dtype not in TOLERANCE:
            support &= Support.no("dtype", "bfloat16 or float16", str(spec.dtype).removeprefix("torch."))
        if spec.cache_dtype != spec.dtype:
            support &= Support.no("kv_dtype", "that of the layer", str(spec.cache_dtype).removeprefix("torch."))
        if spec.head_dim > 256:
            support &= Support.no("head_dim", "at most 256", spec.head_dim)
        if work.attention_phase is Phase.EXTEND and not self.extends:
            support &= Support.no("phase", "prefill without context", "extend")
        query_lens = {query_len for query_len, _ in work.lens}
        if work.phase == "decode" and (len(query_lens) > 1 or max(query_lens) > self.uniform_query_len):
            support &= Support.no("query_len", f"the same, at most {self.uniform_query_len}", sorted(query_lens))
        return support

    def prepare(self, case: Case) -> Call:
        """Everything a step needs before the call itself: reshaped inputs, masks, plans. No host copy of q, k or v."""
        return self.decode(case) if case.metadata.num_decodes else self.prefill(case)

    @abstractmethod
    def probe(self) -> None:
        """Import the functions it calls; raises whatever that raises."""

    @abstractmethod
    def decode(self, case: Case) -> Call:
        """The call of one decode step."""

    @abstractmethod
    def prefill(self, case: Case) -> Call:
        """The call of one dense causal prefill."""


def peer_attempt(peer: Peer, case: Case, error: Callable[[Tensor], float]) -> Attempt:
    """A library's bare call; its output is its own affair, its plan (flashinfer's) is made beforehand and not timed."""
    shape = case.q.shape
    return Attempt(peer.prepare(case), lambda out: error(out.reshape(shape)), TOLERANCE[case.spec.dtype], kernel=peer.name)
