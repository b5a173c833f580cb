"""The contract of a backend for layers that keep a state: a chunked `scan` of prompts and a `step` of decodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headway.core.contract.backend import Lengths, Plan, StepLimits, check_made, lattice
from headway.core.contract.errors import making
from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.spec import DTYPE_NAMES
from headway.core.contract.state import MAMBA1, StateCache, StateLayout, StateMetadata, StateParameters, StateSpec
from headway.core.contract.support import Reason, Support


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
