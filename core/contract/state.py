"""Layers with a recurrent state instead of a KV cache (linear attention, SSM): specs, state layouts, metadata and backends."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headway.core.contract.backend import Lengths, Plan, StepLimits, check_made, lattice
from headway.core.contract.errors import ConfigError, making
from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import zeros
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.support import Reason, Support

STATE_KINDS = ("gated_delta", "kda", "mamba2", "mamba1", "lightning", "conv")
"""Kinds of recurrence. `StateBackend.scan` has the formula of each. `conv` is a convolution without a recurrence."""
GATED_DELTA, KDA, MAMBA2, MAMBA1, LIGHTNING, CONV = STATE_KINDS
CHECKPOINT_TOKENS = 64
"""Checkpoints of a sequence are at multiples of this many new tokens, counted from its first new token in the step."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Parameters of a layer with a state: a short causal convolution, a recurrence over its output, or both. Hashable."""

    kind: str
    """One of STATE_KINDS."""
    num_heads: int
    """Number of heads of the state, v and the output. For `mamba1`: number of channels. For `conv`: 0."""
    num_key_heads: int
    """Number of heads of q and k (`mamba2`: groups of B and C). Head h uses key head h // (num_heads // num_key_heads)."""
    key_dim: int
    """Number of elements per head of q and k (`mamba2`, `mamba1`: of B and C, the state size)."""
    value_dim: int
    """Number of elements per head of v and the output (`mamba1`: 1)."""
    conv_channels: int = 0
    """Number of channels of the convolution. 0 means there is none, and the recurrence reads the layer's inputs."""
    conv_width: int = 0
    """Width of the convolution: a token's output depends on the token and the conv_width - 1 tokens before it."""
    activation: str = "silu"
    """Activation after the convolution: silu or none."""
    dtype: torch.dtype = torch.float32
    """Element type of inputs, output and convolution states."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device that the layer runs on."""
    state_dtype: torch.dtype = torch.float32
    """Element type of stored recurrent states. Backends always compute in float32."""
    scale: float = 1.0
    """Factor applied to q (`gated_delta`, `kda`, `lightning`)."""
    qk_norm: bool = False
    """True if each head of q and k is first divided by its L2 norm: x / sqrt(sum(x^2) + 1e-6)."""
    beta_scale: float = 1.0
    """Factor applied to beta (`gated_delta`, `kda`). 2 allows negative eigenvalues of the state transition."""
    dt_limits: tuple[float, float] = (0.0, math.inf)
    """Range to which dt is clamped after the softplus (`mamba2`)."""
    invariance: Invariance = Invariance.NONE
    """Level that a token's output must keep. Set in deterministic mode."""

    def __post_init__(self) -> None:
        fault = _fault_of(self)
        assert not fault, fault

    @property
    def recurrent(self) -> bool:
        """True if the layer has a recurrence: for every kind except `conv`."""
        return self.kind != CONV

    @property
    def input_channels(self) -> int:
        """Number of channels of the layer's input x; see `StateBackend.scan`."""
        return self.conv_channels or _recurrence_channels(self)

    @property
    def out_channels(self) -> int:
        """Number of channels of the layer's output."""
        return self.num_heads * self.value_dim if self.recurrent else self.conv_channels

    @property
    def convolution(self) -> StateSpec:
        """Spec of the layer's convolution without the recurrence, as a layer of kind `conv`."""
        assert self.conv_channels
        return StateSpec(
            CONV,
            0,
            0,
            0,
            0,
            self.conv_channels,
            self.conv_width,
            self.activation,
            self.dtype,
            self.device,
            self.state_dtype,
            invariance=self.invariance,
        )

    @property
    def recurrence(self) -> StateSpec:
        """Spec of the layer's recurrence without the convolution. Its input is the convolution's output."""
        assert self.recurrent
        return replace(self, conv_channels=0, conv_width=0, activation="silu")

    def __str__(self) -> str:
        dtype, state = DTYPE_NAMES.get(self.dtype, str(self.dtype)), DTYPE_NAMES.get(self.state_dtype, str(self.state_dtype))
        conv = f"convolution of {self.conv_channels} x {self.conv_width}" if self.conv_channels else ""
        if not self.recurrent:
            return f"{conv} {dtype} on {self.device.type}"
        heads = f"{self.kind} {self.num_heads}/{self.num_key_heads} heads x {self.key_dim}/{self.value_dim} {dtype}"
        return f"{heads}, {state} states{f', {conv}' if conv else ''} on {self.device.type}"


def _recurrence_channels(spec: StateSpec) -> int:
    """Return the number of channels that a recurrence reads, excluding its gates."""
    if spec.kind == MAMBA1:
        return spec.num_heads
    return 2 * spec.num_key_heads * spec.key_dim + spec.num_heads * spec.value_dim


def _fault_of(spec: StateSpec) -> str:
    """Return the first rule that a layer breaks, or "" if it breaks none."""
    if spec.kind not in STATE_KINDS:
        return f"kind must be one of {', '.join(STATE_KINDS)}: {spec.kind}"
    sizes = (spec.num_heads, spec.num_key_heads, spec.key_dim, spec.value_dim)
    rules = {
        "a recurrence has heads and elements": min(sizes) > 0 if spec.recurrent else not any(sizes),
        "num_heads must be a multiple of num_key_heads": not spec.recurrent or spec.num_heads % spec.num_key_heads == 0,
        "a convolution has at least two taps": spec.conv_width >= 2 if spec.conv_channels else spec.conv_width == 0,
        "a layer of kind conv has channels": spec.recurrent or spec.conv_channels > 0,
        "activation must be silu or none": spec.activation in ("silu", "none"),
        "a convolution reads what its recurrence reads": not (spec.recurrent and spec.conv_channels)
        or spec.conv_channels == _recurrence_channels(spec),
    }
    return next((rule for rule, kept in rules.items() if not kept), "")


@dataclass(frozen=True)
class StateParameters:
    """Weights of a layer with a state. A weight is None if the kind does not use it. `StateBackend.scan` has the formulas."""

    conv_weight: Tensor | None = None
    """[conv_channels, conv_width], in the layer's dtype: taps of each channel, the newest token's last."""
    conv_bias: Tensor | None = None
    """[conv_channels], in the layer's dtype."""
    A_log: Tensor | None = None
    """float32 [num_heads] (`mamba1`: [num_heads, key_dim]; `lightning`: the logarithm of each head's slope)."""
    dt_bias: Tensor | None = None
    """float32 [num_heads] (`kda`: [num_heads, key_dim])."""
    D: Tensor | None = None
    """float32 [num_heads] (`mamba2`, `mamba1`): factor of the input that is added to the output."""
    decay_rate: Tensor | None = field(init=False, repr=False, compare=False, default=None)
    """float32, shape of A_log: -exp(A_log), computed once."""

    def __post_init__(self) -> None:
        if self.A_log is not None:
            object.__setattr__(self, "decay_rate", -self.A_log.float().exp())


_STATE_AXES = ("slot", "head", "key", "value")
_CONV_AXES = ("slot", "channel", "time")


@dataclass(frozen=True)
class StateLayout:
    """Memory order of a slot's state, as named axes. Layouts with equal axes are equal, whatever their names."""

    name: str = field(compare=False)
    recurrent: tuple[str, ...] = _STATE_AXES
    """Order of slot, head, key and value in memory, outermost first. The slot comes first."""
    conv: tuple[str, ...] = _CONV_AXES
    """Order of slot, channel and time in memory. A slot holds the last conv_width - 1 inputs, the newest last."""

    def __post_init__(self) -> None:
        for what, axes, known in (("recurrent", self.recurrent, _STATE_AXES), ("conv", self.conv, _CONV_AXES)):
            if axes[:1] != ("slot",) or sorted(axes) != sorted(known):
                need = f"slot first, and then {', '.join(known[1:])} in some order"
                raise ConfigError(f"state layout {self.name!r}, axes of {what}", need, ", ".join(axes) or "none")

    def shapes(self, spec: StateSpec, num_slots: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and element type of each tensor of a layer's states: "recurrent", "conv" or both."""
        sizes = {
            "slot": num_slots,
            "head": spec.num_heads,
            "key": spec.key_dim,
            "value": spec.value_dim,
            "channel": spec.conv_channels,
            "time": spec.conv_width - 1,
        }
        found = {"recurrent": (tuple(sizes[axis] for axis in self.recurrent), spec.state_dtype)} if spec.recurrent else {}
        if spec.conv_channels:
            found["conv"] = tuple(sizes[axis] for axis in self.conv), spec.dtype
        return found

    def bytes_per_slot(self, spec: StateSpec) -> int:
        """Return the size in bytes of one slot of one layer."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(spec, 1).values())

    def allocate(self, spec: StateSpec, num_slots: int) -> StateCache:
        """Allocate the zeroed states of one layer."""
        shapes = self.shapes(spec, num_slots)
        return StateCache({name: zeros(shape, dtype, spec.device) for name, (shape, dtype) in shapes.items()}, self, spec)


KEY_VALUE = StateLayout("key_value")
"""State layout of transformers and flash-linear-attention: [slot, head, key, value]."""
VALUE_KEY = StateLayout("value_key", ("slot", "head", "value", "key"))
"""State layout of vLLM, FlashInfer and the Mamba kernels: [slot, head, value, key]."""


@dataclass(frozen=True)
class StateCache:
    """States of one layer, one per slot.

    :raises ConfigError: if a tensor is missing, or its shape or element type does not match layout and spec.
    """

    tensors: Mapping[str, Tensor]
    """Tensors "recurrent", "conv" or both; see `StateLayout.shapes`."""
    layout: StateLayout
    spec: StateSpec

    def __post_init__(self) -> None:
        what = f"states in layout {self.layout.name}"
        shapes = self.layout.shapes(self.spec, self.num_slots)
        if set(self.tensors) != set(shapes):
            raise ConfigError(what, f"the tensors {', '.join(shapes)}", ", ".join(self.tensors) or "none")
        for name, tensor in self.tensors.items():
            shape, dtype = shapes[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ConfigError(f"{what}, {name}", f"{dtype} {list(shape)}", f"{tensor.dtype} {list(tensor.shape)}")

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return next(iter(self.tensors.values())).shape[0]

    @cached_property
    def convolution(self) -> StateCache:
        """Cache with only the convolution's states, for a backend that computes only the convolution."""
        return StateCache({"conv": self.tensors["conv"]}, self.layout, self.spec.convolution)

    @cached_property
    def recurrence(self) -> StateCache:
        """Cache with only the recurrent states."""
        return StateCache({"recurrent": self.tensors["recurrent"]}, self.layout, self.spec.recurrence)

    @cached_property
    def logical_recurrent(self) -> Tensor:
        """View [num_slots, num_heads, key_dim, value_dim] of the recurrent states. Layouts differ only in the view's strides."""
        axes = self.layout.recurrent
        return self.tensors["recurrent"].permute([axes.index(axis) for axis in _STATE_AXES])

    @cached_property
    def logical_conv(self) -> Tensor:
        """View [num_slots, conv_channels, conv_width - 1] of the convolution's last inputs, the newest last."""
        axes = self.layout.conv
        return self.tensors["conv"].permute([axes.index(axis) for axis in _CONV_AXES])


@dataclass(frozen=True)
class StateMetadata:
    """Metadata of one step for layers with states: the lengths, shared by all layers, and the sequences' slots.

    A sequence without context starts from a zero state, whatever its slot contains. If draft tokens are verified, the state after
    each new token is stored, because the number of accepted tokens is not known yet.
    """

    step: AttentionMetadata
    """Lengths, packing and phases. Its block table and slot mapping are for layers with a KV cache."""
    slots: Tensor
    """int32 [num_seqs]: slot of each sequence's state before the step. -1 marks a padding row, which reads and writes no
    state."""
    out_slots: Tensor
    """int32 [num_seqs, width]: slots to write states to. Without draft tokens, column 0 gets the state after the last new token.
    With draft tokens, column i gets the state after new token i. -1 means no write, as in columns after the last new token. A
    sequence may write the slot that it reads, but not a slot that another sequence of the step reads."""
    slots_cpu: Tensor
    out_slots_cpu: Tensor
    checkpoints: Tensor | None = None
    """int32 [num_checkpoints, 3], for sequences in PREFILL or EXTEND: index of the sequence, number of its new tokens before the
    checkpoint (a multiple of CHECKPOINT_TOKENS), and slot for the state after them. None means no checkpoints."""
    checkpoints_cpu: Tensor | None = None
    recomputed: Tensor | None = None
    """int64 [num_seqs], only in captured steps that verify draft tokens: number of leading tokens of each sequence that are not
    new. These tokens pad the sequence to the graph's width. The sequence's state already includes them, so they must not change
    the state. None means all tokens are new."""

    @cached_property
    def prefill(self) -> StateMetadata | None:
        """View of the sequences in PREFILL or EXTEND, for `scan`, or None if there are none."""
        return self._part(self.step.prefill, slice(self.step.num_prefills))

    @cached_property
    def decode(self) -> StateMetadata | None:
        """View of the sequences in DECODE, for `step`, or None if there are none."""
        rows = slice(self.step.num_prefills, None)
        part = self._part(self.step.decode, rows)
        if part is None or part is self:
            return part
        recomputed = None if self.recomputed is None else self.recomputed[rows]
        return replace(part, checkpoints=None, checkpoints_cpu=None, recomputed=recomputed)

    def _part(self, view: AttentionMetadata | None, rows: slice) -> StateMetadata | None:
        if view is None or view is self.step:
            return None if view is None else self
        return replace(
            self,
            step=view,
            slots=self.slots[rows],
            out_slots=self.out_slots[rows],
            slots_cpu=self.slots_cpu[rows],
            out_slots_cpu=self.out_slots_cpu[rows],
        )


@dataclass(frozen=True, slots=True)
class StateCapabilities:
    """Claims of a state backend. `headway backends` shows them; the conformance kit tests supported and refused layers."""

    kinds: frozenset[str]
    """Supported recurrences, out of STATE_KINDS. `conv` means that convolutions without a recurrence are supported."""
    layouts: tuple[StateLayout, ...] | None = None
    """Supported state layouts, preferred first. None means every layout."""
    phases: frozenset[Phase] = frozenset(Phase)
    """Supported phases: PREFILL and EXTEND for `scan`, DECODE for `step`."""
    convolution: bool = True
    """True if the backend computes a layer's convolution together with its recurrence. Otherwise the engine runs the convolution
    on another backend that claims `conv`, and passes the convolution's output to this backend."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    devices: tuple[str, ...] = ("cuda",)
    """Supported device types, as in torch.device.type."""
    key_dims: tuple[int, ...] | None = None
    """Supported key_dim. None means any."""
    value_dims: tuple[int, ...] | None = None
    """Supported value_dim, except for `mamba1`, whose channels have one value each. None means any."""
    max_draft_tokens: int = 7
    """Maximum number of draft tokens per sequence in `step`."""
    invariance: Invariance = Invariance.NONE
    """Highest level that the backend supports as `StateSpec.invariance`."""

    def check(self, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        """Return every reason why a combination is outside the claims. The result is truthy if there is none. Never raises."""
        return Support(tuple(self._refusals(spec, layout, phase)))

    def _refusals(self, spec: StateSpec, layout: StateLayout, phase: Phase) -> Iterator[Reason]:
        phases = " or ".join(known.value for known in Phase if known in self.phases)
        layouts = " or ".join(known.name for known in self.layouts or ())
        names = " or ".join(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in self.dtypes)
        states = " or ".join(DTYPE_NAMES.get(dtype, str(dtype)) for dtype in self.state_dtypes)
        fused = self.convolution or not (spec.recurrent and spec.conv_channels)
        values = None if spec.kind == MAMBA1 else self.value_dims
        sizes = (("key_dim", spec.key_dim, self.key_dims), ("value_dim", spec.value_dim, values))
        rules = [
            (spec.kind in self.kinds, "kind", " or ".join(sorted(self.kinds)), spec.kind),
            (spec.invariance <= self.invariance, "invariance", self.invariance.name.lower(), spec.invariance.name.lower()),
            (phase in self.phases, "phase", phases, phase.value),
            (self.layouts is None or layout in self.layouts, "state_layout", layouts, layout.name),
            (spec.device.type in self.devices, "device", " or ".join(self.devices), spec.device.type),
            (spec.dtype in self.dtypes, "dtype", names, DTYPE_NAMES.get(spec.dtype, str(spec.dtype))),
            (fused, "convolution", "a recurrence alone", "a layer with a convolution"),
            *(
                (known is None or size in known, what, " or ".join(map(str, known or ())), size)
                for what, size, known in sizes
                if spec.recurrent
            ),
        ]
        if spec.recurrent:
            got = DTYPE_NAMES.get(spec.state_dtype, str(spec.state_dtype))
            rules.append((spec.state_dtype in self.state_dtypes, "state_dtype", states, got))
        yield from (Reason(what, need or "none", str(got)) for kept, what, need, got in rules if not kept)


class StateBackend(Kernel):
    """A named implementation of layers with a state. It sees neither the engine nor the engine's configuration.

    A subclass sets `name` and `capabilities`, and implements `plan` and at least one of `scan` and `step`. The engine makes one
    instance per distinct `StateSpec`, calls `plan` once per step and `scan` or `step` once per layer. `scan` and `step` must not
    synchronise with the host. `step` must allocate only through torch's allocator, so that a CUDA graph can own the memory.
    """

    capabilities: ClassVar[StateCapabilities]

    def __init__(self, spec: StateSpec, layout: StateLayout) -> None:
        self.spec = spec
        self.layout = layout

    @classmethod
    def supports(cls, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        """Return whether the backend supports a layer. Override it for conditions that `capabilities` cannot express."""
        return cls.capabilities.check(spec, layout, phase)

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Return the number of bytes of device memory that the backend needs in addition to the states."""
        return 0

    def warmup_steps(self, phase: Phase, limits: StepLimits) -> Iterable[Sequence[Lengths]]:
        """Return steps of a phase that together reach every kernel that this instance may select within the limits."""
        return lattice(phase, limits)

    @abstractmethod
    def plan(self, metadata: StateMetadata) -> Plan:
        """Return the plan for one view of a step, which contains only sequences in PREFILL or EXTEND, or only sequences in
        DECODE. Host work and allocation are allowed."""

    def plan_for_capture(self, metadata: StateMetadata) -> Plan:
        """Return the plan for a `step` that is captured in a CUDA graph and replayed in many steps.

        The metadata's tensors are static: before each replay, the engine writes that step's values into them. Rows whose slot is
        -1 are padding. Every sequence has as many tokens as at capture, but only those after its first `StateMetadata.recomputed`
        tokens are new.
        """
        return self.plan(metadata)

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Run several new tokens per sequence (PREFILL, EXTEND) through the layer, and write states and checkpoints.

        x: [num_prefill_tokens, input_channels], packed.
        gates: tensors that depend on the kind, listed below.
        out: [num_prefill_tokens, out_channels]
        All are in the spec's dtype; only the last axis need be contiguous.

        If the spec has a convolution, x[t] becomes activation(bias + sum over i of weight[:, i] * x[t - conv_width + 1 + i]);
        inputs before the first token come from the slot. Then, with S the state of a head, [key_dim, value_dim], in float32:

        gated_delta: x is q | k | v, [key heads, key_dim] twice and [heads, value_dim]; gates: a, b [num_tokens, heads]. q and k
        are normed if `qk_norm` is set, and q is scaled; g = -exp(A_log) * softplus(a + dt_bias); beta = beta_scale * sigmoid(b);
        S = exp(g) * S; S = S + k (beta * (v - S^T k))^T; out = S^T q. (Yang et al. 2024, arXiv 2412.06464.)
        kda: as gated_delta, but a is [num_tokens, heads, key_dim], so each key channel has its own decay exp(g). (Kimi Team 2025,
        arXiv 2510.26692.)
        mamba2: x is x | B | C, [heads, value_dim] and [key heads, key_dim] twice; gates: dt [num_tokens, heads]. dt =
        clamp(softplus(dt + dt_bias), dt_limits); S = exp(-exp(A_log) * dt) * S + B (dt * x)^T; out = S^T C + D * x. (Dao and Gu
        2024, arXiv 2405.21060.)
        mamba1: x is [heads]; gates: dt [num_tokens, heads], B, C [num_tokens, key_dim]. dt = softplus(dt + dt_bias); for each
        channel S = exp(-exp(A_log) * dt) * S + dt * x * B; out = S . C + D * x. (Gu and Dao 2023, arXiv 2312.00752.)
        lightning: x is q | k | v; S = exp(-exp(A_log)) * S + k v^T; out = scale * S^T q. (Qin et al. 2024, arXiv 2401.04658.)
        conv: out is the convolution's output.
        """
        raise NotImplementedError(f"{self.name} declares no scan")

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Run the newest tokens of sequences in DECODE through the layer, as `scan` does: for each sequence, one token, or one
        token and its draft tokens.

        x: [num_decode_tokens, input_channels]; out: [num_decode_tokens, out_channels].

        The state after each token is written to the sequence's `out_slots`, which may include the slot from which the state was
        read. Padding rows must not write states. The output of padding rows and of `recomputed` tokens is ignored.
        """
        raise NotImplementedError(f"{self.name} declares no step")


StateBackends = Mapping[StateSpec, StateBackend]
"""Instances of one backend, keyed by the spec that each was made for."""


@dataclass(frozen=True, slots=True)
class StateBackendInfo(KernelInfo):
    """A plugin's registration of a state backend."""

    kind: ClassVar[str] = "state"


def make_state_backend(kind: type[StateBackend], spec: StateSpec, layout: StateLayout) -> StateBackend:
    """Return a new instance of a backend, which may come from a plugin.

    :raises PluginError: if the constructor raises, or the instance lacks an attribute of the base class.
    """
    who = f"state backend {kind.name} ({kind.__module__}.{kind.__qualname__})"
    with making(who):
        made = kind(spec, layout)
    return check_made(who, made, StateBackend, ("spec", "layout"))  # type: ignore[type-abstract]
