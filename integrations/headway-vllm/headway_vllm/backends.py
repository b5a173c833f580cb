"""The classes that vLLM asks for by path, `headway_vllm.backends.HEADWAY_TRITON` and so on, made when they are asked for."""

from __future__ import annotations

import logging
import time
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)

from headway.contract import NHD, AttentionSpec, ConfigError, LayerCache, Phase, StepLimits, UnsupportedError
from headway.core.select.request import BackendRequest
from headway.core.select.selector import Selector
from headway.tuning.measure.device import resolve_device
from headway_vllm.cache import layer_cache
from headway_vllm.generation import find_generation
from headway_vllm.layers import LayerOptions, check_exact_lengths, make_selector, registry
from headway_vllm.planner import Planner, Step, attend, graph_backend
from headway_vllm.request import AUTO, environment_request, member_names
from headway_vllm.warming import warm

log = logging.getLogger("headway")

GENERATION = find_generation()
BORROWED = ("CUSTOM", "CPU_ATTN")
"""vLLM's own names under which Headway serves where it cannot have one: any GPU of vLLM 0.24, and a CPU."""


class HeadwayImpl(AttentionImpl):  # type: ignore[misc]
    """One attention layer."""

    def __init__(self, *given: Any, **options: Any) -> None:
        names = ("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype")
        more = ("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name")
        options = {**dict(zip(names + more, given, strict=False)), **options}
        self.options = LayerOptions.of(options)
        self.num_heads, self.head_size, self.scale = self.options.num_heads, self.options.head_size, self.options.scale
        self.num_kv_heads, self.sliding_window = self.options.num_kv_heads, self.options.sliding_window
        self.kv_cache_dtype = options.get("kv_cache_dtype", "auto")
        self.shared = options.get("kv_sharing_target_layer_name") is not None
        """Whether another layer fills this layer's cache."""
        self.selectors: dict[int, Selector] = {}
        """Block size -> selector; those of a model's first layer serve all layers."""
        self.spec: AttentionSpec | None = None
        self.kind = 0
        """Number of the layer's spec in the planner of its group."""
        self._cache: LayerCache | None = None
        self._address: tuple[int, ...] = ()
        self.writer = registry().layout(NHD.name).load_writer(resolve_device(_device_type()))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query, output: [rows, num_heads, head_size]; key, value: [rows, num_kv_heads, head_size]. Writes k and v first."""
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise ConfigError("attention output", "the layer's element type", "a quantised one", "switch that fusion off in vLLM")
        cache = self._cache
        if cache is None or self._address != (kv_cache.data_ptr(), *kv_cache.shape):
            cache = self._bind(kv_cache, attn_metadata)
        attend(attn_metadata, self.kind, (query, key, value), cache, None if self.shared else self.writer, output)
        return output

    def _bind(self, kv_cache: Tensor, step: Step) -> LayerCache:
        """View vLLM's memory once, and ask the backends whether they can read it."""
        assert self.spec is not None, "vLLM makes a metadata builder before the first step"
        cache = layer_cache(*GENERATION.views(kv_cache), self.spec)
        for work in (step.decode, step.prefill):
            support = work.backends[self.kind].accepts(cache) if work is not None else None
            if work is not None and support is not None and not support:
                raise UnsupportedError(f"attention backend {work.backends[self.kind].name} in vLLM", support.reasons)
        self._cache, self._address = cache, (kv_cache.data_ptr(), *kv_cache.shape)
        return cache


class HeadwayBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Makes the step of a group of layers."""

    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        selector = selector_of(vllm_config, kv_cache_spec.block_size)
        impls = [layer.impl for layer in _layers(vllm_config, layer_names)]
        kinds = list(dict.fromkeys(impl.spec for impl in impls))
        for impl in impls:
            impl.kind = kinds.index(impl.spec)
        self._writer, self._warm = impls[0].writer, False
        drafts = vllm_config.speculative_config is not None
        if drafts:
            check_exact_lengths(selector)
        parallel = vllm_config.parallel_config.data_parallel_size > 1  # idle ranks run steps with the tables of old requests
        self._planner = Planner(
            kinds,
            selector,
            kv_cache_spec.block_size,
            vllm_config.model_config.max_model_len,
            vllm_config.scheduler_config.max_num_seqs,
            may_write=not parallel,
            upper_bound_lens=drafts,
        )

    def _warm_up(self) -> None:
        """vLLM captures once its cache is there and before the first request, so that is the time."""
        started, scheduler = time.perf_counter(), self.vllm_config.scheduler_config
        limits = StepLimits(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, self.vllm_config.model_config.max_model_len)
        layers = {layer.impl.spec: layer for layer in _layers(self.vllm_config, self.layer_names)}
        caches = {
            spec: layer_cache(*GENERATION.views(layer.kv_cache), spec)
            for spec, layer in layers.items()
            if isinstance(layer.kv_cache, Tensor) and layer.kv_cache.numel()
        }
        count = warm(selector_of(self.vllm_config, self.kv_cache_spec.block_size), caches, self._writer, limits)
        log.info("headway-vllm: %d steps of attention warmed up in %.1f s", count, time.perf_counter() - started)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs of decodes of one token, where a backend that can be captured serves each size that vLLM captures."""
        selector = selector_of(vllm_config, kv_cache_spec.block_size)
        sizes = vllm_config.compilation_config.cudagraph_capture_sizes or [1]
        held = all(graph_backend(selector, size) for size in sizes)
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if held else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """Plan a step; every layer of the group gets it."""
        return self._planner.step(common_attn_metadata)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        """Plan a decode for all lengths that may come; before the first of them, run every kernel once."""
        if not self._warm:
            self._warm = True
            self._warm_up()
        return self._planner.captured_step(common_attn_metadata)


class HeadwayBackend(AttentionBackend):  # type: ignore[misc]
    """The common part of the backends that vLLM sees; a subclass has a name, and with it a request."""

    request: ClassVar[BackendRequest]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_impl_cls() -> type[HeadwayImpl]:
        """The layer's implementation, which all of Headway's names share."""
        return HeadwayImpl

    @staticmethod
    def get_builder_cls() -> type[HeadwayBuilder]:
        """The builder of metadata, which all of Headway's names share."""
        return HeadwayBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """Always: a backend that lacks sinks is refused with its reasons once the layers are known."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Always, for the reason of `supports_sink`."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Never: prompts are planned by the lengths on the host."""
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, block_size: int | None, *_: Any
    ) -> Any:
        """Why a backend that was named cannot serve such a layer; None: nothing speaks against it."""
        spec = AttentionSpec(1, 1, head_size, head_size**-0.5, dtype, resolve_device(_device_type()))
        for phase in Phase:
            name = cls.request.name_for(phase)
            if name in cls.request.names:
                support = registry().supports(name, spec, NHD, block_size or cls.block_multiple(), phase)
                if not support:
                    return f"{name}, {phase.value}: {support.brief}"
        return None

    @classmethod
    def block_multiple(cls) -> int:
        """Tokens of which block sizes must be a multiple: as the named backends need; for auto as most backends need."""
        claims = [registry().backend(name).capabilities for name in cls.request.names]
        return max([16 if cls.request.auto_phases else 1, *(claim.block_multiple for claim in claims)])


def selector_of(vllm_config: Any, block_size: int) -> Selector:
    """The selector of all of the model's layers that Headway serves, made when it is first asked for.

    :raises HeadwayError: the request cannot be served; the reasons are in it.
    """
    layers = _layers(vllm_config)
    device, dtype = resolve_device(_device_type()), vllm_config.model_config.dtype
    for layer in layers:
        layer.impl.spec = layer.impl.spec or layer.impl.options.spec(dtype, device)
    known: dict[int, Selector] = layers[0].impl.selectors
    if block_size not in known:
        specs = [layer.impl.spec for layer in layers]
        known[block_size] = make_selector(specs, layers[0].attn_backend.request, block_size)
    return known[block_size]


def _layers(vllm_config: Any, names: list[str] | None = None) -> list[Any]:
    """Attention layers that Headway serves: those of a group, or all of the model's."""
    context = vllm_config.compilation_config.static_forward_context
    layers = [context[name] for name in (context if names is None else names)]
    return [layer for layer in layers if isinstance(getattr(layer, "impl", None), HeadwayImpl)]


def _device_type() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def _make(member: str, request: BackendRequest) -> type[HeadwayBackend]:
    multiple = {"get_supported_kernel_block_sizes": staticmethod(lambda *_: [MultipleOf(made.block_multiple())])}
    own = {name: staticmethod(method) for name, method in GENERATION.members.items()}
    names = {"get_name": staticmethod(lambda: member), "request": request, "__module__": __name__, "__qualname__": member}
    made: type[HeadwayBackend] = type(member, (HeadwayBackend,), {**multiple, **own, **names})
    return made


def __getattr__(member: str) -> type[HeadwayBackend]:
    """A backend's class by vLLM's name of it.

    :raises ConfigError: the environment variable has another form.
    """
    known = member_names(registry().backends)
    if member not in known and member != AUTO and member not in BORROWED:
        raise AttributeError(f"module {__name__!r} has no attribute {member!r}")
    request = known.get(member) or environment_request() or "auto"
    globals()[member] = made = _make(member, BackendRequest.parse(request))
    return made
