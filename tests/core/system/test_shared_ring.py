"""A ring of slots in shared memory: every message, in order, to every reader."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import numpy
import pytest

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
