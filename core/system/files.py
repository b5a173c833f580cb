"""Reading of users' text files, and atomic writing of files and folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import platformdirs

log = logging.getLogger("headway")

_LITTLE = 64 * 2**20  # Minimum free bytes of a folder: the kernels of one model may take as much


def cache_folder() -> Path:
    """Return $HEADWAY_CACHE if it is set, else `headway` in the user's cache folder on this operating system."""
    if os.environ.get("HEADWAY_CACHE"):
        return Path(os.environ["HEADWAY_CACHE"])
    return platformdirs.user_cache_path("headway", appauthor=False)


def kernel_folders() -> tuple[Path, Path]:
    """Return the folders of compiled kernels: for CUDA C++, and for Triton, where $TRITON_CACHE_DIR takes precedence."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    return cache_folder() / "kernels", Path(chosen) if chosen else cache_folder() / "triton"


def obstacle(folder: Path) -> str:
    """Return the reason why files cannot be stored in a folder, or "" if they can. The folder need not exist yet."""
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not parent.is_dir():
        return f"{parent} is not a folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return "cannot be written"
    free = shutil.disk_usage(parent).free
    return f"{free / 2**20:.0f} MiB free" if free < _LITTLE else ""


@cache
def warn_unwritable(folder: Path, why: str) -> None:
    """Warn once that compiled kernels are not cached, with the consequences."""
    log.warning(
        "kernel cache: %s cannot be written (%s): every process recompiles its kernels, about a second each; set HEADWAY_CACHE "
        "to another folder",
        folder,
        why,
    )


_POLL_SECONDS = 0.02
_PART = ".headway-part"  # Suffix of incomplete files and folders
_SHARED, _PRIVATE = 0o666, 0o600
LARGEST_TEXT = 1 << 28
"""Maximum size of a text file to read, in bytes. For comparison, a crossover table of 20,000 cells takes 10 MiB."""


def read_text(path: Path) -> str:
    """Return the content of a user's UTF-8 file or pipe. :raises OSError, UnicodeDecodeError: if unreadable or too large."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe without a writer would otherwise block forever
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):  # fdopen's error would not name the path
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with os.fdopen(handle, "rb") as file:
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "not a file", str(path))
        os.set_blocking(handle, True)
        content = file.read(LARGEST_TEXT + 1)
    if len(content) > LARGEST_TEXT:
        raise OSError(errno.EINVAL, f"larger than {LARGEST_TEXT >> 20} MiB", str(path))
    return content.decode("utf-8")


def write_whole(path: Path, *content: bytes | memoryview, durable: bool = False, private: bool = False) -> None:
    """Write a file atomically: readers never see half a file, and a failed write leaves the old file unchanged.

    For a symbolic link, the target is written. An existing file keeps its mode and owner. A character device or FIFO is written
    to and never replaced. Incomplete files of killed processes in the folder are removed.

    content: parts of the file, in order. durable: True to wait until the file is on disk, so that a power loss neither removes
    the old file nor leaves an empty one. private: True to let only this user read the file, regardless of the umask and of an
    existing file's mode.

    :raises OSError: if the file cannot be written, in which case no incomplete file remains. Also if the path is a folder, a
    block device, a socket, a read-only file, or a file of a different owner, which only root can preserve.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:
        old = None
    if old is not None and not stat.S_ISREG(old.st_mode):
        _write_into(path, content, old)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if old is not None:
        _check_replaceable(path, old)
    clean_once(path.parent)
    with _part_file(path, _PRIVATE if private else _SHARED) as (part, handle):
        _write_all(handle, content)
        if private:
            os.fchmod(handle, _PRIVATE)
        elif old is not None:
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):  # this user is not in the group
                    os.fchown(handle, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
        if durable:
            os.fsync(handle)
        os.replace(part, path)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill. It is renamed to `target` when the block ends without an exception; otherwise it is removed.

    Incomplete folders of killed processes in the same parent folder are removed. If a different process has made `target`
    meanwhile, the new folder is discarded.

    :raises OSError: if the folder cannot be made.
    """
    clean(target.parent)
    with scratch_folder(target) as part:
        yield part
        with contextlib.suppress(OSError):
            os.rename(part, target)
        if not target.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder next to `target`. It is removed when the block ends or, if the process is killed, by the next `clean`.

    :raises OSError: if the folder cannot be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _part_name(target)
    part.mkdir()
    handle = os.open(part, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(handle)


@contextmanager
def one_process(path: Path, seconds: float = 120.0, work: str = "") -> Iterator[bool]:
    """Run the block while no other process or thread runs a block for the same path. Yield whether it had to wait.

    If a process that runs the block dies, the next one starts. After `seconds`, or in a folder without locks, the block runs
    regardless of the others. work: description of the block for the log, which says that this process waits; "" logs nothing.
    """
    lock, handle, held, waited = path.with_name(f".{path.name}.lock"), -1, False, False
    end = time.monotonic() + seconds
    try:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            while not held and time.monotonic() < end:
                if handle < 0:
                    handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, _SHARED)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    held = os.fstat(handle).st_nlink > 0
                    if not held:  # the holder has removed the file, and a third process may have made another
                        os.close(handle)
                        handle, waited = -1, True
                except BlockingIOError:
                    if work and not waited:
                        log.warning("waiting up to %.0f s for another process: %s", seconds, work)
                    waited = True
                    time.sleep(_POLL_SECONDS)
        yield waited
    finally:
        if handle >= 0:
            with contextlib.suppress(OSError):
                if held:
                    lock.unlink()
            os.close(handle)


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter.

    :raises PermissionError: if the folder belongs to a different user.

    :raises OSError: if the folder cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to another user ({owner})", str(folder))
    folder.chmod(0o700)


def clean(folder: Path) -> list[Path]:
    """Remove incomplete files and folders of killed processes, but not of running ones. Return the removed paths."""
    found = []
    with contextlib.suppress(OSError):
        for part in folder.glob(f".*{_PART}"):
            try:
                handle = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a living writer holds this lock
                if part.is_dir():
                    shutil.rmtree(part, ignore_errors=True)
                else:
                    part.unlink(missing_ok=True)
                found.append(part)
            except OSError:  # locked, or not permitted
                continue
            finally:
                os.close(handle)
    return found


@cache
def clean_once(folder: Path) -> None:
    """Call `clean` once per folder."""
    clean(folder)


def _part_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}{_PART}")


@contextmanager
def _part_file(path: Path, mode: int) -> Iterator[tuple[Path, int]]:
    """Yield a new, locked file in the folder of `path`. When the block ends, the file is removed unless it was renamed. mode: the
    file's mode before the umask."""
    while True:
        part = _part_name(path)
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:  # else another process removed it between the two calls, as if its writer were dead
            break
        os.close(handle)
    try:
        yield part, handle
    finally:
        part.unlink(missing_ok=True)
        os.close(handle)


def _check_replaceable(path: Path, old: os.stat_result) -> None:
    """Check that a file can be replaced. :raises PermissionError: if it is read-only, or if its owner could not be preserved."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if os.geteuid() not in (0, old.st_uid):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))


def _write_into(path: Path, content: Sequence[bytes | memoryview], old: os.stat_result) -> None:
    """Write to a character device or a FIFO."""
    if stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not (stat.S_ISCHR(old.st_mode) or stat.S_ISFIFO(old.st_mode)):
        raise OSError(errno.EINVAL, "it is neither a file nor something that text is written to", str(path))
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a pipe that nobody reads", str(path)) from None
        raise
    try:
        os.set_blocking(handle, True)
        _write_all(handle, content)
    finally:
        os.close(handle)


def _write_all(handle: int, content: Sequence[bytes | memoryview]) -> None:
    for piece in content:
        left = memoryview(piece)
        while left:
            left = left[os.write(handle, left) :]
