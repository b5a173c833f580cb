"""The contract of kernels for mixture-of-experts (MoE) layers, and the configuration of such a layer."""

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
from headway.core.contract.weights import Weight, WeightFormat, rewrite


@dataclass(frozen=True)
class ExpertsConfig:
    """Configuration of an MoE layer: a router sends each token to `top_k` of `num_experts` MLPs and adds their weighted outputs.

    Shared experts, which process every token, are split into experts of the routed experts' size. Their weights follow the routed
    experts' weights, so that one kernel computes all of them.
    """

    num_experts: int
    """Number of routed experts."""
    top_k: int
    intermediate_size: int
    """Intermediate size of one expert."""
    shared_intermediate_size: int = 0
    """Total intermediate size of all shared experts. 0 means there are none."""
    shared_gate: bool = False
    """True if the shared experts' output is multiplied by the sigmoid of an extra row of the router (Qwen2-MoE)."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns router logits into scores."""
    renormalize: bool = True
    """True if a token's expert weights are divided by their sum. With softmax, this equals a softmax over the chosen logits."""
    scale: float = 1.0
    """Factor of the routed experts' weights, applied after `renormalize`."""
    num_groups: int = 1
    """Number of equal groups of experts. Each token uses experts of `top_k_groups` groups (node-limited routing, DeepSeek-V2)."""
    top_k_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """Score of a group: its best expert's score (DeepSeek-V2), or the sum of its two best scores (DeepSeek-V3)."""
    correction_bias: bool = False
    """True if a bias per expert is added to its score for the selection, but not for its weight (DeepSeek-V3)."""
    router_bias: bool = False
    """True if the router has a bias (gpt-oss)."""
    biases: bool = False
    """True if the experts' linear layers have biases (gpt-oss)."""
    gated: bool = True
    """True if an expert computes SiLU(gate) * up. False means squared ReLU of up, without a gate (Nemotron-H)."""
    swiglu_alpha: float = 1.0
    """Factor alpha in gate * sigmoid(alpha * gate). 1 means SiLU."""
    swiglu_limit: float | None = None
    """Clamping limit: gate is clamped to at most the limit, and up to between -limit and limit; up is then increased by 1
    (gpt-oss). None means no clamping and no increase."""
    held: range | None = None
    """Indices of the routed experts whose weights this rank holds. None means all. The router always chooses from all experts."""

    @property
    def activation(self) -> Literal["silu", "relu2"]:
        """Activation between an expert's two linear layers."""
        return "silu" if self.gated else "relu2"

    def __post_init__(self) -> None:
        """:raises ModelError: if numbers contradict each other. The message uses the field names of config.json."""
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
        """Number of experts per group."""
        return self.num_experts // self.num_groups

    @property
    def scores_a_group(self) -> int:
        """Number of a group's best expert scores that are added to rank the group."""
        return 1 if self.group_score == "max" else 2

    @property
    def up_size(self) -> int:
        """Number of output rows of an expert's first linear layer: gate and up, or only up."""
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def num_shared(self) -> int:
        """Number of experts that the shared experts are split into. The last one may be padded."""
        return -(-self.shared_intermediate_size // self.intermediate_size)

    @property
    def num_all(self) -> int:
        """Number of routed and shared experts."""
        return self.num_experts + self.num_shared

    @property
    def num_held(self) -> int:
        """Number of routed experts whose weights this rank holds."""
        return self.num_experts if self.held is None else len(self.held)

    @property
    def num_slots(self) -> int:
        """Number of experts that process each token, shared experts included."""
        return self.top_k + self.num_shared

    @property
    def num_logits(self) -> int:
        """Number of router rows: one per routed expert, plus one for the shared experts' gate if there is one."""
        return self.num_experts + (1 if self.shared_gate else 0)


def _whole(key: str, value: object, least: int, most: int | None = None, what: str = "") -> None:
    """Check an integer from config.json. :raises ModelError: if the value is not an integer from `least` to `most`."""
    if type(value) is not int or value < least or (most is not None and value > most):
        need = f"of at least {least}" if most is None else f"from {least} to {most}, {what}"
        raise ModelError(f"{key}: needs a whole number {need}, got {value!r}")


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Parameters of an MoE layer, for kernel selection."""

    config: ExpertsConfig
    hidden_size: int
    dtype: torch.dtype
    """Element type of the activations."""
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
    """Weights of an MoE layer's experts: routed experts first, then shared experts."""

    gate_up: Weight
    """[num_all, up_size, hidden_size]: gate rows before up rows, or only up rows. A quantized weight is 2-d, with the rows of all
    experts."""
    down: Weight
    """[num_all, hidden_size, intermediate_size]. A quantized weight is 2-d, with the rows of all experts."""
    gate_up_bias: Tensor | None = None
    """[num_all, up_size]"""
    down_bias: Tensor | None = None
    """[num_all, hidden_size]"""


@dataclass(frozen=True, slots=True)
class ExpertsCapabilities:
    """Claims of an experts kernel. `headway backends` shows them; the conformance kit tests supported and refused layers."""

    formats: frozenset[str]
    """Supported weight formats, out of FORMATS (core.contract.weights)."""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    devices: tuple[str, ...] = ("cuda",)
    """Supported device types, as in torch.device.type."""
    max_tokens: int | None = None
    """Maximum number of tokens. None means any."""
    batch_invariant: bool = False
    """True if the bits of a token's output do not depend on the other tokens or their number. Deterministic mode uses only such
    kernels."""
    biases: bool = False
    """True if layers whose experts have biases are supported."""
    ungated: bool = False
    """True if experts without a gate (squared ReLU) are also supported."""
    clamped: bool = False
    """True if layers with `swiglu_limit`, or with a `swiglu_alpha` other than 1, are supported."""
    partial: bool = False
    """True if the kernel supports layers with only some of the routed experts on a rank (`ExpertsConfig.held`)."""

    def check(self, spec: ExpertsSpec) -> Support:
        """Return every reason why a layer is outside the claims. The result is truthy if there is none. Never raises."""
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
    """A named implementation of MoE layers. It sees neither the engine nor the model nor the checkpoint.

    A subclass sets `name` and `capabilities` and implements `apply`. The engine makes one instance per distinct `ExpertsSpec` and
    calls `prepare` once per layer. In each step the engine normalizes and routes the tokens, then calls `apply`. On a GPU,
    `apply` must neither synchronise with the host nor read tensor elements on the host. It must allocate only through torch's
    allocator, so that a CUDA graph can own the memory. Steps are captured in CUDA graphs: kernels with a `graph_level` of NONE
    are refused on GPUs. A call that raises must leave `out` unchanged.
    """

    capabilities: ClassVar[ExpertsCapabilities]

    def __init__(self, spec: ExpertsSpec) -> None:
        self.spec = spec

    @classmethod
    def supports(cls, spec: ExpertsSpec) -> Support:
        """Return whether the kernel supports a layer. Override it for conditions that `capabilities` cannot express."""
        return cls.capabilities.check(spec)

    def runs(self, num_tokens: int) -> bool:
        """Return whether the kernel runs steps with this number of tokens."""
        most = self.capabilities.max_tokens
        return most is None or num_tokens <= most

    def prepare(self, weights: ExpertsWeights) -> Any:
        """Return the weights as `apply` reads them: unchanged, or repacked once when the model is loaded."""
        return weights

    def update(self, prepared: Any, again: Any) -> None:
        """Copy `again`, prepared from new weights, into `prepared`; see `LinearKernel.update`.

        :raises ConfigError: if `prepared` and `again` differ in anything other than the elements of tensors.
        """
        rewrite(prepared, again, self.name)

    @abstractmethod
    def apply(self, x: Tensor, experts: Tensor, scores: Tensor, weights: Any, out: Tensor) -> None:
        """Add the outputs of the selected experts to `out`: out[t] += sum over s of scores[t, s] * expert(experts[t, s], x[t]).

        x: [tokens, hidden_size], after the norm.
        experts: int32 [tokens, num_slots]: indices of the experts, shared experts last.
        scores: float32 [tokens, num_slots]
        weights: result of `prepare`.
        out: [tokens, hidden_size]
        """


@dataclass(frozen=True, slots=True)
class ExpertsKernelInfo(KernelInfo):
    """A plugin's registration of an experts kernel, for the hook `headway_register_kernels`."""

    kind: ClassVar[str] = "experts"
