"""The device that a user names, and what is fastest on it."""

from __future__ import annotations

import logging

import torch

from headway.core.errors import ConfigError
from headway.core.sampler import TORCH_SAMPLING, SamplingOps

log = logging.getLogger("headway")


def fastest_sampling(device: torch.device) -> SamplingOps:
    """What chooses tokens fastest."""
    if device.type == "cuda":
        try:
            from headway.models.fused.draw import FusedSampling
        except ImportError as error:
            log.warning("tokens are chosen by torch's operations: %s (pip install 'headway[triton]')", error)
        else:
            fused = FusedSampling(device)
            return SamplingOps(fused.greedy, fused.draw)
    return TORCH_SAMPLING


def resolve_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N; auto is the GPU if there is one.

    :raises ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("device", "auto, cpu, cuda or cuda:N", repr(name)) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", "auto, cpu, cuda or cuda:N", repr(name))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError("device", "a CUDA device that torch sees", f"{name}, and torch sees {torch.cuda.device_count()}")
    return device
