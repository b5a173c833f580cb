"""Attention backends over modules with flash-attention's Python interface: FlashAttention 2, 3 and 4 of the kernel hub, or a
folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headway.backends.varlen import VarlenAttention, VarlenStep
from headway.core.contract.backend import Options
from headway.core.contract.capabilities import ALL_PHASES, FEATURES, Capabilities
from headway.core.contract.errors import PluginError
from headway.core.contract.layout import NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.kernels.runtime.probe import HALF_DTYPES

_VARLEN, _WITH_CACHE = "flash_attn_varlen_func", "flash_attn_with_kvcache"
_NEEDED = frozenset({"cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal"})
_PARAMETERS = {
    "sliding_window": ("window_size",),
    "softcap": ("softcap",),
    "alibi_slopes": ("alibi_slopes",),
    "sinks": ("sinks", "s_aux", "learnable_sink"),
    "table": ("block_table", "page_table"),
}
"""Feature of a layer, or `table` for the block table -> parameters that pass it, in FlashAttention 2, 3 and 4."""


class FlashFunction(NamedTuple):
    """A function of a module, with its parameters."""

    call: Callable[..., Any]
    parameters: dict[str, Parameter]

    @classmethod
    def of(cls, module: ModuleType, name: str) -> FlashFunction | None:
        """Return a function of a module, or None if the module lacks it or its parameters cannot be read."""
        try:
            found = getattr(module, name)
            return cls(found, dict(signature(found).parameters))
        except (AttributeError, TypeError, ValueError):
            return None

    def named(self, feature: str) -> str:
        """Return the parameter that passes a feature, or "" if there is none. feature: a key of _PARAMETERS."""
        return next((name for name in _PARAMETERS[feature] if name in self.parameters), "")


class FlashInterface(VarlenAttention):
    """Varlen prefill and, if a function takes a block table, extend and decode over a paged cache.

    `flash_backend` makes one subclass per module. The functions allocate their results, which are copied into `out`.
    """

    varlen: ClassVar[FlashFunction]
    packed: ClassVar[FlashFunction | None]
    """Function for sequences with different numbers of new tokens over a paged cache: `varlen`, or `with_cache` if it takes
    cu_seqlens_q. None if there is none."""
    with_cache: ClassVar[FlashFunction | None]
    """Function for sequences with equal numbers of new tokens over a paged cache. None if `packed` serves them."""

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        self._layer: dict[str, Any] = {}
        if spec.sliding_window is not None:  # flash-attn counts only keys before the query
            left = spec.sliding_window - 1
            self._layer["sliding_window"] = (left, 0 if spec.causal else left)
        if spec.softcap is not None:
            self._layer["softcap"] = spec.softcap
        if spec.alibi_slopes is not None:
            self._layer["alibi_slopes"] = torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=spec.device)
        if spec.sinks is not None:
            self._layer["sinks"] = torch.tensor(spec.sinks, dtype=spec.dtype, device=spec.device)

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase)
        if cls.packed is None and phase is not Phase.PREFILL:
            need = f"a parameter block_table or page_table, in {_WITH_CACHE} in addition to cu_seqlens_q"
            support &= Support.no(f"{_VARLEN} of {cls.name}", need, "functions without", f"prefill={cls.name}")
        return support

    def plan(self, metadata: AttentionMetadata) -> VarlenStep:
        step, taken = VarlenStep.of(metadata), self.varlen.parameters
        lengths = "seqused_k" in taken and taken["cu_seqlens_k"].default is not Parameter.empty
        if lengths or not step.paged or self.packed is not self.varlen:
            return step
        ends = step.kv_lens.cumsum(0, dtype=torch.int32)
        return replace(step, kv_starts=torch.cat([ends.new_zeros(1), ends]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: VarlenStep, out: Tensor) -> None:
        function = self.packed if plan.paged else self.varlen
        assert function is not None, "not declared"
        given = {"cu_seqlens_q": plan.starts, "max_seqlen_q": plan.max_query_len, "max_seqlen_k": plan.max_kv_len}
        if not plan.paged:
            given["cu_seqlens_k"] = plan.starts
        else:
            given |= {function.named("table"): plan.block_table, "seqused_k": plan.kv_lens, "cache_seqlens": plan.kv_lens}
            given |= {} if plan.kv_starts is None else {"cu_seqlens_k": plan.kv_starts}
        self._call(function, q, k, v, given, out)

    def decode(self, q: Tensor, cache: LayerCache, plan: VarlenStep, out: Tensor, lse: Tensor | None = None) -> None:
        """Call the function for equal numbers of new tokens if the step has these and the module has the function."""
        if self.with_cache is None or not plan.uniform:
            super().decode(q, cache, plan, out, lse)
            return
        given = {"cache_seqlens": plan.kv_lens, self.with_cache.named("table"): plan.block_table}
        queries = q.unflatten(0, (plan.num_seqs, plan.max_query_len))
        self._call(self.with_cache, queries, cache.key, cache.value, given, out)

    def _call(self, function: FlashFunction, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], out: Tensor) -> None:
        given = {name: value for name, value in given.items() if name in function.parameters}
        given |= {function.named(feature): value for feature, value in self._layer.items()}
        call = partial(function.call, q, k, v, softmax_scale=self.spec.scale, causal=self.spec.causal)
        found = call(**given)
        out.copy_((found[0] if isinstance(found, tuple) else found).view(out.shape))


def flash_backend(name: str, module: ModuleType, devices: tuple[str, ...]) -> type[FlashInterface]:
    """Return the attention backend of a module with flash-attention's functions.

    devices: device types that the module's kernels run on. Kernels for GPUs only have the limits of FlashAttention's releases:
    16-bit types, heads of up to 256 elements, and blocks of a multiple of 256 (FlashAttention 2) or 128 tokens (4).

    :raises PluginError: if the module lacks the varlen function or one of its parameters.
    """
    varlen, with_cache = FlashFunction.of(module, _VARLEN), FlashFunction.of(module, _WITH_CACHE)
    missing = sorted(_NEEDED - (varlen.parameters.keys() if varlen else frozenset()))
    if varlen is None or missing:
        got = f"one without {', '.join(missing)}" if varlen else "none"
        raise PluginError(f"kernel {name}: needs a function {_VARLEN} with flash-attention's parameters, got {got}")
    if with_cache is not None and not (with_cache.named("table") and "cache_seqlens" in with_cache.parameters):
        with_cache = None
    packed = varlen if varlen.named("table") else None
    if packed is None and with_cache is not None and "cu_seqlens_q" in with_cache.parameters:
        packed = with_cache
    with_cache = None if packed is None else with_cache
    gpu = devices == ("cuda",)
    used = [each for each in (varlen, with_cache) if each is not None]
    multiple = {"block_table": 256, "page_table": 128}.get(varlen.named("table"), 1) if gpu else 1
    capabilities = Capabilities(
        phases=ALL_PHASES if packed else frozenset({Phase.PREFILL}),
        layouts=(NHD,),
        dtypes=HALF_DTYPES if gpu else (torch.float32, *HALF_DTYPES),
        devices=devices,
        block_multiple=multiple,
        head_dims=tuple(range(8, 257, 8)) if gpu else None,
        features=frozenset(feature for feature in FEATURES if all(each.named(feature) for each in used)),
        dense_prefill=True,
        non_causal=True,
        reads_whole_blocks=True,
    )
    doc = f"Attention by {module.__name__}, a module with flash-attention's interface."
    fields = {"name": name, "capabilities": capabilities, "varlen": varlen, "packed": packed, "with_cache": with_cache}
    return type("FlashInterfaceKernel", (FlashInterface,), {"__doc__": doc, "__module__": __name__, **fields})
