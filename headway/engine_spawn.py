"""The process of an engine, begun before its parent has imported what it needs itself: both import at the same time."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import NamedTuple

from headway.core.system.child import found_modules, python
from headway.wire import Wire


class Spawned(NamedTuple):
    """A process that waits for its first message, and the wire to it. It ends with the wire."""

    process: subprocess.Popen[bytes]
    wire: Wire


def spawn_engine() -> Spawned:
    """Begin one: a Python of its own, which finds the modules that this one finds.

    :raises OSError: the system starts no more processes.
    """
    near, far = socket.socketpair()
    with far:
        process = subprocess.Popen(
            python("headway.engine_worker", str(far.fileno())),
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent, even while the child still starts
            env={**os.environ, "PYTHONPATH": found_modules()},
        )
    return Spawned(process, Wire(near))
