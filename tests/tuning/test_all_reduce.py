"""Which way ranks sum how many bytes: the choice by times, and the file that keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headway.core.engine.ranks.torch_ranks import SIZES, AllReduceChoice
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin
from headway.tuning.measure.all_reduce import AllReduceFile, describe_kept, kept_path, kept_times
from headway.tuning.measure.device import identify_device


@dataclass
class Way:
    name: str

    def takes(self, x: torch.Tensor) -> bool:
        return True

    def __call__(self, x: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        return x

    def abort(self) -> None:
        pass


ONE_SHOT, NCCL = Way("one_shot"), Way("nccl")
US: dict[str, list[float | None]] = {
    "one_shot": [5.0 if size <= 2**17 else 20.0 if size <= 2**19 else None for size in SIZES],
    "nccl": [10.0] * len(SIZES),
}


def test_the_fastest_way_serves_the_nearest_sizes() -> None:
    choice = AllReduceChoice(US, "measured today")
    found = [choice.fastest(count, [ONE_SHOT, NCCL]).name for count in (1, 1024, 150_000, 200_000, 2**19, 2**26)]
    assert found == ["one_shot", "one_shot", "one_shot", "nccl", "nccl", "nccl"]
    assert choice.fastest(1024, [NCCL]) is NCCL
    assert AllReduceChoice({}, "").fastest(1024, [ONE_SHOT, NCCL]) is NCCL
    assert str(choice) == "one_shot from 1,024 bytes, nccl from 262,144 bytes on (measured today)"


def test_kept_times_are_those_of_this_software_and_so_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    device = identify_device(torch.device("cpu"))
    assert kept_times(device, 2) is None
    for ranks, sizes in ((2, SIZES), (4, SIZES[1:])):
        made = AllReduceFile(device=device, origin=Origin.here(), ranks=ranks, sizes=list(sizes), us=US)
        write_json(made, kept_path(device, ranks), "HEADWAY_CACHE")
    kept = kept_times(device, 2)
    assert kept is not None
    assert kept.us == US
    assert kept_times(device, 4) is None  # of other sizes
    assert kept_times(device.model_copy(update={"torch": "0.1"}), 2) is None
    assert describe_kept(torch.device("cpu"), 2) == "gloo"
