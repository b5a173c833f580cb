"""Where Triton keeps what it compiles: a folder that may be copied to another machine, be read-only, be damaged or be full."""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from triton import knobs
from triton.runtime.cache import FileCacheManager

from headway.core.system.files import kernel_folders, read_text, warn_unwritable, write_whole
from headway.core.system.json_text import parse_json

_SHARED_MEMORY = Path("/dev/shm")


def use_kernel_cache() -> None:
    """Have Triton keep its files by `KernelCache` in this process, unless somebody has chosen a manager of his own."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = KernelCache


class KernelCache(FileCacheManager):  # type: ignore[misc]
    """The files of one compilation, with three differences to Triton's own manager.

    Files are found beside the list that names them, wherever the folder lies now. What is not what was written counts as missing.
    Where the folder cannot be written, files go to temporary memory of this process, with a warning.
    """

    spare_folders: ClassVar[tuple[Path, ...]] = ()
    """Folders of this process alone; there are none before they are needed."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:  # for people who look into compilations
            super().__init__(key, override, dump)
            return
        self.key = key
        self.cache_dir = str(kernel_folders()[1] / key)

    def has_file(self, filename: str) -> bool:
        """Whether a file is there."""
        return self.get_file(filename) is not None

    def get_file(self, filename: str) -> str | None:
        """Where a file is."""
        folders = (Path(self.cache_dir).parent, *self.spare_folders)
        return next((str(folder / self.key / filename) for folder in folders if (folder / self.key / filename).is_file()), None)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Files that belong together, by name; None unless all are there and are what was written."""
        listed = self.get_file(f"__grp__{filename}")
        if listed is None:
            return None
        try:
            digests: dict[str, str] = parse_json(read_text(Path(listed)), listed, dict)["digests"]
            paths = {name: Path(listed).with_name(name) for name in digests}
            whole = all(_digest(path.read_bytes()) == digests[name] for name, path in paths.items())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return {name: str(path) for name, path in paths.items()} if whole else None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Note that files belong together."""
        digests = {name: _digest(Path(path).read_bytes()) for name, path in group.items()}
        return self.put(json.dumps({"digests": digests}), f"__grp__{filename}")

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file; returns where it is.

        :raises OSError: neither the folder nor any temporary memory can be written.
        """
        content = data if isinstance(data, bytes) else str(data).encode()
        folder = Path(self.cache_dir).parent
        try:
            return self._write(folder, filename, content)
        except OSError as error:
            warn_unwritable(folder, error.strerror or str(error))
            if not self.spare_folders:
                KernelCache.spare_folders = _temporary_folders()
            for spare in self.spare_folders:
                with suppress(OSError):
                    return self._write(spare, filename, content)
            raise

    def _write(self, folder: Path, filename: str, content: bytes) -> str:
        path = folder / self.key / filename
        write_whole(path, content)
        return str(path)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _temporary_folders() -> tuple[Path, ...]:
    """Made now, removed when the process ends. The first must allow code to be loaded, which shared memory often does not."""
    found = []
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), _SHARED_MEMORY)):
        try:
            folder = tempfile.mkdtemp(prefix="headway-triton-", dir=parent)
        except OSError:
            continue
        found.append(Path(folder))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tuple(found)
