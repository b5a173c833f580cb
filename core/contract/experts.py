"""The contract of a kernel for layers of experts, and what such a layer computes, as plain numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.support import Reason, Support
from headway.core.contract.weights import Weight, WeightFormat


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: a router sends every token to `top_k` of `num_experts` MLPs and adds what they give.

    Shared experts, which every token passes, are cut into experts of the routed ones' size: their weights stand after the routed
    ones', so that all are computed together.
    """

    num_experts: int
    """Number of experts that the router chooses from."""
    top_k: int
    intermediate_size: int
    """Inner size of one expert."""
    shared_intermediate_size: int = 0
    """Inner size of all shared experts together; 0: there is none."""
    shared_gate: bool = False
    """True if what the shared experts give is multiplied by the sigmoid of one more row of the router (Qwen2-MoE)."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores."""
    renormalize: bool = True
    """True if a token's weights are divided by their sum. With softmax this is the softmax over the chosen logits alone."""
    scale: float = 1.0
    """Multiplies the weights of the routed experts, after that."""
    num_groups: int = 1
    """Groups of equally many experts, of which a token may choose from `top_k_groups` (DeepSeek-V2, node-limited routing)."""
    top_k_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """What ranks a group: its best score (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""
    correction_bias: bool = False
    """True if a bias for each expert is added to its score for the choice, not for its weight (DeepSeek-V3)."""
    router_bias: bool = False
    """True if the logits have a bias (gpt-oss)."""
    biases: bool = False
    """True if the experts' products have biases (gpt-oss)."""
    gated: bool = True
    """True if an expert multiplies the SiLU of one product by another; without, it is the squared ReLU of one (Nemotron-H)."""
    swiglu_alpha: float = 1.0
    """The gate is gate * sigmoid(alpha * gate); 1: SiLU."""
    swiglu_limit: float | None = None
    """The gate is at most this, and the other half within plus and minus this and then raised by 1 (gpt-oss); None: neither."""
    held: range | None = None
    """Numbers of the routed experts whose weights this rank holds; None: all. The router chooses from all of them anyway."""

    @property
    def activation(self) -> Literal["silu", "relu2"]:
        """The activation between an expert's products."""
        return "silu" if self.gated else "relu2"

    def __post_init__(self) -> None:
        """:raises ModelError: numbers that contradict each other, by the names of config.json."""
        _whole("num_experts", self.num_experts, 1)
        _whole("moe_intermediate_size", self.intermediate_size, 1)
        _whole("num_experts_per_tok", self.top_k, 1, self.num_experts, "the number of experts")
        _whole("shared experts' size", self.shared_intermediate_size, 0)
        if self.scoring not in ("softmax", "sigmoid"):
            raise ModelError(f"scoring_func: needs softmax or sigmoid, got {self.scoring!r}")
        _whole("n_group", self.num_groups, 1, self.num_experts, "the number of experts")
        if self.num_experts % self.num_groups:
            raise ModelError(f"n_group: needs a divisor of {self.num_experts}, the number of experts, got {self.num_groups}")
        _whole("topk_group", self.top_k_groups, 1, self.num_groups, "n_group")
        allowed = self.top_k_groups * self.group_size
        _whole("num_experts_per_tok", self.top_k, 1, allowed, "the experts of topk_group groups")
        if self.num_groups > 1 and self.group_size < self.scores_a_group:
            raise ModelError(f"n_group: needs groups of {self.scores_a_group} experts or more, got groups of {self.group_size}")

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.num_groups

    @property
    def scores_a_group(self) -> int:
        """How many of a group's best scores are added to rank the group."""
        return 1 if self.group_score == "max" else 2

    @property
    def up_size(self) -> int:
        """Rows of an expert's first product: gate over up, or up alone."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def num_shared(self) -> int:
        """Pieces that the shared experts are cut into; the last may be padded."""
        return -(-self.shared_intermediate_size // self.intermediate_size)

    @property
    def num_all(self) -> int:
        """Experts that a token may pass: routed, then shared."""
        return self.num_experts + self.num_shared

    @property
    def num_held(self) -> int:
        """Routed experts whose weights are held; those of the shared ones stand behind them."""
        return self.num_experts if self.held is None else len(self.held)

    @property
    def num_slots(self) -> int:
        """Experts that each token passes."""
        return self.top_k + self.num_shared

    @property
    def num_logits(self) -> int:
        """Rows of the router: the experts', and the shared ones' gate."""
        return self.num_experts + (1 if self.shared_gate else 0)


def _whole(key: str, value: object, least: int, most: int | None = None, what: str = "") -> None:
    """:raises ModelError: a value that is no whole number between the two."""
    if type(value) is not int or value < least or (most is not None and value > most):
        need = f"of at least {least}" if most is None else f"from {least} to {most}, {what}"
        raise ModelError(f"{key}: needs a whole number {need}, got {value!r}")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A layer of experts as a kernel is asked for it."""

    config: ExpertsConfig
    hidden_size: int
    dtype: torch.dtype
    """Element type of the rows."""
    device: torch.device
    gate_up: WeightFormat
    down: WeightFormat

    def __str__(self) -> str:
        config = self.config
        sizes = f"{config.num_all} experts of {config.intermediate_size}, {config.num_slots} a token, hidden {self.hidden_size}"
        weights = str(self.gate_up) if self.gate_up == self.down else f"{self.gate_up}, down {self.down}"
        return f"{sizes}, {weights}, {DTYPE_NAMES.get(self.dtype, str(self.dtype))}"


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """The weights of a layer's experts, as a kernel is given them: routed experts first, then the pieces of the shared ones."""

    gate_up: Weight
    """[num_all, up_size, hidden_size], gate over up, or up alone; quantised: the rows of all, without the first axis"""
    down: Weight
    """[num_all, hidden_size, intermediate_size]; quantised: the rows of all"""
    gate_up_bias: Tensor | None = None
    """[num_all, up_size]"""
    down_bias: Tensor | None = None
    """[num_all, hidden_size]"""


@dataclass(frozen=True, slots=True)
class ExpertsCapabilities:
    """The claims of an experts kernel: checked in one place, shown by `headway backends`, and tested both ways by the kit."""

    formats: frozenset[str]
    """Weights that the kernel reads, out of FORMATS (core.contract.weights)."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    devices: tuple[str, ...] = ("cuda",)
    """Device types, as in torch.device.type."""
    max_tokens: int | None = None
    """Tokens up to which the kernel serves; None: any."""
    batch_invariant: bool = False
    """True if the bits of a token depend neither on the other tokens nor on their number. Deterministic mode takes no other
    kernel."""
    biases: bool = False
    """True if the experts' products may have biases."""
    ungated: bool = False
    """True if experts of one product with the squared ReLU are served, too."""
    clamped: bool = False
    """True if the gate may have another factor than 1 (`swiglu_alpha`) and limits (`swiglu_limit`)."""
    partial: bool = False
    """True if layers are served of which the rank holds only some routed experts (`ExpertsConfig.held`)."""

    def check(self, spec: ExpertsSpec) -> Support:
        """Return every reason why a layer lies outside the claims; truthy where there is none. Nothing is raised."""
        return Support(tuple(self._refusals(spec)))

    def _refusals(self, spec: ExpertsSpec) -> Iterator[Reason]:
        config = spec.config
        dtypes = " or ".join(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in self.dtypes)
        formats = " or ".join(sorted(self.formats))
        plain = config.swiglu_alpha == 1.0 and config.swiglu_limit is None
        rules = [
            *((weight.name in self.formats, "weight format", formats, weight.name) for weight in {spec.gate_up, spec.down}),
            (spec.device.type in self.devices, "device", " or ".join(self.devices), spec.device.type),
            (spec.dtype in self.dtypes, "dtype", dtypes, DTYPE_NAMES.get(spec.dtype, str(spec.dtype))),
            (self.biases or not config.biases, "biases", "none", "a layer with biases"),
            (self.ungated or config.gated, "activation", "a gate with SiLU", "one product with the squared ReLU"),
            (self.clamped or plain, "activation", "plain SiLU", "a gate with a factor or limits"),
            (self.partial or config.held is None, "experts", "all of the layer's", f"{config.num_held} of {config.num_experts}"),
        ]
        yield from (Reason(what, need, got) for holds, what, need, got in rules if not holds)


class ExpertsKernel(Kernel):
    """One named way to compute layers of experts; it never sees the engine, the model or the checkpoint.

    A subclass sets `name` and `capabilities` and writes `apply`. On a GPU steps are captured in CUDA graphs, so that a kernel
    with a `graph_level` of NONE is refused there. The engine norms the rows and routes them, makes one instance for each
    distinct ExpertsSpec, calls `prepare` once for each layer and `apply` in each step. On a GPU `apply` must not synchronise
    with the host nor read a value there, and what it allocates must come from torch's allocator, so that a CUDA graph can own
    it. A call that raises leaves `out` as it was.
    """

    capabilities: ClassVar[ExpertsCapabilities]

    def __init__(self, spec: ExpertsSpec) -> None:
        self.spec = spec

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        """Return whether the kernel can serve a layer; extend it where `capabilities` cannot express a condition."""
        return cls.capabilities.check(spec)

    def runs(self, num_tokens: int) -> bool:
        """Return whether the kernel runs steps of this many tokens."""
        most = self.capabilities.max_tokens
        return most is None or num_tokens <= most

    def prepare(self, weights: ExpertsWeights) -> Any:
        """Return what `apply` reads of a layer: the weights themselves, or an arrangement of them that is made once."""
        return weights

    @abstractmethod
    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: Any, out: Tensor) -> None:
        """Add what the chosen experts give to `out`, in place: out[t] += sum over s of scores[t, s] expert(experts[t, s], x[t]).

        x: [tokens, hidden_size], normed; experts: int32 [tokens, num_slots], shared ones last; scores: float32, as large;
        weights: what `prepare` returned; out: [tokens, hidden_size].
        """


@dataclass(frozen=True, slots=True)
class ExpertsKernelInfo(KernelInfo):
    """Registration of an experts kernel by a plugin, for the hook `headway_register_kernels`."""

    kind: ClassVar[str] = "experts"
