"""Decode of the Triton state backend: convolution, gates and recurrence of the newest tokens, in place and in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headway.backends.states.triton.arguments import (
    StateTuning,
    channel_constants,
    convolution_constants,
    head_constants,
    launch,
    states,
    weights,
)
from headway.backends.states.triton.window_kernels import convolved, convolved_once, leave_windows, out_slot_of, softplus
from headway.core.contract.state import MAMBA1, StateCache, StateMetadata, StateParameters, StateSpec
from headway.kernels.runtime.triton_launch import Launcher, Workspace, launches_early


@triton.jit(do_not_specialize=["stride_x", "stride_a", "stride_b", "stride_out", "stride_slots"])
def step_heads(
    x_ptr,  # [num_tokens, channels]: q | k | v, mamba2: v | k | q, where k is B and q is C
    a_ptr,  # gate a, or dt: [num_tokens, heads], kda: [num_tokens, heads, KEY_DIM]
    b_ptr,  # gate b: [num_tokens, heads]
    out_ptr,  # [num_tokens, heads * VALUE_DIM]
    state_ptr,
    conv_ptr,
    weight_ptr,
    bias_ptr,
    a_log_ptr,
    dt_bias_ptr,
    d_ptr,
    slots_ptr,  # int32 [num_seqs]; -1 marks a padding row
    out_slots_ptr,  # int32 [num_seqs, OUT_WIDTH]
    query_start_ptr,  # int32 [num_seqs + 1]
    recomputed_ptr,  # int64 [num_seqs], with RECOMPUTED
    arrived_ptr,  # int32 [num_seqs, key heads], zero between launches
    stride_x,
    stride_a,
    stride_b,
    stride_out,
    stride_slots,  # stride of the rows of out_slots
    scale,
    beta_scale,
    dt_least,
    dt_most,
    KIND: tl.constexpr,
    SINGLE: tl.constexpr,  # every sequence has one new token
    RECOMPUTED: tl.constexpr,  # the first tokens of a sequence may be recomputed ones
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,  # KEY_DIM rounded up to a power of two
    BLOCK_V: tl.constexpr,  # number of value elements per program
    STATE_SLOT: tl.constexpr,  # strides of the states
    STATE_HEAD: tl.constexpr,
    STATE_KEY: tl.constexpr,
    STATE_VALUE: tl.constexpr,
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,  # taps; 0 means the input is already convolved
    BLOCK_W: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    QK_NORM: tl.constexpr,
    HAS_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run a decode step. Grid (heads * cdiv(VALUE_DIM, BLOCK_V), num_seqs). A program has a [BLOCK_K, BLOCK_V] tile of a state.

    Both S^T k and S^T q are computed from the state before the update. With decay a, S' = aS + k d^T, so S'^T q = S^T (aq) + (k .
    q) d. Neither S^T k nor S^T q needs to wait for the other.

    All programs of a key head read its convolution state, which may be updated in place. After reading, each program adds 1 to
    the key head's counter. The last program to do so writes the new convolution state for all programs.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    TILES: tl.constexpr = (VALUE_DIM + BLOCK_V - 1) // BLOCK_V
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    head = tl.program_id(0) // TILES
    seq = tl.program_id(1)
    slot = tl.load(slots_ptr + seq)
    if slot < 0:
        return
    key_head = head // GROUP
    i = tl.arange(0, BLOCK_K)
    j = (tl.program_id(0) % TILES) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key = i < KEY_DIM
    in_value = j < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    within = head * STATE_HEAD + i[:, None] * STATE_KEY + j[None, :] * STATE_VALUE
    state = tl.load(state_ptr + slot.to(tl.int64) * STATE_SLOT + within, mask=inside, other=0.0).to(tl.float32)

    first = tl.load(query_start_ptr + seq)
    if RECOMPUTED:
        first += tl.load(recomputed_ptr + seq).to(tl.int32)
    if SINGLE:
        count = 1
    else:
        count = tl.load(query_start_ptr + seq + 1) - first
    rows_ptr = x_ptr + first.to(tl.int64) * stride_x
    base_ptr = conv_ptr + slot.to(tl.int64) * CONV_SLOT
    out_slots_ptr += seq * stride_slots
    if KIND == "mamba2":
        v_at = j + head * VALUE_DIM
        k_at = i + HEADS * VALUE_DIM + key_head * KEY_DIM
        q_at = k_at + KEY_HEADS * KEY_DIM
    else:
        q_at = i + key_head * KEY_DIM
        k_at = q_at + KEY_HEADS * KEY_DIM
        v_at = j + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    slope = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    if KIND == "kda":
        dt_bias = tl.load(dt_bias_ptr + head * KEY_DIM + i, mask=in_key, other=0.0)
    elif KIND != "lightning":
        dt_bias = tl.load(dt_bias_ptr + head)

    for t in range(count):
        token = (first + t).to(tl.int64)
        if WIDTH:
            q = convolved(
                rows_ptr, base_ptr, weight_ptr, bias_ptr, t, q_at, in_key, stride_x,
                CONV_CHANNEL, CONV_TIME, WIDTH, HAS_BIAS, SILU,
            )  # fmt: skip
            k = convolved(
                rows_ptr, base_ptr, weight_ptr, bias_ptr, t, k_at, in_key, stride_x,
                CONV_CHANNEL, CONV_TIME, WIDTH, HAS_BIAS, SILU,
            )  # fmt: skip
            v = convolved(
                rows_ptr, base_ptr, weight_ptr, bias_ptr, t, v_at, in_value, stride_x,
                CONV_CHANNEL, CONV_TIME, WIDTH, HAS_BIAS, SILU,
            )  # fmt: skip
        else:
            row_ptr = x_ptr + token * stride_x
            q = tl.load(row_ptr + q_at, mask=in_key, other=0.0).to(tl.float32)
            k = tl.load(row_ptr + k_at, mask=in_key, other=0.0).to(tl.float32)
            v = tl.load(row_ptr + v_at, mask=in_value, other=0.0).to(tl.float32)
        if QK_NORM:
            q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
            k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        if KIND != "mamba2":
            q *= scale
        shared = tl.sum(q * k, 0)

        if KIND == "kda":
            a = tl.load(a_ptr + token * stride_a + head * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
            decay = tl.exp(-slope * softplus(a + dt_bias))
        elif KIND == "lightning":
            decay = tl.zeros([BLOCK_K], tl.float32) + tl.exp(-slope)
        else:
            dt = softplus(tl.load(a_ptr + token * stride_a + head).to(tl.float32) + dt_bias)
            if KIND == "mamba2":
                dt = tl.minimum(tl.maximum(dt, dt_least), dt_most)
            decay = tl.zeros([BLOCK_K], tl.float32) + tl.exp(-slope * dt)
        decayed = tl.sum(state * (decay * q)[:, None], 0)
        if KIND == "gated_delta" or KIND == "kda":
            beta = beta_scale * tl.sigmoid(tl.load(b_ptr + token * stride_b + head).to(tl.float32))
            added = beta * (v - tl.sum(state * (decay * k)[:, None], 0))
        elif KIND == "mamba2":
            added = dt * v
        else:
            added = v
        state = state * decay[:, None] + k[:, None] * added[None, :]
        y = decayed + shared * added
        if HAS_D:
            y += tl.load(d_ptr + head) * v
        y_ptrs = out_ptr + token * stride_out + head * VALUE_DIM + j
        tl.store(y_ptrs, y.to(out_ptr.dtype.element_ty), mask=in_value)
        target = out_slot_of(out_slots_ptr, t, count, OUT_WIDTH)
        if target >= 0:
            there = state_ptr + target.to(tl.int64) * STATE_SLOT + within
            tl.store(there, state.to(state_ptr.dtype.element_ty), mask=inside)

    if WIDTH:
        tl.debug_barrier()  # every thread has read its windows
        last = True
        if GROUP * TILES > 1:
            counter = arrived_ptr + seq * KEY_HEADS + key_head
            # `relaxed` suffices: a program that has computed with its reads has finished them, and no program reads another's
            # writes.
            last = tl.atomic_add(counter, 1, sem="relaxed") == GROUP * TILES - 1
        leave_windows(
            rows_ptr, conv_ptr, out_slots_ptr, slot, count, v_at, in_value, stride_x,
            SINGLE, OUT_WIDTH, CONV_SLOT, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W,
        )  # fmt: skip
        if last:
            leave_windows(
                rows_ptr, conv_ptr, out_slots_ptr, slot, count, q_at, in_key, stride_x,
                SINGLE, OUT_WIDTH, CONV_SLOT, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W,
            )  # fmt: skip
            leave_windows(
                rows_ptr, conv_ptr, out_slots_ptr, slot, count, k_at, in_key, stride_x,
                SINGLE, OUT_WIDTH, CONV_SLOT, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W,
            )  # fmt: skip
            if GROUP * TILES > 1:
                tl.store(counter, 0)


@triton.jit(do_not_specialize=["stride_x", "stride_dt", "stride_b", "stride_c", "stride_out", "stride_slots"])
def step_channels(
    x_ptr,  # [num_tokens, CHANNELS]
    dt_ptr,  # [num_tokens, CHANNELS]
    b_ptr,  # [num_tokens, KEY_DIM]
    c_ptr,  # [num_tokens, KEY_DIM]
    out_ptr,  # [num_tokens, CHANNELS]
    state_ptr,
    conv_ptr,
    weight_ptr,
    bias_ptr,
    a_log_ptr,  # [CHANNELS, KEY_DIM]
    dt_bias_ptr,
    d_ptr,
    slots_ptr,  # int32 [num_seqs]; -1 marks a padding row
    out_slots_ptr,  # int32 [num_seqs, OUT_WIDTH]
    query_start_ptr,  # int32 [num_seqs + 1]
    recomputed_ptr,  # int64 [num_seqs], with RECOMPUTED
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_out,
    stride_slots,  # stride of the rows of out_slots
    SINGLE: tl.constexpr,  # every sequence has one new token
    RECOMPUTED: tl.constexpr,  # the first tokens of a sequence may be recomputed ones
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,  # channels per program
    KEY_DIM: tl.constexpr,  # 0 means only the convolution
    BLOCK_K: tl.constexpr,
    STATE_SLOT: tl.constexpr,
    STATE_CHANNEL: tl.constexpr,
    STATE_KEY: tl.constexpr,
    CONV_SLOT: tl.constexpr,
    CONV_CHANNEL: tl.constexpr,
    CONV_TIME: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run a decode step of layers with independent channels: a convolution, optionally followed by `mamba1`. Grid (cdiv(CHANNELS,
    BLOCK_C), num_seqs)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    seq = tl.program_id(1)
    slot = tl.load(slots_ptr + seq)
    if slot < 0:
        return
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = c < CHANNELS
    first = tl.load(query_start_ptr + seq)
    if RECOMPUTED:
        first += tl.load(recomputed_ptr + seq).to(tl.int32)
    if SINGLE:
        count = 1
    else:
        count = tl.load(query_start_ptr + seq + 1) - first
    rows_ptr = x_ptr + first.to(tl.int64) * stride_x
    out_slots_ptr += seq * stride_slots
    if WIDTH:
        base_ptr = conv_ptr + slot.to(tl.int64) * CONV_SLOT
    if KEY_DIM:
        n = tl.arange(0, BLOCK_K)
        inside = live[:, None] & (n < KEY_DIM)[None, :]
        within = c[:, None] * STATE_CHANNEL + n[None, :] * STATE_KEY
        state = tl.load(state_ptr + slot.to(tl.int64) * STATE_SLOT + within, mask=inside, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(a_log_ptr + c[:, None] * KEY_DIM + n[None, :], mask=inside, other=0.0).to(tl.float32))
        dt_bias = tl.load(dt_bias_ptr + c, mask=live, other=0.0).to(tl.float32)

    for t in range(count):
        token = (first + t).to(tl.int64)
        if WIDTH and SINGLE:
            y = convolved_once(
                rows_ptr, conv_ptr, weight_ptr, bias_ptr, slot, tl.load(out_slots_ptr), c, live,
                CONV_SLOT, CONV_CHANNEL, CONV_TIME, WIDTH, HAS_BIAS, SILU,
            )  # fmt: skip
        elif WIDTH:
            y = convolved(
                rows_ptr, base_ptr, weight_ptr, bias_ptr, t, c, live, stride_x,
                CONV_CHANNEL, CONV_TIME, WIDTH, HAS_BIAS, SILU,
            )  # fmt: skip
        else:
            y = tl.load(x_ptr + token * stride_x + c, mask=live, other=0.0).to(tl.float32)
        if KEY_DIM:
            x = y
            dt = softplus(tl.load(dt_ptr + token * stride_dt + c, mask=live, other=0.0).to(tl.float32) + dt_bias)
            put = tl.load(b_ptr + token * stride_b + n, mask=n < KEY_DIM, other=0.0).to(tl.float32)
            get = tl.load(c_ptr + token * stride_c + n, mask=n < KEY_DIM, other=0.0).to(tl.float32)
            state = state * tl.exp(-rate * dt[:, None]) + (dt * x)[:, None] * put[None, :]
            y = tl.sum(state * get[None, :], 1)
            if HAS_D:
                y += tl.load(d_ptr + c, mask=live, other=0.0) * x
            target = out_slot_of(out_slots_ptr, t, count, OUT_WIDTH)
            if target >= 0:
                there = state_ptr + target.to(tl.int64) * STATE_SLOT + within
                tl.store(there, state.to(state_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + token * stride_out + c, y.to(out_ptr.dtype.element_ty), mask=live)

    if WIDTH and not SINGLE:
        leave_windows(
            rows_ptr, conv_ptr, out_slots_ptr, slot, count, c, live, stride_x,
            SINGLE, OUT_WIDTH, CONV_SLOT, CONV_CHANNEL, CONV_TIME, WIDTH, BLOCK_W,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StatesStepPlan:
    """Plan of one decode step: the slots of its sequences, and their numbers of new tokens."""

    slots: Tensor
    out_slots: Tensor
    query_start_loc: Tensor
    recomputed: Tensor | None
    num_seqs: int
    single: bool
    """True if every sequence has one new token."""

    @property
    def recomputed_tokens(self) -> Tensor:
        """Tensor for the kernel's `recomputed` argument. If no tokens are recomputed, this is a placeholder."""
        return self.slots if self.recomputed is None else self.recomputed


class StateStep:
    """Launches of decode for one kind of layer."""

    def __init__(self, spec: StateSpec, workspace: Workspace) -> None:
        self._spec = spec
        self._workspace = workspace
        self._early = launches_early(spec.device)
        self._heads = Launcher(step_heads)
        self._channels = Launcher(step_channels)

    def plan(self, metadata: StateMetadata) -> StatesStepPlan:
        """Return the plan for sequences in DECODE. Tensors are not copied, so a captured graph reads each step's values from the
        same tensors."""
        step = metadata.step
        if self._spec.recurrent and self._spec.conv_channels:
            self._workspace.counters(step.num_seqs * self._spec.num_key_heads)
        out_slots = metadata.out_slots
        width = out_slots.shape[1]
        assert width == 1 or width >= step.max_query_len, f"a column for each of {step.max_query_len} new tokens, or one: {width}"
        single = step.max_query_len == 1
        return StatesStepPlan(metadata.slots, out_slots, step.query_start_loc, metadata.recomputed, step.num_seqs, single)

    def __call__(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StatesStepPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        """Run a layer; see `StateBackend.step`."""
        spec = self._spec
        if not spec.recurrent or spec.kind == MAMBA1:
            self._run_channels(x, gates, parameters, cache, plan, out, tuning)
            return
        self._run_heads(x, gates, parameters, cache, plan, out, tuning)

    def _run_heads(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StatesStepPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        spec = self._spec
        block_v, num_warps = self._cut(plan, tuning)
        constants = {
            **head_constants(spec, cache),
            **convolution_constants(spec, cache, parameters),
            "SINGLE": plan.single,
            "RECOMPUTED": plan.recomputed is not None,
            "BLOCK_K": triton.next_power_of_2(spec.key_dim),
            "BLOCK_V": block_v,
            "OUT_WIDTH": plan.out_slots.shape[1],
            "QK_NORM": spec.qk_norm,
            "HAS_D": parameters.D is not None,
            "PDL": self._early,
        }
        first, second = (*gates, x, x)[:2]
        tensors = (
            x, first, second, out, *states(cache, x), *weights(parameters, x), plan.slots, plan.out_slots,
            plan.query_start_loc, plan.recomputed_tokens, self._workspace.counters(plan.num_seqs * spec.num_key_heads),
        )  # fmt: skip
        strides = x.stride(0), first.stride(0), second.stride(0), out.stride(0), plan.out_slots.stride(0)
        numbers = spec.scale, spec.beta_scale, *spec.dt_limits
        grid = spec.num_heads * triton.cdiv(spec.value_dim, block_v), plan.num_seqs, 1
        launch(self._heads, grid, tensors, (*strides, *map(float, numbers)), constants, num_warps)

    def _run_channels(
        self, x: Tensor, gates: Sequence[Tensor], parameters: StateParameters, cache: StateCache, plan: StatesStepPlan,
        out: Tensor, tuning: StateTuning,
    ) -> None:  # fmt: skip
        spec = cache.spec
        channels = channel_constants(spec, cache)
        constants = {
            **channels,
            **convolution_constants(spec, cache, parameters),
            "SINGLE": plan.single,
            "RECOMPUTED": plan.recomputed is not None,
            "BLOCK_C": tuning.channels,
            "OUT_WIDTH": plan.out_slots.shape[1],
            "HAS_D": parameters.D is not None,
            "PDL": self._early,
        }
        dt, b, c = (*gates, x, x, x)[:3]
        tensors = (
            x, dt, b, c, out, *states(cache, x), *weights(parameters, x), plan.slots, plan.out_slots, plan.query_start_loc,
            plan.recomputed_tokens,
        )  # fmt: skip
        strides = tuple(each.stride(0) for each in (x, dt, b, c, out, plan.out_slots))
        grid = triton.cdiv(channels["CHANNELS"], tuning.channels), plan.num_seqs, 1
        launch(self._channels, grid, tensors, strides, constants, tuning.channel_warps)

    def _cut(self, plan: StatesStepPlan, tuning: StateTuning) -> tuple[int, int]:
        """Return (value elements per program, number of warps) with which the tile of a state takes 32 or 64 registers per
        thread."""
        spec = self._spec
        chosen = 64 if plan.num_seqs * spec.num_heads >= 256 else 32
        block_v = min(tuning.step_value or chosen, triton.next_power_of_2(spec.value_dim))
        elements = triton.next_power_of_2(spec.key_dim) * block_v
        return block_v, tuning.step_warps or max(1, min(4, elements // 1024))
