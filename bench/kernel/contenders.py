"""Contenders of `headway bench kernel`: backends, cache writers and peers (kernels of other libraries, passed by the caller)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from headway.bench.kernel.results import ContenderRecord, Owner
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import NHD, CacheLayout, CacheWriter
from headway.core.contract.metadata import Phase
from headway.core.contract.support import YES, Support
from headway.core.oracle.cases import Case
from headway.registry import Registry
from headway.tuning.measure.contender import Contender, writer_name
from headway.tuning.measure.workloads import AttentionWork, PhaseName

DEFAULT_BLOCK_SIZES = (16, 256)


@dataclass(frozen=True)
class Entry:
    """One contender with one layout and block size on one workload: a row of the result."""

    name: str
    owner: Owner
    layout: CacheLayout
    block_size: int
    support: Support = YES
    backend: type[AttentionBackend] | None = None
    peer: KernelPeer | None = None
    writer: CacheWriter | None = None
    dense: bool = field(default=False)
    """True if no cache is read, so that layout and block size do not matter."""


EntriesOf = Callable[[AttentionWork, "Sequence[str] | None", "Sequence[int] | None"], list[Entry]]
"""Function (work, layouts, block sizes) -> the contender's rows, in display order."""


def entrants(
    phase: PhaseName,
    backends: Sequence[str] | None,
    peers: Sequence[KernelPeer],
    device: torch.device,
    registry: Registry,
) -> tuple[list[ContenderRecord], EntriesOf]:
    """Return all contenders, with reasons for unavailable ones, and a function that makes the rows of one workload.

    A backend requested by name gets a row even if it cannot run; the row then has the reason. Other unavailable backends are only
    listed.
    :raises UnknownBackendError: if a backend is not registered.
    :raises ConfigError: if backends are named but the phase does not call any.
    """
    if phase == "write":
        if backends is not None:
            need = "--phase decode or prefill, which call backends"
            raise ConfigError("--backends", need, "--phase write, which times the cache writers of --layouts")
        contenders = [ContenderRecord(name=name, owner="writer", available=True) for name in registry.layouts]
        return contenders, lambda work, layouts, blocks: _writer_entries(registry, work, layouts, blocks)
    names = list(registry.backends) if backends is None else list(dict.fromkeys(backends))
    contenders, present = [], []
    for name in names:
        if backends is not None and name not in registry.backends:
            registry.backend(name)  # raises an error that lists the registered backends
        support = registry.availability(name)
        reason = "; ".join(map(str, support.reasons))
        contenders.append(ContenderRecord(name=name, owner="backend", available=bool(support), reason=reason))
        if support or backends is not None:
            present.append(name)
    usable = []
    for peer in (peer for peer in peers if phase in peer.phases):
        support = peer.available(device)
        reason = "; ".join(map(str, support.reasons))
        contenders.append(
            ContenderRecord(name=peer.name, owner="peer", version=peer.version, available=bool(support), reason=reason)
        )
        if support:
            usable.append(peer)

    def entries_of(work: AttentionWork, layouts: Sequence[str] | None, blocks: Sequence[int] | None) -> list[Entry]:
        rows = [row for name in present for row in _backend_entries(registry, name, work, layouts, blocks)]
        return rows + [_peer_entry(peer, work, rows) for peer in usable]

    return contenders, entries_of


def _backend_entries(
    registry: Registry, name: str, work: AttentionWork, layouts: Sequence[str] | None, blocks: Sequence[int] | None
) -> list[Entry]:
    available = registry.availability(name)
    if not available:
        return [Entry(name, "backend", NHD, (blocks or DEFAULT_BLOCK_SIZES)[0], available)]
    backend = registry.backend(name)
    readable = backend.capabilities.layouts
    chosen = [registry.layout(layout).layout for layout in layouts] if layouts else [readable[0] if readable else NHD]
    rows = []
    for layout in chosen:
        tried = [
            Entry(
                name,
                "backend",
                layout,
                size,
                registry.supports(name, work.spec, layout, size, work.attention_phase),
                backend=backend,
            )
            for size in blocks or DEFAULT_BLOCK_SIZES
        ]
        accepted = [row for row in tried if row.support]
        # Of the default sizes, keep only supported ones; if there are none, keep one rejection for its reason.
        rows += tried if blocks else accepted or tried[:1]
    return rows


def _peer_entry(peer: KernelPeer, work: AttentionWork, rows: Sequence[Entry]) -> Entry:
    support = peer.supports(work)
    if work.phase == "decode" or (peer.extends and work.attention_phase is Phase.EXTEND):
        return Entry(peer.name, "peer", NHD, peer.block_size, support, peer=peer)
    # Dense: it reads no cache, so it uses the first existing case instead of filling another one.
    shared = next((row for row in rows if row.support), None)
    layout, block_size = (shared.layout, shared.block_size) if shared else (NHD, DEFAULT_BLOCK_SIZES[0])
    return Entry(peer.name, "peer", layout, block_size, support, peer=peer, dense=True)


def _writer_entries(
    registry: Registry, work: AttentionWork, layouts: Sequence[str] | None, blocks: Sequence[int] | None
) -> list[Entry]:
    """Return one row per layout and block size; by default, only layouts that support the layer."""
    rows = []
    for name in layouts or list(registry.layouts):
        info = registry.layout(name)
        writer = info.writer(work.spec.device)
        for size in blocks or DEFAULT_BLOCK_SIZES:
            support = info.layout.check(work.spec, size)
            if support or layouts:
                rows.append(Entry(writer_name(writer), "writer", info.layout, size, support, writer=writer))
    return rows


Call = Callable[[], Tensor]
"""Call of a kernel, which returns [num_tokens, num_heads, head_dim], possibly with leading dimensions."""

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Dtype -> maximum accepted relative error. Peers support only these dtypes."""


class KernelPeer(ABC):
    """One kernel of one library."""

    name: str
    distribution: str
    """Name of the library on PyPI."""
    package: str
    """Top-level package of the library."""
    block_size: int = 0
    """Block size of the paged cache that the kernel reads in decode; 0 if the kernel does not support decode."""
    phases: frozenset[PhaseName] = frozenset({"decode", "prefill"})
    uniform_query_len: int = 1
    """Maximum number of query tokens per sequence in decode, equal for all sequences."""
    extends: bool = False
    """True if the kernel's prefill supports a context in a cache with `block_size`."""

    @property
    def version(self) -> str:
        """Version of the installed distribution; empty if it is not installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return ""

    def available(self, device: torch.device) -> Support:
        """Return whether the peer's functions can be imported. No peer is available on a CPU, since none has a CPU kernel."""
        support = YES
        if find_spec(self.package) is None:
            support &= Support.no("package", self.distribution, "not installed", f"pip install {self.distribution}")
        if device.type != "cuda":
            support &= Support.no("device", "cuda", device.type)
        if not support:
            return support
        try:
            self.probe()
        except Exception as error:  # a library may raise anything on import
            return Support.no("import", f"what {self.name} calls", f"{type(error).__name__}: {error}")
        return YES

    def supports(self, work: AttentionWork) -> Support:
        """Return whether the kernel supports this workload."""
        spec, support = work.spec, YES
        if spec.dtype not in TOLERANCE:
            support &= Support.no("dtype", "bfloat16 or float16", str(spec.dtype).removeprefix("torch."))
        if spec.cache_dtype != spec.dtype:
            support &= Support.no("kv_dtype", "that of the layer", str(spec.cache_dtype).removeprefix("torch."))
        if spec.head_dim > 256:
            support &= Support.no("head_dim", "at most 256", spec.head_dim)
        if work.attention_phase is Phase.EXTEND and not self.extends:
            support &= Support.no("phase", "prefill without context", "extend")
        query_lens = {query_len for query_len, _ in work.lens}
        if work.phase == "decode" and (len(query_lens) > 1 or max(query_lens) > self.uniform_query_len):
            support &= Support.no("query_len", f"the same, at most {self.uniform_query_len}", sorted(query_lens))
        return support

    def prepare(self, case: Case) -> Call:
        """Prepare reshaped inputs, masks and plans. Return the call to time. Does not copy q, k or v to the host."""
        return self.decode(case) if case.metadata.num_decodes else self.prefill(case)

    @abstractmethod
    def probe(self) -> None:
        """Import the functions that the peer calls. Raises whatever the import raises."""

    @abstractmethod
    def decode(self, case: Case) -> Call:
        """Return the call of one decode step."""

    @abstractmethod
    def prefill(self, case: Case) -> Call:
        """Return the call of one dense causal prefill."""


def peer_contender(peer: KernelPeer, case: Case, error: Callable[[Tensor], float]) -> Contender:
    """Return a library's kernel as a contender. The kernel allocates its own output; a plan (flashinfer) is made before
    timing."""
    shape = case.q.shape
    return Contender(peer.prepare(case), lambda out: error(out.reshape(shape)), TOLERANCE[case.spec.dtype], kernel=peer.name)
