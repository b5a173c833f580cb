"""`attn_implementation="headway"` in transformers: Headway's backends over transformers' own caches.

Importing this module registers "headway", which selects a backend by the crossover table, and "headway:NAME" for each backend.
NAME is in upper case if transformers reserves the lower-case name ("headway:FLASH_ATTN_3"); `names` lists the registered names.
The import also patches one method, `ContinuousBatchingManager.switch_to_cb_friendly_attn`, so that continuous batching accepts
these names.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy
import torch
import transformers
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Plan
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.layout import NHD, LayerCache
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES
from headway.core.select.kernels import check_names
from headway.core.select.request import BackendRequest, LayerSpecs
from headway.core.select.selector import Selector
from headway.integrations.dense import IMPLEMENTATION_HINT, BackendShare, Blocks, Sequences, Visibility, VisibilityMask, mask_of
from headway.registry import Registry
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.isolated.trial import create_registry
from headway.tuning.measure.self_test import check_named

GPU_BLOCK = 16
"""Block size in slots on a GPU, unless a backend needs a larger one. Most backends support 16."""


@cache
def registry() -> Registry:
    """Return the registry of Headway's backends and installed plugins."""
    return create_registry()


class LayerKind(NamedTuple):
    """A kind of layer in transformers, and the backends requested for it."""

    request: BackendRequest
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float | None
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None
    softcap: float | None
    sinks: tuple[float, ...] | None


class _OfThread(threading.local):
    """Per-thread state that persists between calls."""

    def __init__(self) -> None:
        self.kinds: dict[LayerKind, tuple[AttentionSpec, Selector]] = {}
        self.selectors: dict[tuple[AttentionSpec, BackendRequest], Selector] = {}
        """Selectors of this thread, since threads must not share a backend instance's buffers and launch arguments."""
        self.maskless: dict[tuple[int, int, int], Visibility] = {}
        """Visibility of the last call without a mask, keyed by batch size, number of queries and number of keys. The layers of a
        step share this visibility."""
        self.layer = 0  # Last layer that a continuous-batching step called
        self.visibilities: dict[tuple[int, ...], Visibility] = {}  # Visibilities of that step, by the address of their lengths


_CACHED = _OfThread()


def serving(kind: LayerKind) -> tuple[AttentionSpec, Selector]:
    """Return spec and selector for a kind of layer; `auto` uses only cached crossover tables. :raises HeadwayError: if the kind
    of layer is unsupported."""
    known = _CACHED.kinds.get(kind)
    if known is None:
        own = kind._asdict()
        request = own.pop("request")
        own["scale"] = kind.head_dim**-0.5 if kind.scale is None else kind.scale
        spec = AttentionSpec(**own)
        known = _CACHED.kinds[kind] = spec, _selector(spec, request)
    return known


def _selector(spec: AttentionSpec, request: BackendRequest) -> Selector:
    known = _CACHED.selectors.get((spec, request))
    if known is None:
        multiples = [registry().backend(name).capabilities.block_multiple for name in request.names]
        layers = LayerSpecs([spec])
        check_named(registry(), request.names, layers.cached)
        costs = costs_for(layers, registry(), request, TableRequest(budget=0.0))
        block_size = max([1 if spec.device.type == "cpu" else GPU_BLOCK, *multiples])
        known = Selector(registry(), layers, request, kv_layout=NHD.name, block_size=block_size, costs=costs)
        _CACHED.selectors[spec, request] = known
    return known


class PlannedPart(NamedTuple):
    """Planned attention of the sequences that one backend runs."""

    backend: AttentionBackend
    plan: Plan
    decodes: bool
    tokens: Tensor | None
    """int64: indices of these sequences' tokens among the packed tokens. None means all tokens."""
    reads: bool


@dataclass(slots=True)
class StepAttention:
    """Plans that the layers of one kind share in a step; each layer passes its own tensors."""

    spec: AttentionSpec
    blocks: Blocks
    parts: list[PlannedPart]
    shape: tuple[int, int, int, int]
    """Shape of the result: batch, q_length, num_heads, v_head_dim."""
    padded: bool
    """True if some queries are padding; their results are zero."""
    in_place: bool
    """True if each query is a single token with contiguous heads."""
    new: slice | Tensor
    """Indices of this call's tokens among the keys: a slice for each row of the batch, or int64 [q_length] for packed sequences
    in one row."""
    kind: LayerCache | None = None
    """Cache of the first layer, already checked, without its tensors."""

    @classmethod
    def of(
        cls, visibility: Visibility, spec: AttentionSpec, selector: Selector, query: Tensor, key: Tensor, value: Tensor
    ) -> StepAttention:
        """Choose backends, lay out blocks and make plans. query: [batch, num_heads, q_length, head_dim]. key, value: cache
        tensors."""
        shares = BackendShare.all_of(visibility.rows, selector, spec)
        blocks = Blocks.of(key, value, shares, selector.selection.block_size)
        padded = visibility.padded
        whole = len(shares) == 1 and not padded
        parts = []
        for share in shares:
            place = share.phase, blocks, spec.device
            metadata = visibility.metadata.get(place)
            if metadata is None:  # shared by kinds that differ only in a number, such as their sinks
                metadata = visibility.metadata[place] = blocks.metadata(share, spec.device)
            index = None if whole else _tokens(share.sequences).to(spec.device)
            plan = share.backend.plan(metadata)
            parts.append(PlannedPart(share.backend, plan, share.phase is Phase.DECODE, index, share.reads))
        first = visibility.q_offset - visibility.kv_offset
        new = slice(first, first + visibility.q_length) if visibility.new_keys is None else visibility.new_keys.to(spec.device)
        in_place = visibility.q_length == 1 and by_token(query).data_ptr() == query.data_ptr()
        return cls(
            spec, blocks, parts, (visibility.batch, visibility.q_length, spec.num_heads, spec.v_head_dim), padded, in_place, new
        )

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention [batch, q_length, num_heads, v_head_dim]. :raises UnsupportedError: if no backend supports it."""
        batch, length, heads, dim = self.shape
        out = query.new_empty((batch * length, heads, dim))
        if self.padded:
            out.zero_()
        if self.parts:
            q = query.select(2, 0) if self.in_place else by_token(query)
            cache = self._cache(key, value)
            for part in self.parts:
                if part.decodes and part.tokens is None:
                    part.backend.decode(q, cache, part.plan, out)
                else:
                    self._run(part, q, key, value, cache, out)
        return out.view(self.shape)

    def _run(self, part: PlannedPart, q: Tensor, key: Tensor, value: Tensor, cache: LayerCache, out: Tensor) -> None:
        """Run a part that covers only some of the tokens, or that needs the new keys and values."""
        index = part.tokens
        queries, result = (q, out) if index is None else (q[index], out.new_empty((len(index), *out.shape[1:])))
        if part.decodes:
            part.backend.decode(queries, cache, part.plan, result)
        else:
            k, v = self._new_rows(key), self._new_rows(value)
            k, v = (k, v) if index is None else (k[index], v[index])
            part.backend.prefill(queries, k, v, cache, part.plan, result)
        if index is not None:
            out[index] = result

    def _new_rows(self, tensor: Tensor) -> Tensor:
        """Return the rows [batch * q_length, heads, dim] of this call's tokens."""
        if isinstance(self.new, slice):
            return by_token(tensor[:, :, self.new])
        return by_token(tensor)[self.new]

    def _cache(self, key: Tensor, value: Tensor) -> LayerCache:
        if self.kind is None:  # only the first layer's cache is checked
            cache = self.blocks.cache(key, value, self.spec)
            for part in self.parts:
                support = part.backend.accepts(cache) if part.reads else YES
                if not support:
                    raise UnsupportedError(f"attention backend {part.backend.name} over dense tensors", support.reasons)
            self.kind = cache.over({})
            return cache
        return self.kind.over(self.blocks.views(key, value))


def by_token(tensor: Tensor) -> Tensor:
    """Reshape [batch, heads, length, dim] to [batch * length, heads, dim] with contiguous heads, as a view if possible."""
    batch, heads, length, dim = tensor.shape
    tokens = tensor.select(2, 0) if length == 1 else tensor.transpose(1, 2).reshape(batch * length, heads, dim)
    token, head, element = tokens.stride()
    return tokens if element == 1 and token >= head * (heads - 1) + dim else tokens.contiguous()


def _tokens(sequences: Sequences) -> Tensor:
    """Return the indices of these sequences' packed tokens, as int64."""
    spans = zip(sequences.queries, sequences.query_lens, strict=True)
    return torch.from_numpy(numpy.concatenate([numpy.arange(start, start + length) for start, length in spans]))


NAME = "headway"
WORKS = "5.17 to 5.24"
"""Versions of transformers tested with `generate`."""
PACKS = "5.19 to 5.24"
"""Versions of transformers tested with continuous batching."""

try:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    _missing = {"q_offset", "kv_offset", "mask_function", "attention_mask", "local_size"} - set(
        inspect.signature(sdpa_mask).parameters
    )
    if _missing:
        raise ImportError(f"its masks are asked for without {', '.join(sorted(_missing))}")
except ImportError as error:
    raise ConfigError(
        "headway.integrations.transformers", f"transformers {WORKS}", f"{transformers.__version__} ({error})"
    ) from error
_RESERVED = ("flash", "sdpa", "flex_attention")  # Words that transformers looks for in names
_REQUESTS: dict[str, str] = {}  # Registered name -> request; global like transformers' own registry
_REFUSED = {
    "dropout": "no dropout (training)",
    "output_attentions": "no weights",
    "position_bias": "no bias",
    "head_mask": "none",
}


def names() -> dict[str, str]:
    """Return registered name -> backend request."""
    return dict(_REQUESTS)


def register(request: str) -> str:
    """Register a request in the format of --attn-backend, such as "prefill=hopper,decode=triton". Return its name.

    transformers reserves lower-case names that contain "flash", "sdpa" and similar words. Each request is therefore also
    registered in upper case, and the upper-case name is returned if the lower-case name is reserved.
    :raises HeadwayError: if the request is invalid or names an unregistered backend.
    """
    parsed = BackendRequest.parse(request)
    check_names(registry(), parsed)
    plain, capital = (NAME, NAME) if request == "auto" else (f"{NAME}:{request}", f"{NAME}:{request.upper()}")
    for name in {plain, capital}:
        if "flash" not in name:
            _REQUESTS[name] = request
            AttentionInterface.register(name, partial(_attend, parsed))
            AttentionMaskInterface.register(name, mask_of)
    return capital if any(word in plain for word in _RESERVED) else plain


def _attend(
    request: BackendRequest,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (attention [batch, q_length, num_heads, v_head_dim], None). transformers calls this function.

    query: [batch, num_heads, q_length, head_dim].
    key, value: [batch, num_kv_heads, kv_length, head_dim or v_head_dim] of the cache, including this call's tokens.
    :raises ConfigError: if Headway does not support the call.
    """
    if torch.compiler.is_dynamo_compiling():  # checked here, since calling a disabled function has a constant cost
        found: tuple[Tensor, None] = _attend_untraced(request, module, query, key, value, attention_mask, scaling, **options)
        return found
    _check(module, query, options)
    if options.get("cache") is not None:  # transformers before 5.24: later versions update the cache in the layer itself
        key, value = options["cache"].update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
    if options.get("cu_seq_lens_k") is not None:
        window = options.get("sliding_window") or None
        visibility = _packed(module.layer_idx, query, key, options)
    else:
        visibility = _visibility_of(attention_mask, query, key)
        window = visibility.window
    softcap, sinks = options.get("softcap") or None, _sinks(module, options.get("s_aux"))
    # All that a plan depends on besides the mask; a layer that differs in any part is of another kind.
    kind = (
        *(request.text, scaling, window, softcap, sinks, query.dtype, query.device, query.shape, query.stride()),
        *(key.dtype, key.shape, key.stride(), key.storage_offset(), key.untyped_storage().nbytes()),
        *(value.dtype, value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()),
    )
    call = visibility.calls.get(kind)
    if call is None:
        heads = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
        spec, selector = serving(LayerKind(request, *heads, scaling, query.dtype, query.device, window, softcap, sinks))
        call = visibility.calls[kind] = StepAttention.of(visibility, spec, selector, query, key, value)
    return call(query, key, value), None


_attend_untraced = torch.compiler.disable(_attend)


def _check(module: Any, query: Tensor, options: dict[str, Any]) -> None:
    for name, need in _REFUSED.items():
        if options.get(name) not in (None, False, 0.0):
            raise ConfigError(name, need, "one that asks for it", IMPLEMENTATION_HINT)
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ConfigError("attention", "causal attention", "a layer that is not", IMPLEMENTATION_HINT)
    if query.requires_grad and torch.is_grad_enabled():
        raise ConfigError("attention", "inference", "gradients", f"torch.inference_mode(), or for training {IMPLEMENTATION_HINT}")


def _visibility_of(mask: Any, query: Tensor, key: Tensor) -> Visibility:
    """Return the visibility of a layer's call. :raises ConfigError: if the mask is not Headway's or is not supported."""
    found: Visibility | None = getattr(mask, "visibility", None) if isinstance(mask, VisibilityMask) else None
    lengths = query.shape[2], key.shape[2]
    if found is None:
        if mask is not None or lengths[0] not in (1, lengths[1]):
            got = "a mask of its own" if mask is not None else f"none for {lengths[0]} queries of {lengths[1]} keys"
            hint = f"{IMPLEMENTATION_HINT}; beside torch.compile, generate takes disable_compile=True"
            raise ConfigError("attention_mask", "a padding mask [batch, length], or none", got, hint)
        sizes = len(query), *lengths
        if sizes not in _CACHED.maskless:
            _CACHED.maskless = {sizes: Visibility(len(query), lengths[0], lengths[1], lengths[1] - lengths[0], 0, None, None)}
        return _CACHED.maskless[sizes]
    if found.refusal:
        raise ConfigError(
            "attention_mask", "causal attention, perhaps within a window, and padding", found.refusal, IMPLEMENTATION_HINT
        )
    if (found.q_length, found.kv_length) != lengths:
        got = f"{lengths[0]} and {lengths[1]}"
        raise ConfigError(
            "attention_mask", f"{found.q_length} queries and {found.kv_length} keys, as it has", got, IMPLEMENTATION_HINT
        )
    return found


def _packed(layer: int, query: Tensor, key: Tensor, options: dict[str, Any]) -> Visibility:
    """Return the visibility of packed sequences in continuous batching, which the layers of a step share. :raises ConfigError: if
    the call is unsupported."""
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError("continuous batching", "use_cuda_graph=False", "a capture", "ContinuousBatchingConfig has it")
    if options.get("block_table") is not None:
        raise ConfigError("continuous batching", "max_blocks_per_request=0", "block tables", "ContinuousBatchingConfig has it")
    if layer <= _CACHED.layer:  # a new step: read the lengths again, since their address stays the same
        _CACHED.visibilities = {}
    _CACHED.layer = layer
    seen = _CACHED.visibilities
    ends = options["cu_seq_lens_q"], options["cu_seq_lens_k"]
    place = *(each.data_ptr() for each in ends), query.shape[2], key.shape[2]
    if place not in seen:
        query_ends, key_ends = (each.cpu().numpy().astype(numpy.int64) for each in ends)
        seen[place] = Visibility.packed(query_ends, key_ends, query.shape[2], key.shape[2])
    return seen[place]


def _sinks(module: Any, sinks: Tensor | None) -> tuple[float, ...] | None:
    """Return the sinks of a layer as numbers, read from the device once."""
    if sinks is None:
        return None
    known: Any = getattr(module, "_headway_sinks", None)
    if known is None or known[0] is not sinks or known[1] != sinks._version:
        known = (sinks, sinks._version, tuple(sinks.float().tolist()))
        module._headway_sinks = known
    found: tuple[float, ...] = known[2]
    return found


def _join_continuous_batching() -> None:
    """Patch continuous batching to accept Headway's names, which are not in its list of implementations."""
    try:
        from transformers import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager as Manager
        from transformers.generation.continuous_batching.utils import attn_mask_is_needed  # noqa: F401 -- not for our names

        switch = Manager.switch_to_cb_friendly_attn
        known = "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
    except (ImportError, AttributeError):  # this transformers has no continuous batching
        return

    def switch_to_cb_friendly_attn(self: Any, model: Any, *given: Any, **options: Any) -> None:
        if str(model.config._attn_implementation).partition(":")[0] != NAME:
            switch(self, model, *given, **options)
        elif not known:
            raise ConfigError(
                "continuous batching with Headway", f"transformers {PACKS}", transformers.__version__, IMPLEMENTATION_HINT
            )

    Manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn  # type: ignore[method-assign]


for _request in ("auto", *registry().backends):
    register(_request)
_join_continuous_batching()
