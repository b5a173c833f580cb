"""A ring of slots in shared memory: every message, in order, to every reader."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Thread

import numpy
import pytest

from headway.core.system.part_clock import PartClock
from headway.core.system.shared_ring import RingReader, RingSize, RingWriter, shared_memory


@contextmanager
def ring(size: RingSize, spin_seconds: float = 0.0) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    memory, pipes = shared_memory(size.num_bytes), [os.pipe() for _ in range(size.num_readers)]
    try:
        yield (
            RingWriter(memory, size, [pipe[1] for pipe in pipes]),
            [RingReader(memory, size, number, pipe[0], spin_seconds) for number, pipe in enumerate(pipes)],
        )
    finally:
        for descriptor in (memory, *(end for pipe in pipes for end in pipe)):
            os.close(descriptor)


def test_every_reader_gets_every_message_also_those_longer_than_the_ring() -> None:
    draw = numpy.random.default_rng(0)
    messages = [draw.bytes(length) for length in (*draw.integers(0, 200, 300), 32, 33, 0, 5000)]
    with ring(RingSize(num_readers=2, num_slots=3, slot_bytes=32)) as (writer, readers):
        found: list[list[bytes]] = [[], []]

        def read(number: int) -> None:
            for _ in messages:
                found[number].append(readers[number].read())
                if number:
                    time.sleep(0.0002)  # the slow one holds the writer up

        threads = [Thread(target=read, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for message in messages:
            writer.write(message, lambda: None)
        for thread in threads:
            thread.join(20)
    assert found == [messages, messages]


def test_a_writer_that_waits_for_a_reader_asks_whether_it_still_should() -> None:
    def check() -> None:
        raise InterruptedError

    with ring(RingSize(num_readers=1, num_slots=2)) as (writer, _):
        writer.write(b"1", check)
        writer.write(b"2", check)
        with pytest.raises(InterruptedError):
            writer.write(b"3", check)


def test_signs_of_life_are_seen_from_the_other_side() -> None:
    with ring(RingSize(num_readers=1)) as (writer, (reader,)):
        seen = writer.progress_of(0)
        assert seen.step_text == "before the first step"
        reader.progress.beat()
        reader.progress.begin_step()
        reader.progress.call()
        assert (seen.beats, seen.place, seen.step_text) == (1, (1, 0, 1), "in step 1")
        reader.progress.end_step()
        assert seen.step_text == "after step 1"
        assert writer.progress_of(-1).place == (0, 0, 0)


class FakeTime:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_runs_inside_a_part_counts_once() -> None:
    time = FakeTime()
    clock = PartClock(time)
    compiling = clock.within("compiling", nullcontext)
    assert clock.within("compiling", None) is None
    with clock.part("measuring"):
        time.now += 2.0
        with compiling():
            time.now += 5.0
    with clock.part("weights"):
        time.now += 1.0
        with compiling():
            time.now += 0.5
    with clock.part("nothing"):
        time.now += 0.01
    time.now += 0.49
    clock.end()
    time.now += 60.0
    assert clock.seconds == {"compiling": 5.5, "measuring": 2.0, "weights": 1.0, "nothing": clock.seconds["nothing"]}
    assert str(clock) == "9.0 s: compiling 5.5, measuring 2.0, weights 1.0, the rest 0.5"
