"""Engines of several ranks over a checkpoint: a process for each, whatever the machine's number of cores."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.local_executor import DeviceParts, LocalExecutor
from headway.core.engine.loop import EngineLoop, EngineParts, make_engine
from headway.core.engine.ranks.rank_messages import RankStart
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.select.request import LayerSpecs
from headway.models.loader import load_model
from headway.registry import create_registry
from ranked_model import MODULE, joined_engine

CONFIG = EngineConfig(block_size=8, kv_cache_memory=2**21, max_model_len=64, max_num_batched_tokens=48, max_num_seqs=8)


def decoder_engine(folder: Path, size: int) -> EngineLoop:
    """Return an engine with `size` ranks over gloo, in float32; 1 means only this process."""
    options: Any = {"source": create_registry(policy="none"), "config": CONFIG, "measured": False}
    if size == 1:
        return make_engine(EngineParts(model=_decoder(folder, ONE_RANK), **options))
    processes = RankProcesses(size, MODULE, ["cpu"] * size, num_threads=1)
    return joined_engine(processes, partial(make_rank, folder=folder), partial(_decoder, folder), **options)


def make_rank(start: RankStart, folder: Path) -> LocalExecutor:
    """The executor of a rank that follows."""
    model = _decoder(folder, start.ranks)
    layers = LayerSpecs.of(model)
    config = CONFIG.for_device(layers.device)
    return LocalExecutor(
        DeviceParts(model=model, layers=layers, source=create_registry(policy="none"), config=config, ranks=start.ranks)
    )


def _decoder(folder: Path, ranks: Ranks) -> Any:
    return load_model(str(folder), "float32", device="cpu", skip_tokenizer_init=True, ranks=ranks).decoder
