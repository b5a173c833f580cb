"""Restrictions of child processes in fault tests: another user, limited file sizes, a signal at some moment."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

NOBODY = 65534


def apart(act: Callable[[], None], user: int | None = None, file_size: int | None = None) -> str:
    """Run something in a fork of this process; returns the error that it raised, in words, or "".

    user: who runs it, not root any more. file_size: bytes beyond which no file of its grows, as on a disk that is full.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            if file_size is not None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            act()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:4096])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def killed_after(arguments: Sequence[str], seconds: float, cwd: Path, **environment: str) -> bool:
    """Run this Python with these arguments and kill it, and all that it started, by SIGKILL after some time.

    Returns whether it was still running then.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


def left_behind(folder: Path) -> list[Path]:
    """Return incomplete files in a folder."""
    return [path for path in folder.rglob("*") if path.name.endswith(".headway-part")]
