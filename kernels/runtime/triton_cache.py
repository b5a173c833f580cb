"""Cache of Triton's compiled kernels whose folder may be moved, read-only, damaged or full."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, ClassVar

from triton import knobs
from triton.runtime import cache
from triton.runtime.cache import FileCacheManager

from headway.core.system.files import kernel_folders, read_text, warn_unwritable, write_whole
from headway.core.system.json_text import parse_json

_SHARED_MEMORY = Path("/dev/shm")


def use_kernel_cache() -> None:
    """Make Triton use `KernelCache` in this process, unless another cache manager is configured."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = KernelCache


def import_file(name: str, path: str) -> ModuleType:
    """Return the module `name` out of a file, imported at the first call. Kernels that are written at run time are such files."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def find_function(module: str, path: str, name: str) -> Any:
    """Return a function of a module, which is imported from its file if it has no import path."""
    return resolve_name(f"{module}:{name}") if "." in module else getattr(import_file(module, path), name)


def hash_triton() -> None:
    """Compute the hash of Triton's own library, for which the first compilation would wait. Triton keeps it."""
    key = getattr(cache, "triton_key", None)  # not part of Triton's public interface
    if key is not None:
        key()


class KernelCache(FileCacheManager):  # type: ignore[misc]
    """Cache manager for the files of one compilation. It differs from Triton's own manager in three ways.

    Files are looked up next to the list of their names, so the folder may be moved. Files whose content does not match the stored
    digest count as missing. If the folder is not writable, files are written to a temporary folder of this process, with a
    warning.
    """

    spare_folders: ClassVar[tuple[Path, ...]] = ()
    """Temporary folders of this process. They are created when the cache folder is not writable."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:  # for developers who inspect compilations
            super().__init__(key, override, dump)
            return
        self.key = key
        self.cache_dir = str(kernel_folders()[1] / key)

    def has_file(self, filename: str) -> bool:
        """Return whether a file is cached."""
        return self.get_file(filename) is not None

    def get_file(self, filename: str) -> str | None:
        """Return the path of a cached file, or None if it is missing."""
        folders = (Path(self.cache_dir).parent, *self.spare_folders)
        return next((str(folder / self.key / filename) for folder in folders if (folder / self.key / filename).is_file()), None)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a group of files by name, or None if any file is missing or damaged."""
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
        """Record that files form a group, with a digest of each file. Return the path of the record."""
        digests = {name: _digest(Path(path).read_bytes()) for name, path in group.items()}
        return self.put(json.dumps({"digests": digests}), f"__grp__{filename}")

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file and return its path.

        :raises OSError: if neither the cache folder nor a temporary folder is writable.
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
    """Create temporary folders that are removed when the process ends.

    The first one must allow loading code, which shared memory often forbids.
    """
    found = []
    for parent in dict.fromkeys((Path(tempfile.gettempdir()), _SHARED_MEMORY)):
        try:
            folder = tempfile.mkdtemp(prefix="headway-triton-", dir=parent)
        except OSError:
            continue
        found.append(Path(folder))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tuple(found)
