"""Tokens from logits, as an engine's runner takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.engine.data.step import StartedRow
from headway.core.engine.execution.host_rows import HostRows
from headway.core.engine.execution.token_sampler import Chosen, TokenSampler
from headway.core.sampling.filtering import torch_filter
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps, draw, greedy


def choose(*arguments: Any, **options: Any) -> Chosen:
    """One row a sequence; see `chooser`."""
    return chooser(*arguments, **options)[0]


def chooser(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    tokens: Sequence[Sequence[int]] | None = None,
    num_prompt_tokens: int = 0,
    stops: Sequence[int] = (),
    ops: SamplingOps = TORCH_SAMPLING,
    hosts: HostRows | None = None,
    ranks: Ranks = ONE_RANK,
) -> tuple[Chosen, TokenSampler]:
    """Return the sampled tokens, one row per sequence, and the sampler.

    tokens: earlier tokens, of which the first are the prompt. ranks: each gets its shard of the logits.
    """
    sampler = TokenSampler(ops, len(params), logits.shape[1], logits.device, hosts, ranks)
    before = tokens or [()] * len(params)
    sampler.update(
        [
            StartedRow(row, each, seeds[row], tuple(before[row]), num_prompt_tokens, tuple(stops))
            for row, each in enumerate(params)
        ]
    )
    rows = numpy.arange(len(params), dtype=numpy.int32)
    own = part_of(logits, ranks)
    return sampler.sample(own, rows, numpy.array(positions, dtype=numpy.int32)), sampler


def part_of(logits: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The logits that a rank's part of a model computes."""
    width = -(-logits.shape[1] // ranks.size)
    padded = torch.nn.functional.pad(logits, (0, width * ranks.size - logits.shape[1]), value=-torch.inf)
    return padded[:, ranks.rank * width :][:, :width]


def take(logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    return choose(logits, params, seeds, positions).tokens


def choose_each(logits: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`SamplingOps.choose` by torch's operations."""
    return torch.where(scales == 0, greedy(logits), draw(logits, scales, keys))


DRAWS_INSIDE = SamplingOps(choose=choose_each)
"""Sampling in graphs, as on a GPU without filter kernels."""
FILTERS_INSIDE = SamplingOps(choose=choose_each, filter=torch_filter)
