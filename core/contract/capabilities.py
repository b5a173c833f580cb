"""Capabilities: what a backend claims, as plain data, and the one check that turns a claim into reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm

import torch

from headway.core.contract.layer import BLOCK_MULTIPLE, OPTIONAL
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES, KV_DTYPE_NAMES, AttentionSpec
from headway.core.contract.support import Reason, Support

ALL_PHASES = frozenset(Phase)
FEATURES = frozenset(OPTIONAL)
"""Optional fields of AttentionSpec, `"sliding_window"`, `"softcap"`, `"alibi_slopes"` and `"sinks"`: a backend lists those it
computes, and is refused for the others."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The claims of a backend: checked in one place, shown by `headway backends`, and tested both ways by the kit."""

    phases: frozenset[Phase]
    layouts: tuple[CacheLayout, ...] | None = None
    """Layouts that the backend reads, preferred first; None: every one, because it reads through `LayerCache.gather`."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    kv_dtypes: tuple[torch.dtype, ...] = ()
    """Cache element types that the backend reads besides the layer's own dtype."""
    devices: tuple[str, ...] = ("cuda",)
    """Device types, as in torch.device.type."""
    block_multiple: int = 1
    """block_size must be a multiple of this."""
    head_dims: tuple[int, ...] | None = None
    """Accepted head_dim where values are as long as keys; None: any; empty: none, as of a backend for latents alone."""
    v_head_dims: tuple[tuple[int, int], ...] | None = ()
    """Accepted pairs (head_dim, v_head_dim) that differ; equal ones are those of `head_dims`. None: any pair."""
    value_in_key: bool = False
    """The backend reads the value out of the key (`AttentionSpec.value_in_key`), in a layout that stores no value."""
    max_group_size: int | None = None
    """Most query heads that may share a kv head; None: any."""
    features: frozenset[str] = frozenset()
    """Optional fields of AttentionSpec that the backend computes, out of FEATURES."""
    dense_prefill: bool = False
    """PREFILL reads this step's k and v and not the cache, so `layouts` and `block_multiple` do not bind it, and a layer without
    a cache can be served (`AttentionSpec.dense`)."""
    non_causal: bool = False
    """PREFILL also computes attention in which queries see later keys (`AttentionSpec.causal` is False): all of their sequence,
    and with the feature sliding_window those on both sides that are nearer than the window. Needs `dense_prefill`."""
    reads_whole_blocks: bool = False
    """The backend may load every slot of a sequence's last block and mask the scores of those past the end. Those slots must be
    finite: 0 * NaN is NaN. The pool keeps that promise (zeroed when allocated, and a freed block keeps the finite rows it
    held), so a test poisons unused slots with a large number for such a backend, and with NaN for any other."""
    reads_live_slots: bool = False
    """DECODE of one new token per sequence loads no slot past a sequence's end from a cache whose rows lie in one piece. So a
    sequence's last block may end behind the memory (`LayerCache.open_blocks`), as in dense tensors that are seen as blocks."""
    contiguous_blocks: bool = False
    """Each block of a cache tensor must be one piece of memory: the backend follows the layout, and not the strides of memory
    that somebody else allocated. Checked by `AttentionBackend.accepts`."""
    exact_host_lengths: bool = False
    """The plan of a decode needs the exact lengths on the host. It is neither captured in a graph nor planned where the host
    knows upper bounds alone (`AttentionMetadata.upper_bound_lens`)."""
    shares_plans: bool = False
    """A plan serves every instance whose layer is of the same kind (`AttentionSpec.kind`): sinks and scales of the cache are the
    instance's own, and no plan holds them. A step is then planned once for layers that differ in these alone, as gpt-oss's do."""
    lse: bool = False
    """The backend fills `lse`, the logarithm of the sum of exp(score) over the keys, where `prefill` or `decode` gets one."""
    batch_invariant: bool = False
    """Where a layer asks for batch invariance (`AttentionSpec.batch_invariant`), the bits of a sequence's output do not depend
    on what else is in the step: no split, tile or grouping is chosen by the number of sequences or another's length, nor by the
    phase, which is EXTEND as soon as one sequence's is. In decode the claim covers one new token per sequence."""

    def check(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Return every reason why this combination lies outside the claims; truthy where there is none. Nothing is raised."""
        paged = not (self.dense_prefill and phase is Phase.PREFILL)
        refused = (
            self._refuse_types(spec, phase),
            self._refuse_layout(spec, layout, block_size, paged),
            self._refuse_heads(spec),
            self._refuse_sizes(spec, block_size, phase, paged),
            self._refuse_features(spec),
        )
        return Support(tuple(chain.from_iterable(refused)))

    def reads_cache_of(self, spec: AttentionSpec, block_size: int) -> bool:
        """Whether a cache of this layer lies in some layout that the backend reads; where not, another layout is no remedy."""
        reads = self.value_in_key or not spec.value_in_key
        return reads and (self.layouts is None or bool(self._fitting(self.layouts, spec, block_size)))

    @staticmethod
    def _fitting(layouts: Sequence[CacheLayout], spec: AttentionSpec, block_size: int) -> Sequence[CacheLayout]:
        return [layout for layout in layouts if layout.check(spec, block_size)]

    def _other_cache(self, spec: AttentionSpec) -> str:
        """The flag that gives a layer a cache of a type that the backend reads; empty if there is none."""
        if spec.dense:
            return ""
        own = {"auto": None, **{KV_DTYPE_NAMES[each]: each for each in self.kv_dtypes if each in KV_DTYPE_NAMES}}
        for name, kv_dtype in own.items():
            other = replace(spec, kv_dtype=kv_dtype, k_scale=1.0, v_scale=1.0)
            if other.cache_dtype != spec.cache_dtype and self.reads_cache_of(other, BLOCK_MULTIPLE):
                return f"--kv-cache-dtype {name}"
        return ""

    def _refuse_types(self, spec: AttentionSpec, phase: Phase) -> Iterator[Reason]:
        if phase not in self.phases:
            served = (each.value for each in Phase if each in self.phases)
            yield Reason("phase", _either(served), phase.value, f"name another backend for {phase.value}")
        if spec.device.type not in self.devices:
            yield Reason("device", _either(self.devices), spec.device.type)
        if spec.dtype not in self.dtypes:
            named = (DTYPE_NAMES.get(each, str(each)) for each in self.dtypes)
            yield Reason("dtype", _either(named), str(DTYPE_NAMES.get(spec.dtype, spec.dtype)), "choose another --dtype")
        own = spec.cache_dtype
        if own != spec.dtype and own not in self.kv_dtypes:
            named = (KV_DTYPE_NAMES.get(each, str(each)) for each in self.kv_dtypes)
            need = _either(["the layer's dtype", *named])
            yield Reason("kv_cache_dtype", need, str(KV_DTYPE_NAMES.get(own, own)), self._other_cache(spec))

    def _refuse_layout(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, paged: bool) -> Iterator[Reason]:
        if self.layouts is not None and paged:
            latents_alone = not any(known.has_value for known in self.layouts)
            if latents_alone and not spec.value_in_key:
                names = _either(known.name for known in self.layouts)
                need = f"latent attention, whose values lie in the keys: the backend reads {names} alone"
                yield Reason("layer", need, "keys and values of their own", "name another backend")
            elif layout not in self.layouts:
                fitting = self._fitting(self.layouts, spec, block_size)  # a layout that cannot hold the layer is no remedy
                hint = f"--kv-layout {fitting[0].name}" if fitting else self._other_cache(spec)
                yield Reason("kv_layout", _either(known.name for known in self.layouts), layout.name, hint)
        if self.contiguous_blocks and paged and not layout.contiguous_blocks:
            yield Reason("kv_layout", "a layout whose blocks are one piece of memory each", layout.name)

    def _refuse_heads(self, spec: AttentionSpec) -> Iterator[Reason]:
        dims = (spec.head_dim, spec.v_head_dim)
        if dims[0] == dims[1]:
            if self.head_dims is not None and dims[0] not in self.head_dims:
                sizes = _either(map(str, self.head_dims)) or "values of another length than keys"
                yield Reason("head_dim", sizes, str(dims[0]))
        elif self.v_head_dims is not None and dims not in self.v_head_dims:
            pairs = _either(f"{head_dim}/{v_head_dim}" for head_dim, v_head_dim in self.v_head_dims)
            yield Reason("head_dim/v_head_dim", pairs or "equal ones", f"{dims[0]}/{dims[1]}")
        if spec.value_in_key and not self.value_in_key:
            yield Reason("value_in_key", "a backend that reads the value out of the key", "True")

    def _refuse_sizes(self, spec: AttentionSpec, block_size: int, phase: Phase, paged: bool) -> Iterator[Reason]:
        multiple, most = self.block_multiple, self.max_group_size
        if spec.dense and paged:
            yield Reason("dense", "a prompt, and a backend that reads no cache for it", phase.value)
        if paged and block_size % multiple:
            smallest = lcm(multiple, BLOCK_MULTIPLE)
            yield Reason("block_size", f"a multiple of {multiple}", str(block_size), f"--block-size {smallest}")
        if most is not None and spec.group_size > most:
            yield Reason("query heads a kv head", f"at most {most}", str(spec.group_size))

    def _refuse_features(self, spec: AttentionSpec) -> Iterator[Reason]:
        if spec.batch_invariant and not self.batch_invariant:
            yield Reason("batch_invariant", "a backend that declares it", "one that does not")
        if not spec.causal and not self.non_causal:
            yield Reason("causal", "a backend that declares non_causal, so that queries see later keys", "causal=False")
        for feature in sorted(spec.features - self.features):
            yield Reason(feature, "a backend that computes it", f"{feature}={getattr(spec, feature)}")


def _either(values: Iterable[str]) -> str:
    return " or ".join(values)
