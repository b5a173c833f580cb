"""One decode step of a model with random weights in a CUDA graph: microseconds, fraction of the memory roofline, and the time
that attention adds per layer.

python -m headway.bench.studies.decode_step --model qwen3-0.6b --batch-size 1,16,64 --context 512
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

from headway.bench.generate.roofline import Roofline
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import Attention, AttentionFunctions
from headway.core.engine.data import pool
from headway.core.engine.execution.attention import PagedAttention
from headway.core.select.request import BackendRequest, LayerSpecs
from headway.core.select.selector import Selector
from headway.core.system.terminal import Terminal
from headway.models.checkpoints.locate import locate, shape_names
from headway.models.checkpoints.weights import DummyWeights
from headway.models.config import DecoderConfig
from headway.models.families.families import read_decoder_config
from headway.models.layers.decoder import Decoder
from headway.models.loader import read_config
from headway.tuning.isolated.trial import create_registry
from headway.tuning.measure.device import identify_device, resolve_device
from headway.tuning.measure.timing import Timer


def shapes(model: str) -> DecoderConfig:
    """Return the configuration of a model whose shape ships with Headway."""
    return read_decoder_config(read_config(locate(model, weights=False)))


class CapturedDecode:
    """CUDA graph of one greedy decode step, including the next tokens."""

    def __init__(self, model: Decoder, batch_size: int, attention: Attention, context: int) -> None:
        self._model = model
        self._attention = attention
        self._ids = torch.randint(0, model.vocab_size, (batch_size,), device="cuda", dtype=torch.int32)
        self._positions = torch.full_like(self._ids, context)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile kernels and initialize libraries
                self._step()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.tokens = self._step()

    def _step(self) -> Tensor:
        return self._model.compute_logits(self._model(self._ids, self._positions, self._attention)).argmax(dim=-1)

    def __call__(self) -> None:
        """Replay the graph."""
        self._graph.replay()


def paged_attention(model: Decoder, backend: str, batch_size: int, context: int, block_size: int = 256) -> PagedAttention:
    """Return attention over a random cache, ready for one decode step of sequences with `context` cached tokens."""
    registry, specs = create_registry(), model.attention_specs
    selector = Selector(registry, LayerSpecs(specs), BackendRequest.parse(backend), kv_layout="nhd", block_size=block_size)
    blocks = -(-(context + 1) // block_size)
    caches = pool.allocate_layers(specs, [registry.layout("nhd").layout] * len(specs), batch_size * blocks, block_size)
    for layer in caches:
        layer.key.normal_()
        layer.value.normal_()
    attention = PagedAttention(LayerSpecs(specs), caches, registry.layout("nhd").load_writer(specs[0].device))
    tables = torch.randperm(batch_size * blocks).view(batch_size, blocks).tolist()
    metadata = AttentionMetadata.build([1] * batch_size, [context] * batch_size, tables, block_size, specs[0].device)
    attention.begin(metadata, selector.backends_for(Phase.PREFILL), selector.backends_for(Phase.DECODE))
    return attention


def step_bytes(model: Decoder, batch_size: int, context: int) -> int:
    """Return the bytes that a step must read: every weight once (without an untied embedding table), K and V once.

    Experts count as if chosen uniformly.
    """
    roofline = Roofline(model.config, model.attention_specs)
    weights = roofline.weight_bytes + roofline.expert_bytes(batch_size)
    return int(weights) + batch_size * (context + 1) * roofline.kv_bytes


def main(
    model: Annotated[str, typer.Option(help=f"Shape: {', '.join(shape_names())}.")] = "qwen3-0.6b",
    batch_size: Annotated[str, typer.Option(help="Number of sequences: N, or a list such as 1,16,64.")] = "1,16,64",
    context: Annotated[int, typer.Option(min=1, help="Number of cached tokens per sequence.")] = 512,
    attn_backend: Annotated[
        str, typer.Option(help="Attention backend: auto, NAME, or none for a step without attention and cache.")
    ] = "auto",
    block_size: Annotated[int, typer.Option(min=16, help="Number of tokens per KV cache block.")] = 256,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Use deterministic mode.")] = False,
    read_gbps: Annotated[float, typer.Option(help="Memory read rate in GB/s.")] = 4192.0,
) -> None:
    """Print a table of decode step times."""
    if model not in shape_names():
        raise typer.BadParameter(f"--model: needs {' or '.join(shape_names())}, got {model!r}")
    sizes = batch_size.split(",")
    if not all(size.isdigit() and int(size) for size in sizes):
        raise typer.BadParameter(f"--batch-size: needs positive numbers with commas, got {batch_size!r}")
    device = resolve_device(None)
    if device.type != "cuda":
        raise typer.BadParameter("needs a CUDA GPU, got none")
    with torch.inference_mode():
        decoder = Decoder(shapes(model), DummyWeights(torch.bfloat16, device), deterministic)
        rows = [_measure(decoder, attn_backend, int(size), context, block_size, read_gbps) for size in sizes]
    who = identify_device(device)
    mode = ", deterministic" if deterministic else ""
    title = f"{model}, bfloat16, context {context}, attention {attn_backend}{mode}; {who.name}, torch {who.torch}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("batch", "us per step", "floor us", "share", "tokens/s", "attention, us per layer"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Terminal(width=110).print(table)


def _measure(decoder: Decoder, backend: str, batch_size: int, context: int, block_size: int, read_gbps: float) -> Sequence[str]:
    spec = decoder.attention_specs[0]
    out = torch.randn(batch_size, spec.num_heads, spec.head_dim, dtype=spec.dtype, device=spec.device)
    bare = _median_us(CapturedDecode(decoder, batch_size, AttentionFunctions(lambda *_: out), context))
    median, added, num_bytes = bare, "", step_bytes(decoder, batch_size, -1)
    if backend != "none":
        attention = paged_attention(decoder, backend, batch_size, context, block_size)
        median = _median_us(CapturedDecode(decoder, batch_size, attention, context))
        num_bytes = step_bytes(decoder, batch_size, context)
        added = f"{(median - bare) / len(decoder.attention_specs):.1f}"
    floor = num_bytes / read_gbps / 1e3
    return str(batch_size), f"{median:.0f}", f"{floor:.0f}", f"{floor / median:.0%}", f"{1e6 * batch_size / median:.0f}", added


def _median_us(step: CapturedDecode) -> float:
    return Timer().time(step, torch.device("cuda")).median_us


if __name__ == "__main__":
    typer.run(main)
