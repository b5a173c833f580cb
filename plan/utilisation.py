"""What kernels reach of a GPU's data sheet, and what the host adds: numbers fitted to measurements of one H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Utilisation:
    """Shares of a GPU's rates and fixed times, chosen by `python -m headway.bench.studies.plan fit`.

    They were fitted on an H200 and are taken for other kinds as well: a share of another data sheet is a guess, and the report
    of a plan says so.
    """

    product_read: float = 0.84
    """Share of the read rate at which a product's weights are read."""
    product_matrix: float = 0.748
    """Share of the matrix rate of a product of many rows: 740 of 989 TFLOP/s, the median of `matrix_tflops` in the files of
    bench/results/h200."""
    product_depth: float = 220.0
    """Columns of the weights that a tile's first reads and its end cost as much time as: short sums reach less of the rate."""
    product_us: float = 1.07
    """Microseconds of a product beside that: its launch in a graph, its first and its last wave."""
    layer_us: float = 3.19
    """Microseconds of what else a layer does in a step of few tokens: norms, rotations, activations."""
    element_read: float = 0.445
    """Share of the read rate at which activations pass between products."""
    expert_us: float = 11.1
    """Microseconds of a layer of experts beside its weights: routing and sorting."""
    expert_matrix: float = 0.45
    """Share of the matrix rate of products of many pairs of tokens and experts."""
    alone_us: float = 3.66
    """Microseconds by which a table's time of a decode exceeds the same launch among others: a graph of it alone has to start."""
    decode_read: float = 0.86
    """Share of the read rate at which a decode reads keys and values, where no crossover table tells."""
    decode_us: float = 7.95
    """Microseconds of a layer's decode beside that."""
    narrow_us: float = 7.0
    """Microseconds of a decode over a cache of 8 bits beside that: what bench/results/h200/decode-fp8.json has over its bytes."""
    prefill_matrix: float = 0.629
    """Share of the matrix rate of the attention of prompts, where no crossover table tells."""
    prefill_us: float = 13.5
    """Microseconds of a layer's attention of prompts beside that."""
    state_read: float = 0.78
    """Share of the read rate at which a step reads and writes states."""
    state_us: float = 5.0
    """Microseconds of a layer with a state beside that."""
    scan_flops: float = 6e13
    """Operations a second of the scan of a prompt's states, at 6 for each element of a state and token, as a whole GPU does."""
    step_us: float = 22.0
    """Microseconds of a step beside its layers: embedding, sampling, copies."""
    host_us: float = 300.0
    """Microseconds of the host for a step, which overlap with the device's: this and the next are 0.84 ms at 256 sequences
    (bench/results/h200/host-256.json) and 0.38 ms at one (throughput-auto-512.json)."""
    host_sequence_us: float = 2.1
    """Microseconds of the host for each sequence of a step."""
    host_layer_us: float = 80.6
    """Microseconds of the host for each layer of prompts that are no graph."""
    host_mixed_us: float = 210.0
    """Microseconds of the host for each layer of a step in which some decode and others have prompts computed, which runs as
    graphs' pieces with two launches of attention between: with it the latencies of bench/results/h200/server.json come out."""
    request_us: float = 434.0
    """Microseconds from a request's arrival until the scheduler sees it."""


H200: Final = Utilisation()
"""Fitted to bench/results/h200; docs/plan.md says how well."""
