"""Small functions that vLLM's programs import beside its classes."""

from __future__ import annotations

import gc
import logging
import random
import socket
import uuid
from pathlib import Path
from typing import Any

import numpy
import torch


def random_uuid() -> str:
    """A fresh name for a request."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def set_random_seed(seed: int | None) -> None:
    """Seed Python, numpy and torch; None: leave them. The option `seed` is what an engine's tokens depend on."""
    if seed is not None:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)


class Platform:
    """The devices that torch sees here."""

    @property
    def device_type(self) -> str:
        """cuda or cpu."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def is_cuda(self) -> bool:
        """Whether there is a GPU of NVIDIA's."""
        return self.device_type == "cuda" and torch.version.hip is None

    def is_cuda_alike(self) -> bool:
        """Whether there is a GPU."""
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        """Whether there is a GPU of AMD's."""
        return self.device_type == "cuda" and torch.version.hip is not None

    def is_tpu(self) -> bool:
        """No."""
        return False

    def is_xpu(self) -> bool:
        """No."""
        return False

    def seed_everything(self, seed: int | None = None) -> None:
        """See `set_random_seed`."""
        set_random_seed(seed)


current_platform = Platform()
"""The one that vLLM's programs ask."""


def init_logger(name: str) -> logging.Logger:
    """Python's logger of this name."""
    return logging.getLogger(name)


def get_tokenizer(tokenizer_name: str, *_: object, **__: object) -> Any:
    """transformers' tokenizer of a model. Arguments beside its name, such as trust_remote_code, are not read.

    :raises ModelError: there is none, or it cannot be read.
    """
    from headway.models.checkpoints.locate import locate
    from headway.models.loader import read_tokenizer

    return read_tokenizer(locate(tokenizer_name, weights=False))


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """A chat template out of a file, or the text itself where no file has its name."""
    if chat_template is None:
        return None
    path = Path(chat_template)
    return path.read_text() if len(str(path)) < 256 and path.is_file() else str(chat_template)


def destroy_model_parallel() -> None:
    """Nothing: the ranks of an LLM end with it."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, and hand the device's unused memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
