"""Loading of transformers' decoders from files or with random weights, compilation of their layers, and attention specs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from headway.core.contract.errors import HeadwayError, ModelError
from headway.core.contract.kernel import announce_compilation
from headway.core.contract.model import AttentionFunctions
from headway.core.contract.spec import AttentionSpec
from headway.core.system.files import cache_folder, kernel_folders, obstacle
from headway.models.checkpoints.tensor_files import plain_slices
from headway.models.checkpoints.weights import IGNORED
from headway.models.config import BeyondDecoderError
from headway.models.families.families import FAMILIES, read_decoder_config
from headway.models.transformers_adapter.interface import NAME, NUM_TOKENS, probing, run_probe
from headway.models.transformers_adapter.model import TransformersModel, spec_of

_NUM_TOKENS = 61
"""Number of tokens in the trial: a prime that equals no size of a model, because torch.compile unifies equal sizes."""
_RECOMPILE_LIMIT = 64
"""Maximum number of recompilations per process: enough for two for each kind of layer in all models of the process."""

Compiler = Callable[[torch.fx.GraphModule, list[Tensor]], Any]


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Compile with torch's own compiler. A log line first announces the compilation, because a request may wait for it."""
    announce_compilation("layers of the model (torch.compile)")
    # In this process: a compile worker would store kernels in Triton's own format, which `KernelCache` considers damaged.
    compiler: Any = torch._dynamo.lookup_backend("inductor")
    return compiler(graph, inputs, config_patches={"compile_threads": 1})


def _set_compile_cache() -> None:
    """Set torch's compilation cache to Headway's cache folder, unless the user has set a cache folder.

    torch would otherwise set TRITON_CACHE_DIR itself, which moves the cache of all other kernels in this process.
    """
    if not obstacle(cache_folder()):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(kernel_folders()[1]))


def compile_layers(model: TransformersModel, backend: Compiler = inductor) -> None:
    """Compile each layer's `forward` for any number of tokens, and check with a few tokens that the compiled code runs.

    Layers of one kind share the compiled code: the only difference between them is the layer index, which
    the attention op takes as a tensor (`interface.AttentionSite.place`). No part may fall back to Python, so the segments of a
    CUDA graph are the same as without compilation.

    backend: backend of torch.compile; tests use one that needs no compiler.

    :raises ModelError: if the model's code cannot be compiled; the message names the option that disables compilation.
    """
    began = time.perf_counter()
    device = model.device
    if device.type == "cuda":
        _set_compile_cache()
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
            del layer.forward  # the class's method is used again
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"torch_compile: the layers of {model.name} cannot be compiled ({reason}); torch_compile=False does without"
        ) from error
    model.implementation += ", layers compiled by torch.compile"
    log.info("model: %d layers compiled by torch.compile in %.1f s", len(model.layers), time.perf_counter() - began)


def causal_lm_class(config: Any) -> Any:
    """Return transformers' causal language model class for a configuration (PreTrainedConfig).

    :raises ModelError: if no such class exists, or it cannot run on Headway's attention; the message states the reason.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    named = ", ".join(config.architectures or [config.model_type])
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise ModelError(f"model architecture: {named} generates no text in transformers: it has no causal language model of it")
    reason = refusal(found, config)
    if reason:
        raise ModelError(f"model architecture: {found.__name__} {reason}{_state_hint(config)}")
    if config.architectures and found.__name__ not in config.architectures:
        raise ModelError(f"model architecture: needs {found.__name__} for model_type={config.model_type}, got {named}")
    return found


def _state_hint(config: Any) -> str:
    """Return a hint that names the first recurrent layer, if config.json shows it, and an implementation for it."""
    kinds = getattr(config, "layer_types", None) or []
    found = next(((index, kind) for index, kind in enumerate(kinds) if kind in _STATE_KINDS), None)
    if found is None:
        return ""
    hint = "Headway's own decoder computes models of this kind that docs/models.md lists"
    if config.model_type in FAMILIES:
        hint = "" if _lacking(config) else "Headway's own decoder computes it: model_impl='headway'"
    return f" (layer {found[0]} is {found[1]}){hint and '; '}{hint}"


_STATE_KINDS = ("linear_attention", "conv", "mamba", "hybrid", "recurrent")
"""Values of layer_types that denote recurrent layers."""


def refusal(model_class: Any, config: Any) -> str:
    """Return the reason why a transformers class cannot run through the adapter, worded to follow the class name; empty if the
    class can run."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder with a decoder; Headway runs only decoders"
    if config.get_text_config() is not config:
        return "reads more than text (its config.json has a text_config and others); Headway runs only text models"
    if getattr(model_class, "_is_stateful", False):
        return (
            "keeps a state of each sequence besides keys and values (_is_stateful in transformers), which the adapter does "
            "not carry"
        )
    if not model_class._supports_attention_backend:
        return (
            "computes its attention by itself: it ignores transformers' attention interface (_supports_attention_backend is "
            "False), through which Headway's attention and cache would serve it"
        )
    return ""


log = logging.getLogger("headway")

EXPERTS = "grouped_mm"
"""transformers' experts implementation: a grouped GEMM that is routed on the device, without host synchronization."""


def load_adapted(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    dummy: bool,
    torch_compile: bool | None,
    longest: int | None = None,
) -> TransformersModel:
    """Load a model with transformers' code, without running the model's own code.

    config: from transformers.
    dummy: True for random weights, which are the same on every start with one kind of device.
    torch_compile: True calls `compile_layers`. None also calls it, but ignores a failure and logs the reason.
    longest: see `rope.read_rope`.

    :raises ModelError: if the adapter does not support the model, or weights do not fit its configuration. If Headway's decoder
    supports the family, the message first names the unsupported feature of this model.
    """
    with _lacking_first(config):
        adapted = _of_files(folder, config, dtype, device, dummy, longest)
        if torch_compile is not False:
            try:
                compile_layers(adapted)
            except ModelError as error:
                if torch_compile:
                    raise
                log.warning("model: running the layers without compilation, several times slower: %s", error)
        return adapted


@contextmanager
def _lacking_first(config: Any) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        lacking = _lacking(config)
        if not lacking:
            raise
        raise ModelError(f"model: {lacking}; and {str(error).removeprefix('model architecture: ')}") from error


def _lacking(config: Any) -> str:
    """Return a description of the model's first feature that Headway's decoder lacks; empty if the decoder lacks no feature, or
    does not support the family."""
    try:
        if config.model_type in FAMILIES:
            read_decoder_config(config)
    except BeyondDecoderError as error:
        return str(error)
    return ""


def _of_files(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, dummy: bool, longest: int | None
) -> TransformersModel:
    model_class = causal_lm_class(config)
    options = {"dtype": dtype, "attn_implementation": NAME}
    if model_class._can_set_experts_implementation():
        options["experts_implementation"] = EXPERTS
    with quiet(), torch.inference_mode():
        try:
            model = _dummy(config, device, options) if dummy else _from_files(folder, model_class, config, device, options)
            return TransformersModel(model, dtype, device, longest)
        except (HeadwayError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelError(f"model {folder}: transformers cannot make it of its files ({_one_line(error)})") from error


def _dummy(config: Any, device: torch.device, options: dict[str, Any]) -> Any:
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)  # type: ignore[no-untyped-call]


def _from_files(folder: Path, model_class: Any, config: Any, device: torch.device, options: dict[str, Any]) -> Any:
    slices = plain_slices(folder)  # Headway reads the index: transformers would use the last file with a tensor
    if config.model_type in FAMILIES:  # it may be the text model of a multimodal checkpoint
        names = FAMILIES[config.model_type].names
        for own, other in names.aliases:
            slices = {name.replace(other, own, 1): each for name, each in slices.items()}
        slices = {name: each for name, each in slices.items() if not name.startswith(names.ignored_modules)}
    if device.type != "cpu" and find_spec("accelerate") is not None:  # copy each tensor directly to the device
        options = {**options, "device_map": {"": device}}
    loaded: Any = model_class.from_pretrained(
        None,
        config=config,
        state_dict=slices,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported by name below
        **options,
    )
    model, found = loaded
    _check(folder, found)
    return model.to(device)


def _check(folder: Path, found: dict[str, Any]) -> None:
    """Check for tensors that transformers would replace with random values after only a warning.

    :raises ModelError: if a tensor is missing, unused, or has a shape other than the configuration's.
    """
    for each in sorted(found["mismatched_keys"]):
        name, stored, wanted = each
        raise ModelError(f"weights: {name} needs shape {list(wanted)} by config.json, got {list(stored)}")
    if found["missing_keys"]:
        raise ModelError(f"weights: {folder} has no tensor {_names(found['missing_keys'])}, which its config.json implies")
    left = [name for name in found["unexpected_keys"] if not name.endswith(IGNORED)]
    if left:
        raise ModelError(f"weights: {len(left)} tensors that this architecture does not use, first {_names(left)}")
    if found.get("error_msgs"):
        raise ModelError(f"weights: {folder} cannot be loaded by transformers ({found['error_msgs'][0]})")


def _names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)[:3])


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings; Headway raises errors for the important warnings."""
    theirs: Any = transformers_logging
    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


def adapted_specs(config: Any, dtype: torch.dtype, device: torch.device) -> Sequence[AttentionSpec]:
    """Return one spec per attention layer for `device`. config: from transformers. Sinks, which are weights, are 0.

    :raises ModelError: if the adapter does not support the model, or transformers cannot build it without its weights.
    """
    model_class = causal_lm_class(config)
    try:
        with quiet(), torch.inference_mode(), torch.device("meta"):
            options = {"dtype": dtype, "attn_implementation": NAME}
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)  # type: ignore[no-untyped-call]
            count = NUM_TOKENS
            ids, mask = torch.zeros(1, count, dtype=torch.int64), torch.ones(1, 1, count, count, dtype=torch.bool)

            def forward() -> Tensor:
                logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, return_dict=True).logits
                return logits

            with probing(model, NAME):
                _, calls = run_probe(model, forward)
        if not calls:
            raise ModelError(f"{model_class.__name__}: never calls its attention through transformers' attention interface")
        return [spec_of(call, dtype, device) for call in calls]
    except HeadwayError:
        raise
    except Exception as error:
        raise ModelError(f"model {model_class.__name__}: its layers show only with weights ({_one_line(error)})") from error
