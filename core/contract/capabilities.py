"""`Capabilities`: a backend's claims as plain data, and the check that returns every reason why a layer is outside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import lcm

import torch

from headway.core.contract.layer import BLOCK_MULTIPLE, OPTIONAL, Invariance
from headway.core.contract.layout import CacheLayout
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES, KV_DTYPE_NAMES, AttentionSpec
from headway.core.contract.support import Reason, Support

ALL_PHASES = frozenset(Phase)
RULE_FEATURES = frozenset({"rule", "rule.blocks", "rule.ahead"})
"""Features of a layer with an `AttentionRule`. `rule` covers `score`, `mask` and `gate`; the others are `blocks` and `ahead`."""
FEATURES = frozenset(OPTIONAL) - RULE_FEATURES
"""Optional fields of `AttentionSpec`: `"sliding_window"`, `"softcap"`, `"alibi_slopes"` and `"sinks"`. A backend lists the
features that it computes, out of these and RULE_FEATURES; layers with other features are refused."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Claims of a backend. `headway backends` shows them; the conformance kit tests supported and refused layers."""

    phases: frozenset[Phase]
    layouts: tuple[CacheLayout, ...] | None = None
    """Supported layouts, preferred first. None means every layout, because the backend reads through `LayerCache.gather`."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    kv_dtypes: tuple[torch.dtype, ...] = ()
    """Supported element types of the cache, in addition to the layer's dtype."""
    devices: tuple[str, ...] = ("cuda",)
    """Supported device types, as in torch.device.type."""
    block_multiple: int = 1
    """Number that block_size must be a multiple of."""
    head_dims: tuple[int, ...] | None = None
    """Supported values of head_dim for layers with an equal v_head_dim. None means any. Empty means none, as in backends that
    support only MLA."""
    v_head_dims: tuple[tuple[int, int], ...] | None = ()
    """Supported pairs (head_dim, v_head_dim) of different sizes; `head_dims` lists the equal sizes. None means any pair."""
    value_in_key: bool = False
    """True if the backend can read the value from the key (`AttentionSpec.value_in_key`), in layouts without a value tensor."""
    max_group_size: int | None = None
    """Maximum number of query heads per kv head. None means any."""
    features: frozenset[str] = frozenset()
    """Features of layers that the backend computes, out of FEATURES and RULE_FEATURES."""
    dense_prefill: bool = False
    """True if PREFILL reads this step's k and v instead of the cache. `layouts` and `block_multiple` then do not apply to
    PREFILL, and layers without a cache are supported (`AttentionSpec.dense`)."""
    non_causal: bool = False
    """True if PREFILL also supports non-causal layers (`AttentionSpec.causal` is False), in which queries see later keys: the
    whole sequence or, with the feature sliding_window, the window on both sides. Requires `dense_prefill`."""
    reads_whole_blocks: bool = False
    """True if the backend may load every slot of a sequence's last block and mask the scores of slots after the sequence's end.
    Values in these slots must be finite, since 0 * NaN is NaN. The pool guarantees this: blocks are zeroed when allocated, and
    freed blocks keep finite rows. Tests therefore fill unused slots with a large number for such a backend, and with NaN for
    other backends."""
    reads_live_slots: bool = False
    """True if DECODE of one token per sequence, from a cache with contiguous rows, loads no slots after a sequence's end. A
    sequence's last block may then extend past the end of the memory (`LayerCache.open_blocks`), as in dense tensors viewed as
    blocks."""
    contiguous_blocks: bool = False
    """True if each block of a cache tensor must be contiguous, because the backend computes addresses from the layout and not
    from the tensor's strides. Checked by `AttentionBackend.accepts`."""
    exact_host_lengths: bool = False
    """True if a decode plan needs exact lengths on the host. Such decodes are not captured in CUDA graphs, nor planned while the
    host knows only upper bounds (`AttentionMetadata.upper_bound_lens`)."""
    shares_plans: bool = False
    """True if one plan is valid for all instances with the same `AttentionSpec.kind`. Plans then must not contain sinks or cache
    scales, which belong to the instance. Layers that differ only in sinks or scales share one plan per step (gpt-oss)."""
    lse: bool = False
    """True if `prefill` and `decode` fill `lse`, the logarithm of the sum of exp(score) over the keys, if it is passed."""
    zeroes_padding: bool = False
    """True if `decode` writes zeros to `out` and, with `lse`, -inf (the sink, if the layer has sinks) to `lse` in padding rows,
    which see no key. Without this claim, the backend may also leave these rows as they were."""
    batch_invariant: bool = False
    """Older name of `invariance=Invariance.BATCH`."""
    invariance: Invariance = Invariance.NONE
    """Highest level that the backend supports as `AttentionSpec.invariance`. With BATCH, no split, tile or grouping may depend on
    the number of sequences, on another sequence's length, or on the phase of a prompt (one sequence in EXTEND makes a step
    EXTEND); in decode, it covers one new token per sequence. With PHASE, a token's bits depend only on its position, its query
    and its sequence's keys and values."""

    @property
    def invariance_level(self) -> Invariance:
        """Highest level that the backend declares, under either name."""
        return max(self.invariance, Invariance(self.batch_invariant))

    def check(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Return every reason why a combination is outside the claims. The result is truthy if there is none. Never raises."""
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
        """Return whether the backend reads any layout that can hold this layer's cache. If it does not, selecting a different
        layout does not help."""
        reads = self.value_in_key or not spec.value_in_key
        return reads and (self.layouts is None or bool(self._fitting(self.layouts, spec, block_size)))

    @staticmethod
    def _fitting(layouts: Sequence[CacheLayout], spec: AttentionSpec, block_size: int) -> Sequence[CacheLayout]:
        return [layout for layout in layouts if layout.check(spec, block_size)]

    def _other_cache(self, spec: AttentionSpec) -> str:
        """Return the flag that selects a cache type readable by the backend for this layer, or "" if no type qualifies."""
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
                sizes = _sizes(self.head_dims) or "values of another length than keys"
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
        if spec.invariance > (level := self.invariance_level):
            need, got = (each.name.lower() for each in (spec.invariance, level))
            yield Reason("invariance", f"a backend that declares {need}", got)
        if not spec.causal and not self.non_causal:
            yield Reason("causal", "a backend that declares non_causal, so that queries see later keys", "causal=False")
        refused = sorted(spec.features - self.features)
        for feature in refused if "rule" not in refused else [each for each in refused if "rule." not in each]:
            value = getattr(spec, feature.partition(".")[0])
            hint = "sdpa computes every attention rule" * (feature in RULE_FEATURES)
            got = feature if isinstance(value, tuple) else f"{feature}={value}"  # sinks and slopes are numbers of each head
            yield Reason(feature, "a backend that computes it", got, hint)


def _sizes(sizes: Sequence[int]) -> str:
    """Return sizes as text: "a multiple of 8 up to 256" for a long series, else all of them."""
    if len(sizes) > 4 and tuple(sizes) == tuple(range(sizes[0], sizes[-1] + 1, sizes[0])):
        return f"a multiple of {sizes[0]} up to {sizes[-1]}"
    return _either(map(str, sizes))


def _either(values: Iterable[str]) -> str:
    return " or ".join(values)
