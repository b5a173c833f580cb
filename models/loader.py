"""Load a model: its decoder, its tokenizer, and the token ids that end a text; or the specs of its layers alone."""

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
from headway.core.contract.linear import LinearSpec
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import DTYPES
from headway.core.select.request import LayerSpecs
from headway.kernels.experts.bound import AUTO, ExpertsOptions
from headway.kernels.experts.weights import reads_experts
from headway.kernels.linear.choice import LinearKernels, builtin_kernels
from headway.kernels.linear.forms import QuantizedWeight, format_of
from headway.kernels.runtime.native.library import functions
from headway.models.checkpoints.checkpoint import check_folder, unknown
from headway.models.checkpoints.end_tokens import read_end_tokens
from headway.models.checkpoints.formats.config import METHODS, Quantization, read_quantization
from headway.models.checkpoints.formats.rounding import ON_LOADING
from headway.models.checkpoints.gguf.blocks import kept_blocks
from headway.models.checkpoints.live_weights import LiveWeights
from headway.models.checkpoints.locate import AS_IT_IS, ModelOrigin, locate
from headway.models.checkpoints.rounded_weights import DummyInFormat, QuantizeOnLoading
from headway.models.checkpoints.tokenizer import first_line, read_tokenizer
from headway.models.checkpoints.weights import DummyWeights, Weights, WeightSource
from headway.models.config import BeyondDecoderError, DecoderConfig, cached_spec, expanded_spec, state_spec
from headway.models.families.families import TEXT_PARTS, read_decoder_config
from headway.models.families.plain_config import plain_config
from headway.models.families.rope import takes_long_factors
from headway.models.layers.decoder import Decoder

if TYPE_CHECKING:
    from headway.models.transformers_adapter.model import TransformersModel

LOAD_FORMATS = ("auto", "dummy")
"""auto: the safetensors files of the folder; dummy: random weights in the shapes of its config.json."""
MODEL_IMPLS = ("auto", "headway", "transformers")
"""headway: our own decoder; transformers: its code with our attention and cache; auto: the first that computes the model."""

log = logging.getLogger("headway")


@dataclass(frozen=True)
class LoadedModel:
    """Everything a folder gives."""

    name: str
    folder: Path
    decoder: Decoder | TransformersModel
    implementation: str
    """What computes it, in words: Headway's decoder or transformers' code."""
    tokenizer: Any
    """What `read_tokenizer` returns; None where there is none or it was not wanted: token ids in, token ids out."""
    eos_token_ids: frozenset[int]
    """Tokens that end an answer unless ignore_eos: see `read_end_tokens`."""
    tokenizer_folder: Path | None = None
    """Where the tokenizer was read; None where there is none."""
    live_weights: LiveWeights | None = None
    """What replaces weights while the model runs; None: they are quantised, on several ranks, or run by transformers' code."""
    long_factors: bool = False
    """True if RoPE of type `longrope` takes its long factors: keys in a cache depend on it."""

    @property
    def rounding(self) -> str:
        """What products round of their activations on this processor, in words; empty: nothing."""
        return self.decoder.rounding if isinstance(self.decoder, Decoder) else ""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What few models are loaded with."""

    batch_invariant: bool = False
    """What deterministic mode needs; see Decoder."""
    torch_compile: bool | None = False
    """Compile the layers of a model that transformers computes; None: if it works."""
    quantization: str | None = None
    """What products' plain weights are rounded to, see ON_LOADING; None: they stay plain."""
    keep_quantized: bool = True
    """False: quantised weights are expanded, whatever the device's products read."""
    tokenizer: str | None = None
    """Where the tokenizer is, by what `locate` takes; None: in the model's folder."""
    origin: ModelOrigin = AS_IT_IS
    """Which files the model has."""
    slots: AdapterSlots | None = None
    """For adapters; None: none."""
    kernels: LinearKernels | None = None
    """For linear layers, on the model's device; None means Headway's own."""
    max_model_len: int | None = None
    """Tokens of the longest sequence, which decides between the factors of `longrope`; None means the model's own."""
    experts: ExpertsOptions = field(default_factory=ExpertsOptions)
    """The kernels that layers of experts may have."""


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
    """Find and load a model.

    dtype: auto, float32, bfloat16 or float16; auto is float32 on a CPU (which computes bfloat16 slower), else the checkpoint's.
    A float32 that is named is computed in float32: blocks of a .gguf file are expanded where their products would round.
    load_format: auto or dummy. A dummy needs a config.json alone; its tokenizer is read if the folder has one.
    model_impl: what computes the model, see MODEL_IMPLS; the log names it, and why auto took transformers.
    ranks: of several, this one's part of the model is loaded alone; every rank calls.

    :raises ModelError: unknown, unreadable or unsupported model.
    :raises ConfigError: unknown dtype, load_format or model_impl, or a model that does not divide among the ranks.
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
        kept = kernels if options.keep_quantized else None
        stores = _Stores(stored, quantization, kept, dtype == "float32", options.experts)
        weights = _weights(native, folder, chosen, device, dummy, stores)
        with torch.inference_mode():
            decoder = Decoder(native, weights, options.batch_invariant, ranks, options.slots, options.kernels, options.experts)
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
    return LoadedModel(name, folder, decoder, implementation, read, ends, place, live, long)


def _refuse_adapted(name: str, stored: Quantization | None, quantization: str | None, ranks: Ranks, options: LoadOptions) -> None:
    """Check that nothing is asked that transformers' code cannot do.

    stored: format of the checkpoint's weights; quantization: what plain ones are to be rounded to.

    :raises HeadwayError: it cannot, with the option's name.
    """
    need, hint = "a model that Headway's decoder computes", "model_impl='headway' says what Headway's decoder lacks"
    if options.batch_invariant:
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
    """What weights are rounded to on loading. asked: that, or the checkpoint's own method, which needs no rounding.

    :raises ConfigError: a method that is neither.
    """
    own = "" if stored is None else stored.method
    if asked is None or (own and asked.removesuffix("_marlin") == own):
        return None
    if asked not in ON_LOADING:
        got = f"{asked} for weights in {stored.label} ({stored.place})" if stored is not None else f"{asked} for plain weights"
        raise ConfigError("quantization", f"none, {', '.join(ON_LOADING)}, or the checkpoint's own method", got)
    return asked


class _Stores(NamedTuple):
    """How weights are kept in memory."""

    stored: Quantization | None
    """The format of a checkpoint's weights, and of random ones in its place."""
    quantization: str | None
    """What plain ones are rounded to."""
    kernels: LinearKernels | None = None
    """Kernels whose formats stay as they are; None expands all quantised weights."""
    exact: bool = True
    """Whether a .gguf file's blocks are expanded where their products would round what they multiply."""
    experts: ExpertsOptions | None = None
    """Kernels for layers of experts, which may read weights of a form on a CPU; None: Headway's own."""


def _weights(
    config: DecoderConfig, folder: Path, dtype: torch.dtype, device: torch.device, dummy: bool, stores: _Stores
) -> WeightSource:
    """Where the decoder takes its tensors from."""
    stored, quantization, kernels, exact, experts = stores
    if stored is not None and quantization is not None:
        hint = "leave quantization out: the checkpoint's format is kept"
        raise ConfigError("quantization", "plain weights", f"{quantization} for weights in {stored.label} ({stored.place})", hint)
    own = functions() if device.type == "cpu" and kernels is not None else None
    if stored is None and quantization is None and own is not None and not (exact and own.x_bits):
        stored = kept_blocks(folder)
    if quantization is not None and own is not None and not dummy and kept_blocks(folder) is not None:
        left = "weights: the blocks of the .gguf file are not kept, since quantization=%s rounds the expanded weights once more"
        log.warning(left + "; leave it out to keep them, in fewer bytes", quantization)
    keeps = partial(reads_weight, kernels, dtype=dtype, device=device) if kernels is not None else _never
    keeps_experts = partial(reads_expert_weight, dtype=dtype, device=device, options=experts) if kernels is not None else _never
    if dummy:
        unit = [] if config.experts is None else [f"{config.names.embed}.weight"]
        drawn = DummyWeights(dtype, device, unit=unit)
        if stored is not None:
            return DummyInFormat(drawn, stored.rules[0].format, keeps, keeps_experts)
        weights: WeightSource = drawn
    else:
        weights = Weights(folder, dtype, device, config.names.aliases, stored, keeps, keeps_experts)
    return weights if quantization is None else QuantizeOnLoading(weights, ON_LOADING[quantization], keeps, keeps_experts)


def reads_weight(kernels: LinearKernels, weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a linear kernel reads a weight as it is; without elements, which one does is asked later. dtype: of x."""
    rows, columns = weight.shape
    return device.type == "meta" or kernels.reads(LinearSpec(columns, rows, dtype, device, format_of(weight)))


def reads_expert_weight(
    weight: QuantizedWeight, dtype: torch.dtype, device: torch.device, options: ExpertsOptions | None
) -> bool:
    """Return whether a kernel reads a weight of experts as it is: on a CPU, where torch expands what others refuse, a third
    party's; without elements, which one does is asked later."""
    if device.type == "meta":
        return True
    if device.type == "cpu" and options is not None:
        return options.reads(weight.kind, dtype, device)
    return reads_experts(weight, dtype, device)


def _never(weight: QuantizedWeight) -> bool:
    """Keep no form."""
    return False


def check_load_options(dtype: str, load_format: str, model_impl: str = "auto", quantization: str | None = None) -> None:
    """:raises ConfigError: unknown dtype, load_format, model_impl or quantization."""
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
    """Return the model's `DecoderConfig`, or None if Headway's decoder does not compute it and `required` is false.

    longest: see `read_rope`.
    """
    try:
        return read_decoder_config(config, longest)
    except HeadwayError as error:
        if required or not isinstance(error, BeyondDecoderError):
            raise
        log.info("model: transformers computes it, because Headway's decoder does not (%s)", error)
        return None
    except Exception as error:  # a number of an impossible kind where nobody looked for it
        raise ModelError(f"model: config.json cannot be used ({first_line(error)})") from error


def read_config(folder: Path, plain: bool = True) -> Any:
    """The configuration of a model folder, as transformers reads it. plain: see `config_of`.

    :raises ModelError: none there, one that cannot be read, or a checkpoint of a kind that Headway does not compute.
    """
    return config_of(folder, check_folder(folder), plain)


def config_of(folder: Path, stated: Mapping[str, Any], plain: bool = True) -> Any:
    """The configuration of a model folder, as transformers reads it. stated: its config.json, checked.

    plain: an ordinary one may be read without transformers, and has then what the decoder needs alone.

    :raises ModelError: it cannot be read, or is of a kind that Headway does not compute.
    """
    short = plain_config(stated) if plain else None
    if short is not None:
        return short
    from transformers import CONFIG_MAPPING, AutoConfig

    if stated["model_type"] not in CONFIG_MAPPING:
        raise ModelError(unknown(stated))
    try:  # without the model's own code: where auto_map names some, transformers would ask on the terminal and wait
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"model {folder}: config.json cannot be used ({first_line(error)})") from error
    return _text_part(config) if config.model_type in TEXT_PARTS else config


def _text_part(config: Any) -> Any:
    """The configuration of a model's text part, with what the whole model says for it."""
    log.info("model: of %s the text part alone is computed; it reads no images", config.model_type)
    text = config.text_config
    text.tie_word_embeddings = config.tie_word_embeddings
    text.dtype = text.dtype or config.dtype
    return text


def chosen_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """The element type that an option names; auto is float32 on a CPU, else the checkpoint's."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype or torch.bfloat16
    return DTYPES[name]


def read_layer_specs(model: str, device: torch.device, dtype: torch.dtype | None = None) -> LayerSpecs:
    """The specs of a model's layers in an element type.

    model: the path of a config.json, or whatever `locate` finds; nothing but the configuration is read, so that quantised weights
    are no obstacle. Sinks, which are weights, are 0. dtype: None is what its config.json names (bfloat16 where none is named).

    :raises ConfigError: the path of another file, or of none.
    :raises ModelError: there is no such model, its configuration cannot be read, or it has no attention of Headway's.
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
    """The specs of a decoder's layers; of one rank's, where the configuration is what that computes. Sinks, which are weights,
    are 0."""
    sinks = (0.0,) * config.num_heads if config.sinks else None
    cached = [cached_spec(config, layer, dtype, device, sinks=sinks) for layer in config.layers if layer.attention]
    latent = config.latent
    expanded = {} if latent is None else {spec: expanded_spec(config, latent, spec) for spec in cached}
    count = sum(layer.state for layer in config.layers)
    states = [] if config.state is None else [state_spec(config.state, dtype, device)] * count
    return LayerSpecs(cached, expanded, states, device)
