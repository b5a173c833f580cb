"""The device memory that the cache may take: what a trial run of the model leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy
import torch
from torch import Tensor

from headway.core.contract.adapters import adapters_of, rows_with
from headway.core.contract.backend import Backends
from headway.core.contract.errors import ConfigError
from headway.core.contract.model import AttentionFunctions, Model, latent_layers, state_layers
from headway.core.contract.state_backend import StateBackends
from headway.core.sampling.filtering import keep_top
from headway.core.sampling.sampler import Draws, sample
from headway.core.select.layer_specs import LayerSpecs

_SPARE = 256 * 2**20
"""Bytes left for what no trial shows: libraries' own workspaces, and graphs beside their activations."""


def cache_memory(
    model: Model,
    layers: LayerSpecs,
    backends: Iterable[Backends | StateBackends],
    *,
    max_num_tokens: int,
    max_num_seqs: int,
    utilization: float,
) -> int:
    """Bytes of a CUDA device that the cache may take, so that all of the process stays below `utilization` of its memory.

    The largest step is run once, with attention left out, and the most it held is set aside; so are the
    backends' workspaces.

    :raises ConfigError: the model alone takes more than the share.
    """
    held = _most_held(model, layers, max_num_tokens, max_num_seqs)
    workspace = sum(backend.workspace_bytes(max_num_tokens, max_num_seqs) for by_spec in backends for backend in by_spec.values())
    free, total = torch.cuda.mem_get_info(layers.device)
    left = int(total * utilization) - (total - free) - held - workspace - _SPARE
    if left <= 0:
        gib = 2**30
        raise ConfigError(
            "gpu_memory_utilization",
            f"more than {(total * utilization - left) / total:.2f} for the model, its activations and what else runs on the GPU",
            f"{utilization} of {total / gib:.1f} GiB, of which {(total - free) / gib:.1f} GiB are taken before the cache",
            "raise it, lower max_num_batched_tokens, or free the GPU",
        )
    return left


def _most_held(model: Model, layers: LayerSpecs, max_num_tokens: int, max_num_seqs: int) -> int:
    """Most bytes that a step needs beside weights and cache."""
    device = layers.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    run_trial(model, layers, max_num_tokens, max_num_seqs)
    torch.cuda.synchronize(device)
    held = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return held


@torch.inference_mode()
def run_trial(model: Model, layers: LayerSpecs, num_tokens: int, num_seqs: int) -> None:
    """Run a step of num_tokens tokens, num_seqs of which are sampled, without attention but with the products of latent layers
    around it.

    Sampling sorts, also where kernels filter without: its 42 bytes for each logit cover penalties, masks and
    log-probabilities as well, which no trial shows.
    """
    latents, states, device = latent_layers(model), state_layers(model), layers.device

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_zeros((*q.shape[:2], layers.value_head_dims[layer]))
        if layer in latents:
            latents[layer].expand(k)
            attended = latents[layer].absorb(q)[..., : v.shape[-1]]
            latents[layer].project(attended.clone(memory_format=torch.contiguous_format), out)
        return out

    def state(layer: int, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        return x.new_zeros(x.shape[0], states[layer].spec.out_channels)

    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device) % model.max_position_embeddings
    count = min(num_seqs, num_tokens)
    slots = torch.zeros(num_tokens, dtype=torch.int32, device=device)  # where there are any, rows with adapters take the most
    with rows_with(adapters_of(model), slots):
        hidden = model(ids, positions, AttentionFunctions(attention, state))
    logits = model.compute_logits(hidden[:count])
    if logits.shape[1] < model.vocab_size:  # those of one rank, which may have to gather all
        logits = logits.new_zeros(count, model.vocab_size)
    likely = keep_top(logits.float(), torch.zeros(count, device=device), torch.full((count,), 0.9, device=device))
    sample(likely, Draws(numpy.ones(count, dtype=numpy.float32), numpy.zeros(count, dtype=numpy.int64)))
