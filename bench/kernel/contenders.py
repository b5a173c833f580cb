"""Who takes part in `headway bench kernel`, on which layouts and block sizes, and why the others do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headway.bench.kernel.peer import Peer
from headway.bench.kernel.peers import all_peers
from headway.bench.kernel.results import Contender, Owner
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import NHD, CacheLayout, CacheWriter
from headway.core.contract.metadata import Phase
from headway.core.contract.support import YES, Support
from headway.registry import Registry
from headway.tuning.attempt import writer_name
from headway.tuning.work import PhaseName, Work

DEFAULT_BLOCK_SIZES = (16, 256)


@dataclass(frozen=True)
class Entry:
    """One contender with one layout and block size on one work: a row of the result."""

    name: str
    owner: Owner
    layout: CacheLayout
    block_size: int
    support: Support = YES
    backend: type[AttentionBackend] | None = None
    peer: Peer | None = None
    writer: CacheWriter | None = None
    dense: bool = field(default=False)
    """Whether no cache is read, so that layout and block size say nothing."""


EntriesOf = Callable[[Work, "Sequence[str] | None", "Sequence[int] | None"], list[Entry]]
"""(work, layouts, block sizes) -> its rows, in the order in which they are shown."""


def entrants(
    phase: PhaseName,
    backends: Sequence[str] | None,
    peers: bool | Sequence[str | Peer],
    device: torch.device,
    registry: Registry,
) -> tuple[list[Contender], EntriesOf]:
    """Everybody asked for, with reasons for who cannot come, and a function that makes the rows of one work.

    A backend asked for by name gets a row even where it cannot run, with the reason; by default such a one is only listed.

    :raises UnknownBackendError: a backend nobody registered. ConfigError: an unknown peer.
    """
    if phase == "write":
        contenders = [Contender(name=name, owner="writer", available=True) for name in registry.layouts]
        return contenders, lambda work, layouts, blocks: _writer_entries(registry, work, layouts, blocks)
    names = list(registry.backends) if backends is None else list(dict.fromkeys(backends))
    contenders, present = [], []
    for name in names:
        if backends is not None and name not in registry.backends:
            registry.backend(name)  # raises, naming all that are registered
        support = registry.availability(name)
        reason = "; ".join(map(str, support.reasons))
        contenders.append(Contender(name=name, owner="backend", available=bool(support), reason=reason))
        if support or backends is not None:
            present.append(name)
    invited = _peers(phase, peers)
    usable = []
    for peer in invited:
        support = peer.available(device)
        reason = "; ".join(map(str, support.reasons))
        contenders.append(Contender(name=peer.name, owner="peer", version=peer.version, available=bool(support), reason=reason))
        if support:
            usable.append(peer)

    def entries_of(work: Work, layouts: Sequence[str] | None, blocks: Sequence[int] | None) -> list[Entry]:
        rows = [row for name in present for row in _backend_entries(registry, name, work, layouts, blocks)]
        return rows + [_peer_entry(peer, work, rows) for peer in usable]

    return contenders, entries_of


def _peers(phase: PhaseName, asked: bool | Sequence[str | Peer]) -> list[Peer]:
    known = [peer for peer in all_peers() if phase in peer.phases]
    if isinstance(asked, bool):
        return known if asked else []
    by_name = {peer.name: peer for peer in known}
    unknown = [name for name in asked if isinstance(name, str) and name not in by_name]
    if unknown:
        raise ConfigError(f"peers for {phase}", " or ".join(by_name), ", ".join(map(repr, unknown)))
    return [by_name[peer] if isinstance(peer, str) else peer for peer in asked]


def _backend_entries(
    registry: Registry, name: str, work: Work, layouts: Sequence[str] | None, blocks: Sequence[int] | None
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
        # Of the default sizes only those that fit are meant, but one refusal is kept where none does: it says why.
        rows += tried if blocks else accepted or tried[:1]
    return rows


def _peer_entry(peer: Peer, work: Work, rows: Sequence[Entry]) -> Entry:
    support = peer.supports(work)
    if work.phase == "decode" or (peer.extends and work.attention_phase is Phase.EXTEND):
        return Entry(peer.name, "peer", NHD, peer.block_size, support, peer=peer)
    # Dense: it reads no cache, so it joins the first case there is instead of filling one more.
    shared = next((row for row in rows if row.support), None)
    layout, block_size = (shared.layout, shared.block_size) if shared else (NHD, DEFAULT_BLOCK_SIZES[0])
    return Entry(peer.name, "peer", layout, block_size, support, peer=peer, dense=True)


def _writer_entries(registry: Registry, work: Work, layouts: Sequence[str] | None, blocks: Sequence[int] | None) -> list[Entry]:
    """One row for each layout and block size; of all layouts, those that hold such a layer."""
    rows = []
    for name in layouts or list(registry.layouts):
        info = registry.layout(name)
        writer = info.load_writer(work.spec.device)
        for size in blocks or DEFAULT_BLOCK_SIZES:
            support = info.layout.check(work.spec, size)
            if support or layouts:
                rows.append(Entry(writer_name(writer), "writer", info.layout, size, support, writer=writer))
    return rows
