"""FlashInfer (Ye et al. 2025, arXiv 2501.01005) as a backend: prefill, extend, decode, and DeepSeek's MLA."""

import inspect
from functools import cache as memo
from importlib import import_module
from typing import ClassVar

import torch

from headway import HeadwayError, hookimpl
from headway.contract import ALL_PHASES, HND, LATENT, NHD, AttentionBackend, BackendInfo, Capabilities, Phase, Support

WORKSPACE = 256 * 2**20
"""Size of the workspace in bytes: twice the library's recommendation, which is too small for long batches with many heads."""
RAGGED, PAGED = "BatchPrefillWithRaggedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
DECODE, MLA = "BatchDecodeWithPagedKVCacheWrapper", "BatchMLAPagedAttentionWrapper"
KERNELS = {"prefill": ("auto", "fa2", "fa3"), "decode": ("auto", "fa2", "fa3", "cuda_cores")}


@memo
def wrapper_class(name):
    """Return a wrapper class. :raises ImportError: if the library is missing, or its `plan` lacks an argument used below."""
    found = getattr(import_module("flashinfer.mla" if name == MLA else "flashinfer"), name)
    wanted = {"sm_scale", "q_data_type", "kv_data_type"} | ({"kv_len_arr"} if name == MLA else {"window_left", "logits_soft_cap"})
    known = inspect.signature(found.plan).parameters
    if (missing := wanted - set(known)) and all(each.kind is not each.VAR_KEYWORD for each in known.values()):
        raise ImportError(f"{name}.plan of this release takes no {', '.join(sorted(missing))}; that of 0.6.4 does")
    return found


@memo
def workspace(device):
    """Return a device's workspace, shared by all layers because their kernels run in sequence."""
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)


class FlashInfer(AttentionBackend):
    """All phases with FlashInfer. Decode is not captured in CUDA graphs: the library plans on the host from exact lengths, before
    each replay too, and at that time the engine knows only upper bounds."""

    name = "flashinfer"
    capabilities = Capabilities(
        phases=ALL_PHASES,
        layouts=(NHD, HND, LATENT),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 128, 256),
        v_head_dims=((576, 512), (192, 128)),
        value_in_key=True,
        features=frozenset({"sliding_window", "softcap"}),
        dense_prefill=True,
        exact_host_lengths=True,
    )
    options: ClassVar = {phase: f"kernels of a {phase}: {', '.join(known)}" for phase, known in KERNELS.items()}

    def __init__(self, spec, layout, block_size, options=None):
        super().__init__(spec, layout, block_size, options)
        self._kernels = {"prefill": "auto", "decode": "auto", **(options or {})}
        for phase, chosen in self._kernels.items():
            if chosen not in KERNELS[phase]:
                raise HeadwayError(f"--attn-opt flashinfer.{phase}: needs one of {', '.join(KERNELS[phase])}, got {chosen!r}")
        self._wrapper = memo(self._make)  # one per part of a step, since both are planned before either runs

    @classmethod
    def available(cls):
        if not torch.cuda.is_available():
            return Support.no("device", "a CUDA GPU", "none")
        try:
            for name in (RAGGED, PAGED, DECODE, MLA):
                wrapper_class(name)
        except Exception as error:
            return Support.no("flashinfer", "an import", f"{type(error).__name__}: {error}", "pip install flashinfer-python")
        return Support()

    @classmethod
    def supports(cls, spec, layout, block_size, phase):
        support = super().supports(spec, layout, block_size, phase)
        if spec.value_in_key and (phase is Phase.PREFILL or spec.num_kv_heads > 1 or spec.features):
            support &= Support.no("value_in_key", "absorbed latent attention, decode or extend", f"{spec}, {phase.value}")
        if (spec.head_dim, spec.v_head_dim) == (192, 128) and phase is not Phase.PREFILL:
            support &= Support.no("phase", "prefill, with values of 128", phase.value)
        return support

    def workspace_bytes(self, max_num_tokens, max_num_seqs):
        return WORKSPACE

    def _make(self, kind, phase):
        memory, layout = workspace(self.spec.device), "HND" if self.layout == HND and kind != RAGGED else "NHD"
        if kind == MLA:
            return wrapper_class(kind)(memory)
        if kind != DECODE:  # auto is fa3 on Hopper
            return wrapper_class(kind)(memory, layout, backend=self._kernels["prefill"])
        kernels = {"auto": "cuda_cores" if self.spec.group_size == 1 else "fa2"}.get(chosen := self._kernels["decode"], chosen)
        tensor_cores = kernels != "cuda_cores"
        return wrapper_class(kind)(memory, layout, use_tensor_cores=tensor_cores, backend=kernels if tensor_cores else "auto")

    def plan(self, metadata):
        """Once per step: return (kind, wrapper, number of tokens without padding), or None if no sequence has keys."""
        spec, size, phase = self.spec, self.block_size, metadata.phase
        live = int((metadata.seq_lens_cpu > 0).sum())
        if not live:
            return None
        lens, starts = metadata.seq_lens_cpu[:live], metadata.query_start_loc_cpu[: live + 1]
        counts = (lens + size - 1) // size
        pages = metadata.block_table_cpu[:live][torch.arange(metadata.block_table_cpu.shape[1]) < counts[:, None]]
        ends, last = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), lens - (counts - 1) * size
        heads, causal = (spec.num_heads, spec.num_kv_heads, spec.head_dim), {"causal": True}
        types = {"sm_scale": spec.scale, "q_data_type": spec.dtype, "kv_data_type": spec.cache_dtype}
        # window_left: number of keys to the left of the query; -1 means all.
        scores = {"window_left": (spec.sliding_window or 0) - 1, "logits_soft_cap": spec.softcap or 0.0, **types}
        if spec.value_in_key:
            dims = {"head_dim_ckv": spec.v_head_dim, "head_dim_kpe": spec.head_dim - spec.v_head_dim, "page_size": size}
            where = {"qo_indptr": starts, "kv_indptr": ends, "kv_indices": pages, "kv_len_arr": lens}
            kind, lists, others = MLA, (), {**where, "num_heads": spec.num_heads, **dims, **causal, **types}
        elif phase is Phase.PREFILL:
            kind, lists, others = RAGGED, (starts, starts, *heads, spec.v_head_dim), scores | causal
        elif phase is Phase.DECODE and metadata.max_query_len == 1:
            kind, lists, others = DECODE, (ends, pages, last, *heads, size), scores
        else:
            kind, lists, others = PAGED, (starts, ends, pages, last, *heads, size), scores | causal
        wrapper = self._wrapper(kind, phase)
        wrapper.plan(*lists, **others)
        return kind, wrapper, int(starts[-1])

    def decode(self, q, cache, plan, out):
        """Attend with the newest tokens of each sequence, one or several."""
        if plan is None:
            return
        kind, wrapper, count = plan
        q, out, value = q[:count], out[:count], self.spec.v_head_dim
        if kind == MLA:
            rows = cache.key.squeeze(2)
            wrapper.run(q[..., :value], q[..., value:], rows[..., :value], rows[..., value:], out=out)
        else:
            wrapper.run(q, (cache.key, cache.value), out=out)

    def prefill(self, q, k, v, cache, plan, out):
        """Attend over this step's k and v for prompts without context, otherwise over the cache."""
        if plan is not None and plan[0] == RAGGED:
            plan[1].run(q, k, v, out=out)
        else:
            self.decode(q, cache, plan, out)


@hookimpl
def headway_register_backends():
    summary = "FlashInfer: fa2 and fa3 kernels, all phases, latent attention"
    return [BackendInfo("flashinfer", summary, lambda: FlashInfer, "flashinfer-python", api_version=2)]
