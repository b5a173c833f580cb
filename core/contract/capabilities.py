"""What a backend claims, as plain data, and the one check that turns a claim into reasons."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.core.contract.layer import OPTIONAL
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES, KV_DTYPE_NAMES, AttentionSpec
from headway.core.contract.support import Reason, Support

ALL_PHASES = frozenset(Phase)
FEATURES = frozenset(OPTIONAL)
"""Optional fields of AttentionSpec; a backend lists those it computes, and is refused for the others."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend claims. Checked in one place, shown by `headway backends`, and tested both ways."""

    phases: frozenset[Phase]
    layouts: tuple[CacheLayout, ...] | None = None
    """Layouts it reads, preferred first; None: every one, because it reads through `LayerCache.gather`."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    kv_dtypes: tuple[torch.dtype, ...] = ()
    """Cache element types it reads besides the layer's own dtype."""
    devices: tuple[str, ...] = ("cuda",)
    """Device types, as in torch.device.type."""
    block_multiple: int = 1
    """block_size must be a multiple of this."""
    head_dims: tuple[int, ...] | None = None
    """Accepted head_dim; None: any."""
    v_head_dims: tuple[tuple[int, int], ...] | None = ()
    """Accepted pairs (head_dim, v_head_dim) beside equal ones of `head_dims`; None: any pair."""
    value_in_key: bool = False
    """It reads the value out of the key (`AttentionSpec.value_in_key`), in a layout that stores no value."""
    max_group_size: int | None = None
    """Most query heads that may share a kv head; None: any."""
    features: frozenset[str] = frozenset()
    """Out of FEATURES."""
    dense_prefill: bool = False
    """PREFILL reads this step's k and v and not the cache, so `layouts` and `block_multiple` do not bind it, and a layer without
    a cache can be served (`AttentionSpec.dense`)."""
    reads_whole_blocks: bool = False
    """It may load every slot of a sequence's last block and mask the scores of those past the end. Those slots must be finite:
    0 * NaN is NaN. The pool keeps that promise (zeroed when allocated, and a freed block keeps the finite rows it held), so a
    test poisons unused slots with a large number for such a backend, and with NaN for any other."""
    reads_live_slots: bool = False
    """Its DECODE of one new token a sequence loads no slot past a sequence's end from a cache whose rows lie in one piece. So a
    sequence's last block may end behind the memory (`LayerCache.open_blocks`), as in dense tensors that are seen as blocks."""
    contiguous_blocks: bool = False
    """It needs each block of a cache tensor to be one piece of memory: it follows the layout, and not the strides of memory that
    somebody else allocated. Asked by `AttentionBackend.accepts`."""
    exact_host_lengths: bool = False
    """Its plan of a decode needs the exact lengths on the host. It is neither captured in a graph nor planned where the host
    knows upper bounds alone (`AttentionMetadata.upper_bound_lens`)."""
    lse: bool = False
    """It fills `lse`, the logarithm of the sum of exp(score) over the keys, where `prefill` or `decode` gets one."""
    batch_invariant: bool = False
    """Where a layer asks for it (`AttentionSpec.batch_invariant`), the bits of a sequence's output do not depend on what else is
    in the step: no split, tile or grouping is chosen by the number of sequences or another's length, nor by the phase, which is
    EXTEND as soon as one sequence's is. Said of one new token a sequence in decode."""

    def check(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Every reason why this combination is outside the claim."""
        reasons = []

        def need(ok: bool, what: str, need: str, got: object, hint: str = "") -> None:
            if not ok:
                reasons.append(Reason(what, need, str(got), hint))

        phases = " or ".join(p.value for p in Phase if p in self.phases)
        need(phase in self.phases, "phase", phases, phase.value, f"name another backend for {phase.value}")
        need(spec.device.type in self.devices, "device", " or ".join(self.devices), spec.device.type)
        dtypes = " or ".join(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in self.dtypes)
        need(
            spec.dtype in self.dtypes,
            "dtype",
            dtypes,
            DTYPE_NAMES.get(spec.dtype, spec.dtype),
            "choose another --dtype",
        )
        kv_dtype = spec.cache_dtype
        need(
            kv_dtype == spec.dtype or kv_dtype in self.kv_dtypes,
            "kv_cache_dtype",
            " or ".join(["the layer's dtype", *(KV_DTYPE_NAMES.get(dtype, str(dtype)) for dtype in self.kv_dtypes)]),
            KV_DTYPE_NAMES.get(kv_dtype, kv_dtype),
        )
        paged = not (self.dense_prefill and phase is Phase.PREFILL)
        if self.layouts is not None and paged:
            names = " or ".join(known.name for known in self.layouts)
            need(layout in self.layouts, "kv_layout", names, layout.name, f"--kv-layout {self.layouts[0].name}")
        pieces = layout.contiguous_blocks or not (self.contiguous_blocks and paged)
        need(pieces, "kv_layout", "a layout whose blocks are one piece of memory each", layout.name)
        dims = (spec.head_dim, spec.v_head_dim)
        if dims[0] == dims[1]:
            known = self.head_dims
            need(known is None or dims[0] in known, "head_dim", " or ".join(map(str, known or ())), dims[0])
        elif self.v_head_dims is not None:
            pairs = " or ".join(f"{head_dim}/{v_head_dim}" for head_dim, v_head_dim in self.v_head_dims)
            need(dims in self.v_head_dims, "head_dim/v_head_dim", pairs or "equal ones", f"{dims[0]}/{dims[1]}")
        need(self.value_in_key or not spec.value_in_key, "value_in_key", "a backend that reads the value out of the key", "True")
        dense = not spec.dense or (self.dense_prefill and phase is Phase.PREFILL)
        need(dense, "dense", "a prompt, and a backend that reads no cache for it", phase.value)
        multiple = self.block_multiple
        need(
            not paged or block_size % multiple == 0,
            "block_size",
            f"a multiple of {multiple}",
            block_size,
            f"--block-size {multiple}",
        )
        if self.max_group_size is not None:
            need(
                spec.group_size <= self.max_group_size,
                "query heads a kv head",
                f"at most {self.max_group_size}",
                spec.group_size,
            )
        need(
            self.batch_invariant or not spec.batch_invariant,
            "batch_invariant",
            "a backend that declares it",
            "one that does not",
        )
        for feature in sorted(spec.features - self.features):
            need(False, feature, "a backend that computes it", f"{feature}={getattr(spec, feature)}")
        return Support(tuple(reasons))
