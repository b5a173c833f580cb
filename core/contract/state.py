"""Layers that keep a state instead of keys and values: their specs, where states lie, and the slots of a step."""

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
from headway.core.contract.layout import zeros
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.support import Reason, Support

STATE_KINDS = (
    "gated_delta",
    "kda",
    "mamba2",
    "mamba1",
    "lightning",
    "conv",
)
"""Recurrences that a layer may ask for. `StateBackend.scan` has the formula of each; `conv` is a convolution without one."""
GATED_DELTA, KDA, MAMBA2, MAMBA1, LIGHTNING, CONV = STATE_KINDS
CHECKPOINT_TOKENS = 64
"""A checkpoint lies this many new tokens, or a multiple of them, after the first new token of its sequence in the step."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One kind of layer with a state: a short causal convolution, a recurrence over what it returns, or both. Hashable."""

    kind: str
    """One of STATE_KINDS."""
    num_heads: int
    """Heads of the state, of v and of the output; of `mamba1` its channels, of `conv` 0."""
    num_key_heads: int
    """Heads of q and k (`mamba2`: groups of B and C); state head h reads key head h // (num_heads // num_key_heads)."""
    key_dim: int
    """Elements of a head of q and k (`mamba2`, `mamba1`: of B and C, the size of the state)."""
    value_dim: int
    """Elements of a head of v and of the output; of `mamba1` 1."""
    conv_channels: int = 0
    """Channels that the convolution runs over; 0: the layer has none, and its inputs are those of the recurrence."""
    conv_width: int = 0
    """Taps of the convolution: a token's output depends on it and on the conv_width - 1 tokens before it."""
    activation: str = "silu"
    """What follows the convolution: silu, or none."""
    dtype: torch.dtype = torch.float32
    """Element type of inputs, output and the convolution's states."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the layer runs."""
    state_dtype: torch.dtype = torch.float32
    """Element type in which the recurrence's states are kept. A backend computes in float32 whatever it is."""
    scale: float = 1.0
    """Multiplies q (`gated_delta`, `kda`, `lightning`)."""
    qk_norm: bool = False
    """Whether q and k are divided by their L2 norm, head by head, before anything else: x / sqrt(sum(x^2) + 1e-6)."""
    beta_scale: float = 1.0
    """Multiplies beta (`gated_delta`, `kda`): 2 lets the state's eigenvalues be negative."""
    dt_limits: tuple[float, float] = (0.0, math.inf)
    """Range to which dt is clamped after its softplus (`mamba2`)."""

    def __post_init__(self) -> None:
        fault = _fault_of(self)
        assert not fault, fault

    @property
    def recurrent(self) -> bool:
        """Whether there is a recurrence: every kind but `conv`."""
        return self.kind != CONV

    @property
    def input_channels(self) -> int:
        """Channels of the layer's input x; see `StateBackend.scan`."""
        return self.conv_channels or _recurrence_channels(self)

    @property
    def out_channels(self) -> int:
        """Channels of the layer's output."""
        return self.num_heads * self.value_dim if self.recurrent else self.conv_channels

    @property
    def convolution(self) -> StateSpec:
        """The layer's convolution alone, as a layer of kind `conv`."""
        assert self.conv_channels
        return StateSpec(
            CONV, 0, 0, 0, 0, self.conv_channels, self.conv_width, self.activation, self.dtype, self.device, self.state_dtype
        )

    @property
    def recurrence(self) -> StateSpec:
        """The layer's recurrence alone: its input is what the convolution returns."""
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
    """Channels that a recurrence reads beside its gates."""
    if spec.kind == MAMBA1:
        return spec.num_heads
    return 2 * spec.num_key_heads * spec.key_dim + spec.num_heads * spec.value_dim


def _fault_of(spec: StateSpec) -> str:
    """Return the first rule that a layer breaks, or an empty string."""
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
    """The weights of one layer with a state. Those that its kind has no use for are None; `StateBackend.scan` uses them."""

    conv_weight: Tensor | None = None
    """[conv_channels, conv_width]: a channel's taps, the newest token's last; dtype of the layer."""
    conv_bias: Tensor | None = None
    """[conv_channels], dtype of the layer."""
    A_log: Tensor | None = None
    """float32 [num_heads] (`mamba1`: [num_heads, key_dim]; `lightning`: the logarithm of each head's slope)."""
    dt_bias: Tensor | None = None
    """float32 [num_heads] (`kda`: [num_heads, key_dim])."""
    D: Tensor | None = None
    """float32 [num_heads] (`mamba2`, `mamba1`): the share of the input that goes straight to the output."""
    decay_rate: Tensor | None = field(init=False, repr=False, compare=False, default=None)
    """float32, shape of A_log: -exp(A_log), made once for all steps."""

    def __post_init__(self) -> None:
        if self.A_log is not None:
            object.__setattr__(self, "decay_rate", -self.A_log.float().exp())


_STATE_AXES = ("slot", "head", "key", "value")
_CONV_AXES = ("slot", "channel", "time")


@dataclass(frozen=True)
class StateLayout:
    """Where the elements of a slot's state lie, as named axes; two layouts with equal axes are the same."""

    name: str = field(compare=False)
    recurrent: tuple[str, ...] = _STATE_AXES
    """Order of slot, head, key and value in memory, outermost first. The slot comes first."""
    conv: tuple[str, ...] = _CONV_AXES
    """Order of slot, channel and time. A slot holds the last conv_width - 1 inputs, the newest last."""

    def __post_init__(self) -> None:
        for what, axes, known in (("recurrent", self.recurrent, _STATE_AXES), ("conv", self.conv, _CONV_AXES)):
            if axes[:1] != ("slot",) or sorted(axes) != sorted(known):
                need = f"slot first, and then {', '.join(known[1:])} in some order"
                raise ConfigError(f"state layout {self.name!r}, axes of {what}", need, ", ".join(axes) or "none")

    def shapes(self, spec: StateSpec, num_slots: int) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and element type of each tensor that a layer's states need: "recurrent", "conv", or both."""
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
        """Bytes that one slot of one layer takes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes(spec, 1).values())

    def allocate(self, spec: StateSpec, num_slots: int) -> StateCache:
        """Allocate the states of one layer, zeroed."""
        shapes = self.shapes(spec, num_slots)
        return StateCache({name: zeros(shape, dtype, spec.device) for name, (shape, dtype) in shapes.items()}, self, spec)


KEY_VALUE = StateLayout("key_value")
"""States as transformers and flash-linear-attention hold them: [slot, head, key, value]."""
VALUE_KEY = StateLayout("value_key", ("slot", "head", "value", "key"))
"""States as vLLM, FlashInfer and Mamba's kernels hold them: [slot, head, value, key]."""


@dataclass(frozen=True)
class StateCache:
    """The states of one layer, one in each slot.

    :raises ConfigError: a tensor is missing, or its shape or element type is not what layout and spec say.
    """

    tensors: Mapping[str, Tensor]
    """"recurrent", "conv", or both; see `StateLayout.shapes`."""
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
        """Slots of the pool."""
        return next(iter(self.tensors.values())).shape[0]

    @cached_property
    def convolution(self) -> StateCache:
        """The states of the convolution alone, for a backend that applies nothing else."""
        return StateCache({"conv": self.tensors["conv"]}, self.layout, self.spec.convolution)

    @cached_property
    def recurrence(self) -> StateCache:
        """The states of the recurrence alone."""
        return StateCache({"recurrent": self.tensors["recurrent"]}, self.layout, self.spec.recurrence)

    @cached_property
    def logical_recurrent(self) -> Tensor:
        """View [num_slots, num_heads, key_dim, value_dim]: its strides address every layout alike."""
        axes = self.layout.recurrent
        return self.tensors["recurrent"].permute([axes.index(axis) for axis in _STATE_AXES])

    @cached_property
    def logical_conv(self) -> Tensor:
        """View [num_slots, conv_channels, conv_width - 1] of the convolution's last inputs, the newest last."""
        axes = self.layout.conv
        return self.tensors["conv"].permute([axes.index(axis) for axis in _CONV_AXES])


@dataclass(frozen=True)
class StateMetadata:
    """One step of layers with states: the lengths that all layers share, and the slots of its sequences.

    A sequence whose context is empty begins with a state of zeros, whatever its slot holds. With drafts, the state after each
    new token is kept, because it is not known yet how many of them hold.
    """

    step: AttentionMetadata
    """Lengths, packing and phases. Its block table and slot mapping belong to layers with a cache."""
    slots: Tensor
    """int32 [num_seqs]: the slot that holds a sequence's state before the step; -1: a padding row, of which nothing is read and
    nothing written."""
    out_slots: Tensor
    """int32 [num_seqs, width]: where states are written. Column 0 of a sequence without drafts gets the state after its last
    new token, column i of one with drafts that after its i-th; -1: nowhere, as past its new tokens. May name the slot that is
    read; no other sequence of the step reads a slot that is written."""
    slots_cpu: Tensor
    out_slots_cpu: Tensor
    checkpoints: Tensor | None = None
    """int32 [num_checkpoints, 3], of sequences that prefill or extend: index of the sequence, its new tokens up to there (a
    multiple of CHECKPOINT_TOKENS), and the slot that gets the state after them. None: there are none."""
    checkpoints_cpu: Tensor | None = None
    recomputed: Tensor | None = None
    """int64 [num_seqs], in a captured step that verifies drafts: how many tokens of each sequence, the first ones, are not new.
    They fill it up to the width of the graph, and its state, which holds them already, must not see them. None: all are new."""

    @cached_property
    def prefill(self) -> StateMetadata | None:
        """View of the sequences that prefill or extend, which `scan` serves; None where there are none."""
        return self._part(self.step.prefill, slice(self.step.num_prefills))

    @cached_property
    def decode(self) -> StateMetadata | None:
        """View of the sequences that decode, which `step` serves; None where there are none."""
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
    """The claims of a state backend: checked in one place, shown by `headway backends`, and tested both ways by the kit."""

    kinds: frozenset[str]
    """Recurrences that the backend computes, out of STATE_KINDS; `conv` where it serves convolutions of their own."""
    layouts: tuple[StateLayout, ...] | None = None
    """Layouts that the backend reads and writes, preferred first; None: every one."""
    phases: frozenset[Phase] = frozenset(Phase)
    """PREFILL and EXTEND stand for `scan`, DECODE for `step`."""
    convolution: bool = True
    """Whether the backend applies a layer's convolution along with its recurrence. Where not, the engine has the convolution
    served by another backend that claims `conv`, and hands on what that returns."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    devices: tuple[str, ...] = ("cuda",)
    """Device types, as in torch.device.type."""
    key_dims: tuple[int, ...] | None = None
    """Accepted key_dim; None: any."""
    value_dims: tuple[int, ...] | None = None
    """Accepted value_dim, but for `mamba1`, whose channels have one value each; None: any."""
    max_draft_tokens: int = 7
    """Most drafts that a sequence may verify in `step`."""

    def check(self, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        """Return every reason why this combination lies outside the claims; truthy where there is none. Nothing is raised."""
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
    """One named way to compute layers with a state; it never sees the engine or its configuration.

    A subclass sets `name` and `capabilities` and writes `plan` and one or both of `scan` and `step`. The engine makes one
    instance for each distinct StateSpec, then calls `plan` once per step and `scan` or `step` once per layer. Those two must
    not synchronise with the host, and what `step` allocates must come from torch's allocator, so that a graph can own it.
    """

    capabilities: ClassVar[StateCapabilities]

    def __init__(self, spec: StateSpec, layout: StateLayout) -> None:
        self.spec = spec
        self.layout = layout

    @classmethod
    def supports(cls, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        """Return whether the backend can serve a layer; extend it where `capabilities` cannot express a condition."""
        return cls.capabilities.check(spec, layout, phase)

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        """Return the bytes of device memory to keep free beside the states."""
        return 0

    def warmup_steps(self, phase: Phase, limits: StepLimits) -> Iterable[Sequence[Lengths]]:
        """Return steps of a phase that together reach every kernel which this instance may choose in a step within the limits."""
        return lattice(phase, limits)

    @abstractmethod
    def plan(self, metadata: StateMetadata) -> Plan:
        """Prepare one step's view (all prefill or extend, or all decode). Host work and allocation are allowed."""

    def plan_for_capture(self, metadata: StateMetadata) -> Plan:
        """Plan a `step` that is captured in a CUDA graph and replayed for many steps.

        The metadata's tensors are static: each replay finds that step's values in them. Rows whose slot is -1 are padding. Every
        sequence has as many tokens as at the capture, but only those behind its `StateMetadata.recomputed` are new.
        """
        return self.plan(metadata)

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Run several new tokens per sequence (PREFILL, EXTEND) through the layer, and leave states and checkpoints.

        x: [num_prefill_tokens, input_channels], packed; out: [num_prefill_tokens, out_channels]; gates: by kind, below; all in
        the dtype of the spec, and of all only the last axis need be contiguous. Where the spec has a convolution, x[t] becomes
        activation(bias + sum over i of weight[:, i] * x[t - conv_width + 1 + i]); tokens before the first come from the slot.
        Then, with S the state of a head, [key_dim, value_dim], all in float32:

        gated_delta: x is q | k | v, [key heads, key_dim] twice and [heads, value_dim]; gates: a, b [num_tokens, heads]. q and k
        are normed (`qk_norm`), q is scaled; g = -exp(A_log) * softplus(a + dt_bias); beta = beta_scale * sigmoid(b);
        S = exp(g) * S; S = S + k (beta * (v - S^T k))^T; out = S^T q. (Yang et al. 2024, arXiv 2412.06464.)
        kda: the same, with a [num_tokens, heads, key_dim] and so a decay exp(g) for each channel of the key. (Kimi Team 2025,
        arXiv 2510.26692.)
        mamba2: x is x | B | C, [heads, value_dim] and [key heads, key_dim] twice; gates: dt [num_tokens, heads].
        dt = clamp(softplus(dt + dt_bias), dt_limits); S = exp(-exp(A_log) * dt) * S + B (dt * x)^T; out = S^T C + D * x.
        (Dao and Gu 2024, arXiv 2405.21060.)
        mamba1: x is [heads]; gates: dt [num_tokens, heads], B, C [num_tokens, key_dim]. dt = softplus(dt + dt_bias); for each
        channel S = exp(-exp(A_log) * dt) * S + dt * x * B; out = S . C + D * x. (Gu and Dao 2023, arXiv 2312.00752.)
        lightning: x is q | k | v; S = exp(-exp(A_log)) * S + k v^T; out = scale * S^T q. (Qin et al. 2024, arXiv 2401.04658.)
        conv: out is what the convolution returns.
        """
        raise NotImplementedError(f"{self.name} declares no scan")

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        """Run the newest tokens of sequences that decode, one each or one and its drafts, as `scan` does.

        x: [num_decode_tokens, input_channels]; out: [num_decode_tokens, out_channels]. The state of a sequence after each of its
        tokens goes to its `out_slots`, also where that is the slot that was read. Padding rows write nothing, and nobody reads
        their output or that of a captured step's `recomputed` tokens.
        """
        raise NotImplementedError(f"{self.name} declares no step")


StateBackends = Mapping[StateSpec, StateBackend]
"""The instances of one backend, by the spec that each serves."""


@dataclass(frozen=True, slots=True)
class StateBackendInfo(KernelInfo):
    """Registration of a state backend by a plugin."""

    kind: ClassVar[str] = "state"


def make_state_backend(kind: type[StateBackend], spec: StateSpec, layout: StateLayout) -> StateBackend:
    """Return an instance of a backend, whose constructor may be a third party's; raises as `make_backend`."""
    who = f"state backend {kind.name} ({kind.__module__}.{kind.__qualname__})"
    with making(who):
        made = kind(spec, layout)
    return check_made(who, made, StateBackend, ("spec", "layout"))  # type: ignore[type-abstract]
