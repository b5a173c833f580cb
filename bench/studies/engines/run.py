"""One other engine on random workloads, in a child process; its figures as a file of peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from headway.bench.crossover.worker_protocol import events
from headway.bench.generate.results import PeerEngine, PeersFile
from headway.bench.generate.workloads import RequestSet
from headway.bench.studies.engines.child import ENGINES
from headway.core.contract.errors import ConfigError, HeadwayError, UnsupportedError
from headway.core.contract.support import Reason
from headway.core.system.child import Child, python_command
from headway.core.system.provenance import Origin
from headway.models.checkpoints.locate import locate
from headway.models.loader import read_config
from headway.tuning.measure.device import identify_device

_LIMIT = 600.0
"""Seconds for one generation."""


@dataclass(frozen=True)
class PeerOptions:
    """What a peer is asked for."""

    engine: str
    model: str = "qwen3-0.6b"
    load_format: str = "dummy"
    dtype: str = "bfloat16"
    repeat: int = 3
    """Timed passes of each workload; the one of the median rate counts."""
    warmup: int = 1
    command: str = ""
    tensor_parallel_size: int = 1
    """GPUs, of vLLM alone."""
    quantization: str | None = None
    """What plain weights are rounded to on loading, of vLLM alone."""


def run_peer(
    options: PeerOptions, workloads: Sequence[RequestSet], device: torch.device, advance: Callable[[str], None] = lambda _: None
) -> PeersFile:
    """Run the workloads through another engine.

    advance: told before each pass which workload it is of.

    :raises ConfigError: an unknown engine.
    :raises UnsupportedError: the engine is not installed.
    :raises HeadwayError: it failed; the message is its own.
    """
    if options.engine not in ENGINES:
        raise ConfigError("engine", " or ".join(ENGINES), repr(options.engine))
    if options.engine != "vllm" and (options.tensor_parallel_size > 1 or options.quantization is not None):
        raise ConfigError("--tensor-parallel-size and --quantization", "vllm", options.engine)
    module = ENGINES[options.engine][0]
    if find_spec(module) is None:
        reason = Reason(options.engine, f"the module {module}", "none installed here", f"pip install {options.engine}")
        raise UnsupportedError(f"measuring {options.engine}", [reason])
    folder = locate(options.model, weights=options.load_format != "dummy")
    vocab_size = int(read_config(folder).vocab_size)
    passes: dict[str, list[float]] = {}
    found: dict[str, Any] = {}
    label = ""
    request = _request(options, workloads, device, str(folder), vocab_size)
    with Child(python_command("headway.bench.studies.engines.child")) as child:
        for event in events(child, request, _LIMIT):
            kind = event["event"]
            if kind == "ready":
                found = event
            elif kind == "begin":
                label = event["label"]
            elif kind == "pass":
                advance(label)
            elif kind == "done":
                wanted = sum(next(each for each in workloads if each.label == label).requests(vocab_size).output_lens)
                passes[label] = [wanted / seconds for seconds in event["seconds"]]
            elif kind == "fatal":
                raise HeadwayError(f"{options.engine}: {event['reason']}")
            elif kind == "late":
                raise HeadwayError(f"{options.engine}: {label} took longer than {_LIMIT:.0f} s")
            elif len(passes) < len(workloads):
                raise HeadwayError(f"{options.engine}: {event['reason']}")
    rates = {name: median(each) for name, each in passes.items()}
    peer = PeerEngine(
        name=options.engine, version=found["version"], settings=found["settings"], tokens_per_second=rates, passes=passes
    )
    return PeersFile(
        device=identify_device(device).name,
        model=", ".join([options.model, f"{options.load_format} weights", options.dtype, *_more(options)]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=options.command,
        origin=Origin.here(),
        peers=[peer],
    )


def _more(options: PeerOptions) -> list[str]:
    """What is not usual of an engine, in words."""
    size, quantization = options.tensor_parallel_size, options.quantization
    return [*([quantization] if quantization else []), *([f"tensor-parallel size {size}"] if size > 1 else [])]


def _request(
    options: PeerOptions, workloads: Sequence[RequestSet], device: torch.device, folder: str, vocab_size: int
) -> dict[str, Any]:
    works = []
    for workload in workloads:
        drawn = workload.requests(vocab_size)
        lens = {"prompts": drawn.prompts, "output_lens": drawn.output_lens}
        works.append({"label": workload.label, "temperature": workload.temperature, **lens})
    return {
        "engine": options.engine,
        "folder": folder,
        "load_format": options.load_format,
        "dtype": options.dtype,
        "device": str(device),
        "tensor_parallel_size": options.tensor_parallel_size,
        "quantization": options.quantization,
        "max_model_len": max(workload.max_len for workload in workloads),
        "max_num_seqs": max(256, *(workload.batch_size for workload in workloads)),
        "repeat": options.repeat,
        "warmup": options.warmup,
        "workloads": works,
    }
