"""Reading the user's text files, and writing files and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import platformdirs

log = logging.getLogger("headway")

_LITTLE = 64 * 2**20  # Free bytes below which a folder counts as full: the kernels of one model may take as many


def cache_folder() -> Path:
    """Return $HEADWAY_CACHE where it is set, else `headway` in the user's cache folder on this operating system."""
    if os.environ.get("HEADWAY_CACHE"):
        return Path(os.environ["HEADWAY_CACHE"])
    return platformdirs.user_cache_path("headway", appauthor=False)


def kernel_folders() -> tuple[Path, Path]:
    """Return the folders of compiled kernels: of CUDA C++, and of Triton, which is $TRITON_CACHE_DIR where that is set."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    return cache_folder() / "kernels", Path(chosen) if chosen else cache_folder() / "triton"


def obstacle(folder: Path) -> str:
    """Return why no file can be kept in a folder, which need not exist yet; empty where one can."""
    parent = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not parent.is_dir():
        return f"{parent} is not a folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return "cannot be written"
    free = shutil.disk_usage(parent).free
    return f"{free / 2**20:.0f} MiB free" if free < _LITTLE else ""


@cache
def warn_unwritable(folder: Path, why: str) -> None:
    """Warn once that compiled kernels are not kept, and what that costs."""
    log.warning(
        "kernel cache: %s cannot be written (%s): every process compiles its kernels again, a second or so each; HEADWAY_CACHE "
        "names another folder",
        folder,
        why,
    )


_PART = ".headway-part"  # End of the names of files and folders that are not complete yet
_SHARED, _PRIVATE = 0o666, 0o600
LARGEST_TEXT = 1 << 28
"""Bytes of the largest text file that is read. A table of 20,000 cells takes 10 MiB."""


def read_text(path: Path) -> str:
    """Read a user's UTF-8 text file; a pipe is read to its end. :raises OSError, UnicodeDecodeError: unreadable, or too large."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # to open a pipe that nobody writes into would wait for ever
    mode = os.fstat(handle).st_mode
    if stat.S_ISDIR(mode):  # an error of fdopen would not name it
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
    """Write a file whole or not at all: no reader sees half a file, and a failed write leaves the old one unchanged.

    A symbolic link stays one: the file that it points to is written. The mode and the owner of an existing file are kept. A
    character device or a FIFO is written into and never replaced. Incomplete files that a killed process has left in the folder
    are removed. content: pieces of the file, in order. durable: the file is on the disk when this returns, so that a loss of
    power neither takes an old file nor leaves an empty one. private: nobody but this user may read the file, whatever the umask
    and an existing file's mode.

    :raises OSError: the file cannot be written, and nothing is left of it; or the path is a folder, a block device, a socket, a
        read-only file, or a file of another owner, whom only root can keep.
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
                with contextlib.suppress(PermissionError):  # the group is none of this user's
                    os.fchown(handle, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
        if durable:
            os.fsync(handle)
        os.replace(part, path)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which appears as `target` when the block ends without an exception; else nothing is left of it.

    Incomplete folders that a killed process has left beside it are removed. Where another process has made `target` meanwhile,
    that one stays.

    :raises OSError: the folder cannot be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    clean(target.parent)
    part = _part_name(target)
    part.mkdir()
    handle = os.open(part, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield part
        with contextlib.suppress(OSError):
            os.rename(part, target)
        if not target.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(handle)


def make_private(folder: Path) -> None:
    """Make a folder that only this user may enter. :raises PermissionError: another user's. :raises OSError: impossible."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if owner != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to another user ({owner})", str(folder))
    folder.chmod(0o700)


def clean(folder: Path) -> list[Path]:
    """Remove incomplete files and folders of killed processes; those of living processes stay. Returns what was removed."""
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
            except OSError:  # held, or not ours to remove
                continue
            finally:
                os.close(handle)
    return found


@cache
def clean_once(folder: Path) -> None:
    """Call `clean` once for each folder."""
    clean(folder)


def _part_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}{_PART}")


@contextmanager
def _part_file(path: Path, mode: int) -> Iterator[tuple[Path, int]]:
    """Yield a new file beside another, locked meanwhile, then removed unless renamed. mode: the file's, less the umask."""
    while True:
        part = _part_name(path)
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:  # else another process removed it between the two calls, as a dead one's
            break
        os.close(handle)
    try:
        yield part, handle
    finally:
        part.unlink(missing_ok=True)
        os.close(handle)


def _check_replaceable(path: Path, old: os.stat_result) -> None:
    """:raises PermissionError: the file may not be written, or belongs to another user and could not be given back."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if os.geteuid() not in (0, old.st_uid):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))


def _write_into(path: Path, content: Sequence[bytes | memoryview], old: os.stat_result) -> None:
    """Write into a character device or a FIFO."""
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
