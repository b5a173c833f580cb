"""The tokenizer of a .gguf file: byte-level or sentencepiece BPE, cut into words as `tokenizer.ggml.pre` names it."""

from __future__ import annotations

from typing import Any

from headway.core.system.text import shown
from headway.models.checkpoints.gguf.hybrids.header import Header

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
"""Words that are tokens are taken whole, whatever merges would make of them; and texts begin with BOS unless the file says no."""
_SPLITS = {
    **dict.fromkeys((*_WHOLE_FIRST, "dbrx", "smaug-bpe"), _LLAMA3),
    "qwen2": _QWEN2,
    "qwen35": _QWEN3_5,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "kimi-k2": _KIMI,
    "gpt-2": None,
}
"""How a text is cut into words before they are merged; None: as GPT-2 does."""
_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens that a text is searched for before all else."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What stands for a space in a sentencepiece vocabulary."""


def build_tokenizer(header: Header) -> Any:
    """transformers' tokenizer; None where the file has no vocabulary.

    :raises ModelError: a kind of tokenizer that Headway does not build.
    """
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
    """:raises ModelError: words that are cut in a way which is not known here: the ids would be others in silence."""
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
    """Pairs merge in the order of the scores of what they make."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.general("tokenizer.ggml.scores", [])
    known = {token: number for number, token in enumerate(tokens)}
    pairs = [
        (scores[number], token[:cut], token[cut:])
        for token, number in known.items()
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
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
    """Put BOS before a text and EOS behind it, where the file says so."""
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
