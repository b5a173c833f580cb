"""A small model sharded over ranks, with real attention and all-reduces, and engines that run it on several ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from headway.core.contract.kernel import CompileAhead
from headway.core.contract.model import Attention
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.host_rows import HostRows
from headway.core.engine.execution.local_executor import DeviceParts, LocalExecutor
from headway.core.engine.loop import EngineLoop, EngineParts, make_engine
from headway.core.engine.ranks.rank_messages import RankStart
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.engine.ranks.ranked_executor import RankedExecutor
from headway.core.sampling.grammar import GrammarCompiler
from headway.core.select.request import LayerSpecs
from headway.core.system.part_clock import PartClock
from headway.hosting.assembly import Assembly
from headway.hosting.driver import EngineDriver
from headway.models.loader import LoadedModel
from headway.registry import Registry, create_registry
from headway.tuning.measure.all_reduce import choose_all_reduce

MODULE = "headway.hosting.rank_child"
"""Module that a rank's process runs."""
MEASURED = 5.0
"""Seconds in which GPUs may measure their sums."""
HEADS, HEAD_DIM, LAYERS, HIDDEN = 4, 16, 2, 32


class RankedModel:
    """Two attention layers over random embeddings, sharded by heads, and an output head sharded by vocabulary."""

    vocab_size = 512
    max_position_embeddings = 256

    def __init__(self, ranks: Ranks = ONE_RANK, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.ranks, self.num_heads = ranks, HEADS // ranks.size
        place = torch.device(device)
        spec = AttentionSpec(self.num_heads, self.num_heads, HEAD_DIM, scale=0.1, device=place)
        self.attention_specs = [spec] * LAYERS
        self.embed = torch.randn(self.vocab_size, HIDDEN, generator=generator).to(place)
        self.places = torch.randn(self.max_position_embeddings, HIDDEN, generator=generator).to(place)
        qkv = torch.randn(LAYERS, HIDDEN, 3, HEADS, HEAD_DIM, generator=generator) * 0.3
        o = torch.randn(LAYERS, HEADS, HEAD_DIM, HIDDEN, generator=generator) * 0.1
        own = slice(ranks.rank * self.num_heads, (ranks.rank + 1) * self.num_heads)
        self.qkv = qkv[:, :, :, own].reshape(LAYERS, HIDDEN, -1).to(place)
        self.o = o[:, own].reshape(LAYERS, -1, HIDDEN).to(place)
        rows = self.vocab_size // ranks.size
        self.head = self.embed[ranks.rank * rows : (ranks.rank + 1) * rows].contiguous()
        self.before: Callable[[int], None] | None = None
        """Called with the number of tokens before each run of the model."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        if self.before is not None:
            self.before(len(input_ids))
        x = self.embed[input_ids] + self.places[positions]
        for layer in range(LAYERS):
            q, k, v = (x @ self.qkv[layer]).view(len(x), 3, self.num_heads, HEAD_DIM).unbind(1)
            x = x + self.ranks.all_reduce(attention(layer, q, k, v).flatten(1) @ self.o[layer])
        return x

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        found = (hidden @ self.head.T) * 0.2
        return found if out is None else out.copy_(found)


def registry() -> Registry:
    return create_registry(policy="none")


def make_rank(
    start: RankStart, config: EngineConfig, max_decode_len: int, fault: str = "", compile_ahead: CompileAhead | None = None
) -> LocalExecutor:
    """The executor of a rank that follows. fault: what it does in a step of 13 tokens, or at its start."""
    if fault == "start":
        raise RuntimeError("no part of the model here")
    choose_all_reduce(start.ranks, registry().all_reduce, MEASURED)
    model = RankedModel(start.ranks, start.device)
    if fault and start.ranks.rank == start.ranks.size - 1:
        model.before = partial(_strike, fault)
    layers = LayerSpecs.of(model, config.kv_cache_dtype)
    parts = DeviceParts(
        model=model,
        layers=layers,
        source=registry(),
        config=config.for_device(layers.device),
        compile_ahead=compile_ahead,
        max_decode_len=max_decode_len,
        ranks=start.ranks,
    )
    return LocalExecutor(parts)


def _strike(fault: str, num_tokens: int) -> None:
    if num_tokens != 13:
        return
    if fault == "raise":
        raise RuntimeError("a kernel of this rank has failed")
    if fault == "loop":
        while True:
            torch.zeros(1).item()
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


def ranked_engine(
    size: int,
    config: EngineConfig,
    *,
    proposer: object = None,
    grammars: GrammarCompiler | None = None,
    fault: str = "",
    compile_ahead: CompileAhead | None = None,
    device: str = "cpu",
) -> EngineLoop:
    """Return an engine with `size` ranks for the model; 1 means only this process. compile_ahead: runs every kind of step at
    the start.
    """
    options = {
        "source": registry(),
        "config": config,
        "proposer": proposer,
        "measured": False,
        "hosts": HostRows(grammars, {}),
        "eos_token_ids": frozenset[int](),
        "compile_ahead": compile_ahead,
    }
    if size == 1:
        return make_engine(EngineParts(model=RankedModel(device=device), **options))
    devices = ["cpu"] * size if device == "cpu" else [f"{device}:{number}" for number in range(size)]
    max_decode_len = 1 if proposer is None else config.num_speculative_tokens + 1
    rank = partial(make_rank, config=config, max_decode_len=max_decode_len, fault=fault, compile_ahead=compile_ahead)

    def own_model(ranks: Ranks) -> RankedModel:
        choose_all_reduce(ranks, registry().all_reduce, MEASURED)
        return RankedModel(ranks, devices[0])

    return joined_engine(RankProcesses(size, MODULE, devices, num_threads=1), rank, own_model, **options)


def joined_engine(
    processes: RankProcesses, rank: Callable[..., LocalExecutor], model_of: Callable[[Ranks], Any], **options: Any
) -> EngineLoop:
    """Start the ranks of processes, and an engine over them; where that fails, all of them end."""
    try:
        ranks = processes.join(rank)
        return make_engine(EngineParts(model=model_of(ranks), ranks=ranks, processes=processes, **options))
    except Exception as error:
        try:
            processes.fail(error)
        finally:
            processes.end()
        raise


def ranked_driver(size: int, fault: str = "") -> EngineDriver:
    """An engine of `size` ranks as a host has one; token ids in and out."""
    engine = ranked_engine(size, EngineConfig(block_size=8, kv_cache_memory=2**20 // size), fault=fault)
    model: Any = LoadedModel("ranked", Path(), RankedModel(), "a model of a test", None, frozenset())
    return EngineDriver(Assembly(registry(), torch.device("cpu"), 1, model, engine, None, PartClock()))


def pids_of(engine: EngineLoop) -> list[int]:
    """Process ids of ranks 1 and above."""
    assert isinstance(engine.executor, RankedExecutor)
    return engine.executor.pids


def assert_ended(pids: Sequence[int]) -> None:
    """Wait for processes to end, which takes moments."""
    until = time.monotonic() + 5
    while any(map(is_alive, pids)):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; False for one that ended and has not been waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
