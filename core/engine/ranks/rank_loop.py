"""The process of a rank that follows rank 0: it makes its executor, and then runs the steps that come through the ring."""

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

from headway.core.engine.ranks.rank_messages import MakeRank, RankChoices, RankFailed, RankJoins, RankReady, RankStart, StartRank
from headway.core.system.logs import log_to_stderr
from headway.core.system.shared_ring import LifeSigns, RingReader
from headway.core.system.system_errors import escape_unencodable, open_closed_streams, system_error_text
from headway.core.system.wire import Wire

if TYPE_CHECKING:
    from headway.core.engine.execution.host_rows import Launched
    from headway.core.engine.execution.local_executor import LocalExecutor

log = logging.getLogger("headway")

_BEAT: Final = 0.5  # Seconds between two signs of life
_SPIN: Final = {"cuda": 0.005, "cpu": 0.0002}  # Seconds that a rank polls before it sleeps: on a CPU others need the core
_AHEAD: Final = 1  # Launched steps not done when another one is launched, as in the engine's loop: graphs have memory for two


def run_rank(wire_fd: int, memory_fd: int, wake_fd: int, ready: Callable[[], None], stepped: Callable[[], None]) -> None:
    """Run a rank until rank 0 closes the wire or ends. wire_fd, memory_fd, wake_fd: the wire, the ring, the reader's pipe.
    ready: called when the executor is made. stepped: called after each step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service manager signals rank 0, too, which ends this process
    open_closed_streams()
    escape_unencodable(sys.stdout, sys.stderr)
    parent = os.getppid()
    wire = Wire(socket.socket(fileno=wire_fd))
    try:
        start: StartRank = wire.receive()
    except (EOFError, OSError):  # rank 0 has refused an option
        return
    log_to_stderr(start.log_level, f"headway rank {start.rank}")
    spin = _SPIN[start.device.split(":")[0]]
    reader = RingReader(memory_fd, start.ring, start.rank - 1, wake_fd, spin)
    choices: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_listen, args=(wire, choices), daemon=True).start()
    Thread(target=_beat, args=(reader.progress, parent), daemon=True).start()
    try:
        executor = _make(start, wire, reader.progress, choices.get)
        ready()
        wire.send(RankReady(executor.facts))
        follow(executor, reader, stepped)
    except BaseException as error:
        with suppress(OSError):
            wire.send(_failed(error))
        wire.close()
        os._exit(1)  # threads of torch may hang in calls in which ranks meet


def follow(executor: LocalExecutor, reader: RingReader, stepped: Callable[[], None]) -> None:
    """Run the steps that come through the ring, for ever. stepped: called after each."""
    from headway.core.engine.ranks.rank_messages import decode

    launched: deque[Launched] = deque()
    while True:
        step = decode(reader.read())
        reader.progress.begin_step()
        while len(launched) > _AHEAD:
            launched.popleft().tokens.wait()
        launched.append(executor.launch(step))
        reader.progress.end_step()
        stepped()


def _make(start: StartRank, wire: Wire, progress: LifeSigns, choices: Callable[[], Any]) -> LocalExecutor:
    """Meet the other ranks, and make this one's executor, ready for steps."""
    import torch

    from headway.core.engine.ranks.torch_ranks import TorchRanks, find_store

    if start.num_threads is not None:
        torch.set_num_threads(start.num_threads)
    make: MakeRank = pickle.loads(start.make)
    size = start.ring.num_readers + 1
    store = find_store(start.port, size)
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
    os._exit(0)  # rank 0 has closed the wire, or has ended


def _beat(progress: LifeSigns, parent: int) -> None:
    while os.getppid() == parent:  # another process may hold rank 0's end of the wire, a child that it has forked
        progress.beat()
        time.sleep(_BEAT)
    os._exit(0)


def _failed(error: BaseException) -> RankFailed:
    from headway.core.contract.errors import HeadwayError
    from headway.core.engine.ranks.torch_ranks import MeetingError

    text = " ".join(str(error).split())
    named = text if isinstance(error, HeadwayError) else system_error_text(error) or f"{type(error).__name__}: {text}"
    return RankFailed(named, isinstance(error, MeetingError), traceback.format_exc())
