"""Process of a rank above 0: makes its executor, then runs the steps that arrive through the ring.

`headway.hosting.rank_assembly` starts it.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from headway.core.engine.ranks.rank_messages import (
    MakeRank,
    RankChoices,
    RankFailed,
    RankJoins,
    RankReady,
    RankStart,
    StartRank,
    decode,
)
from headway.core.system.child import Wire
from headway.core.system.logs import log_to_stderr
from headway.core.system.shared_ring import LifeSigns, RingReader
from headway.core.system.system_errors import escape_unencodable, open_closed_streams, system_error_text
from headway.machine.process import TRIM_INTERVAL, freeze_heap, trim_memory

if TYPE_CHECKING:
    from headway.core.engine.execution.host_rows import Launched
    from headway.core.engine.execution.local_executor import LocalExecutor

log = logging.getLogger("headway")

_BEAT: Final = 0.5  # Seconds between two heartbeats
_SPIN: Final = {"cuda": 0.005, "cpu": 0.0002}  # Seconds of polling before a rank sleeps: short on a CPU, for the others' sake
_AHEAD: Final = 1  # Unfinished steps when another one is launched, as in the engine's loop: graphs have memory for two


def main() -> None:
    """Run a rank until rank 0 closes the wire or ends.

    The command-line arguments are file descriptors of the wire, the ring, and the pipe that wakes the reader.
    """
    wire_fd, memory_fd, wake_fd = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service manager signals rank 0 too, which ends this process
    open_closed_streams()
    escape_unencodable(sys.stdout, sys.stderr)
    parent = os.getppid()
    wire = Wire(socket.socket(fileno=wire_fd))
    try:
        start: StartRank = wire.receive()
    except (EOFError, OSError):  # rank 0 has rejected an option
        return
    log_to_stderr(start.log_level, f"headway rank {start.rank}")
    spin = _SPIN[start.device.split(":")[0]]
    reader = RingReader(memory_fd, start.ring, start.rank - 1, wake_fd, spin)
    choices: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_listen, args=(wire, choices), daemon=True).start()
    Thread(target=_beat, args=(reader.progress, parent), daemon=True).start()
    try:
        executor = _make(start, wire, reader.progress, choices.get)
        freeze_heap()
        wire.send(RankReady(executor.facts))
        _follow(executor, reader)
    except BaseException as error:
        with suppress(OSError):
            wire.send(_failed(error))
        wire.close()
        os._exit(1)  # threads of torch may hang in collective calls


def _follow(executor: LocalExecutor, reader: RingReader) -> None:
    """Run the steps that arrive through the ring, forever. Return freed memory to the system at intervals."""
    launched: deque[Launched] = deque()
    next_trim = time.monotonic() + TRIM_INTERVAL
    while True:
        step = decode(reader.read())
        reader.progress.begin_step()
        while len(launched) > _AHEAD:
            launched.popleft().tokens.wait()
        launched.append(executor.launch(step))
        reader.progress.end_step()
        if (now := time.monotonic()) >= next_trim:
            next_trim = now + TRIM_INTERVAL
            trim_memory()


def _make(start: StartRank, wire: Wire, progress: LifeSigns, choices: Callable[[], Any]) -> LocalExecutor:
    """Join the other ranks and make this rank's executor, ready for steps."""
    import torch

    from headway.core.engine.ranks.torch_ranks import TorchRanks, make_store

    if start.num_threads is not None:
        torch.set_num_threads(start.num_threads)
    make: MakeRank = pickle.loads(start.make)
    size = start.ring.num_readers + 1
    store = make_store(size, start.port)
    wire.send(RankJoins())
    ranks = TorchRanks(store, start.rank, size, torch.device(start.device), progress)
    executor = make(RankStart(ranks, start.device, choices))
    executor.capture()
    return executor


def _listen(wire: Wire, choices: SimpleQueue[Any]) -> None:
    with suppress(EOFError, OSError):
        while True:
            message: RankChoices = wire.receive()
            choices.put(message.choices)
    os._exit(0)  # rank 0 has closed the wire or ended


def _beat(progress: LifeSigns, parent: int) -> None:
    while os.getppid() == parent:  # a child that rank 0 forked may keep rank 0's end of the wire open
        progress.beat()
        time.sleep(_BEAT)
    os._exit(0)


def _failed(error: BaseException) -> RankFailed:
    from headway.core.contract.errors import HeadwayError
    from headway.core.engine.ranks.torch_ranks import CollectiveError

    text = " ".join(str(error).split())
    named = text if isinstance(error, HeadwayError) else system_error_text(error) or f"{type(error).__name__}: {text}"
    return RankFailed(named, isinstance(error, CollectiveError), traceback.format_exc())


if __name__ == "__main__":
    main()
