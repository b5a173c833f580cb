"""Conversion of a hybrid model's .gguf file to a folder with the weights that its configuration needs, and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.core.system.text import shown
from headway.kernels.linear.axes import Shape, held_sizes, whole_sizes
from headway.models.checkpoints.checkpoint import check_sizes
from headway.models.checkpoints.gguf.header import Header
from headway.models.checkpoints.gguf.hybrid_architectures import GgufArchitecture
from headway.models.checkpoints.weights import WeightSource
from headway.models.config import DecoderConfig
from headway.models.families.families import FAMILIES, read_decoder_config
from headway.models.layers.decoder import Decoder

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_ENDS}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_ENDS}"
_QWEN3_5 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_ENDS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _REST = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _ENDS
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{_REST}"
)
_UPPER_KIMI, _LOWER_KIMI = (rf"{letters[:-1]}&&[^\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"[\p{{Han}}]+|{_BEFORE}{_UPPER_KIMI}*{_LOWER_KIMI}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER_KIMI}+{_LOWER_KIMI}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_ENDS}"
)
_WHOLE_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2")
"""Pre-tokenizers that do not apply merges to a word that is itself a token, and that add BOS unless the file disables it."""
_SPLITS = {
    **dict.fromkeys((*_WHOLE_FIRST, "dbrx", "smaug-bpe"), _LLAMA3),
    "qwen2": _QWEN2,
    "qwen35": _QWEN3_5,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "kimi-k2": _KIMI,
    "gpt-2": None,
}
"""Regular expression that splits text into words before merging, for each pre-tokenizer. None means GPT-2's expression."""
_CONTROL, _USER_DEFINED = 3, 4
"""Token types that are matched in a text before the text is split into words."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # Space in a sentencepiece vocabulary


def build_tokenizer(header: Header) -> Any:
    """Return a transformers tokenizer, or None without a vocabulary. :raises ModelError: if the tokenizer is unsupported."""
    import transformers
    from tokenizers import AddedToken

    kind = header.general("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise header.refuse("tokenizer.ggml.model", "gpt2 or llama", shown(kind))
    tokens = header.general("tokenizer.ggml.tokens", [])
    built = _byte_level(header, tokens) if kind == "gpt2" else _sentencepiece(header, tokens)
    kinds = list(zip(tokens, header.general("tokenizer.ggml.token_type", []), strict=False))
    built.add_special_tokens([AddedToken(token, normalized=False, special=True) for token, of in kinds if of == _CONTROL])
    built.add_tokens([AddedToken(token, normalized=False) for token, of in kinds if of == _USER_DEFINED])
    ids = {name: header.general(f"tokenizer.ggml.{key}_token_id") for name, key in _ROLES.items()}
    roles = {name: tokens[number] for name, number in ids.items() if number is not None and number < len(tokens)}
    _set_ends(header, built, roles, default=kind == "llama" or header.general("tokenizer.ggml.pre") in _WHOLE_FIRST)
    made: Any = transformers.PreTrainedTokenizerFast
    tokenizer = made(tokenizer_object=built, clean_up_tokenization_spaces=False, **roles)
    tokenizer.chat_template = header.general("tokenizer.chat_template")
    return tokenizer


_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(header: Header, tokens: list[str]) -> Any:
    """Return a byte-level BPE tokenizer. :raises ModelError: if its pre-tokenizer is unknown, as token ids could be wrong."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = header.general("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise header.refuse("tokenizer.ggml.pre", f"one of {', '.join(_SPLITS)}", shown(pre))
    if (written := header.general("tokenizer.ggml.merges")) is None:
        raise header.refuse("tokenizer.ggml.merges", "the merges of byte-level BPE", "no such key")
    merges = [tuple(merge.split(" ", 1)) for merge in written]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_FIRST))
    split = _SPLITS[pre]
    words = [] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    built.pre_tokenizer = pre_tokenizers.Sequence([*words, byte_level])
    built.decoder = decoders.ByteLevel()
    return built


def _sentencepiece(header: Header, tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.general("tokenizer.ggml.scores", [])
    known = {token: number for number, token in enumerate(tokens)}
    pairs = [
        (scores[number], token[:end], token[end:])
        for token, number in known.items()
        for end in range(1, len(token))
        if token[:end] in known and token[end:] in known
    ]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    unknown = header.general("tokenizer.ggml.unknown_token_id", 0)
    merges = [(left, right) for _, left, right in pairs]
    built = Tokenizer(models.BPE(vocab=known, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = bool(header.general("tokenizer.ggml.add_space_prefix", True))
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    built.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    built.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    return built


def _set_ends(header: Header, built: Any, roles: dict[str, str], default: bool) -> None:
    """Make the tokenizer add BOS before and EOS after a text if the file requests it. default: True to add BOS if the file has no
    setting."""
    from tokenizers import processors

    wanted = {"bos_token": default, "eos_token": False}
    first, last = (
        [roles[name]] if name in roles and header.general(f"tokenizer.ggml.add_{name}", usual) else []
        for name, usual in wanted.items()
    )
    if first or last:
        built.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, "$B", *last],
            special_tokens=[(token, built.token_to_id(token)) for token in dict.fromkeys(first + last)],
        )


_SHARD = 4 << 30  # Maximum bytes of one safetensors file, except for its last tensor
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


@dataclass(frozen=True)
class _Recipe:
    sources: tuple[str, ...]
    make: Callable[..., Tensor]
    expert: int | None = None  # Index of the expert along the first axis; None means the whole tensor


def write_folder(header: Header, architecture: GgufArchitecture, target: Path) -> None:
    """Write configuration, tokenizer and float32 weights. :raises ModelError: if the result would be a different model."""
    from transformers import AutoConfig

    _check(header, architecture)
    config = AutoConfig.for_model(**{**_stated(header, architecture), **architecture.config(header)})
    check_sizes(header.path, config.to_dict(), "its header")
    read = read_decoder_config(config)
    _check_experts(header, read)
    needed = _needed(header, architecture, read)
    tokenizer = build_tokenizer(header)
    config.save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    _write_tensors(header, needed, target)


def _check(header: Header, architecture: GgufArchitecture) -> None:
    """Check the header. :raises ModelError: if it has an unsupported setting that changes the model."""
    for key in ("embedding_length", "attention.head_count"):
        header.size(key, least=1)
    scaling = header.get("rope.scaling.type", "none")
    if scaling != "none":
        raise header.refuse(f"{header.architecture}.rope.scaling.type", "none", str(scaling))
    scoring = header.get("expert_gating_func", 0)
    if scoring not in (0, architecture.scoring):
        raise header.refuse(f"{header.architecture}.expert_gating_func", str(architecture.scoring), str(scoring))
    if header.get("attention.causal", True) is False:
        raise header.refuse(f"{header.architecture}.attention.causal", "true", "false")
    if header.get("attention.sliding_window", 0):
        raise header.refuse(f"{header.architecture}.attention.sliding_window", "0", str(header.get("attention.sliding_window")))
    if "token_embd.weight" not in header:
        raise ModelError(f"model {header.path}: it has no tensor token_embd.weight, which its header implies")


def _check_experts(header: Header, config: DecoderConfig) -> None:
    """Check the number of experts in the header. :raises ModelError: if the expert tensors have a different number."""
    stacks = {name: header.shape(name)[0] for name in header.names if name.endswith("_exps.weight")}
    count = config.experts.num_experts if config.experts is not None else 0
    name, found = next(((name, found) for name, found in stacks.items() if found != count), ("", 0))
    if name or (count and not stacks):
        need = f"{found}, as {name} has them" if name else "0, as there are no tensors of experts"
        raise header.refuse(f"{header.architecture}.expert_count", need, str(count))


def _stated(header: Header, architecture: GgufArchitecture) -> dict[str, Any]:
    return {
        "model_type": architecture.model_type,
        "architectures": [FAMILIES[architecture.model_type].architecture],
        "vocab_size": header.shape("token_embd.weight")[0],
        "hidden_size": header.size("embedding_length"),
        "num_hidden_layers": header.num_layers,
        "num_attention_heads": header.size("attention.head_count"),
        "num_key_value_heads": header.size("attention.head_count_kv"),
        "max_position_embeddings": header.size("context_length"),
        "tie_word_embeddings": "output.weight" not in header,
        **{key: header.general(f"tokenizer.ggml.{name}_token_id") for key, name in _IDS.items()},
    }


class _Names(WeightSource):
    """Weight source that only records the names and shapes of the tensors that a decoder takes."""

    def __init__(self, known: Mapping[str, _Recipe]) -> None:
        self.dtype = torch.float32
        self.device = torch.device("meta")
        self._known = known
        self.shapes: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def take(self, name: str, shape: Shape) -> Tensor:
        self.shapes[name] = whole_sizes(shape)
        return torch.empty(held_sizes(shape), device=self.device)

    def take_as(self, dtype: torch.dtype, name: str, shape: Shape) -> Tensor:
        return self.take(name, shape).to(dtype)

    def take_number(self, name: str) -> float:
        """Record a one-element tensor. No architecture in ARCHITECTURES has such a tensor."""
        return float(self.take(name, (1,)).numel())

    def finish(self, ignored: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> None:
        """Do nothing: nothing was read."""


def _needed(header: Header, architecture: GgufArchitecture, config: DecoderConfig) -> dict[str, tuple[_Recipe, tuple[int, ...]]]:
    """Return each decoder tensor's recipe and shape. :raises ModelError: if the file lacks a tensor or has an unknown tensor."""
    possible = _recipes(header, architecture, config)
    known = {name: recipe for name, recipe in possible.items() if all(source in header for source in recipe.sources)}
    names = _Names(known)
    with torch.inference_mode():
        Decoder(config, names)
    missing = [name for name in names.shapes if name not in known]
    if missing:
        sources = possible[missing[0]].sources if missing[0] in possible else (missing[0],)
        first = next(source for source in sources if source not in header)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"model {header.path}: it has no tensor {first}{more}, which its header implies")
    used = {header.stored(source) for name in names.shapes for source in known[name].sources}
    drafts = tuple(f"blk.{layer}." for layer in range(header.num_layers, header.size("block_count")))
    left = sorted(name for name in header.names if name not in used and not name.startswith(drafts))
    if left:
        raise ModelError(
            f"model {header.path}: {len(left)} tensors that Headway does not read of {header.architecture}, first "
            f"{', '.join(left[:3])}: computed without them it would be another model"
        )
    return {name: (known[name], shape) for name, shape in names.shapes.items()}


def _recipes(header: Header, architecture: GgufArchitecture, config: DecoderConfig) -> dict[str, _Recipe]:
    """Return a recipe for each checkpoint tensor that the rules can make. If several rules make a tensor, a rule whose source
    tensors are in the file takes precedence."""
    names, recipes = config.names, {}
    recipes[f"{names.embed}.weight"] = _Recipe(("token_embd.weight",), torch.Tensor.contiguous)
    recipes[f"{names.norm}.weight"] = _Recipe((f"{architecture.norm}.weight",), architecture.make_norm)
    recipes[f"{names.head}.weight"] = _Recipe(("output.weight",), torch.Tensor.contiguous)
    count = 0 if config.experts is None else config.experts.num_experts
    rules = architecture.rules(header)
    for layer in range(header.num_layers):
        for rule in rules:
            sources = tuple(f"blk.{layer}.{source}" for source in rule.sources)
            target = names.layer.format(layer) + rule.target
            numbers = range(count) if "{}" in rule.target else [None]
            for number in numbers:
                name = target if number is None else target.format(number)
                if name not in recipes or all(source in header for source in sources):
                    recipes[name] = _Recipe(sources, rule.make, number)
    return recipes


def _write_tensors(header: Header, needed: Mapping[str, tuple[_Recipe, tuple[int, ...]]], target: Path) -> None:
    """Make the tensors one by one, and write them to files of a few gigabytes each, which limits memory use."""
    from safetensors.torch import save_file

    place: dict[str, str] = {}
    made: dict[str, Tensor] = {}
    last: tuple[object, Tensor] | None = None
    for name, (recipe, shape) in needed.items():
        key = recipe.sources, recipe.make
        if last is None or last[0] != key:  # experts of one tensor are consecutive
            last = key, recipe.make(*map(header.tensor, recipe.sources))
        tensor = last[1] if recipe.expert is None else last[1][recipe.expert]
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"model {header.path}: {' and '.join(recipe.sources)} (in the checkpoint {name}) needs shape {list(shape)} by "
                f"its header, got {list(tensor.shape)}"
            )
        made[name] = tensor.clone()
        if sum(tensor.nbytes for tensor in made.values()) >= _SHARD or len(place) + len(made) == len(needed):
            file = f"model-{len(set(place.values())) + 1:05}.safetensors"
            save_file(made, target / file, metadata={"format": "pt"})
            place |= dict.fromkeys(made, file)
            made = {}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
