"""The cut of a decode step, under the interpreter (started by test_interpreter.py) or on a GPU."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
try:
    from headway.backends.triton.chunk_kernel import Chunks, cut_sequences
    from headway.kernels.runtime.triton_launch import INTERPRETED, Launcher
except RuntimeError as error:  # pragma: no cover - an old GPU driver
    pytest.skip(str(error), allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="test_interpreter.py runs these with TRITON_INTERPRET=1"
)

Chunk = tuple[int, int, int, int, int, int, int, int]


def cut(
    kv_lens: list[int], splits: int, *, query_len: int = 1, block_n: int = 16, window: int | None = None, even: bool = False
) -> list[Chunk]:
    seq_lens = torch.tensor(kv_lens, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(len(kv_lens) + 1, dtype=torch.int32, device=DEVICE) * query_len
    chunks = Chunks(seq_lens, starts, splits, block_n, window, even)
    chunks.cut(Launcher(cut_sequences), splits)
    return [tuple(row) for row in chunks.table.tolist()]


def check(kv_lens: list[int], splits: int, block_n: int = 16, window: int | None = None, query_len: int = 1) -> list[int]:
    """That every visible key lies in exactly one chunk, in order, and the numbers agree. Returns the chunks of each sequence."""
    for even in (False, True):
        table = cut(kv_lens, splits, query_len=query_len, block_n=block_n, window=window, even=even)
        used = [row for row in table if row[0] >= 0]
        assert table[: len(used)] == used, "chunks without work come last"
        counts = [0] * len(kv_lens)
        for at, (seq, kv_len, token, length, tile, end, first, count) in enumerate(used):
            start = tile * block_n
            assert (kv_len, token, length) == (kv_lens[seq], seq * query_len, query_len)
            assert first <= at < first + count
            whole = 0 if window is None else max(kv_len - query_len - window + 1, 0) // block_n * block_n
            assert start == (whole if at == first else used[at - 1][5])
            assert start < end
            assert (end == kv_len) == (at == first + count - 1)
            counts[seq] += 1
            assert counts[seq] <= count
        assert [count > 0 for count in counts] == [kv_len > 0 for kv_len in kv_lens]
        if even:
            assert max(counts) <= splits
        else:
            found = counts
    return found


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [None, 40])
def test_every_key_lies_in_one_chunk(splits: int, window: int | None) -> None:
    draw = random.Random(splits)
    for count in (1, 2, 5, 17):
        check([draw.choice([0, 1, 15, 16, 17, draw.randrange(1, 700)]) for _ in range(count)], splits, window=window)
    check([0, 0], splits, window=window)
    check([5, 300, 70], splits, window=window, query_len=4)


def test_equal_sequences_are_cut_alike() -> None:
    assert check([640] * 6, 4) == [4] * 6
    assert check([640] * 6, 1) == [1] * 6
    assert check([640, 0, 640, 0], 3) == [3, 0, 3, 0], "padding takes no share"


def test_a_long_sequence_among_short_ones_is_cut_most() -> None:
    counts = check([16] * 30 + [16 * 500] + [16], 1)
    assert counts[30] >= 14
    assert counts[:30] == [1] * 30
    # sequences near the mean stay whole where one split was asked for
    assert check([600, 640, 700, 560], 1) == [1] * 4


def test_there_are_never_more_chunks_than_rows() -> None:
    draw = random.Random(0)
    for _ in range(20):
        count, splits = draw.randrange(1, 40), draw.randrange(1, 5)
        check([draw.choice([1, draw.randrange(1, 9000)]) for _ in range(count)], splits)
    check([1] * 20 + [9000] * 20, 1)
    check([1] * 39 + [90000], 1)


def test_a_sequence_s_even_cut_does_not_hang_on_the_others() -> None:
    def of_last(kv_lens: list[int]) -> list[tuple[int, int]]:
        return [row[4:6] for row in cut(kv_lens, 5, even=True) if row[0] == len(kv_lens) - 1]

    assert of_last([300]) == of_last([9000, 1, 0, 300])
