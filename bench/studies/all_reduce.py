"""All-reduce on the GPUs of one host, in CUDA graphs: Headway's kernel, NCCL, torch's symmetric memory, and vLLM's kernel.

If there are no saved times for these GPUs, the times of Headway's kernels are measured and saved first, so that later engines use
them.

python -m headway.bench.studies.all_reduce
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.engine.ranks.torch_ranks import SIZES, TorchRanks, make_store
from headway.core.system.json_files import write_json
from headway.core.system.provenance import command_line
from headway.core.system.shared_ring import LifeSigns
from headway.core.system.terminal import Terminal
from headway.registry import create_registry
from headway.tuning.measure.all_reduce import choose_all_reduce, sums_table, time_sum
from headway.tuning.measure.device import identify_device

_MEASURED = 5.0
"""Maximum seconds for measuring Headway's own all-reduce kernels."""


class TorchOneShot:
    """`one_shot_all_reduce_copy_out` of torch's symmetric memory. A launch that waits for a missing rank cannot be aborted."""

    name = "torch one_shot"

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        prefixed = dist.PrefixStore("peers", store)  # type: ignore[attr-defined]
        dist.init_process_group("nccl", store=prefixed, rank=rank, world_size=size, device_id=device)
        self._group: str = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._buffer = symmetric.empty(SIZES[-1] // 2, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(self._buffer, self._group)

    def takes(self, x: Tensor) -> bool:
        """Return whether a tensor is at most as large as the largest timed tensor."""
        return x.nbytes <= int(SIZES[-1])

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Sum x over the ranks, adding the sum to `onto` if given."""
        shared = self._buffer[: x.numel()]
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", self._group, x)
        return x if onto is None else onto.add_(x)

    def abort(self) -> None:
        """Do nothing: torch's launches cannot be aborted."""


class TorchTwoShot(TorchOneShot):
    """`two_shot_all_reduce_` of torch's symmetric memory, including copies to and from that memory."""

    name = "torch two_shot"

    def __init__(self, other: TorchOneShot) -> None:
        self._buffer = other._buffer
        self._group = other._group

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Sum x over the ranks, adding the sum to `onto` if given."""
        shared = self._buffer[: x.numel()].copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self._group)
        return x.copy_(shared) if onto is None else onto.add_(shared)


class VllmCustom:
    """vLLM's own all-reduce, out of place, with graph buffers registered as in vLLM."""

    name = "vllm custom"

    def __init__(self, device: torch.device) -> None:
        """torch's default group must exist.
        :raises ImportError: if vLLM is not installed. :raises RuntimeError: if vLLM does not support these GPUs."""
        import torch.distributed as dist

        os.environ.setdefault("VLLM_SKIP_P2P_CHECK", "1")  # the check would use vLLM's own groups, which do not exist
        library: Any = importlib.import_module("vllm.distributed.device_communicators.custom_all_reduce")
        self._sum: Any = library.CustomAllreduce(dist.new_group(backend="gloo"), device)
        getattr(self._sum, "finalize_p2p", lambda: None)()  # later releases finish their setup here
        if self._sum.disabled:
            raise RuntimeError("vLLM's all-reduce does not serve these GPUs")

    def takes(self, x: Tensor) -> bool:
        """Return whether vLLM's own rule accepts a tensor."""
        return bool(self._sum.should_custom_ar(x))

    def __call__(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Sum x over the ranks, adding the sum to `onto` if given."""
        found: Tensor = self._sum.custom_all_reduce(x)
        return found if onto is None else onto.add_(found)

    def capture(self) -> AbstractContextManager[object]:
        """Return the context that vLLM needs around a capture."""
        found: AbstractContextManager[object] = self._sum.capture()
        return found

    def abort(self) -> None:
        """Do nothing: a launch cannot be aborted."""


def _peers(ranks: TorchRanks) -> Iterator[TorchOneShot | VllmCustom]:
    """Yield other libraries' all-reduce kernels that are available on every rank."""
    made: list[TorchOneShot] = []

    def first() -> TorchOneShot:
        made.append(TorchOneShot(ranks.group.store, ranks.rank, ranks.size, ranks.device))
        return made[0]

    makers: list[Callable[[], Any]] = [first, lambda: TorchTwoShot(made[0]), lambda: VllmCustom(ranks.device)]
    for make in makers:
        method = None
        try:
            method = make()
        except Exception as error:  # a library may raise anything
            print(f"unavailable on rank {ranks.rank}: {' '.join(str(error).split())}")
        if bool(ranks.all_gather(torch.tensor([method is not None], dtype=torch.int32, device=ranks.device)).min()):
            assert method is not None
            yield method


def _of_rank(rank: int, size: int, port: int, store: Any, found: dict[str, list[float | None]]) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = store or make_store(size, port)
    ranks = TorchRanks(store, rank, size, device, LifeSigns(numpy.zeros(16, numpy.int64)))
    choose_all_reduce(ranks, create_registry(policy="none").all_reduce, _MEASURED)
    for method in (*ranks.sums, *_peers(ranks)):
        for adds in (False, True):
            name = f"{method.name}{' + add' if adds else ''}"
            found[name] = [None] * len(SIZES)
            for cell, num_bytes in enumerate(SIZES):
                x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
                if method.takes(x):
                    capture = method.capture if isinstance(method, VllmCustom) else nullcontext
                    onto = torch.zeros_like(x) if adds else None
                    found[name][cell] = time_sum(ranks, partial(method, x, onto), capture).median_us
    torch.cuda.synchronize()


def all_reduce(
    ranks: Annotated[int, typer.Option(min=2, help="Number of GPUs.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Write the times to this JSON file.")] = None,
) -> None:
    """Time all-reduce over GPUs, with and without adding to a residual stream."""
    if torch.cuda.device_count() < ranks:
        raise ConfigError("--ranks", f"at most {torch.cuda.device_count()}, the GPUs that torch sees", ranks)
    store, found = make_store(ranks), dict[str, list[float | None]]()
    context = torch.multiprocessing.get_context("spawn")
    others = [context.Process(target=_of_rank, args=(rank, ranks, store.port, None, {})) for rank in range(1, ranks)]
    for other in others:
        other.start()
    _of_rank(0, ranks, store.port, store, found)
    for other in others:
        other.join()
    device = identify_device(torch.device("cuda", 0))
    table = Table(title=f"{ranks} x {device.name}, torch {device.torch}: us of a sum, bfloat16", box=box.SIMPLE_HEAD)
    for column in ("bytes", *found):
        table.add_column(column, justify="right")
    for cell, num_bytes in enumerate(SIZES):
        times = [each[cell] for each in found.values()]
        table.add_row(f"{num_bytes:,}", *("-" if us is None else f"{us:.1f}" for us in times))
    Terminal().print(table)
    if output is not None:
        print(command_line("python", "-m", "headway.bench.studies.all_reduce"))
        write_json(sums_table(device, ranks, found), output)


if __name__ == "__main__":
    run_study(all_reduce)
