"""Loading of models: decoder, tokenizer and end-of-text tokens; or only the layers' specs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headway.core.contract.adapters import AdapterSlots
from headway.core.contract.errors import ConfigError, HeadwayError, ModelError
from headway.core.contract.layer import Invariance
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import DTYPES
from headway.core.contract.weights import QuantizedWeight
from headway.core.select.request import LayerSpecs
from headway.kernels.experts.bound import AUTO, ExpertsOptions
from headway.kernels.experts.weights import reads_experts
from headway.kernels.linear.choice import LinearKernels, builtin_kernels
from headway.kernels.runtime.native.library import functions
from headway.models.checkpoints.checkpoint import check_folder, unknown
from headway.models.checkpoints.end_tokens import read_end_tokens
from headway.models.checkpoints.formats.config import METHODS, read_quantization
from headway.models.checkpoints.formats.rounding import ON_LOADING
from headway.models.checkpoints.formats.stored import Quantization
from headway.models.checkpoints.gguf.blocks import stored_blocks
from headway.models.checkpoints.live_weights import LiveWeights
from headway.models.checkpoints.locate import AS_IT_IS, ModelOrigin, locate
from headway.models.checkpoints.tokenizer import first_line, read_tokenizer
from headway.models.checkpoints.weights import DummyWeights, QuantizeOnLoading, Weights, WeightSource
from headway.models.config import BeyondDecoderError, DecoderConfig, cached_spec, expanded_spec, state_spec
from headway.models.families.families import TEXT_PARTS, read_decoder_config
from headway.models.families.plain_config import plain_config
from headway.models.families.rope import takes_long_factors
from headway.models.layers.decoder import Decoder

if TYPE_CHECKING:
    from headway.models.transformers_adapter.model import TransformersModel

LOAD_FORMATS = ("auto", "dummy")
"""Values of load_format: auto reads the folder's safetensors files; dummy draws random weights with the shapes of config.json."""
MODEL_IMPLS = ("auto", "headway", "transformers")
"""Values of model_impl. headway is Headway's own decoder; transformers is transformers' code with Headway's attention and KV
cache; auto prefers headway."""

log = logging.getLogger("headway")


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model: its decoder, tokenizer and end-of-text tokens."""

    name: str
    folder: Path
    decoder: Decoder | TransformersModel
    implementation: str
    """Name of the implementation, for messages: Headway's decoder or transformers' code."""
    tokenizer: Any
    """Result of `read_tokenizer`. None if the tokenizer is missing or skipped; inputs and outputs are then token ids."""
    eos_token_ids: frozenset[int]
    """Ids of the tokens that end a response unless ignore_eos is set; see `read_end_tokens`."""
    tokenizer_folder: Path | None = None
    """Folder of the tokenizer. None means no tokenizer."""
    live_weights: LiveWeights | None = None
    """Interface for replacing weights at run time. None for quantized weights, several ranks, or transformers' code."""
    attention_rules: Mapping[str, Any] = field(default_factory=dict)
    """Attention rules of config.json (`headway_attention_rules`): key of layers -> name of a plugin's rule, or a mapping."""
    long_factors: bool = False
    """True if RoPE of type `longrope` uses its long factors. Cached keys depend on this choice."""

    @property
    def rounding(self) -> str:
        """Description of how this CPU's kernels round activations; empty if the kernels do not round activations."""
        return self.decoder.rounding if isinstance(self.decoder, Decoder) else ""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Rarely used options of `load_model`."""

    invariance: Invariance = Invariance.NONE
    """Level of deterministic mode; see Decoder."""
    torch_compile: bool | None = False
    """True to compile the layers of a model that runs on transformers' code. None also compiles the layers, but continues
    uncompiled if this fails."""
    quantization: str | None = None
    """Quantization applied to plain weights of linear layers, a key of ON_LOADING. None means no quantization."""
    keep_quantized: bool = True
    """False to dequantize all quantized weights, even if the device has kernels for them."""
    tokenizer: str | None = None
    """Name or path of the tokenizer, resolved by `locate`. None means the model's folder."""
    origin: ModelOrigin = AS_IT_IS
    """Options that determine which files the model is loaded from."""
    slots: AdapterSlots | None = None
    """Slots for LoRA adapters. None means no adapters."""
    kernels: LinearKernels | None = None
    """Kernels for linear layers on the model's device. None means Headway's own."""
    max_model_len: int | None = None
    """Maximum sequence length in tokens, which selects `longrope`'s factors. None means the model's maximum."""
    experts: ExpertsOptions = field(default_factory=ExpertsOptions)
    """Kernels allowed for MoE layers."""


def load_model(
    name: str,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    skip_tokenizer_init: bool = False,
    model_impl: str = "auto",
    ranks: Ranks = ONE_RANK,
    options: LoadOptions | None = None,
) -> LoadedModel:
    """Locate and load a model.

    dtype: auto, float32, bfloat16 or float16. auto is float32 on a CPU, where bfloat16 is slower, else the checkpoint's dtype. An
    explicit float32 is exact: blocks of a .gguf file are dequantized if their kernels would round activations.
    load_format: auto or dummy. dummy needs only a config.json; the tokenizer is read if the folder has one.
    model_impl: one of MODEL_IMPLS. The log names the implementation, and the reason if auto chose transformers.
    ranks: if there are several, only this rank's shard is loaded, and every rank must call this function.

    :raises ModelError: if the model is unknown, unreadable or unsupported.
    :raises ConfigError: if dtype, load_format or model_impl is unknown, or the model does not divide among the ranks.
    """
    options = options or LoadOptions()
    check_load_options(dtype, load_format, model_impl, options.quantization)
    dummy, max_model_len = load_format == "dummy", options.max_model_len
    folder, device = locate(name, weights=not dummy, origin=options.origin), torch.device(device)
    stated = check_folder(folder)
    config = config_of(folder, stated, plain=model_impl != "transformers")
    stored = read_quantization(folder, stated)
    quantization = _on_loading(options.quantization, stored)
    chosen, long = chosen_dtype(dtype, config, device), takes_long_factors(config, max_model_len)
    decoder: Decoder | TransformersModel
    live: LiveWeights | None = None
    native = None if model_impl == "transformers" else decoder_config(config, model_impl == "headway", max_model_len)
    if native is not None:
        kernels = options.kernels or builtin_kernels(device)
        readers = kernels if options.keep_quantized else None
        stores = _Stores(stored, quantization, readers, dtype == "float32", options.experts)
        weights = _weights(native, folder, chosen, device, dummy, stores)
        with torch.inference_mode():
            decoder = Decoder(native, weights, options.invariance, ranks, options.slots, options.kernels, options.experts)
        if options.kernels is not None:
            options.kernels.check_named(decoder.linear_choices)
        options.experts.check()
        if isinstance(weights, DummyWeights) or (isinstance(weights, Weights) and weights.quantization is None):
            again = partial(_weights, native, folder, chosen, device, stores=_Stores(stored, None))
            live = LiveWeights(decoder, again, dummy) if ranks.size == 1 else None
        implementation = "Headway's decoder" + (f", rank {ranks.rank} of {ranks.size}" if ranks.size > 1 else "")
    else:
        _refuse_adapted(name, stored, quantization, ranks, options)
        from headway.models.transformers_adapter.load import load_adapted

        whole = config_of(folder, stated, plain=False)
        decoder = load_adapted(folder, whole, chosen, device, dummy, options.torch_compile, max_model_len)
        implementation = decoder.implementation
    log.info("model: %s, computed by %s", name, implementation)
    place, tokenizer = None if skip_tokenizer_init else folder, options.tokenizer
    if place is not None and tokenizer not in (None, name):
        place = locate(tokenizer, weights=False)
    if dummy and place == folder and not (folder / "tokenizer_config.json").is_file():
        place = None
    read = None if place is None else read_tokenizer(place)
    ends = read_end_tokens(folder, stated, config, read)
    rules = stated.get("headway_attention_rules") or {}
    if not isinstance(rules, Mapping):
        raise ModelError(f"model {name}: headway_attention_rules of config.json needs a mapping, got {rules!r}")
    return LoadedModel(name, folder, decoder, implementation, read, ends, place, live, rules, long)


def _refuse_adapted(name: str, stored: Quantization | None, quantization: str | None, ranks: Ranks, options: LoadOptions) -> None:
    """Check that all options that are set are supported with transformers' code.

    stored: quantization of the checkpoint. quantization: quantization applied while loading.

    :raises HeadwayError: if an unsupported option is set; the error names the option.
    """
    need, hint = "a model that Headway's decoder computes", "model_impl='headway' says what Headway's decoder lacks"
    if options.invariance:
        raise ConfigError("deterministic", need, name, "transformers' code is not batch-invariant")
    if ranks.size > 1:
        got = f"{ranks.size} with {name}"
        raise ConfigError("tensor_parallel_size", f"1, or {need}", got, f"transformers' code runs on one rank; {hint}")
    if quantization is not None:
        raise ConfigError("quantization", f"none, or {need}", f"{quantization} with {name}", hint)
    if options.kernels is not None and options.kernels.named is not None:
        raise ConfigError("linear_kernel", f"auto, or {need}", f"{options.kernels.named} with {name}", hint)
    if options.slots is not None:
        raise ConfigError("enable_lora", need, name, f"transformers' code has no slots for adapters; {hint}")
    if options.experts.requested != AUTO:
        raise ConfigError("experts_kernel", need, name, hint)
    if stored is not None:
        raise ModelError(
            f"model {name}: needs plain weights where transformers computes it, got {stored.label} ({stored.place}), "
            f"which only Headway's own decoder reads; {hint}"
        )


def _on_loading(asked: str | None, stored: Quantization | None) -> str | None:
    """Return the quantization to apply while loading. asked: a key of ON_LOADING, or the checkpoint's own method, which has no
    effect.

    :raises ConfigError: if `asked` is neither.
    """
    own = "" if stored is None else stored.method
    if asked is None or (own and asked.removesuffix("_marlin") == own):
        return None
    if asked not in ON_LOADING:
        got = f"{asked} for weights in {stored.label} ({stored.place})" if stored is not None else f"{asked} for plain weights"
        raise ConfigError("quantization", f"none, {', '.join(ON_LOADING)}, or the checkpoint's own method", got)
    return asked


class _Stores(NamedTuple):
    """Options that determine the formats of weights in memory."""

    stored: Quantization | None
    """Quantization of the checkpoint, which random weights also use. None means unquantized."""
    quantization: str | None
    """Quantization applied to plain weights while loading. None means no quantization."""
    kernels: LinearKernels | None = None
    """Kernels for linear layers. Weights in formats that these kernels support stay quantized. None means that all weights are
    dequantized."""
    exact: bool = True
    """True to dequantize a .gguf file's blocks if their kernels round activations."""
    experts: ExpertsOptions | None = None
    """Kernels for MoE layers, which may read quantized weights on a CPU. None means Headway's own."""


def _weights(
    config: DecoderConfig, folder: Path, dtype: torch.dtype, device: torch.device, dummy: bool, stores: _Stores
) -> WeightSource:
    """Return the source of the decoder's tensors."""
    stored, quantization, kernels, exact, experts = stores
    if stored is not None and quantization is not None:
        hint = "leave quantization out: the checkpoint's format is kept"
        raise ConfigError("quantization", "plain weights", f"{quantization} for weights in {stored.label} ({stored.place})", hint)
    own = functions() if device.type == "cpu" and kernels is not None else None
    if stored is None and quantization is None and own is not None and not (exact and own.x_bits):
        stored = stored_blocks(folder)
    if quantization is not None and own is not None and not dummy and stored_blocks(folder) is not None:
        left = (
            "weights: the blocks of the .gguf file are not used, because quantization=%s quantizes the dequantized weights again"
        )
        log.warning(left + "; leave it out to use the blocks, which need less memory", quantization)
    supports = partial(kernels.reads, dtype=dtype) if kernels is not None else _never
    supports_experts = (
        partial(reads_expert_weight, dtype=dtype, device=device, options=experts) if kernels is not None else _never
    )
    if dummy:
        unit = [] if config.experts is None else [f"{config.names.embed}.weight"]
        form = None if stored is None else stored.rules[0].format
        weights: WeightSource = DummyWeights(dtype, device, unit=unit, form=form)
        if form is not None:
            return QuantizeOnLoading(weights, lambda weight: weight, supports, supports_experts)
    else:
        weights = Weights(folder, dtype, device, config.names.aliases, stored, supports, supports_experts)
    return weights if quantization is None else QuantizeOnLoading(weights, ON_LOADING[quantization], supports, supports_experts)


def reads_expert_weight(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, options: ExpertsOptions | None
) -> bool:
    """Return whether a kernel supports a quantized weight of experts.

    On a CPU, third-party kernels are considered too. On torch's `meta` device the result is True, and kernels are checked later.
    """
    if device.type == "meta":
        return True
    if device.type == "cpu" and options is not None:
        return options.reads(weight.kind, dtype, device)
    return reads_experts(weight, dtype, device)


def _never(weight: QuantizedWeight) -> bool:
    """Return False, so that every weight is dequantized."""
    return False


def check_load_options(dtype: str, load_format: str, model_impl: str = "auto", quantization: str | None = None) -> None:
    """Check the values of loading options. :raises ConfigError: if a value is unknown."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError("dtype", f"auto, {', '.join(DTYPES)}", repr(dtype))
    if load_format not in LOAD_FORMATS:
        raise ConfigError("load_format", " or ".join(LOAD_FORMATS), repr(load_format))
    if model_impl not in MODEL_IMPLS:
        raise ConfigError("model_impl", ", ".join(MODEL_IMPLS), repr(model_impl))
    if quantization is not None and quantization.removesuffix("_marlin") not in (*ON_LOADING, *METHODS):
        hint = "a checkpoint's own format needs no option"
        raise ConfigError("quantization", f"none or {', '.join(ON_LOADING)}", repr(quantization), hint)


def decoder_config(config: Any, required: bool, longest: int | None = None) -> DecoderConfig | None:
    """Return the model's `DecoderConfig`, or None if Headway's decoder does not support it and `required` is false.

    longest: see `read_rope`.
    """
    try:
        return read_decoder_config(config, longest)
    except HeadwayError as error:
        if required or not isinstance(error, BeyondDecoderError):
            raise
        log.info("model: using transformers' code, because Headway's decoder does not support the model (%s)", error)
        return None
    except Exception as error:  # a value of a wrong type that no check covers
        raise ModelError(f"model: config.json cannot be used ({first_line(error)})") from error


def read_config(folder: Path, plain: bool = True) -> Any:
    """Return the configuration of a model folder, as transformers reads it. plain: see `config_of`.

    :raises ModelError: if config.json is missing or unreadable, or Headway does not support the kind of checkpoint.
    """
    return config_of(folder, check_folder(folder), plain)


def config_of(folder: Path, stated: Mapping[str, Any], plain: bool = True) -> Any:
    """Return the configuration of a model folder, as transformers reads it. stated: the checked content of config.json.

    plain: True to read common configurations without transformers; the result then has only the fields that the decoder needs.

    :raises ModelError: if the configuration cannot be read, or Headway does not support its model type.
    """
    config: Any = plain_config(stated) if plain else None
    if config is None:
        from transformers import CONFIG_MAPPING, AutoConfig

        if stated["model_type"] not in CONFIG_MAPPING:
            raise ModelError(unknown(stated))
        try:  # refuse the model's own code: for an auto_map transformers would prompt on the terminal
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            raise ModelError(f"model {folder}: config.json cannot be used ({first_line(error)})") from error
    return _text_part(config) if config.model_type in TEXT_PARTS else config


def _text_part(config: Any) -> Any:
    """Return the configuration of a model's text model, with the whole model's settings that apply to it."""
    log.info("model: only the text model of %s is computed; images are not supported", config.model_type)
    text = config.text_config
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype
    return text


def chosen_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype for a value of the option dtype; auto is float32 on a CPU, else the checkpoint's dtype."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype or torch.bfloat16
    return DTYPES[name]


def read_layer_specs(model: str, device: torch.device, dtype: torch.dtype | None = None) -> LayerSpecs:
    """Return the specs of a model's layers in a dtype.

    model: path of a config.json, or a name for `locate`. Only the configuration is read, so quantization has no effect.
    Sinks, which are weights, are 0. dtype: None means the dtype in config.json, or bfloat16 if it states none.

    :raises ConfigError: if the path is a file other than config.json, or does not exist.
    :raises ModelError: if no such model exists, its configuration is unreadable, or its attention is unsupported.
    """
    path = Path(model).expanduser()
    if path.suffix == ".json" and (path.name != "config.json" or not path.is_file()):
        raise ConfigError("--model", "a config.json that is there, a folder with one, or a model's name", model)
    folder = locate(str(path.parent) if path.suffix == ".json" else model, weights=False)
    config = read_config(folder)
    dtype = dtype or config.dtype or torch.bfloat16
    decoder = decoder_config(config, required=False)
    if decoder is None:
        from headway.models.transformers_adapter.load import adapted_specs

        return LayerSpecs(adapted_specs(read_config(folder, plain=False), dtype, device))
    return decoder_layer_specs(decoder, dtype, device)


def decoder_layer_specs(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> LayerSpecs:
    """Return the specs of a decoder's layers, or of a rank's shard if `config` is the shard's. Sinks are 0."""
    sinks = (0.0,) * config.num_heads if config.sinks else None
    cached = [cached_spec(config, layer, dtype, device, sinks=sinks) for layer in config.layers if layer.caches]
    latent = config.latent
    expanded = {} if latent is None else {spec: expanded_spec(config, latent, spec) for spec in cached}
    count = sum(layer.state for layer in config.layers)
    states = [] if config.state is None else [state_spec(config.state, dtype, device)] * count
    return LayerSpecs(cached, expanded, states, device)
