"""Files that appear whole or not at all, and that never take the place of what they are not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_PART = ".headway-part"
"""How the names of files and folders end that are not complete yet."""
_LARGEST_TEXT = 1 << 28
"""Bytes. A table of 20,000 cells takes 10 MiB."""


def read_text(path: Path) -> str:
    """A text file of the user's, UTF-8. A pipe is read while somebody writes into it, and is empty where nobody does.

    :raises OSError: it cannot be read, is a device, or is too large for a text that somebody wrote.
    :raises UnicodeDecodeError: it is no UTF-8.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # to open a pipe that nobody writes into would wait for ever
    with os.fdopen(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "It is no file", str(path))
        os.set_blocking(handle, True)
        content = file.read(_LARGEST_TEXT + 1)
    if len(content) > _LARGEST_TEXT:
        raise OSError(errno.EINVAL, f"It is larger than {_LARGEST_TEXT >> 20} MiB", str(path))
    return content.decode("utf-8")


def write_whole(path: Path, *content: bytes | memoryview, durable: bool = False) -> None:
    """Write a file whole or not at all: no reader sees half of it, and where writing fails the old file stays as it was.

    A symbolic link stays one: what it points to is written. The mode and the owner of a file that is there are kept. Into a
    character device or a FIFO the content is written; it is never replaced. What a killed process has left in the folder is
    removed. content: its pieces, in order. durable: on the disk when this returns, so that a loss of power takes no old file
    and leaves no empty one.

    :raises OSError: it cannot be written; then nothing is left of it. Also: it is a folder, a block device or a socket, a file
        that may not be written, or one of another owner, whom only root can keep.
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
    with _part_file(path) as (part, handle):
        _write_all(handle, content)
        if old is not None:
            if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(PermissionError):  # of a group that is not ours
                    os.fchown(handle, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
            os.fchmod(handle, stat.S_IMODE(old.st_mode))
        if durable:
            os.fsync(handle)
        os.replace(part, path)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which appears as `target` when the block ends without an exception; else nothing is left of it.

    What an earlier process that was killed has left beside it is removed. Where `target` is there by then, because another
    process was faster, that one stays.

    :raises OSError: it cannot be made.
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


def clean(folder: Path) -> list[Path]:
    """Remove what processes that were killed have left in a folder; what a living one is writing stays. Returns what it was."""
    found = []
    with contextlib.suppress(OSError):
        for part in folder.glob(f".*{_PART}"):
            try:
                handle = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
            except OSError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer holds it as long as it lives
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
    """`clean`, at the first call for a folder."""
    clean(folder)


def _part_name(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}{_PART}")


@contextmanager
def _part_file(path: Path) -> Iterator[tuple[Path, int]]:
    """A new file beside another, locked as long as it is being written, and gone afterwards unless it was renamed."""
    while True:
        part = _part_name(path)
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:  # else another process took it for a dead one's, between the two calls
            break
        os.close(handle)
    try:
        yield part, handle
    finally:
        part.unlink(missing_ok=True)
        os.close(handle)


def _check_replaceable(path: Path, old: os.stat_result) -> None:
    """:raises PermissionError: the file may not be written, or belongs to somebody whom it could not be given back to."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if os.geteuid() not in (0, old.st_uid):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))


def _write_into(path: Path, content: Sequence[bytes | memoryview], old: os.stat_result) -> None:
    """Write to something that is no file and is not to become one."""
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
