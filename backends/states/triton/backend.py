"""The state backend `triton`: linear attention and SSM layers in Triton. Prompts run as a scan over chunks of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy
import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.backends.states.triton.arguments import (
    StateTuning,
    channel_constants,
    convolution_constants,
    head_constants,
    launch,
    states,
    weights,
)
from headway.backends.states.triton.chunk_kernels import convolve_chunks, cut_chunks, leave_inputs
from headway.backends.states.triton.scan_kernels import walk_chunks, walk_tokens
from headway.backends.states.triton.step_kernels import StateStep
from headway.core.contract.backend import Plan
from headway.core.contract.kernel import GraphLevel, Packed
from headway.core.contract.metadata import Phase
from headway.core.contract.state import (
    CHECKPOINT_TOKENS,
    GATED_DELTA,
    KDA,
    LIGHTNING,
    MAMBA1,
    STATE_KINDS,
    StateBackend,
    StateCache,
    StateCapabilities,
    StateLayout,
    StateMetadata,
    StateParameters,
    StateSpec,
)
from headway.core.contract.support import Support
from headway.kernels.runtime.triton_launch import INTERPRETED, Launcher, Workspace, can_launch, shared_memory

CHUNK = CHECKPOINT_TOKENS
"""Number of tokens per chunk. States are available after multiples of this number."""


@dataclass(frozen=True, slots=True)
class ChunkedPlan:
    """Plan of one prefill or extend step. All tensors are int32 on the device, with fields defined by the kernels."""

    chunks: Tensor
    seqs: Tensor
    places: Tensor
    parts: Tensor
    num_chunks: int
    num_seqs: int
    num_places: int


def plan_scan(metadata: StateMetadata, device: torch.device) -> ChunkedPlan:
    """Return the plan for sequences in PREFILL or EXTEND."""
    step = metadata.step
    query = numpy.asarray(step.query_lens, dtype=numpy.int64)
    slots = metadata.slots_cpu.numpy().astype(numpy.int64)
    live = slots >= 0
    reads = numpy.where(live & (numpy.asarray(step.kv_lens) > query), slots, -1)
    firsts = step.query_start_loc_cpu.numpy()[:-1].astype(numpy.int64)
    counts = numpy.where(live, -(-query // CHUNK), 0)
    starts = numpy.cumsum(counts) - counts
    num_chunks, num_seqs = int(counts.sum()), len(query)
    rows = numpy.repeat(numpy.arange(num_seqs), counts)
    before = (numpy.arange(num_chunks) - starts[rows]) * CHUNK
    targets = numpy.where(live, metadata.out_slots_cpu.numpy()[:, 0], -1)
    marks = numpy.zeros((0, 3), dtype=numpy.int64)
    if metadata.checkpoints_cpu is not None:
        marks = metadata.checkpoints_cpu.numpy().astype(numpy.int64)
        marks = marks[live[marks[:, 0]] & (marks[:, 2] >= 0)]
    ends = numpy.stack([numpy.arange(num_seqs), query, targets], 1)
    parts = numpy.concatenate([marks, ends])  # sequence, number of new tokens up to its end, slot
    parts = parts[numpy.lexsort((parts[:, 1], parts[:, 0]))]
    seq, tokens, slot = parts.T
    first_parts = numpy.searchsorted(seq, numpy.arange(num_seqs + 1))
    places = numpy.stack([firsts[seq], tokens, reads[seq], slot], 1)[slot >= 0]
    packed = Packed(chunks=4 * num_chunks, seqs=8 * num_seqs, places=4 * len(places), parts=2 * len(parts))
    packed.host("chunks").reshape(-1, 4)[:] = numpy.stack(
        [reads[rows], firsts[rows] + before, before, numpy.minimum(query[rows] - before, CHUNK)], 1
    )
    packed.host("seqs").reshape(-1, 8)[:, :7] = numpy.stack(
        [starts, counts, firsts, query, reads, first_parts[:-1], numpy.diff(first_parts)], 1
    )
    packed.host("places").reshape(-1, 4)[:] = places
    packed.host("parts").reshape(-1, 2)[:] = numpy.stack([-(-tokens // CHUNK), slot], 1)
    packed.upload(device)
    return ChunkedPlan(
        chunks=packed.device("chunks"),
        seqs=packed.device("seqs"),
        places=packed.device("places"),
        parts=packed.device("parts"),
        num_chunks=num_chunks,
        num_seqs=num_seqs,
        num_places=len(places),
    )


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_COPY_BYTES = 16


@dataclass(frozen=True, slots=True)
class _ScanTiling:
    turned: bool  # True if the state has values as rows: the MMAs then read it from registers
    block_v: int  # Number of elements of the value per program
    warps: int
    stages: int  # Number of chunks in flight from memory


_KNOWN_MULTIPLE = 16  # In elements; Triton specialises a kernel by whether a number is a multiple of 16


def _aligned(spec: StateSpec) -> bool:
    """Return whether every head's rows can be prefetched, which requires key_dim and value_dim to be multiples of 16. Without
    prefetching, Triton 3.6 miscompiles wgmma on Hopper."""
    return spec.key_dim % _KNOWN_MULTIPLE == 0 and spec.value_dim % _KNOWN_MULTIPLE == 0


def shared_bytes(spec: StateSpec) -> int:
    """Return the minimum shared memory for prompts, in bytes. `walk_chunks` stores float32 keys and inner products in shared
    memory."""
    if spec.dtype != torch.float32 or not spec.recurrent or spec.kind == MAMBA1:
        return 0
    return CHUNK * ((3 if spec.kind == KDA else 2) * _key_block(spec) + CHUNK) * spec.dtype.itemsize


def _key_block(spec: StateSpec) -> int:
    return max(16, int(triton.next_power_of_2(spec.key_dim)))


class StateScan:
    """Launches of prefill and extend for one kind of layer."""

    def __init__(self, spec: StateSpec, multiprocessors: int) -> None:
        self._spec = spec
        self._multiprocessors = multiprocessors
        self._shared = shared_memory(spec.device)
        kernels = convolve_chunks, leave_inputs, cut_chunks, walk_chunks, walk_tokens
        self._convolve, self._leave, self._cut, self._walk, self._walk_tokens = map(Launcher, kernels)
        # without tensor cores, both operands of a product are in registers, which takes 8 warps
        whole = spec.dtype == torch.float32
        exact = whole or INTERPRETED
        self._dots = {"DOT": tl.float32 if exact else _TYPES[spec.dtype], "PRECISION": "ieee" if whole else "tf32"}
        unit = _COPY_BYTES // spec.dtype.itemsize
        self._row = -(-spec.input_channels // unit) * unit  # rows begin at multiples of 16 bytes, for asynchronous copies
        self._aligned = _aligned(spec)
        self._hopper = spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device)[0] == 9
        self._sum = torch.float64 if whole else torch.float32
        # its elements are at most about 2, and float16 is more precise than bfloat16
        self._inverse_dot = tl.float32 if exact else tl.float16

    def workspace_bytes(self, num_tokens: int, num_seqs: int) -> int:
        """Return the number of bytes that a call allocates through torch."""
        spec, chunks = self._spec, num_tokens // CHUNK + num_seqs
        size = spec.dtype.itemsize
        total = num_tokens * self._row * size
        if spec.recurrent and spec.kind != MAMBA1:
            rows = 3 * spec.key_dim if spec.kind == KDA else 0
            total += (
                chunks * spec.num_heads * (CHUNK * (2 * CHUNK + rows) * size + 2 * self._sum.itemsize * max(CHUNK, spec.key_dim))
            )
        return total

    def __call__(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: ChunkedPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        """Run a layer; see `StateBackend.scan`."""
        spec = self._spec
        if not plan.num_chunks:
            return
        mixed = x.new_empty(len(x), self._row)[:, : spec.input_channels] if spec.recurrent else out
        self._run_convolution(x, parameters, cache, plan, mixed, tuning)
        if spec.kind == MAMBA1:
            self._run_tokens(mixed, gates, parameters, cache, plan, out, tuning)
        elif spec.recurrent:
            self._run_chunks(mixed, gates, parameters, cache, plan, out, tuning)

    def _run_convolution(
        self, x: Tensor, parameters: StateParameters, cache: StateCache, plan: ChunkedPlan, mixed: Tensor, tuning: StateTuning
    ) -> None:
        spec = self._spec
        convolution = convolution_constants(spec, cache, parameters)
        heads = spec.kind in (GATED_DELTA, KDA, LIGHTNING)
        unit = spec.value_dim if heads else tuning.channels
        key_units = 2 * spec.num_key_heads if heads else 0
        constants = {
            "CHANNELS": spec.input_channels,
            "KEY_UNITS": key_units,
            "KEY_DIM": spec.key_dim,
            "UNIT": unit,
            "BLOCK_C": triton.next_power_of_2(max(unit, spec.key_dim if heads else 1)),
            "ROWS": tuning.rows,
            "RUN": tuning.run,
            **convolution,
            "QK_NORM": spec.qk_norm,
        }
        _, conv = states(cache, x)
        weight, bias, *_ = weights(parameters, x)
        units = key_units + triton.cdiv(spec.input_channels - key_units * spec.key_dim, unit)
        grid = units, plan.num_chunks, CHUNK // tuning.rows
        numbers = x.stride(0), mixed.stride(0), float(spec.scale)
        launch(self._convolve, grid, (x, conv, weight, bias, mixed, plan.chunks), numbers, constants, tuning.row_warps)
        if spec.conv_channels and plan.num_places:
            names = ("CONV_SLOT", "CONV_CHANNEL", "CONV_TIME", "WIDTH", "BLOCK_W")
            constants = {
                "CHANNELS": spec.conv_channels,
                "BLOCK_C": tuning.channels,
                **{name: convolution[name] for name in names},
            }
            grid = triton.cdiv(spec.conv_channels, tuning.channels), plan.num_places, 1
            launch(self._leave, grid, (x, conv, plan.places), (x.stride(0),), constants, tuning.channel_warps)

    def _run_chunks(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: ChunkedPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        spec, pairs = self._spec, (plan.num_chunks, self._spec.num_heads)
        sizes = {name: value for name, value in head_constants(spec, cache).items() if not name.startswith("STATE_")}
        block_k = _key_block(spec)
        shared = {**sizes, "BLOCK_K": block_k}
        delta, per_key = spec.kind in (GATED_DELTA, KDA), spec.kind == KDA
        sums = torch.empty((*pairs, spec.key_dim if per_key else CHUNK), dtype=self._sum, device=x.device)
        put = torch.empty_like(sums, dtype=torch.float32)
        inner = x.new_empty((*pairs, CHUNK, CHUNK))
        inverse = torch.empty_like(inner) if delta else inner
        rows = x.new_empty((3, *pairs, CHUNK, spec.key_dim)) if per_key else inner
        first, second = (*gates, x, x)[:2]
        _, _, a_log, dt_bias, d = weights(parameters, x)
        tensors = x, first, second, a_log, dt_bias, plan.chunks, sums, put, inverse, inner, rows
        numbers = x.stride(0), first.stride(0), second.stride(0), float(spec.beta_scale), *map(float, spec.dt_limits)
        whole = spec.dtype == torch.float32
        piece = 16 if whole else block_k
        constants: dict[str, Any] = {**shared, "PIECE": piece, "DOT": self._dots["DOT"], "INVERSE_DOT": self._inverse_dot}
        constants["PRECISION"] = self._dots["PRECISION"]
        warps = tuning.chunk_warps or (8 if whole else 2)
        constants["BLOCKS"] = max(4, 2 * warps)
        launch(self._cut, (spec.num_heads, plan.num_chunks, 1), tensors, numbers, constants, warps, spills=whole or per_key)

        cut = self._scan_tiling(plan, block_k, tuning)
        recurrent, _ = states(cache, x)
        strides = {name: value for name, value in head_constants(spec, cache).items() if name.startswith("STATE_")}
        constants = {**shared, "BLOCK_V": cut.block_v, **strides, "TURNED": cut.turned}
        constants |= {"HAS_D": parameters.D is not None, **self._dots}
        tensors = x, out, recurrent, d, plan.seqs, plan.parts, sums, put, inverse, inner, rows
        numbers = x.stride(0), out.stride(0), plan.num_chunks
        grid = triton.cdiv(spec.value_dim, cut.block_v), spec.num_heads, plan.num_seqs
        launch(self._walk, grid, tensors, numbers, constants, cut.warps, cut.stages, spills=whole)

    def _scan_tiling(self, plan: ChunkedPlan, block_k: int, tuning: StateTuning) -> _ScanTiling:
        spec = self._spec
        whole = max(16, triton.next_power_of_2(spec.value_dim))
        exact = spec.dtype == torch.float32
        many = plan.num_seqs * spec.num_heads * triton.cdiv(whole, 128) >= self._multiprocessors
        turned = tuning.walk_turned if tuning.walk_turned is not None else many and not exact
        block_v = min(tuning.walk_value or (16 if exact else 128 if turned else 32), whole)
        keys = 3 if spec.kind == KDA else 2
        stage = CHUNK * (keys * block_k + block_v + 2 * CHUNK) * spec.dtype.itemsize
        rest = (block_k + 2 * CHUNK) * block_v * spec.dtype.itemsize  # state and values as operands, and the output
        stages = tuning.walk_stages or max(1, min(2 if turned else 3, (self._shared - rest) // stage))
        warps = tuning.walk_warps or (8 if exact or block_v > 64 else 4)
        if self._hopper and (stages < 2 or not self._aligned) and not exact:
            warps = min(warps, 2)  # Triton 3.6 miscompiles wgmma on Hopper if its operands are not pipelined
        return _ScanTiling(turned, block_v, warps, stages)

    def _run_tokens(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: ChunkedPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        spec = self._spec
        dt, b, c = gates
        recurrent, _ = states(cache, x)
        _, _, a_log, dt_bias, d = weights(parameters, x)
        constants = {**channel_constants(spec, cache), "BLOCK_C": tuning.token_channels, "HAS_D": parameters.D is not None}
        tensors = x, dt, b, c, out, recurrent, a_log, dt_bias, d, plan.seqs, plan.parts
        numbers = tuple(each.stride(0) for each in (x, dt, b, c, out))
        grid = triton.cdiv(spec.num_heads, tuning.token_channels), plan.num_seqs, 1
        launch(self._walk_tokens, grid, tensors, numbers, constants, 1)


LONGEST_KEY = 256
"""Maximum key_dim: the kernels hold a whole column of the state in registers."""


class TritonStates(StateBackend):
    """Runs decode steps (convolution and recurrence) in one launch, and prompts in chunks, for every kind and layout of state.
    Needs no build step."""

    name = "triton"
    capabilities: ClassVar[StateCapabilities] = StateCapabilities(
        kinds=frozenset(STATE_KINDS),
        state_dtypes=(torch.float32, torch.bfloat16),
        devices=("cpu", "cuda") if INTERPRETED else ("cuda",),
    )
    graph_level = GraphLevel.UNIFORM

    def __init__(self, spec: StateSpec, layout: StateLayout) -> None:
        super().__init__(spec, layout)
        self.tuning = StateTuning()
        cuda = spec.device.type == "cuda"
        multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count if cuda else 4
        self._step = StateStep(spec, Workspace(spec.device))
        self._scan = StateScan(spec, multiprocessors)

    @classmethod
    def available(cls) -> Support:
        return can_launch()

    @classmethod
    def supports(cls, spec: StateSpec, layout: StateLayout, phase: Phase) -> Support:
        """Return whether the backend's capabilities, the layer's key_dim and the GPU's shared memory allow a layer."""
        support = super().supports(spec, layout, phase)
        if spec.key_dim > LONGEST_KEY:
            support &= Support.no("key_dim", f"at most {LONGEST_KEY}", spec.key_dim)
        asked = phase != Phase.DECODE and spec.device.type == "cuda" and torch.cuda.is_available()
        if asked and (needed := shared_bytes(spec)) > (found := shared_memory(spec.device)):
            wanted = f"{needed >> 10} KB for keys of {spec.key_dim} in float32"
            support &= Support.no("shared memory", wanted, f"{found >> 10} KB", "--dtype bfloat16, or --state-backend torch")
        return support

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        return self._scan.workspace_bytes(max_num_tokens, max_num_seqs)

    def plan(self, metadata: StateMetadata) -> Plan:
        return self._step.plan(metadata) if metadata.step.num_decodes else plan_scan(metadata, self.spec.device)

    def scan(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        self._scan(x, gates, parameters, cache, plan, out, self.tuning)

    def step(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: Plan, out: Tensor
    ) -> None:
        self._step(x, gates, parameters, cache, plan, out, self.tuning)
