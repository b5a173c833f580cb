"""Our all-reduce on one GPU, whose streams stand for ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from headway.core.system.child import module_path

pytestmark = pytest.mark.gpu


def test_ranks_meet_and_an_end_is_not_waited_for() -> None:
    from headway.kernels.all_reduce.one_shot_kernels import CAPACITY, NOTHING, OneShotAllReduce

    device = torch.device("cuda", 0)
    shared = [
        torch.full((OneShotAllReduce.shared_bytes(2) // 2,), NOTHING - 2**16, dtype=torch.int16, device=device) for _ in range(2)
    ]
    addresses = [each.data_ptr() for each in shared]
    ranks = [OneShotAllReduce(rank, device, addresses, each, torch.cuda.Stream()) for rank, each in enumerate(shared)]
    streams = [torch.cuda.Stream() for _ in ranks]
    for rank, part in zip(ranks, torch.zeros(2, 64, dtype=torch.bfloat16, device=device), strict=True):
        rank.abort()  # the first launch compiles, and would wait for a rank that cannot be launched meanwhile
        rank(part)
    torch.cuda.synchronize()
    ranks = [
        OneShotAllReduce(rank, device, addresses, each.fill_(NOTHING - 2**16), torch.cuda.Stream())
        for rank, each in enumerate(shared)
    ]
    for count in (64, 4096, 200_000, CAPACITY // 2, 32, 70_000, 8, 8):
        parts = list(torch.randn(2, count, device=device, dtype=torch.bfloat16))
        expected = sum(part.float() for part in parts)
        torch.cuda.synchronize()
        for rank, stream, part in zip(ranks, streams, parts, strict=True):
            with torch.cuda.stream(stream):
                rank(part)
        torch.cuda.synchronize()
        assert torch.equal(parts[0], parts[1])
        assert (parts[0].float() - expected).abs().max() <= expected.abs().max() * 2**-8
    with torch.cuda.stream(streams[0]):
        ranks[0](torch.ones(64, device=device, dtype=torch.bfloat16))  # whom nobody comes to meet
    ranks[0].abort()
    torch.cuda.synchronize()


def test_two_shot_ranks_meet_and_an_end_is_not_waited_for() -> None:
    from headway.kernels.all_reduce.two_shot_kernels import TwoShotAllReduce

    class Half(TwoShotAllReduce):
        """Few enough programs for two ranks on one GPU."""

        num_states = 48

    device = torch.device("cuda", 0)
    shared = [torch.zeros(Half.shared_bytes(2), dtype=torch.uint8, device=device) for _ in range(2)]
    addresses = [each.data_ptr() for each in shared]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for rank in range(2):  # the first launches compile, and would wait for a rank that cannot be launched meanwhile
        first = Half(rank, device, addresses, None, torch.cuda.Stream())
        first.abort()
        first(torch.zeros(64, dtype=torch.bfloat16, device=device))
        first(torch.zeros(64, dtype=torch.bfloat16, device=device), torch.zeros(64, dtype=torch.bfloat16, device=device))
    torch.cuda.synchronize()
    for each in shared:
        each.zero_()
    ranks = [Half(rank, device, addresses, None, torch.cuda.Stream()) for rank in range(2)]
    for number, count in enumerate((64, 4096, 5_000_000, 2**24, 32, 2**22 + 8, 8, 8)):
        parts = torch.randn(2, count, device=device, dtype=torch.bfloat16)
        onto = torch.randn(count, device=device, dtype=torch.bfloat16).repeat(2, 1)
        expected = parts.float().sum(0) + (onto[0].float() if number % 2 else 0.0)
        torch.cuda.synchronize()
        for rank, stream, part, residual in zip(ranks, streams, parts, onto, strict=True):
            with torch.cuda.stream(stream):
                rank(part, residual if number % 2 else None)
        torch.cuda.synchronize()
        found = onto if number % 2 else parts
        assert torch.equal(found[0], found[1])
        assert (found[0].float() - expected).abs().max() <= expected.abs().max() * 2**-7
    with torch.cuda.stream(streams[0]):
        ranks[0](torch.ones(64, device=device, dtype=torch.bfloat16))  # whom nobody comes to meet
    ranks[0].abort()
    torch.cuda.synchronize()


COPIES = """
import torch
from headway.kernels.all_reduce.copy_kernels import CAPACITY, CopyAllReduce, ShareSum

device = torch.device("cuda", 0)
shared = [torch.zeros(CopyAllReduce.shared_bytes(2), dtype=torch.uint8, device=device) for _ in range(2)]
addresses = [each.data_ptr() for each in shared]
x, y = torch.zeros(2, 64, dtype=torch.bfloat16, device=device)
for adds in (False, True):  # the first launches load the kernels, and would wait for a rank that cannot be launched meanwhile
    ShareSum(0, device, addresses)(x, y, (0, 64), 0, adds=adds)
torch.cuda.synchronize()
ranks = [CopyAllReduce(rank, device, addresses, None) for rank in range(2)]
for number, count in enumerate((64, 4096, 5_000_000, CAPACITY // 2, 32, 2**22 + 8, 8, 8)):
    parts = torch.randn(2, count, device=device, dtype=torch.bfloat16)
    onto = torch.randn(count, device=device, dtype=torch.bfloat16).repeat(2, 1)
    expected = parts.float().sum(0) + (onto[0].float() if number % 2 else 0.0)
    works = [rank.start(part, residual if number % 2 else None) for rank, part, residual in zip(ranks, parts, onto, strict=True)]
    for work in works:
        work.wait()
    found = onto if number % 2 else parts
    assert torch.equal(found[0], found[1])
    assert (found[0].float() - expected).abs().max() <= expected.abs().max() * 2**-7
lost = ranks[0].start(torch.ones(64, device=device, dtype=torch.bfloat16))  # whom nobody comes to meet
ranks[0].abort()
lost.wait()
torch.cuda.synchronize()
print("ended")
"""


def test_copies_overlap_and_an_end_is_not_waited_for() -> None:
    """In a process of its own with a hardware queue for each stream: streams that share a queue wait for each other's flags."""
    environment = {**os.environ, "PYTHONPATH": module_path(), "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    done = subprocess.run([sys.executable, "-c", COPIES], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "ended\n", done.stderr
