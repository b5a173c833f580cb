"""The two sides of a comparison: a backend, selected and run as in the engine, or float64 attention."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.layout import NHD, CacheGeometry, CacheLayout, LayerCache, write_rows
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.operation import ATTENTION
from headway.core.contract.spec import DTYPE_NAMES, AttentionSpec
from headway.core.engine.execution.attention import PagedAttention
from headway.core.oracle.cases import Case, reference
from headway.core.select.kernels import Kernels, check_names
from headway.core.select.request import ALL_AUTO, BackendRequest, LayerSpecs
from headway.core.select.selector import Selector
from headway.models.checkpoints.checkpoint import check_folder
from headway.models.checkpoints.formats.config import read_quantization
from headway.models.checkpoints.formats.rounding import ON_LOADING
from headway.models.checkpoints.locate import locate
from headway.models.layers.decoder import Decoder
from headway.models.loader import LoadedModel, LoadOptions, load_model
from headway.tuning.measure.linear import choose_linear_kernels

AS_STORED = "checkpoint"
"""Value of `--quantization` for a checkpoint's own format. The other values are formats for quantization while loading."""
_OPTION = "--quantization"


@dataclass(frozen=True, slots=True)
class DiffModels:
    """Models of both sides and descriptions of their weights. The descriptions are "" if both sides use the same weights."""

    a: LoadedModel
    b: LoadedModel
    weights_a: str = ""
    weights_b: str = ""
    products: tuple[str, ...] = ()
    """Kernels of A's quantized linear layers, if there is a choice."""


def load_models(
    name: str, dtype: str, device: torch.device, load_format: str, model_impl: str, quantization: str | None
) -> DiffModels:
    """Load the sides' models. quantization: None uses one model for both sides. A name in ON_LOADING quantizes only A's weights.
    "checkpoint" uses the checkpoint's quantized weights for A, and dequantizes them for B.
    :raises ConfigError: if the weights do not suit `quantization`. :raises ModelError: if `load_model` raises it.
    """
    load = partial(load_model, name, dtype, device, load_format, model_impl=model_impl)
    if quantization is None:
        both = load()
        return DiffModels(both, both)
    stored = _checked(name, load_format, quantization)
    a = load(options=LoadOptions(quantization=None if quantization == AS_STORED else quantization))
    assert isinstance(a.decoder, Decoder)
    read, count = sum(linear.reads_quantized for linear, _ in a.decoder.products), len(a.decoder.products)
    plain = DTYPE_NAMES[a.decoder.dtype]
    if quantization == AS_STORED and not read:
        got = f"{stored}, which is expanded to {plain} on a {device.type}: both sides would be the same"
        hint = "a GPU, or on a CPU 4 bits in groups of 32 to 256 with --dtype bfloat16"
        raise ConfigError(_OPTION, "weights that products read as they are on this device", got, hint)
    choose_linear_kernels(a.decoder.linear_choices, 0)
    where = f"read as they are by {read} of {count} products" if read else f"expanded to {plain} again"
    weights_a = f"{stored}, {where}" if quantization == AS_STORED else f"rounded to {quantization}, {where}"
    weights_b = f"{stored}, expanded to {plain}" if quantization == AS_STORED else f"the checkpoint's, in {plain}"
    products = tuple(f"{kind.name}: {kind.describe()}" for kind in a.decoder.linear_choices)
    return DiffModels(a, load(options=LoadOptions(keep_quantized=False)), weights_a, weights_b, products)


def _checked(name: str, load_format: str, quantization: str) -> str:
    """Return the checkpoint's quantization format in words, or "" if the weights are plain. Reads only small files."""
    if quantization not in (known := (*ON_LOADING, AS_STORED)):
        raise ConfigError(_OPTION, " or ".join(known), repr(quantization))
    if load_format == "dummy":
        hint = "leave --load-format out"
        raise ConfigError(_OPTION, "a checkpoint's weights, whose next tokens say something", "--load-format dummy", hint)
    folder = locate(name)
    stored = read_quantization(folder, check_folder(folder))
    if stored is None and quantization == AS_STORED:
        hint = " or ".join(f"{_OPTION} {each}" for each in ON_LOADING) + " rounds them"
        raise ConfigError(f"{_OPTION} {AS_STORED}", "a checkpoint whose weights are quantised", f"plain ones in {name}", hint)
    if stored is not None and quantization != AS_STORED:
        got, hint = f"weights in {stored.label} ({stored.place})", f"{_OPTION} {AS_STORED} compares them with the expanded ones"
        raise ConfigError(f"{_OPTION} {quantization}", "plain weights", got, hint)
    return "" if stored is None else stored.label


REFERENCE = "reference"
"""Name of float64 attention (`headway.core.oracle.cases`) as a side."""
_REFERENCE_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class DiffStep:
    """New tokens of some sequences, in one phase."""

    phase: Phase
    rows: Sequence[int]
    """Indices of the sequences."""
    query_lens: Sequence[int]
    context_lens: Sequence[int]


@dataclass(frozen=True, slots=True)
class SideOptions:
    """Options of a side: cache layout, block size and backend options."""

    kv_layout: str = "auto"
    block_size: int | None = None
    options: Mapping[str, Mapping[str, str]] | None = None


class SideRun(Protocol):
    """One side with its own caches, for one batch of sequences."""

    def begin(self, step: DiffStep) -> None:
        """Prepare a step. Each layer then calls this object once."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention in the shape of q. q: [num_tokens, num_heads, head_dim]. k, v: [num_tokens, num_kv_heads,
        head_dim]."""


class Side(Protocol):
    """One side of the comparison."""

    @property
    def name(self) -> str:
        """The side's name as the user wrote it."""

    @property
    def layout(self) -> CacheLayout:
        """Layout of the side's caches."""

    @property
    def block_size(self) -> int:
        """Block size of the side's caches."""

    def backend(self, phase: Phase) -> str:
        """Return the name of the backend for a phase."""

    def kernel(self, phase: Phase) -> str:
        """Return the name of the kernel for the first layer."""

    def tolerance(self, phase: Phase) -> float:
        """Return the declared maximum relative error in the model's dtype."""

    def open(self, max_lens: Sequence[int]) -> SideRun:
        """Allocate caches for sequences with these maximum lengths."""


def make_side(name: str, source: Kernels, specs: Sequence[AttentionSpec], options: SideOptions) -> Side:
    """Return the side for a name: "reference", or any value of --attn-backend.

    :raises HeadwayError: if the name is unknown, or the backend does not support the model; the error has the reasons.
    """
    make = _OTHER_SIDES.get(name, BackendSide)
    return make(name, source, specs, options)


def check_side(name: str, source: Kernels, options: SideOptions) -> None:
    """Check the names before a model is loaded.

    :raises HeadwayError: if a backend, a layout or the owner of an option is not registered.
    """
    request = ALL_AUTO if name in _OTHER_SIDES else BackendRequest.parse(name)
    check_names(source, request, options.kv_layout, options.options or ())


class BackendSide:
    """A backend, or one per phase, with the layout and block size that the selector chooses for it."""

    def __init__(self, name: str, source: Kernels, specs: Sequence[AttentionSpec], options: SideOptions) -> None:
        self.name = name
        self._source = source
        self._kernels = source.of(ATTENTION)
        self._specs = specs
        try:
            self._selector = Selector(
                source,
                LayerSpecs(specs),
                BackendRequest.parse(name),
                kv_layout=options.kv_layout,
                block_size=options.block_size,
                options=options.options,
            )
        except UnsupportedError as error:  # the hint would suggest another backend, which would be another comparison
            raise UnsupportedError(error.asked, error.reasons) from None
        self.layout = self._selector.selection.layout
        self.block_size = self._selector.selection.block_size

    def backend(self, phase: Phase) -> str:
        """Return the name of the backend for a phase."""
        return self._selector.selection.names[phase]

    def kernel(self, phase: Phase) -> str:
        """Return the name of the kernel for the first layer."""
        kernel: str = self._kernels.backend(self.backend(phase)).kernel(self._specs[0], phase)
        return kernel

    def tolerance(self, phase: Phase) -> float:
        """Return the backend's declared tolerance for the model's dtype."""
        tolerance: float = self._kernels.backend(self.backend(phase)).tolerance[self._specs[0].dtype]
        return tolerance

    def open(self, max_lens: Sequence[int]) -> SideRun:
        """Allocate caches, written by the layout's writer and read by new backend instances."""
        blocks = _Blocks(max_lens, self.block_size)
        writer = self._source.layout(self.layout.name).writer(self._specs[0].device)
        caches = blocks.allocate(self._specs, self.layout)
        return _PagedRun(PagedAttention(LayerSpecs(self._specs), caches, writer), self._selector, blocks)


class ReferenceSide:
    """Float64 attention on a cache with a plain writer. Shares no code with any backend."""

    layout = NHD
    block_size = _REFERENCE_BLOCK_SIZE

    def __init__(self, name: str, source: Kernels, specs: Sequence[AttentionSpec], options: SideOptions) -> None:
        self.name = name
        self._specs = specs

    def backend(self, phase: Phase) -> str:
        """Return the side's own name, since it has no backend."""
        return self.name

    def kernel(self, phase: Phase) -> str:
        """Return a description of the computation."""
        return "explicit softmax in float64 (torch)"

    def tolerance(self, phase: Phase) -> float:
        """Return 0, because float64 attention is the reference."""
        return 0.0

    def open(self, max_lens: Sequence[int]) -> SideRun:
        """Allocate caches."""
        blocks = _Blocks(max_lens, self.block_size)
        return _ReferenceRun(self._specs, blocks.allocate(self._specs, self.layout), blocks)


_OTHER_SIDES: Mapping[str, Callable[[str, Kernels, Sequence[AttentionSpec], SideOptions], Side]] = {REFERENCE: ReferenceSide}


class _Blocks:
    """Cache blocks for each sequence, shuffled as in a used pool."""

    def __init__(self, max_lens: Sequence[int], block_size: int) -> None:
        counts = [-(-length // block_size) for length in max_lens]
        order = list(range(sum(counts)))
        random.Random(0).shuffle(order)
        self.block_size = block_size
        self._tables = [[order.pop() for _ in range(count)] for count in counts]

    def allocate(self, specs: Sequence[AttentionSpec], layout: CacheLayout) -> list[LayerCache]:
        num_blocks = sum(map(len, self._tables))
        return [
            layout.allocate(CacheGeometry.of(spec, num_blocks, self.block_size), spec.k_scale, spec.v_scale) for spec in specs
        ]

    def metadata(self, step: DiffStep, spec: AttentionSpec) -> AttentionMetadata:
        tables = [self._tables[row] for row in step.rows]
        return AttentionMetadata.build(step.query_lens, step.context_lens, tables, self.block_size, spec.device)


class _PagedRun:
    def __init__(self, attention: PagedAttention, selector: Selector, blocks: _Blocks) -> None:
        self._attention = attention
        self._selector = selector
        self._blocks = blocks

    def begin(self, step: DiffStep) -> None:
        metadata = self._blocks.metadata(step, self._attention.specs[0])
        backends = self._selector.backends_for(step.phase)
        self._attention.begin(metadata, backends, backends)  # a step has one phase

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention(layer, q, k, v)


class _ReferenceRun:
    def __init__(self, specs: Sequence[AttentionSpec], caches: Sequence[LayerCache], blocks: _Blocks) -> None:
        self._specs = specs
        self._caches = caches
        self._blocks = blocks
        self._metadata: AttentionMetadata | None = None

    def begin(self, step: DiffStep) -> None:
        self._metadata = self._blocks.metadata(step, self._specs[0])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention in float64, so that the comparison uses unrounded values."""
        assert self._metadata is not None, "begin() a step first"
        cache = self._caches[layer]
        write_rows(k, v, cache, self._metadata.slot_mapping)
        return reference(Case(self._specs[layer], self._metadata, cache, q, k, v))
