"""torch.compile for the layers of an adapted model, so that what lies between two products is one kernel instead of ten."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.compiled import announce_compilation
from headway.core.contract.errors import ModelError
from headway.core.contract.model import AttentionFunctions
from headway.core.system.files import cache_folder, kernel_folders, obstacle
from headway.models.transformers_adapter.model import TransformersModel

log = logging.getLogger("headway")


_NUM_TOKENS = 61
"""Tokens of the trial: a prime, which is no other size of a model. torch.compile takes equal sizes for one and the same."""
_RECOMPILE_LIMIT = 64
"""Kinds of layers, twice each; and transformers runs the layers of all models of a process through one function."""

Compiler = Callable[[torch.fx.GraphModule, list[Tensor]], Any]


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """torch's own compiler; each graph is announced, for one that a request waits for must be seen."""
    announce_compilation("layers of the model (torch.compile)")
    # By this process: another would keep its kernels in Triton's own form, which `KernelCache` takes for damaged.
    compiler: Any = torch._dynamo.lookup_backend("inductor")
    return compiler(graph, inputs, config_patches={"compile_threads": 1})


def _keep_compilations() -> None:
    """Have torch keep what it compiles in Headway's cache folder, unless the user has named others.

    It would otherwise set TRITON_CACHE_DIR itself, and so move all other kernels of this process.
    """
    if not obstacle(cache_folder()):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(kernel_folders()[1]))


def compile_layers(model: TransformersModel, backend: Compiler = inductor) -> None:
    """Compile each layer's `forward` for any number of tokens, and show on a few tokens that the result works.

    Layers of one kind share what is compiled: attention is an op whose layer is a tensor (`interface.AttentionSite.place`), and
    nothing else tells them apart. No part may fall back to Python, so the pieces of a graph are the same as without.

    backend: of torch.compile; tests take one that needs no compiler.

    :raises ModelError: the model's code cannot be compiled; the message names the option that does without.
    """
    began = time.perf_counter()
    device = model.device
    if device.type == "cuda":
        _keep_compilations()
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=backend)
    ids = torch.zeros(_NUM_TOKENS, dtype=torch.int64, device=device)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.new_zeros((*q.shape[:2], model.attention_specs[layer].v_head_dim))

    try:
        with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            for count in (len(ids), 1):
                model(ids[:count], ids[:count], AttentionFunctions(attention))
    except Exception as error:
        for layer in model.layers:
            del layer.forward  # which uncovers the class's own
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"torch_compile: the layers of {model.name} cannot be compiled ({reason}); torch_compile=False does without"
        ) from error
    model.implementation += ", layers compiled by torch.compile"
    log.info("model: %d layers compiled by torch.compile in %.1f s", len(model.layers), time.perf_counter() - began)
