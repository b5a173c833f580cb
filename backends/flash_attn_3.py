"""The attention backend `flash_attn_3`: FlashAttention 3, for Hopper GPUs, from a library of another package.

A library built for a different release of torch may crash the process that loads it. `python -m headway.backends.flash_attn_3
PATH` loads a library, calls it once, and prints the result as one line of JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend, Lengths, Options, StepLimits, fits
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.errors import BackendError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import HND, LATENT, NHD, CacheLayout, LayerCache
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import YES, Support
from headway.core.system.child import open_replies, reply
from headway.kernels.runtime.compiled_library import BoundOperator, Home, LibraryCandidate, LibrarySearch
from headway.kernels.runtime.probe import HALF_DTYPES, capability, has_gpu

FORWARD: Final = "fwd"
SCHEDULE: Final = "get_scheduler_metadata"
NEEDED: Final = frozenset(
    (
        *("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table"),
        *("softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap", "scheduler_metadata", "num_splits"),
    )
)
"""Names of the arguments that the forward operator must have."""
GIVEN: Final = NEEDED | {"batch_size", "num_heads", "num_heads_k", "headdim", "headdim_v", "qkv_dtype"}
"""Names of the arguments that this backend always passes if the operator has them."""
OTHER_NAMES: Final = {"qv": "q_v", "sinks": "s_aux", "learnable_sink": "s_aux", "causal": "is_causal"}
"""Name of an argument in some packages -> its name in this backend."""
AT_REST: Final = {
    "attention_chunk": 0,
    "cp_rank": 0,
    "cp_world_size": 1,
    "has_softcap": False,
    "is_causal": False,
    "is_rotary_interleaved": False,
    "max_seqlen_k_new": 0,
    "num_splits": 0,
    "sm_margin": 0,
    "softcap": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
}
"""Argument without a default in the operator's schema -> neutral value. Optional arguments are set to None."""


@dataclass(frozen=True)
class Operators:
    """Operators of one library."""

    forward: BoundOperator
    schedule: BoundOperator | None
    """Operator that plans a step's split once for all layers. None if the library does not expose it."""

    @classmethod
    def of(cls, namespace: str) -> Operators:
        """Bind the operators of a torch namespace. :raises BackendError: if the forward operator has an unsupported signature."""
        space = getattr(torch.ops, namespace)
        schedule = getattr(space, SCHEDULE, None)
        return cls(
            _bound(getattr(space, FORWARD).default, NEEDED),
            None if schedule is None else _bound(schedule.default, frozenset({"seqused_k", "page_size"})),
        )

    @property
    def sinks(self) -> bool:
        """True if the forward operator supports attention sinks."""
        return "s_aux" in self.forward.place

    @property
    def latent(self) -> bool:
        """True if the forward operator supports absorbed MLA, that is, has an argument q_v for the part of the query that is
        multiplied by the value."""
        return "q_v" in self.forward.place


def _bound(overload: Any, needed: frozenset[str]) -> BoundOperator:
    return BoundOperator.of(overload, needed, GIVEN, AT_REST, OTHER_NAMES)


def registered(before: frozenset[str] = frozenset()) -> list[str]:
    """Return the torch namespaces whose operator `fwd` has a page table argument, except those in `before`."""
    schemas = torch._C._jit_get_all_schemas()
    suffix = f"::{FORWARD}"
    found = {
        schema.name.removesuffix(suffix)
        for schema in schemas
        if schema.name.endswith(suffix) and any(argument.name == "page_table" for argument in schema.arguments)
    }
    return sorted(found - before)


TOLERANCE = 2e-2
"""Maximum accepted relative error of the trial call in bfloat16: ||out - reference|| / ||reference||."""


def examine(path: str) -> dict[str, str]:
    """Load and test a library. Return {"namespace": ...} if its results are correct, otherwise {"error": reason}."""
    before = frozenset(registered())
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return {"error": f"does not load: {' '.join(str(error.__cause__ or error).split())}"}
    spaces = registered(before)
    if not spaces:
        return {"error": "registers no operator `fwd` that reads a page table"}
    try:
        apart = trial(Operators.of(spaces[0]), torch.device("cuda"))
    except (BackendError, RuntimeError) as error:
        return {"error": f"{' '.join(str(error).split())[:300]}"}
    if not apart <= TOLERANCE:
        return {"error": f"computes something else: relative error {apart:.2g} in a trial call"}
    return {"namespace": spaces[0]}


def trial(operators: Operators, device: torch.device) -> float:
    """Return the relative error of a small extend over a paged cache: 5 queries after 40 cached tokens, blocks of 16."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, key, value, table = draw(5, 4, 128), draw(5, 16, 2, 128), draw(5, 16, 2, 128), ints(3, 0, 4).view(1, 3)
    out = torch.zeros_like(q)
    operators.forward.call(
        *operators.forward.arguments(
            q=q,
            k=key,
            v=value,
            out=out,
            cu_seqlens_q=ints(0, 5),
            seqused_k=ints(45),
            max_seqlen_q=5,
            max_seqlen_k=45,
            page_table=table,
            softmax_scale=0.1,
            is_causal=True,
        )
    )
    rows = [cache[table[0].long()].flatten(0, 1)[:45].double().repeat_interleave(2, 1).transpose(0, 1) for cache in (key, value)]
    scores = q.double().transpose(0, 1) @ rows[0].transpose(1, 2) * 0.1
    hidden = torch.arange(45, device=device) > torch.arange(40, 45, device=device)[:, None]
    right = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ rows[1]).transpose(0, 1)
    return float((out.double() - right).norm() / right.norm())


SEARCH = LibrarySearch(
    "flash_attn_3",
    "HEADWAY_FA3_LIBRARY",
    (
        Home("flash-attn-3", "flash_attn_3", "_C*.so"),
        Home("vllm", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
        Home("sgl-kernel", "sgl_kernel", "**/flash_ops*.so"),
    ),
    "headway.backends.flash_attn_3",
)
"""Search for the library. torch is not listed, because its `activate_flash_attention_impl("FA3")` imports the first package."""
GENERATION = 9
"""Major compute capability of the supported GPUs."""


@dataclass(frozen=True)
class Library:
    """A library that works on this machine."""

    home: str
    """Name of the package that contains the library."""
    path: Path
    operators: Operators


@cache
def find_library() -> tuple[Library | None, Support]:
    """Load the first library that works into this process. Return (library, support), or (None, a reason for each candidate)."""
    here = has_gpu()
    if here:
        major, minor = torch.cuda.get_device_capability()
        if major != GENERATION:
            here = Support.no("compute capability", f"{GENERATION}.x (Hopper)", f"{major}.{minor}")
    if not here:
        return None, here
    return SEARCH.first("FlashAttention 3", "a library that holds it", load)


def load(candidate: LibraryCandidate, namespace: str) -> Library:
    """Load a library that the child process has tested, unless it is already loaded.

    :raises OSError or BackendError: if loading fails.
    """
    if namespace not in registered():
        torch.ops.load_library(str(candidate.path))
    return Library(candidate.home, candidate.path, Operators.of(namespace))


LATENT_HEAD = (576, 512)
"""head_dim and v_head_dim of DeepSeek's absorbed MLA. The key consists of the value's 512 elements and 64 elements with RoPE."""
MAX_HEADS_WITH_SINKS = 64
WORKSPACE = 256 * 2**20
"""Maximum size of split-KV partial results, in bytes. For every query token, the library allocates the number of partial results
of the longest sequence. This could take gigabytes for many extends, but such steps fill the GPU without splits."""
TILE = 128
"""Maximum number of query rows (tokens x heads of a group) per program of the library."""
MAX_PAIRS = 2**24
"""Maximum number of query tokens times context tokens in a warm-up step. Larger steps use the same kernels as smaller ones."""
ALIGNMENT = 16
"""Alignment of rows that TMA requires, in bytes."""


@dataclass
class FlashStep:
    """Arguments of the library's calls for one step, except the layers' tensors."""

    paged: bool
    """True if keys are read from the cache. False means that all keys are this step's k and v."""
    arguments: list[Any]
    schedule: list[Any] | None = None
    """Arguments of the operator that plans the split. Only captured steps store them: lengths change between replays, so the
    operator runs inside the CUDA graph, before the first layer."""
    first: LayerCache | None = None
    """Cache of the layer that runs first. A captured step plans the split before this layer."""


class FlashAttention3(AttentionBackend):
    """FlashAttention 3 (Shah et al. 2024, arXiv 2407.08608): warp-specialised varlen prefill, paged extend and split-KV decode.

    Operators are called directly, with the argument names of their schema, so that the builds of upstream, vLLM and SGLang all
    work. FP8 caches are not supported: the library would need an e4m3 query and would round the softmax weights to 3 mantissa
    bits. The relative error against float64 over the same cache would then be 0.036; Headway's contract accepts 0.008.
    """

    name = "flash_attn_3"
    capabilities = Capabilities(
        phases=ALL_PHASES,
        layouts=(NHD, HND, LATENT),
        dtypes=HALF_DTYPES,
        head_dims=tuple(range(8, 257, 8)),
        v_head_dims=((192, 128), LATENT_HEAD),
        value_in_key=True,
        features=frozenset({"sliding_window", "softcap", "sinks"}),
        dense_prefill=True,
        non_causal=True,
        reads_whole_blocks=True,
        lse=True,
        shares_plans=True,
    )
    graph_level = GraphLevel.UNIFORM

    def __init__(self, spec: AttentionSpec, layout: CacheLayout, block_size: int, options: Options = None) -> None:
        super().__init__(spec, layout, block_size, options)
        library, support = find_library()
        if library is None:
            raise BackendError(f"{self.name}: {support.brief}")
        self.operators = library.operators
        self._call = library.operators.forward.call
        place = library.operators.forward.place
        q, k, v, out = (place[name] for name in ("q", "k", "v", "out"))
        self._q = q
        self._k = k
        self._v = v
        self._out = out
        self._q_v = place.get("q_v", -1)
        self._metadata = place["scheduler_metadata"]
        self._latent = spec.v_head_dim if spec.value_in_key else 0
        window = spec.sliding_window
        # A window of w keys includes the query's own key; the library takes the number of keys to its left. -1 means unbounded.
        self._mask: dict[str, Any] = {"is_causal": spec.causal}
        if window is not None:
            self._mask |= {"window_size_left": window - 1, "window_size_right": 0 if spec.causal else window - 1}
        self._always: dict[str, Any] = {**self._mask, "softmax_scale": spec.scale, "softcap": spec.softcap or 0.0}
        self._sinks = None
        self._aux = place.get("s_aux", -1)
        if spec.sinks is not None:
            self._sinks = torch.tensor(spec.sinks, dtype=torch.bfloat16, device=spec.device)
        cuda = spec.device.type == "cuda"
        self._multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count if cuda else 132

    @classmethod
    def available(cls) -> Support:
        return find_library()[1]

    @classmethod
    def origin(cls) -> str:
        library = find_library()[0]
        return f"{library.home}, {library.path}" if library is not None else ""

    @classmethod
    def supports(cls, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        support = super().supports(spec, layout, block_size, phase)
        found = capability(spec.device)
        if found is not None and found[0] != GENERATION:
            support &= Support.no("compute capability", f"{GENERATION}.x (Hopper)", "{}.{}".format(*found))
        dims, latent = (spec.head_dim, spec.v_head_dim), spec.value_in_key
        if latent != (dims == LATENT_HEAD):
            need = "{}/{} where the value lies in the key, and only there".format(*LATENT_HEAD)
            support &= Support.no("head_dim/v_head_dim", need, "{}/{}".format(*dims))
        library = find_library()[0]
        if latent and library is not None and not library.operators.latent:
            support &= Support.no("value_in_key", "a library whose operator takes q_v", f"that of {library.home}")
        if spec.sinks is None:
            return support
        if library is not None and not library.operators.sinks:
            support &= Support.no("sinks", "a library whose operator takes s_aux", f"that of {library.home}")
        if spec.dtype != torch.bfloat16:
            support &= Support.no("sinks", "bfloat16, to which the library rounds them", "another dtype", "--dtype bfloat16")
        if spec.num_heads > MAX_HEADS_WITH_SINKS or dims[0] != dims[1]:
            need = f"at most {MAX_HEADS_WITH_SINKS} heads with values as long as keys"
            support &= Support.no("sinks", need, f"{spec.num_heads} heads of {dims[0]}/{dims[1]}")
        return support

    @classmethod
    def accepts(cls, cache: LayerCache) -> Support:
        """Return whether the cache's strides allow TMA loads. Caches with other strides are accepted only for prompts without
        context."""
        if cls.capabilities.layouts is not None and cache.layout not in cls.capabilities.layouts:
            return YES
        for name, rows in (("key", cache.logical_key), ("value", cache.logical_value)):
            step = ALIGNMENT // rows.element_size()
            if rows.stride(3) != 1 or any(stride % step for stride in rows.stride()[:3]) or rows.data_ptr() % ALIGNMENT:
                need = f"rows of one piece that begin at multiples of {ALIGNMENT} bytes"
                return Support.no(f"cache, {name}", need, f"strides {tuple(rows.stride()[:4])}", "name triton")
        return YES

    @classmethod
    def kernel(cls, spec: AttentionSpec, phase: Phase) -> str:
        library = find_library()[0]
        home = f" of {library.home}" if library is not None else ""
        return f"FlashAttnFwdSm90 (FlashAttention 3{home}, {'varlen' if phase is Phase.PREFILL else 'paged'})"

    def workspace_bytes(self, max_num_tokens: int, max_num_seqs: int) -> int:
        return min(WORKSPACE, self._most_splits(1) * self._bytes_per_split(max_num_tokens))

    def warmup_steps(self, phase: Phase, limits: StepLimits) -> Iterator[list[Lengths]]:
        """Yield steps that together use all of the library's compiled kernels: query rows around half a tile and a full tile,
        with and without splits."""
        rows = TILE // self.spec.group_size
        longest = limits.max_decode_len if phase is Phase.DECODE else min(limits.max_num_tokens, limits.max_model_len)
        fewest = 2 if phase is Phase.EXTEND else 1
        queries = {1, 2, rows // 2, rows // 2 + 1, rows, rows + 1, 8 * rows, longest}
        most = limits.max_model_len - longest
        contexts = {0} if phase is Phase.PREFILL else {1, *(4**n for n in range(5, 16)), max(most, 1)}
        seqs = {1, 8, limits.max_num_seqs} if phase is Phase.DECODE else {1, 8}
        for num_seqs, query_len, context_len in product(sorted(seqs), sorted(queries), sorted(contexts)):
            step = [Lengths(query_len, context_len, query_len - 1 if phase is Phase.DECODE else 0)] * num_seqs
            if fits(step, limits) and fewest <= query_len <= longest and num_seqs * query_len * context_len <= MAX_PAIRS:
                yield step

    def plan(self, metadata: AttentionMetadata) -> FlashStep:
        """Return the arguments for all layers' calls. For a paged step, this runs the library's split planning once."""
        step = self._step(metadata, lengths_hold=True)
        if step.schedule is not None:
            self._make_schedule(step)
            step.schedule = None
        return step

    def plan_for_capture(self, metadata: AttentionMetadata) -> FlashStep:
        """Return a plan whose split planning is captured in the CUDA graph and therefore uses the lengths on the device."""
        return self._step(metadata, lengths_hold=False)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: FlashStep, out: Tensor, lse: Tensor | None = None
    ) -> None:
        if plan.paged:
            k, v = self._rows(cache)
        elif self._latent:
            k = k[..., self._latent :]
        self._attend(q, k, v, plan, out, lse)

    def decode(self, q: Tensor, cache: LayerCache, plan: FlashStep, out: Tensor, lse: Tensor | None = None) -> None:
        if plan.schedule is not None and (plan.first is None or plan.first is cache):
            plan.first = cache
            self._make_schedule(plan)
        k, v = self._rows(cache)
        self._attend(q, k, v, plan, out, lse)

    def _step(self, metadata: AttentionMetadata, lengths_hold: bool) -> FlashStep:
        paged = metadata.phase is not Phase.PREFILL
        splits = self.num_splits(metadata, lengths_hold) if paged else 0
        lengths = {
            "cu_seqlens_q": metadata.query_start_loc,
            "max_seqlen_q": metadata.max_query_len,
            "max_seqlen_k": metadata.max_seq_len,
            "num_splits": splits,
        }
        if not paged:
            keys: dict[str, Any] = {"cu_seqlens_k": metadata.query_start_loc}
        else:
            keys = {"seqused_k": metadata.seq_lens, "page_table": metadata.block_table}
        step = FlashStep(paged, self.operators.forward.arguments(**self._always, **lengths, **keys))
        schedule, spec = self.operators.schedule, self.spec
        if paged and schedule is not None:
            step.schedule = schedule.arguments(
                **self._mask,
                **lengths,
                batch_size=metadata.num_seqs,
                num_heads=spec.num_heads,
                num_heads_k=spec.num_kv_heads,
                headdim=spec.head_dim - self._latent,
                headdim_v=spec.v_head_dim,
                qkv_dtype=spec.dtype,
                seqused_k=metadata.seq_lens,
                page_size=metadata.block_size,
                has_softcap=spec.softcap is not None,
            )
        return step

    def _make_schedule(self, step: FlashStep) -> None:
        assert self.operators.schedule is not None
        assert step.schedule is not None
        step.arguments[self._metadata] = self.operators.schedule.call(*step.schedule)

    def num_splits(self, metadata: AttentionMetadata, lengths_hold: bool) -> int:
        """Return the num_splits argument: 0 to use the library's rule, 1 if the rule would split no sequence, or the maximum for
        which partial results fit WORKSPACE.

        The library's rule splits a sequence if one SM needs longer for it than all SMs together need for the whole step. If no
        sequence is that long, splits would only add the launch that merges partial results.

        lengths_hold: True if the step runs with the lengths that the host knows.
        """
        kv_lens = metadata.seq_lens_cpu.long().numpy()  # int64: the sums may exceed 2**31
        starts = metadata.query_start_loc_cpu.numpy()
        tiles = -(-(starts[1:] - starts[:-1]) * self.spec.group_size // TILE)
        if lengths_hold and metadata.max_seq_len * self._multiprocessors <= int(tiles @ kv_lens) * self.spec.num_kv_heads:
            return 1
        each = self._bytes_per_split(metadata.num_tokens)
        return 0 if self._most_splits(int(tiles.max())) * each <= WORKSPACE else max(1, WORKSPACE // each)

    def _most_splits(self, tiles: int) -> int:
        """Return the maximum number of splits by the library's rule, which gives a program on every SM to a sequence that is the
        only one in a step."""
        return min(128, max(1, self._multiprocessors // (self.spec.num_kv_heads * tiles)))

    def _bytes_per_split(self, num_tokens: int) -> int:
        return num_tokens * self.spec.num_heads * (self.spec.v_head_dim + 1) * 4

    def _rows(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """Return the cache's keys and values as views [num_blocks, block_size, num_kv_heads, elements]."""
        if self._latent:
            return cache.key[..., self._latent :], cache.value
        if cache.layout == NHD:
            return cache.key, cache.value
        return cache.logical_key.squeeze(-1), cache.logical_value.squeeze(-1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: FlashStep, out: Tensor, lse: Tensor | None) -> None:
        arguments = plan.arguments.copy()
        if self._latent:
            arguments[self._q_v] = q[..., : self._latent]
            q = q[..., self._latent :]
        arguments[self._q], arguments[self._k], arguments[self._v], arguments[self._out] = q, k, v, out
        if self._sinks is not None:
            arguments[self._aux] = self._sinks
        result = self._call(*arguments)
        if lse is not None:
            lse.copy_(result[1])


if __name__ == "__main__":
    reply(open_replies(), examine(sys.argv[1]))
    os._exit(0)  # a crash at process exit does not count against the library
