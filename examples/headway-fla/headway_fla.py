"""fla-core (flash-linear-attention) as a state backend for prompts: gated delta (arXiv 2412.06464), KDA (2510.26692) and, by
gated linear attention, Mamba2 (2405.21060) and lightning attention (2401.04658)."""

import inspect
from collections import namedtuple
from functools import cache as memo
from importlib import import_module
from itertools import accumulate, pairwise, zip_longest

import torch
from torch.nn.functional import softplus

from headway import hookimpl
from headway.contract import KEY_VALUE, VALUE_KEY, Phase, StateBackend, StateBackendInfo, StateCapabilities, Support

CHUNK = 64  # tokens per chunk of the library
DELTA = {"gated_delta": "fla.ops.gated_delta_rule.chunk_gated_delta_rule", "kda": "fla.ops.kda.chunk_kda"}
KERNELS = {**DELTA, **dict.fromkeys(("mamba2", "lightning"), "fla.ops.simple_gla.chunk_simple_gla")}
Plan = namedtuple("Plan", "slots empty calls")
Call = namedtuple("Call", "rows starts chunks kept tokens starts_cpu slots")
"""One library call for segments of sequences. rows: indices in the plan's slots; kept: segments with a stored final state."""


@memo
def kernel(kind):
    """Return the library's function for a kind. :raises ImportError: if it is missing, or lacks an argument used below."""
    module, _, name = KERNELS[kind].rpartition(".")
    found = getattr(import_module(module), name)
    wanted = {"state_v_first", "cu_seqlens_cpu", *(("use_beta_sigmoid_in_kernel",) if kind in DELTA else ("g_gamma",))}
    if missing := wanted - set(inspect.signature(found).parameters):
        raise ImportError(f"{name} of this release takes no {', '.join(sorted(missing))}; that of fla-core 0.6.0 does")
    return found


class Fla(StateBackend):
    """Prefill and extend with fla-core. The library returns only a sequence's final state, so sequences are split at checkpoints
    into several calls. Decode needs another backend: fla-core 0.6.0's gated delta decode has an illegal access on an H200."""

    name = "fla"
    capabilities = StateCapabilities(
        kinds=frozenset(KERNELS),
        layouts=(KEY_VALUE, VALUE_KEY),
        phases=frozenset({Phase.PREFILL, Phase.EXTEND}),
        convolution=False,
        dtypes=(torch.bfloat16,),  # float32 would use TF32, which is too imprecise for the contract
        state_dtypes=(torch.float32, torch.bfloat16),
        key_dims=(64, 128),
        value_dims=(64, 128),
        max_draft_tokens=0,
    )

    @classmethod
    def available(cls):
        if not torch.cuda.is_available():
            return Support.no("device", "a CUDA GPU", "none")
        try:
            for kind in KERNELS:
                kernel(kind)
        except Exception as error:
            return Support.no("fla-core", "an import", f"{type(error).__name__}: {error}", "pip install fla-core")
        return Support()

    @classmethod
    def supports(cls, spec, layout, phase):
        support = super().supports(spec, layout, phase)
        if spec.kind in DELTA and spec.beta_scale not in (1.0, 2.0):
            support &= Support.no("beta_scale", "1 or 2", spec.beta_scale)
        if spec.kind == "lightning" and spec.qk_norm:
            support &= Support.no("qk_norm", "q and k as they are", "normed q and k")
        return support

    def workspace_bytes(self, max_num_tokens, max_num_seqs):
        """Return the size of the states (16-bit per chunk, float32 per sequence) and of copies of the inputs, in bytes."""
        spec, states = self.spec, 2 * (max_num_tokens // CHUNK + max_num_seqs) + 12 * max_num_seqs
        return spec.num_heads * (spec.key_dim * spec.value_dim * states + 32 * max_num_tokens * (spec.key_dim + spec.value_dim))

    def plan(self, metadata):
        step, first, lens = metadata.step, metadata.step.query_start_loc_cpu.tolist(), metadata.step.query_lens
        live = [row for row, slot in enumerate(metadata.slots_cpu.tolist()) if slot >= 0 and lens[row]]
        # Number of tokens before the end of each segment -> indices in `targets` of the slots for the state there.
        cuts = {row: {lens[row]: [row] if metadata.out_slots_cpu[row, 0] >= 0 else []} for row in live}
        targets = metadata.out_slots[:, 0]
        if metadata.checkpoints is not None:
            targets = torch.cat((targets, metadata.checkpoints[:, 2]))
            for place, (row, tokens, slot) in enumerate(metadata.checkpoints_cpu.tolist(), start=len(lens)):
                if slot >= 0 and row in cuts:
                    cuts[row].setdefault(tokens, []).append(place)
        pieces = [
            [(number, first[row] + begin, first[row] + end, cuts[row][end]) for begin, end in pairwise([0, *sorted(cuts[row])])]
            for number, row in enumerate(live)
        ]
        calls = [self._call(list(filter(None, turn)), targets) for turn in zip_longest(*pieces)]
        empty = torch.tensor([step.kv_lens[row] <= lens[row] for row in live], dtype=torch.bool).view(-1, 1, 1, 1)
        return Plan(metadata.slots.index_select(0, self._upload(live)), self._upload(empty), calls)

    def _call(self, pieces, targets):
        rows, begins, ends, places = zip(*pieces, strict=True)
        ranges = [range(*bounds) for bounds in zip(begins, ends, strict=True)]
        together = begins[1:] == ends[:-1]
        tokens = slice(begins[0], ends[-1]) if together else self._upload([token for each in ranges for token in each])
        starts = torch.tensor([0, *accumulate(map(len, ranges))])
        chunks = [[piece, chunk] for piece, each in enumerate(ranges) for chunk in range(-(-len(each) // CHUNK))]
        kept = [piece for piece, each in enumerate(places) for _ in each]
        slots = targets.index_select(0, self._upload([place for each in places for place in each])).long()
        return Call(*map(self._upload, (rows, starts, chunks, kept)), tokens, starts, slots)

    def _upload(self, numbers):
        tensor = numbers if isinstance(numbers, torch.Tensor) else torch.tensor(numbers, dtype=torch.int64)
        return tensor if self.spec.device.type == "cpu" else tensor.pin_memory().to(self.spec.device, non_blocking=True)

    def scan(self, x, gates, parameters, cache, plan, out):
        pool = cache.tensors["recurrent"]
        states = pool.index_select(0, plan.slots).float().masked_fill_(plan.empty, 0.0)
        for call in plan.calls:
            parts = [part[call.tokens] for part in (x, *gates)]
            out[call.tokens], last = self._run(*parts, parameters=parameters, call=call, states=states.index_select(0, call.rows))
            states.index_copy_(0, call.rows, last)
            pool.index_copy_(0, call.slots, last.index_select(0, call.kept).to(pool.dtype))

    def _run(self, x, *gates, parameters, call, states):
        """Return the output [tokens, channels], and the state after each segment."""
        spec, run, A_log, mamba = self.spec, kernel(self.spec.kind), parameters.A_log.float(), self.spec.kind == "mamba2"
        asked = {"initial_state": states, "output_final_state": True, "state_v_first": self.layout == VALUE_KEY}
        asked |= {"cu_seqlens": call.starts, "cu_seqlens_cpu": call.starts_cpu, "scale": 1.0 if mamba else spec.scale}
        shapes = [(spec.num_key_heads, spec.key_dim)] * 2
        shapes.insert(0 if mamba else 2, (spec.num_heads, spec.value_dim))
        parts = torch.split(x[None], [heads * dim for heads, dim in shapes], dim=-1)
        q, k, v = (part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))
        if spec.kind in DELTA:
            asked |= {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": parameters.dt_bias.float().flatten()}
            asked |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": spec.beta_scale == 2.0}
            # The other functions derive chunk indices from cu_seqlens_cpu, which synchronises with the device.
            asked |= {"chunk_indices": call.chunks} if spec.kind == "gated_delta" else {}
            o, last = run(q, k, v, *(gate[None] for gate in gates), use_qk_l2norm_in_kernel=spec.qk_norm, **asked)
            return o.flatten(2)[0], last
        asked["g_gamma"], value, skip = -A_log.exp(), v, 0.0
        if mamba:
            v, k, q = q, k, v
            dt = softplus(gates[0].float() + parameters.dt_bias.float()).clamp(*spec.dt_limits)
            asked["g"] = (asked.pop("g_gamma") * dt)[None]
            value, skip = (v * dt[..., None]).to(v.dtype), v * parameters.D[:, None]
        q, k = (part.repeat_interleave(spec.num_heads // spec.num_key_heads, 2) for part in (q, k))  # one per head
        o, last = run(q, k, value, **asked)
        return (o + skip).to(x.dtype).flatten(2)[0], last


@hookimpl
def headway_register_state_backends():
    summary = "flash-linear-attention: chunked kernels for prompts of gated delta, KDA, Mamba2 and lightning layers"
    return [StateBackendInfo("fla", summary, lambda: Fla, "fla-core", api_version=3)]
