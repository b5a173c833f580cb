"""Pages on disk: names of stored pages and of pages to write (`DiskTier`), and the files that contain them (`DiskStore`)."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from headway.core.contract.errors import ConfigError
from headway.core.engine.data.page_mover import PageMover, PageName, Pending, StoredPage
from headway.core.engine.data.stats import EngineStats
from headway.core.engine.offload.costs import OffloadFailures
from headway.core.engine.offload.host_tier import HostTiers
from headway.core.system.files import make_private, write_whole


class DiskTier:
    """Names of the pages on disk, least recently used first. Every page that enters the host tier is also written to disk.

    A page is written once the steps that computed it have been read without an error. Until then, its slot is locked. If a page
    cannot be written or is found damaged, it is forgotten and counted as failed.
    """

    def __init__(self, mover: PageMover, tier: HostTiers, stats: EngineStats, failures: OffloadFailures) -> None:
        self._mover = mover
        self._tier = tier
        self._stats = stats
        self._failures = failures
        self._names: OrderedDict[PageName, None] = OrderedDict.fromkeys(mover.stored)
        self._unread: list[StoredPage] = []  # Copied out since the last flush: the step that computed them may be unread
        self._unwritten: list[StoredPage] = []
        self._storing: list[tuple[Pending[frozenset[PageName]], list[PageName]]] = []
        self._fetching: list[tuple[Pending[frozenset[PageName]], list[PageName]]] = []
        self._abandoned: set[PageName] = set()  # Pages that are being fetched although no sequence waits for them any more

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: PageName) -> bool:
        return name in self._names

    def is_abandoned(self, name: PageName) -> bool:
        """Return whether a page is being read from disk although no sequence waits for it any more."""
        return name in self._abandoned

    def keep(self, page: StoredPage) -> None:
        """Schedule a page for writing to disk. The page is still being copied into its host slot."""
        if not self._mover.max_stored or page.name in self._names:
            return
        tier = self._tier.of(page.name)
        if 2 * tier.num_unlocked < tier.num_slots:
            self._failures.count("disk slower than what is offloaded", 1)
            return
        self._tier.lock([page.name])
        self._unread.append(page)

    def forget_lost(self, names: Iterable[PageName]) -> None:
        """Cancel the writes of pages whose copies into their slots failed."""
        gone = set(names)
        waiting = [page.name for page in (*self._unread, *self._unwritten) if page.name in gone]
        self._unread = [page for page in self._unread if page.name not in gone]
        self._unwritten = [page for page in self._unwritten if page.name not in gone]
        self._tier.unlock(waiting)

    def fetch(self, pages: Sequence[StoredPage]) -> Pending[frozenset[PageName]]:
        """Start reading pages into their slots, which stay locked until the read has ended. Errors of the mover are passed on."""
        names = [page.name for page in pages]
        pending = self._mover.fetch(pages)
        self._tier.lock(names)
        for name in names:
            if name in self._names:
                self._names.move_to_end(name)  # most recently used
        self._fetching.append((pending, names))
        return pending

    def abandon(self, fetching: Pending[frozenset[PageName]]) -> None:
        """Record that no sequence waits for the pages of a fetch any more."""
        for pending, names in self._fetching:
            if pending is fetching:
                self._abandoned.update(names)

    def end_fetch(self, fetching: Pending[frozenset[PageName]]) -> frozenset[PageName]:
        """End a fetch. Returns the names of the pages that could not be read."""
        failed: list[PageName] = []
        for pending, names in list(self._fetching):
            if pending is fetching:
                self._fetching.remove((pending, names))
                self._abandoned.difference_update(names)
                failed = self._result(pending, names, "not read from disk")
                for name in failed:
                    self._tier.drop(name)
                self._tier.unlock(names)
                self._forget(failed)
        return frozenset(failed)

    def flush(self, idle: bool) -> None:
        """Write the pages whose steps have been read without an error. idle: True if every step has been read."""
        for pending, names in list(self._storing):
            if pending.done():
                self._storing.remove((pending, names))
                self._stored(names, self._result(pending, names, "not written to disk"))
        for pending, names in list(self._fetching):
            if pending.done() and self._abandoned.intersection(names):
                self.end_fetch(pending)
        pages = self._unwritten + (self._unread if idle else [])
        if pages:
            names = [page.name for page in pages]
            try:
                self._storing.append((self._mover.store(pages), names))
                self._names.update(dict.fromkeys(names))
            except Exception as error:
                self._failures.count("not written to disk", len(names), error)
                self._stored(names, names)
        self._unwritten = [] if idle else self._unread
        self._unread = []
        surplus = [name for name, _ in zip(self._names, range(len(self._names) - self._mover.max_stored), strict=False)]
        for name in surplus:
            del self._names[name]
        self._discard(surplus)

    def _result(self, pending: Pending[frozenset[PageName]], names: list[PageName], what: str) -> list[PageName]:
        """Return the names of a transfer's pages that failed, and count them as failures of kind `what`."""
        error = None
        try:
            result = pending.result()
        except Exception as raised:
            result, error = frozenset(names), raised
        failed = [name for name in names if name in result]
        if failed:
            self._failures.count(what, len(failed), error)
        return failed

    def _forget(self, names: list[PageName]) -> None:
        """Forget pages that could not be written or read, and delete their files, in case a different attempt has written
        them."""
        for name in names:
            self._names.pop(name, None)
        self._discard(names)

    def _discard(self, names: list[PageName]) -> None:
        if names:
            try:
                self._mover.discard(names)
            except Exception as error:
                self._failures.count("not deleted from disk", len(names), error)

    def _stored(self, names: list[PageName], failed: list[PageName]) -> None:
        self._forget(failed)
        self._tier.unlock(names)
        self._stats.blocks_stored += len(names) - len(failed)

    def forget_unwritten(self) -> None:
        """Cancel all pending writes, because a step has failed."""
        self._tier.unlock(page.name for page in (*self._unread, *self._unwritten))
        self._unread = []
        self._unwritten = []

    def empty(self) -> None:
        """Delete every page on disk."""
        names = list(self._names)
        self._names = OrderedDict()
        self._discard(names)


log = logging.getLogger("headway")

_HEADER = struct.Struct("<8sIQ16s")  # Magic, bytes of the tokens, bytes of the content, checksum of both and of the name
_MAGIC = b"headwKV1"
_NAME = re.compile(r"(\d+)-([0-9a-f]{32})\.page")


class DiskStore:
    """Store of page files, in one folder per salt. Each file is written completely or not at all.

    A page is read only if its file was written for the same tokens by the same model. One thread does all work, in the order of
    the calls. If a file is invalid or cannot be written or read, only its page is lost. Each kind of failure is logged once.
    """

    def __init__(
        self,
        folder: Path,
        salt: str,
        page_bytes: int,
        max_bytes: int,
        parts: Callable[[int], Sequence[memoryview]],
        wait_for_slot: Callable[[int], None],
    ) -> None:
        """salt: digest of everything on which the meaning of a page's bytes depends. parts: function that returns a slot's
        memory. wait_for_slot: function that waits until copies of a slot have ended.

        :raises ConfigError: if the folder is unusable.
        """
        self._folder = folder / salt
        self._parts = parts
        self._wait = wait_for_slot
        self._warned: set[str] = set()
        try:
            _make_folders(folder, self._folder)
            others = _trim(folder, max_bytes, self._folder)
            found = [(path.stat().st_mtime_ns, path.name) for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        except OSError as error:
            raise ConfigError("kv_offload_dir", "a folder that can be written", f"{folder}: {error}") from error
        parts_of_names = (name.removesuffix(".page").split("-") for _, name in sorted(found))
        self.stored: list[PageName] = [(int(group), bytes.fromhex(digest)) for group, digest in parts_of_names]
        """Names of the pages in the folder, least recently used first."""
        self.max_stored = max((max_bytes - others) // (page_bytes + _HEADER.size), 1)
        self._thread = ThreadPoolExecutor(1, "headway-offload")

    def store(self, pages: Sequence[StoredPage]) -> Future[frozenset[PageName]]:
        """Write slots to disk; see `PageMover.store`."""
        return self._thread.submit(self._each, pages, self._write, "written")

    def fetch(self, pages: Sequence[StoredPage]) -> Future[frozenset[PageName]]:
        """Read slots from disk; see `PageMover.fetch`."""
        return self._thread.submit(self._each, pages, self._read, "read")

    def discard(self, names: Sequence[PageName]) -> None:
        """Delete pages from disk; see `PageMover.discard`."""

        def unlink() -> None:
            for name in names:
                try:
                    self._path(name).unlink(missing_ok=True)
                except OSError as error:
                    self._warn(f"not deleted: {error.strerror}", name)

        self._thread.submit(unlink)

    def _path(self, name: PageName) -> Path:
        return self._folder / f"{name[0]}-{name[1].hex()}.page"

    def _each(self, pages: Sequence[StoredPage], work: Callable[[StoredPage], None], what: str) -> frozenset[PageName]:
        failed = set()
        for page in pages:
            try:
                self._wait(page.slot)
                work(page)
            except Exception as error:  # any error: the engine continues without the page
                failed.add(page.name)
                self._warn(f"not {what}: {error.strerror if isinstance(error, OSError) else error}", page.name)
        return frozenset(failed)

    def _warn(self, fault: str, name: PageName) -> None:
        if fault not in self._warned:
            self._warned.add(fault)
            log.warning("kv_offload_dir: a block was %s (%s); further failures are only counted", fault, self._path(name))

    def _write(self, page: StoredPage) -> None:
        parts = self._parts(page.slot)
        header = _HEADER.pack(_MAGIC, len(page.tokens), sum(map(len, parts)), _checksum(page, parts))
        write_whole(self._path(page.name), header, page.tokens, *parts, private=True)  # contains a prompt's tokens

    def _read(self, page: StoredPage) -> None:
        path, parts = self._path(page.name), self._parts(page.slot)
        try:
            with path.open("rb") as file:
                magic, num_tokens, size, checksum = _HEADER.unpack(_exactly(file.read(_HEADER.size), _HEADER.size))
                if magic != _MAGIC or num_tokens != len(page.tokens) or size != sum(map(len, parts)):
                    raise ValueError("the file is not a page of this model")
                if file.read(num_tokens) != page.tokens:
                    raise ValueError("the file holds other tokens")
                for part in parts:
                    _exactly(part, file.readinto(part))
            if _checksum(page, parts) != checksum:
                raise ValueError("the file is damaged, or another page's")
        except ValueError:
            path.unlink(missing_ok=True)
            raise
        os.utime(path)  # marks it as most recently used


def _make_folders(folder: Path, own: Path) -> None:
    """Make the folder shared by all models, and this model's private folder. :raises OSError: if a folder cannot be made, or
    belongs to another user."""
    if not folder.exists():
        make_private(folder)
    elif folder.stat().st_uid not in (os.geteuid(), 0):
        log.warning("kv_offload_dir: %s belongs to another user, who can delete its files", folder)
    make_private(own)


def _exactly(content: bytes | memoryview, size: int) -> bytes | memoryview:
    if len(content) != size:
        raise ValueError("the file is cut off")
    return content


def _checksum(page: StoredPage, parts: Sequence[memoryview]) -> bytes:
    digest = hashlib.blake2b(repr(page.name).encode() + page.tokens, digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _trim(folder: Path, max_bytes: int, own: Path) -> int:
    """Delete the least recently used pages of all models until the remaining pages fit in `max_bytes`. Returns the total size in
    bytes of pages outside `own`."""
    found = [(path.stat(), path) for path in folder.glob("*/*.page") if _NAME.fullmatch(path.name)]
    total = sum(stat.st_size for stat, _ in found)
    others = sum(stat.st_size for stat, path in found if path.parent != own)
    for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
        if total <= max_bytes:
            break
        path.unlink(missing_ok=True)
        total -= stat.st_size
        others -= stat.st_size if path.parent != own else 0
    return others
