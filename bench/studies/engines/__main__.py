"""Other engines on the workloads of `headway bench throughput`: `python -m headway.bench.studies.engines ENGINE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.bench.generate.workloads import Nano, random_workloads
from headway.bench.studies.command import run_study
from headway.bench.studies.engines.run import PeerOptions, run_peer
from headway.core.system.json_files import write_json
from headway.core.system.provenance import command_line
from headway.core.system.terminal import Terminal
from headway.tuning.measure.device import resolve_device


def measure(
    engine: Annotated[str, typer.Argument(help="vllm, nano-vllm or transformers.")],
    workload: Annotated[str | None, typer.Option(help="nano: 256 random prompts as in nano-vllm's bench.")] = None,
    batch_size: Annotated[str, typer.Option(help="Random prompts sent at once: N, or a list 1,16,64.")] = "1,16,64",
    input_len: Annotated[str, typer.Option(help="Their tokens: N, or a list.")] = "512",
    output_len: Annotated[str | None, typer.Option(help="Tokens written for each. [as the input]")] = None,
    model: Annotated[str, typer.Option(help="A folder, or as dummy qwen3-0.6b, qwen3-30b-a3b or llama-3-8b.")] = "qwen3-0.6b",
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights in the model's shapes.")] = "dummy",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs; of vLLM alone.")] = 1,
    quantization: Annotated[str | None, typer.Option(help="What plain weights are rounded to: fp8; of vLLM alone.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed passes; the median counts.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Passes before them.")] = 1,
    output: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Measure another engine on the requests that Headway's own benchmark sends."""
    err = Terminal(stderr=True)
    works = [Nano()] if workload == "nano" else random_workloads(batch_size, input_len, output_len, 0.0)
    command = command_line("python", "-m", "headway.bench.studies.engines")
    options = PeerOptions(engine, model, load_format, dtype, repeat, warmup, command, tensor_parallel_size, quantization)
    with err.status(f"starting {engine}") as status:
        found = run_peer(options, works, resolve_device(device), lambda label: status.update(f"{engine}: {label}"))
    if output is not None:
        write_json(found, output)
    (peer,) = found.peers
    print(f"{peer.name} {peer.version} on {found.device}: {peer.settings}")
    for label, rate in peer.tokens_per_second.items():
        print(f"{label:<20} {rate:>12,.1f} tokens/s")


if __name__ == "__main__":
    run_study(measure)
