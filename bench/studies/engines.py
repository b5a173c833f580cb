"""Engines on the workloads of `headway bench throughput`: `python -m headway.bench.studies.engines ENGINES`.

Each engine runs in its own process: engine_child.py with this Python, or llama_child.py with a Python that has llama-cpp-python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from headway.bench.crossover.worker_protocol import events
from headway.bench.generate.results import PeerEngine, PeersFile
from headway.bench.generate.workloads import Nano, RequestSet, random_workloads
from headway.bench.studies.command import run_study
from headway.bench.studies.engine_child import ENGINES
from headway.core.contract.errors import ConfigError, HeadwayError, UnsupportedError
from headway.core.contract.support import Reason
from headway.core.system.child import Child, python_command
from headway.core.system.json_files import write_json
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import Terminal
from headway.models.checkpoints.locate import locate
from headway.models.loader import read_config
from headway.tuning.measure.device import identify_device, resolve_device

LLAMA = "llama.cpp"
_LIMIT = 600.0
"""Maximum seconds per generation."""


@dataclass(frozen=True)
class PeerOptions:
    """Options of a run with a peer engine."""

    engine: str
    model: str = "qwen3-0.6b"
    load_format: str = "dummy"
    dtype: str = "bfloat16"
    repeat: int = 3
    """Number of timed passes per workload; the pass with the median rate counts."""
    warmup: int = 1
    command: str = ""
    tensor_parallel_size: int = 1
    """Number of GPUs (vLLM only)."""
    quantization: str | None = None
    """Format to which plain weights are quantized while loading; only for vLLM."""
    python: str = "python3"
    """Python interpreter that has llama-cpp-python."""
    threads: int = 2
    """Number of CPU threads for Headway and llama.cpp."""

    def __post_init__(self) -> None:
        if self.engine not in (*ENGINES, LLAMA):
            raise ConfigError("engine", " or ".join([*ENGINES, LLAMA]), repr(self.engine))
        if self.engine != "vllm" and (self.tensor_parallel_size > 1 or self.quantization is not None):
            raise ConfigError("--tensor-parallel-size and --quantization", "vllm", self.engine)
        if self.engine == LLAMA and not self.model.endswith(".gguf"):
            raise ConfigError("--model", "a .gguf file for llama.cpp", self.model)


def run_peer(
    options: PeerOptions, workloads: Sequence[RequestSet], device: torch.device, advance: Callable[[str], None] = lambda _: None
) -> PeersFile:
    """Run the workloads with another engine. advance: called before each pass with the workload's label.
    :raises UnsupportedError: if the engine is not installed. :raises HeadwayError: if the engine failed, with its message."""
    folder = locate(options.model, weights=options.load_format != "dummy")
    vocab_size = int(read_config(folder).vocab_size)
    passes: dict[str, list[float]] = {}
    found: dict[str, Any] = {}
    label = ""
    with _child(options) as child:
        for event in events(child, _request(options, workloads, device, str(folder), vocab_size), _LIMIT):
            kind = event["event"]
            if kind == "ready":
                found = event
            elif kind == "begin":
                label = event["label"]
            elif kind == "pass":
                advance(label)
            elif kind == "done":
                wanted = next(each for each in workloads if each.label == label).requests(vocab_size).num_output_tokens
                passes[label] = [wanted / seconds for seconds in event["seconds"]]
            elif kind == "fatal":
                raise HeadwayError(f"{options.engine}: {event['reason']}")
            elif kind == "late":
                raise HeadwayError(f"{options.engine}: {label} took longer than {_LIMIT:.0f} s")
            elif len(passes) < len(workloads):
                raise HeadwayError(f"{options.engine}: {event['reason']}")
    peer = PeerEngine(
        name=options.engine,
        version=found["version"],
        settings=found["settings"],
        tokens_per_second={name: median(each) for name, each in passes.items()},
        passes=passes,
    )
    size = options.tensor_parallel_size
    more = [*([options.quantization] if options.quantization else []), *([f"tensor-parallel size {size}"] if size > 1 else [])]
    return PeersFile(
        device=identify_device(device).name,
        model=", ".join([options.model, f"{options.load_format} weights", options.dtype, *more]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=options.command,
        origin=Origin.here(),
        peers=[peer],
    )


def _child(options: PeerOptions) -> Child:
    """Return the process of the engine. :raises UnsupportedError: if the engine is not installed."""
    if options.engine == LLAMA:
        try:
            return Child([options.python, str(Path(__file__).with_name("llama_child.py"))], {"PYTHONPATH": ""})
        except OSError as error:
            reason = Reason("--python", "a Python that has llama-cpp-python", f"{options.python}: {error.strerror}")
            raise UnsupportedError(f"measuring {LLAMA}", [reason]) from None
    module = ENGINES[options.engine][0]
    if find_spec(module) is None:
        reason = Reason(options.engine, f"the module {module}", "none installed here", f"pip install {options.engine}")
        raise UnsupportedError(f"measuring {options.engine}", [reason])
    return Child(python_command("headway.bench.studies.engine_child"))


def _request(
    options: PeerOptions, workloads: Sequence[RequestSet], device: torch.device, folder: str, vocab_size: int
) -> dict[str, Any]:
    works = [{"label": each.label, "temperature": each.temperature, **asdict(each.requests(vocab_size))} for each in workloads]
    return asdict(options) | {
        "folder": folder,
        "device": str(device),
        "max_model_len": max(workload.max_len for workload in workloads),
        "max_num_seqs": max(256, *(workload.batch_size for workload in workloads)),
        "workloads": works,
    }


def engines(
    engines: Annotated[str, typer.Argument(help="headway, vllm, nano-vllm, transformers, llama.cpp, or a list: headway,vllm.")],
    workload: Annotated[
        str | None, typer.Option(help="Named workload: nano (256 random prompts, as in nano-vllm's benchmark).")
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Number of random prompts sent at once: N, or a list such as 1,16,64.")
    ] = "1,16,64",
    input_len: Annotated[str, typer.Option(help="Number of tokens per prompt: N, or a list.")] = "512",
    output_len: Annotated[str | None, typer.Option(help="Number of tokens to generate per prompt. Default: --input-len.")] = None,
    model: Annotated[
        str, typer.Option(help="Model: a folder, a built-in shape (dummy), or a .gguf file (llama.cpp).")
    ] = "qwen3-0.6b",
    load_format: Annotated[str, typer.Option(help="Weights: auto, or dummy (random weights in the model's shapes).")] = "dummy",
    dtype: Annotated[str, typer.Option(help="Element type: float32, bfloat16, float16 or auto (as in the file).")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Number of GPUs (vLLM only).")] = 1,
    quantization: Annotated[str | None, typer.Option(help="Format to quantize plain weights to: fp8 (vLLM only).")] = None,
    python: Annotated[str, typer.Option(help="Python interpreter with llama-cpp-python.")] = "python3",
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads (Headway and llama.cpp).")] = 2,
    repeat: Annotated[int, typer.Option(min=1, help="Number of timed passes; the median is reported.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Number of untimed warm-up passes.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Measure engines, one after the other, on the workloads of Headway's own benchmark."""
    err = Terminal(stderr=True)
    works = [Nano()] if workload == "nano" else random_workloads(batch_size, input_len, output_len, 0.0)
    command = command_line("python", "-m", "headway.bench.studies.engines")
    rest = tensor_parallel_size, quantization, python, threads
    every = [PeerOptions(name, model, load_format, dtype, repeat, warmup, command, *rest) for name in engines.split(",")]
    with err.status("starting") as status:
        files = [run_peer(each, works, resolve_device(device), lambda label: status.update(label)) for each in every]
    found = files[0].model_copy(update={"peers": [peer for file in files for peer in file.peers]})
    if output is not None:
        write_json(found, output)
    for peer in found.peers:
        print(f"{peer.name} {peer.version} on {found.device}: {peer.settings}")
    for label, ours in found.peers[0].tokens_per_second.items():
        print(f"{label:<20} {ours:>12,.2f} tokens/s", end="")
        theirs = [(peer.name, peer.tokens_per_second[label]) for peer in found.peers[1:]]
        print("".join(f", {name} {rate:,.2f} (ratio {ours / rate:.2f})" for name, rate in theirs))


if __name__ == "__main__":
    run_study(engines)
