"""Expert layers of Headway and other libraries: each result is checked against a float32 reference and then timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module, metadata
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.functional import linear

from headway.bench.generate.roofline import measure_read_gbps
from headway.core.contract.errors import ConfigError
from headway.core.contract.experts import ExpertsConfig, ExpertsKernel
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.weights import QuantizedWeight, Weight, WeightFormat
from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.kernels.experts.bound import ExpertsOptions
from headway.kernels.experts.plain import Routed, TorchExperts, activate
from headway.kernels.experts.weights import RoutedWeights, reads_experts
from headway.kernels.linear.forms import GgufWeight
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.kernels.step.fused import fused_experts
from headway.kernels.step.operations import Norm
from headway.models.checkpoints.formats.rounding import float4, float8, int4, int8
from headway.tuning.measure.contender import captured
from headway.tuning.measure.device import describe_device
from headway.tuning.measure.experts import choose_experts
from headway.tuning.measure.timing import Timer
from headway.tuning.table.schema import DeviceInfo


class ExpertsCell(BaseModel):
    """Result of one method for a layer of one shape and token count. Only correct results have a time."""

    model_config = ConfigDict(extra="forbid")

    way: str
    """Name of the method: a kernel of Headway, or a library."""
    peer: bool
    """True for a library called without Headway."""
    shape: str
    tokens: int
    touched: int
    """Number of experts that at least one token uses, including shared ones."""
    median_us: float | None = None
    """Microseconds of the GEMMs and the weighted sum over experts, in a CUDA graph with a flushed L2 cache. The time excludes
    routing."""
    layer_us: float | None = None
    """Time of the layer in microseconds, including norm, router and routing. None for peers."""
    relative_error: float | None = None
    """||out - reference|| / ||reference||."""
    reason: str = ""
    """Reason for a missing time; else empty."""
    bytes_share: float | None = None
    """Time to read the weights of the touched experts at the measured read rate, divided by `median_us`."""
    operations_share: float | None = None
    """Time for the floating-point operations at the measured matrix rate, divided by `median_us`."""


class ExpertsReport(ResultFile):
    """Result of one run of the experts study."""

    schema_: Literal["headway.bench_experts/1"] = Field(default="headway.bench_experts/1", alias="schema")
    command: str
    origin: Origin
    date: str
    """Date and time of the run: UTC, ISO 8601."""
    dtype: str
    form: str = "plain"
    """Format of the experts' weights."""
    device: DeviceInfo
    read_gbps: float
    """Measured read rate in GB/s."""
    libraries: dict[str, str]
    """Peer -> the peer's version, or why it is unavailable."""
    chosen: dict[str, str]
    """Shape -> Headway's chosen kernels by token count."""
    cells: list[ExpertsCell]


Layer = Callable[[Routed], Tensor]
"""Function that returns the weighted sum over experts, [num_tokens, hidden_size]."""
MakeLayer = Callable[[ExpertsConfig, RoutedWeights], Layer]


@dataclass(frozen=True)
class ExpertsPeer:
    """An installed library, as a peer for expert layers."""

    name: str
    version: str
    make: MakeLayer
    plain_gate: bool = False
    """True if the library's call that this study uses supports neither biases nor a clamped gate (gpt-oss)."""

    def refusal(self, config: ExpertsConfig) -> str:
        """Return why a layer is not timed, or "" if the layer is timed."""
        clamped = config.biases or config.swiglu_limit is not None
        return "its plain call takes neither biases nor a clamped gate" if self.plain_gate and clamped else ""


def grouped_mm() -> ExpertsPeer:
    """Return torch's grouped GEMM with unfused torch operations around it."""
    if not hasattr(torch, "_grouped_mm"):
        raise ImportError("torch has no _grouped_mm: needs 2.9 or newer")

    def make(config: ExpertsConfig, weights: RoutedWeights) -> Layer:
        numbers = torch.arange(config.num_all, device=weights.router.device)
        gate_up, down = _plain(weights)

        def layer(routed: Routed) -> Tensor:
            ordered, pairs = routed.experts.flatten().sort(stable=True)
            ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
            tokens = pairs // config.num_slots
            both = torch._grouped_mm(routed.x[tokens], gate_up.mT, offs=ends)
            if weights.gate_up_bias is not None:
                both = both + weights.gate_up_bias[ordered]
            parts = torch._grouped_mm(activate(both, config), down.mT, offs=ends)
            if weights.down_bias is not None:
                parts = parts + weights.down_bias[ordered]
            weighted = parts * routed.weights.flatten()[pairs, None]
            return torch.zeros_like(weighted[: len(routed.x)]).index_add_(0, tokens, weighted)

        return layer

    return ExpertsPeer("torch.grouped_mm, composed", torch.__version__, make)


def _plain(weights: RoutedWeights) -> tuple[Tensor, Tensor]:
    """Return the experts' weights. Peers get only unquantized weights."""
    assert isinstance(weights.gate_up, Tensor)
    assert isinstance(weights.down, Tensor)
    return weights.gate_up, weights.down


def vllm() -> ExpertsPeer:
    """Return vLLM's Triton experts."""
    library: Any = import_module("vllm.model_executor.layers.fused_moe.fused_moe")

    def make(config: ExpertsConfig, weights: RoutedWeights) -> Layer:
        def layer(routed: Routed) -> Tensor:
            found: Tensor = library.fused_experts(routed.x, weights.gate_up, weights.down, routed.weights, routed.experts)
            return found

        return layer

    return ExpertsPeer("vllm.fused_experts", metadata.version("vllm"), make, plain_gate=True)


def flashinfer() -> ExpertsPeer:
    """Return FlashInfer's CUTLASS experts. They are compiled at the first call, which takes minutes."""
    library: Any = import_module("flashinfer.fused_moe")

    def make(config: ExpertsConfig, weights: RoutedWeights) -> Layer:
        gate_up, down = _plain(weights)
        gate, up = gate_up.chunk(2, dim=1)
        up_gate = torch.cat([up, gate], dim=1)

        def layer(routed: Routed) -> Tensor:
            dtype = routed.x.dtype
            out: Any = library.cutlass_fused_moe(routed.x, routed.experts, routed.weights, up_gate, down, dtype, quant_scales=[])
            found: Tensor = out[0] if isinstance(out, (list, tuple)) else out
            return found

        return layer

    return ExpertsPeer("flashinfer.cutlass_fused_moe", metadata.version("flashinfer-python"), make, plain_gate=True)


PEERS: dict[str, Callable[[], ExpertsPeer]] = {"torch": grouped_mm, "vllm": vllm, "flashinfer": flashinfer}
"""Name -> function that returns the peer, or raises if the library is not installed."""


def installed() -> tuple[list[ExpertsPeer], dict[str, str]]:
    """Return the available peers, and for each library its version or why it is unavailable."""
    found, versions = [], {}
    for name, load in PEERS.items():
        try:
            peer = load()
        except Exception as error:  # an import may raise anything
            versions[name] = f"not here: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
        else:
            found.append(peer)
            versions[name] = peer.version
    return found, versions


Products = Callable[[], Tensor]
TOLERANCE = 2e-2
"""Maximum error relative to the result's norm, in half precision."""


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of a layer."""

    name: str
    hidden_size: int
    config: ExpertsConfig


SHAPES = {
    shape.name: shape
    for shape in (
        ExpertsShape("qwen3-30b-a3b", 2048, ExpertsConfig(128, 8, 768)),
        ExpertsShape("deepseek-v2-lite", 2048, ExpertsConfig(64, 6, 1408, 2816, renormalize=False)),
        ExpertsShape("mixtral-8x7b", 4096, ExpertsConfig(8, 2, 14336)),
        ExpertsShape(
            "gpt-oss-20b", 2880, ExpertsConfig(32, 4, 2880, router_bias=True, biases=True, swiglu_alpha=1.702, swiglu_limit=7.0)
        ),
    )
}


def parse_shape(text: str) -> ExpertsShape:
    """Return the shape for a name in SHAPES, or for a text num_experts/top_k/intermediate_size/hidden_size.
    :raises ConfigError: if the text is neither.
    """
    parts = text.split("/")
    if text in SHAPES:
        return SHAPES[text]
    if len(parts) != 4 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(
            "shape", f"{', '.join(SHAPES)}, or experts/top_k/intermediate/hidden such as 128/8/768/2048", repr(text)
        )
    num_experts, top_k, inner, hidden = map(int, parts)
    return ExpertsShape(text, hidden, ExpertsConfig(num_experts, top_k, inner))


def _blocks(weight: Tensor) -> QuantizedWeight:
    return float8(weight, (128, 128))


EXPERT_FORMS: Mapping[str, Callable[[Tensor], QuantizedWeight] | None] = {
    "plain": None,
    "fp8-blocks": _blocks,
    "fp8-rows": float8,
    "mxfp4": float4,
    "int4": partial(int4, group_size=128),
    "int8": int8,
}
"""Format name -> function that quantizes the rows of all experts, [experts * out, in]; None for plain weights. fp8-blocks: blocks
of 128 x 128. int4: symmetric groups of 128."""


def parse_form(text: str) -> Callable[[Tensor], QuantizedWeight] | None:
    """Return the quantization function of a format's name; None for plain. :raises ConfigError: if the name is unknown."""
    if text not in EXPERT_FORMS:
        raise ConfigError("form", ", ".join(EXPERT_FORMS), repr(text))
    return EXPERT_FORMS[text]


def run_experts_bench(
    shapes: Sequence[ExpertsShape],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    timer: Timer,
    budget: float = 60.0,
    command: str = "",
    on_progress: Callable[[str], None] = lambda what: None,
    form: str = "plain",
) -> ExpertsReport:
    """Time all of Headway's kernels and all installed peers. budget: maximum seconds to measure Headway's kernels for a shape
    without saved times. form: a name in EXPERT_FORMS; peers only get plain weights.
    :raises ConfigError: if there is no GPU, or the kernels do not support the format for this shape or type."""
    if device.type != "cuda":
        raise ConfigError("headway.bench.studies.experts", "a GPU", device.type)
    quantize = parse_form(form)
    peers, versions = installed() if quantize is None else ([], {})
    described, read_gbps = describe_device(device, dtype, timer), measure_read_gbps(device, timer)
    chosen: dict[str, str] = {}
    cells: list[ExpertsCell] = []
    for shape in shapes:
        on_progress(shape.name)
        layer = RandomLayer(shape, dtype, device, quantize)
        choose_experts([layer.kind], budget, compile_ahead(device))
        chosen[shape.name] = layer.kind.describe()
        for count in tokens:
            on_progress(f"{shape.name}, {count} tokens")
            cells += layer.cells(count, peers, timer, read_gbps, described.matrix_tflops)
        del layer
        torch.cuda.empty_cache()
    return ExpertsReport(
        command=command,
        origin=Origin.here(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        dtype=DTYPE_NAMES[dtype],
        form=form,
        device=described,
        read_gbps=read_gbps,
        libraries=versions,
        chosen=chosen,
        cells=cells,
    )


class RandomLayer:
    """Layer with random weights of a shape, and its kernels."""

    def __init__(
        self,
        shape: ExpertsShape,
        dtype: torch.dtype,
        device: torch.device,
        quantize: Callable[[Tensor], QuantizedWeight] | None = None,
    ) -> None:
        """quantize: function that quantizes the experts' weights; None leaves them plain.
        :raises ConfigError: if the kernels do not support the quantized weights.
        """
        config, hidden, inner = shape.config, shape.hidden_size, shape.config.intermediate_size
        self._shape = shape
        self._generator = torch.Generator(device).manual_seed(0)

        def draw(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            scale = sizes[-1] ** -0.5 if len(sizes) > 1 else 0.1
            return torch.empty(sizes, dtype=dtype, device=device).normal_(0, scale, generator=self._generator)

        def rows(*sizes: int) -> Weight:
            if quantize is None:
                return draw(*sizes)
            form = quantize(draw(*sizes).flatten(0, 1))
            if isinstance(form, GgufWeight) or not reads_experts(form, dtype, device):
                need = f"one that the kernels read of {sizes[-1]} columns and x in {dtype}"
                raise ConfigError("form", need, WeightFormat.of(form))
            return form

        self._weights = RoutedWeights(
            router=draw(config.num_logits, hidden),
            router_bias=draw(config.num_logits, dtype=torch.float32) if config.router_bias else None,
            correction_bias=draw(config.num_experts, dtype=torch.float32) if config.correction_bias else None,
            gate_up=rows(config.num_all, 2 * inner, hidden),
            gate_up_bias=draw(config.num_all, 2 * inner) if config.biases else None,
            down=rows(config.num_all, hidden, inner),
            down_bias=draw(config.num_all, hidden) if config.biases else None,
        )
        self._norm = Norm(torch.ones(hidden, dtype=dtype, device=device), 1e-6)
        self._bound = fused_experts(ExpertsOptions(), device).bind(config, self._weights, self._norm)
        self.kind = self._bound.kind
        self._expert_bytes = _bytes(self._weights.gate_up, self._weights.down) / config.num_all

    def cells(
        self, count: int, peers: Sequence[ExpertsPeer], timer: Timer, read_gbps: float, tflops: float
    ) -> Iterator[ExpertsCell]:
        """Yield the cells of one token count."""
        config, kind = self._shape.config, self.kind
        hidden, inner = self._shape.hidden_size, config.intermediate_size
        x = torch.empty(count, hidden, dtype=kind.dtype, device=kind.device).normal_(generator=self._generator)
        kernels = kind.serving(count)
        ahead = compile_ahead(kind.device)
        with ahead() if ahead is not None else nullcontext():
            for kernel in kernels:
                self._bound.add(kernel, self._bound.routed(x, kernel), x.clone())
        routed = {kernel.name: self._bound.routed(x, kernel) for kernel in kernels}
        given = next(iter(routed.values()))
        touched = len(set(given.experts.flatten().tolist()))
        floor_bytes = touched * self._expert_bytes / read_gbps * 1e-3
        floor_operations = given.experts.numel() * 6 * hidden * inner / tflops * 1e-6
        empty = ExpertsCell(way="", peer=False, shape=self._shape.name, tokens=count, touched=touched)

        def timed(name: str, call: Products, routed: Routed, layer: Callable[[], object] | None) -> ExpertsCell:
            cell = empty.model_copy(update={"way": name, "peer": layer is None})
            try:
                error = self._error(call(), routed)
                if not error < TOLERANCE:
                    return cell.model_copy(update={"relative_error": error, "reason": "wrong answer"})
                us = timer.time(_replayed(call), kind.device).median_us
                whole = None if layer is None else timer.time(_replayed(layer), kind.device).median_us
            except Exception as raised:  # a library's failure is its result
                return cell.model_copy(update={"reason": " ".join(f"{type(raised).__name__}: {raised}".split())[:300]})
            shares = {"bytes_share": floor_bytes / us, "operations_share": floor_operations / us}
            return cell.model_copy(update={"median_us": us, "layer_us": whole, "relative_error": error, **shares})

        for kernel in kernels:
            yield timed(kernel.name, *self._calls(kernel, x, routed[kernel.name]))
        for peer in peers:
            refusal = peer.refusal(config)
            if refusal:
                yield empty.model_copy(update={"way": peer.name, "peer": True, "reason": refusal})
            else:
                yield timed(peer.name, partial(peer.make(config, self._weights), given), given, None)

    def _calls(self, kernel: ExpertsKernel, x: Tensor, routed: Routed) -> tuple[Products, Routed, Callable[[], object]]:
        """Return a kernel's GEMMs as a call, the routing, and the whole layer as a call. Both calls accumulate, so the sum after
        the first call is the result."""
        sums, stream, bound = torch.zeros_like(x), x.clone(), self._bound

        def products() -> Tensor:
            bound.add(kernel, routed, sums)
            return sums

        def layer() -> None:
            bound.add(kernel, bound.routed(stream, kernel), stream)

        return products, routed, layer

    def _error(self, found: Tensor, routed: Routed) -> float:
        """Return the relative error against the same experts computed in float32 from the quantized weights."""

        def product(rows: Tensor, one: object) -> Tensor:
            bias = getattr(one, "bias", None)
            weight = one.weight  # type: ignore[attr-defined]
            weight = weight.float() if isinstance(weight, Tensor) else weight.dequantized(torch.float32)
            return linear(rows.float(), weight, None if bias is None else bias.float())

        plain, expected = TorchExperts(self.kind.spec, product), torch.zeros_like(routed.x, dtype=torch.float32)
        plain.apply(routed.x.float(), routed.experts, routed.weights, plain.prepare(self._weights), expected)
        return float((found.float() - expected).norm() / expected.norm())


def _bytes(*weights: Tensor | QuantizedWeight) -> int:
    return sum(each.nbytes for each in weights)


def _replayed(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that replays a call's CUDA graph."""

    def run() -> None:
        call()

    return captured(run)
