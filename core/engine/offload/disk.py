"""Pages as files: what is read is what was written for these tokens by this model, or nothing."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from headway.core.contract.errors import ConfigError
from headway.core.engine.offload.mover import KeptPage
from headway.core.engine.offload.tier import PageName
from headway.core.system.files import write_whole

log = logging.getLogger("headway")

_HEADER = struct.Struct("<8sIQ16s")
"""Magic, bytes of the tokens, bytes of the content, checksum of both and of the name."""
_MAGIC = b"headwKV1"
_NAME = re.compile(r"(\d+)-([0-9a-f]{32})\.page")


class DiskStore:
    """A folder of pages for each salt, in which a file is written whole or not at all.

    One thread does everything, in the order in which it was asked for. A file that cannot be written, read or believed costs its
    page alone, and the log says so once for each kind of fault.
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
        """salt: of everything that gives a page's bytes their meaning. parts: the memory of a slot.

        :raises ConfigError: the folder cannot be made or read.
        """
        self._folder = folder / salt
        self._parts, self._wait = parts, wait_for_slot
        self._warned: set[str] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            others = _trim(folder, max_bytes, self._folder)
            found = [(path.stat().st_mtime_ns, path.name) for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        except OSError as error:
            raise ConfigError("kv_offload_dir", "a folder that can be written", f"{folder}: {error}") from error
        self.stored: list[PageName] = [_name_of(name) for _, name in sorted(found)]
        """The one used longest ago first."""
        self.max_stored = max((max_bytes - others) // (page_bytes + _HEADER.size), 1)
        self._thread = ThreadPoolExecutor(1, "headway-offload")

    def store(self, pages: Sequence[KeptPage]) -> Future[frozenset[PageName]]:
        """See PageMover."""
        return self._thread.submit(self._each, pages, self._write, "written")

    def fetch(self, pages: Sequence[KeptPage]) -> Future[frozenset[PageName]]:
        """See PageMover."""
        return self._thread.submit(self._each, pages, self._read, "read")

    def discard(self, names: Sequence[PageName]) -> None:
        """See PageMover."""

        def unlink() -> None:
            for name in names:
                try:
                    self._path(name).unlink(missing_ok=True)
                except OSError as error:
                    self._warn(f"not deleted: {error.strerror}", name)

        self._thread.submit(unlink)

    def _path(self, name: PageName) -> Path:
        return self._folder / f"{name[0]}-{name[1].hex()}.page"

    def _each(self, pages: Sequence[KeptPage], work: Callable[[KeptPage], None], what: str) -> frozenset[PageName]:
        failed = set()
        for page in pages:
            try:
                self._wait(page.slot)
                work(page)
            except Exception as error:  # whatever it is, the engine goes on without this page
                failed.add(page.name)
                self._warn(f"not {what}: {error.strerror if isinstance(error, OSError) else error}", page.name)
        return frozenset(failed)

    def _warn(self, fault: str, name: PageName) -> None:
        if fault not in self._warned:
            self._warned.add(fault)
            log.warning("kv_offload_dir: a block was %s (%s); further ones are only counted", fault, self._path(name))

    def _write(self, page: KeptPage) -> None:
        parts = self._parts(page.slot)
        header = _HEADER.pack(_MAGIC, len(page.tokens), sum(map(len, parts)), _checksum(page, parts))
        write_whole(self._path(page.name), header, page.tokens, *parts)

    def _read(self, page: KeptPage) -> None:
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
        os.utime(path)  # used last


def _exactly(content: bytes | memoryview, size: int) -> bytes | memoryview:
    if len(content) != size:
        raise ValueError("the file is cut off")
    return content


def _checksum(page: KeptPage, parts: Sequence[memoryview]) -> bytes:
    digest = hashlib.blake2b(repr(page.name).encode() + page.tokens, digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _name_of(file_name: str) -> PageName:
    group, digest = file_name.removesuffix(".page").split("-")
    return int(group), bytes.fromhex(digest)


def _trim(folder: Path, max_bytes: int, own: Path) -> int:
    """Delete the pages used longest ago, whoever wrote them, until the rest fits; returns the bytes of what is not in `own`."""
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
