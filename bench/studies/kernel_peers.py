"""`python -m headway.bench.studies.kernel_peers`: `headway bench kernel` compared with other libraries in the same run.

A peer imports its library only when used, and checks availability by importing the function that it calls. A package without its
compiled part still counts as installed, and a different package may own part of its folder (flash_attn.cute). Decode reads an
`nhd` cache with the peer's own block size; prefill is dense, over the step's own k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor

from headway.backends.flash_attn_3 import find_library
from headway.bench.kernel.contenders import Call, KernelPeer
from headway.bench.studies.command import run_study
from headway.cli.measure.bench_kernel import measure_attention, takes_kernel_options
from headway.cli.options import PluginFiles, names_of
from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.support import Support
from headway.core.oracle.cases import Case
from headway.core.system.provenance import command_line
from headway.tuning.measure.workloads import PhaseName

if TYPE_CHECKING:
    pass


class FlashAttn3(KernelPeer):
    """FlashAttention 3: one `fwd` for all phases, with blocks of 128 if there is a context. The library plans its splits inside
    the call."""

    name, distribution, package, block_size, uniform_query_len = "flash_attn_3.bare", "flash-attn-3", "flash_attn_3", 128, 8
    extends = True

    @property
    def version(self) -> str:
        """Package that provides the library, since the library has no version."""
        library = find_library()[0]
        return library.home if library is not None else ""

    def available(self, device: torch.device) -> Support:
        """Return whether a working library is found. No library works on a CPU."""
        if device.type != "cuda":
            return Support.no("device", "cuda", device.type)
        return find_library()[1]

    def probe(self) -> None:
        """Do nothing: `available` checks everything."""

    def decode(self, case: Case) -> Call:
        """Return the paged call."""
        return self._paged(case)

    def prefill(self, case: Case) -> Call:
        """Return the dense varlen call, or the paged call if there is a context."""
        if case.metadata.kv_lens != case.metadata.query_lens:
            return self._paged(case)
        starts, longest = case.metadata.query_start_loc, case.metadata.max_query_len
        return _call_flash_attn_3(case, k=case.k, v=case.v, cu_seqlens_k=starts, max_seqlen_k=longest)

    def _paged(self, case: Case) -> Call:
        step = case.metadata
        keys = {"seqused_k": step.seq_lens, "page_table": step.block_table, "max_seqlen_k": step.max_seq_len}
        return _call_flash_attn_3(case, k=case.cache.key, v=case.cache.value, **keys)


def _call_flash_attn_3(case: Case, **keys: Any) -> Call:
    library = find_library()[0]
    assert library is not None, "asked for where it is not available"
    forward, step = library.operators.forward, case.metadata
    arguments = forward.arguments(
        q=case.q,
        out=torch.empty_like(case.q),
        cu_seqlens_q=step.query_start_loc,
        max_seqlen_q=step.max_query_len,
        softmax_scale=case.spec.scale,
        is_causal=True,
        **keys,
    )

    def call() -> Tensor:
        out: Tensor = forward.call(*arguments)[0]
        return out

    return call


FLASHINFER_WORKSPACE_BYTES = 256 * 2**20


class FlashAttn2(KernelPeer):
    """flash-attn 2: `flash_attn_with_kvcache` with blocks of 256, and `flash_attn_varlen_func`."""

    name, distribution, package, block_size, uniform_query_len = "flash_attn", "flash-attn", "flash_attn", 256, 8

    def probe(self) -> None:
        """Import the two functions."""
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: F401

    def decode(self, case: Case) -> Call:
        """Return the call; the library chooses the number of splits."""
        from flash_attn import flash_attn_with_kvcache

        q, cache, step, scale = _by_sequence(case), case.cache, case.metadata, case.spec.scale
        return lambda: flash_attn_with_kvcache(
            q,
            cache.key,
            cache.value,
            cache_seqlens=step.seq_lens,
            block_table=step.block_table,
            softmax_scale=scale,
            causal=True,
        )

    def prefill(self, case: Case) -> Call:
        """Return the dense varlen call."""
        from flash_attn import flash_attn_varlen_func

        starts, longest, scale = case.metadata.query_start_loc, case.metadata.max_query_len, case.spec.scale
        q, k, v = case.q, case.k, case.v
        return lambda: flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, softmax_scale=scale, causal=True)


class FlashAttn4(KernelPeer):
    """flash-attn-4 (CuTe DSL): `flash_attn.cute.flash_attn_varlen_func`, with pages of 128, the size for its TMA path on
    Hopper."""

    name, distribution, package, block_size, uniform_query_len = "flash_attn_4", "flash-attn-4", "flash_attn", 128, 8

    def probe(self) -> None:
        """Import the function. flash-attn 2's folder contains an old copy without paging."""
        from flash_attn.cute import flash_attn_varlen_func

        missing = {"page_table", "seqused_k", "num_splits"} - set(signature(flash_attn_varlen_func).parameters)
        if missing:
            raise ImportError(f"flash_attn.cute.flash_attn_varlen_func takes no {', '.join(sorted(missing))}")

    def decode(self, case: Case) -> Call:
        """Return the call, with the library's split-KV heuristic on Blackwell; Hopper's forward pass does not support splits."""
        from flash_attn.cute import flash_attn_varlen_func

        q, cache, step, scale = _by_sequence(case), case.cache, case.metadata, case.spec.scale
        splits = 0 if torch.cuda.get_device_capability(case.q.device)[0] in (10, 11) else 1
        return lambda: _first(
            flash_attn_varlen_func(
                q,
                cache.key,
                cache.value,
                seqused_k=step.seq_lens,
                max_seqlen_k=step.max_seq_len,
                page_table=step.block_table,
                softmax_scale=scale,
                causal=True,
                num_splits=splits,
            )
        )

    def prefill(self, case: Case) -> Call:
        """Return the dense varlen call."""
        from flash_attn.cute import flash_attn_varlen_func

        starts, longest, scale = case.metadata.query_start_loc, case.metadata.max_query_len, case.spec.scale
        q, k, v = case.q, case.k, case.v
        lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda: _first(flash_attn_varlen_func(q, k, v, **lengths, softmax_scale=scale, causal=True))


class FlashInfer(KernelPeer):
    """flashinfer's batch wrappers with blocks of 16, compiled at first use. Planning is not part of the call."""

    distribution, package, block_size = "flashinfer-python", "flashinfer", 16

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.name = f"flashinfer.{kernel}"
        self.phases = frozenset({"decode"} if kernel == "cuda_cores" else {"decode", "prefill"})

    def probe(self) -> None:
        """Import the two wrappers. :raises RuntimeError: if the kernel is fa3 and the GPU is not a Hopper GPU."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper  # noqa: F401

        if self.kernel == "fa3" and torch.cuda.get_device_capability()[0] != 9:
            raise RuntimeError("flashinfer's fa3 kernels run on compute capability 9.x only")

    def decode(self, case: Case) -> Call:
        """Return the call. The kernel cuda_cores uses no tensor cores; the other kernels use tensor cores for the query heads of
        a KV head."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        spec, step, q = case.spec, case.metadata, case.q
        tensor_cores = self.kernel != "cuda_cores"
        backend = self.kernel if tensor_cores else "auto"
        wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(case), "NHD", use_tensor_cores=tensor_cores, backend=backend)
        wrapper.plan(
            *page_lists(step),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            step.block_size,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
            sm_scale=spec.scale,
        )
        caches, out = (case.cache.key, case.cache.value), torch.empty_like(q)
        return lambda: wrapper.run(q, caches, out=out)

    def prefill(self, case: Case) -> Call:
        """Return the library's prefill call with ragged (unpaged) keys and values."""
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        spec, starts, q, k, v = case.spec, case.metadata.query_start_loc, case.q, case.k, case.v
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(case), "NHD", backend=self.kernel)
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        wrapper.plan(starts, starts, *heads, causal=True, q_data_type=spec.dtype, kv_data_type=spec.dtype, sm_scale=spec.scale)
        out = torch.empty_like(q)
        return lambda: wrapper.run(q, k, v, out=out)


class XFormers(KernelPeer):
    """xformers' memory_efficient_attention_forward with a given operator. Grouped heads use the operator's 5-dimensional
    format."""

    distribution, package = "xformers", "xformers"

    def __init__(self, name: str, module: str, phase: PhaseName) -> None:
        self.name = f"xformers.{name}"
        self.module = module
        self.phases = frozenset({phase})
        self.block_size = 64 if phase == "decode" else 0

    def probe(self) -> None:
        """Import the operator and check that its compiled part is available."""
        from xformers.ops.fmha import memory_efficient_attention_forward  # noqa: F401

        if not self._op().is_available():
            raise ImportError(f"xformers.ops.fmha.{self.module}.FwOp says it is not available")

    def _op(self) -> Any:
        return import_module(f"xformers.ops.fmha.{self.module}").FwOp

    def decode(self, case: Case) -> Call:
        """Return the paged call, with one query token per sequence."""
        from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask

        step = case.metadata
        mask = PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            step.query_lens, step.kv_lens, step.block_table, step.block_size, device=case.q.device
        )
        return self._call(case, case.cache.key.flatten(0, 1), case.cache.value.flatten(0, 1), mask)

    def prefill(self, case: Case) -> Call:
        """Return the dense, block-diagonal causal call."""
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

        return self._call(
            case, case.k, case.v, BlockDiagonalCausalMask.from_seqlens(case.metadata.query_lens, device=case.q.device)
        )

    def _call(self, case: Case, k: Tensor, v: Tensor, mask: object) -> Call:
        """Return the call. k, v: [rows, num_kv_heads, head_dim], expanded without copies to [1, rows, num_kv_heads, group_size,
        head_dim]."""
        from xformers.ops.fmha import memory_efficient_attention_forward

        groups, op, scale = case.spec.group_size, self._op(), case.spec.scale
        q = case.q.view(1, len(case.q), -1, groups, case.spec.head_dim)
        k, v = (rows[None, :, :, None].expand(-1, -1, -1, groups, -1) for rows in (k, v))
        return lambda: memory_efficient_attention_forward(q, k, v, attn_bias=mask, scale=scale, op=op)


def all_peers() -> list[KernelPeer]:
    """Return every known peer, installed or not."""
    return [
        FlashAttn2(),
        FlashInfer("fa2"),
        FlashInfer("fa3"),
        FlashInfer("cuda_cores"),
        FlashAttn3(),
        FlashAttn4(),
        XFormers("splitk", "triton_splitk", "decode"),
        XFormers("cutlass", "cutlass", "prefill"),
        XFormers("flash", "flash", "prefill"),
    ]


def page_lists(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block table in flashinfer's format, int32 on the CPU: indptr [num_seqs + 1], blocks in order, and the number of
    slots used in each sequence's last block."""
    lens = metadata.seq_lens_cpu
    counts = (lens + metadata.block_size - 1) // metadata.block_size
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
    torch.cumsum(counts, 0, out=indptr[1:])
    used = torch.arange(metadata.block_table_cpu.shape[1]) < counts[:, None]
    return indptr, metadata.block_table_cpu[used], (lens - (counts - 1) * metadata.block_size).to(torch.int32)


def _by_sequence(case: Case) -> Tensor:
    """Return q as [num_seqs, query_len, num_heads, head_dim]."""
    return case.q.view(case.metadata.num_seqs, -1, *case.q.shape[1:])


def _workspace(case: Case) -> Tensor:
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=case.q.device)


def _first(answer: Tensor | tuple[Tensor, ...]) -> Tensor:
    return answer[0] if isinstance(answer, tuple) else answer


def peers_of(phase: str, names: Sequence[str] | None) -> list[KernelPeer]:
    """Return the peers of a phase by name; None means all peers, installed or not.
    :raises ConfigError: if the phase has no peer with one of the names.
    """
    known = {peer.name: peer for peer in all_peers() if phase in peer.phases}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"peers for {phase}", " or ".join(known), ", ".join(map(repr, unknown)))
    return [known[name] for name in names] if names is not None else list(known.values())


@takes_kernel_options
def main(
    options: Any,
    plugin: PluginFiles = None,
    only_peers: Annotated[
        str | None, typer.Option(help="Libraries whose kernels to time, comma-separated. Default: all.")
    ] = None,
) -> None:
    """Time attention kernels and other libraries' kernels, after checking each against float64."""
    peers = peers_of(options.phase, names_of(only_peers))
    command = command_line("python", "-m", "headway.bench.studies.kernel_peers")
    measure_attention(replace(options, peers=peers, command=command), plugin)


if __name__ == "__main__":
    run_study(main)
