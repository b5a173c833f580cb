"""Tokenizers of .gguf files give the ids of those that they were written from, and cut texts as the file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from headway.core.contract.errors import ModelError

pytest.importorskip("gguf")
from gguf_models import save_gguf
from headway.models.checkpoints.gguf.header import Header
from headway.models.checkpoints.gguf.hybrid_convert import build_tokenizer

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPLITS = {"qwen2": QWEN2, "lfm2": LLAMA3, "dbrx": LLAMA3}
TEXTS = [
    "It's 1234567 o'clock, WE'LL see:\n\n  two blanks\r\n\tand a tab...  ",
    "<|im_start|>user\nnaïve café 中文字符 नमस्ते 🙂<|im_end|>  <think>x</think>",
    "",
    " leading",
]
WORDS = ["user", "It's we'll see 123 456 two blanks", "café naïve 中文", "नमस्ते 🙂\n\n  \t", "oclock leading and a tab"] * 4


def byte_level(split: str, whole_first: bool) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=whole_first))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        WORDS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    made.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in ("<|bos|>", "<|im_start|>", "<|im_end|>")]
    )
    made.add_tokens([AddedToken("<think>", normalized=False)])
    return made


def keys_of(made: Tokenizer, **more: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes: tokens by id, their kinds, and merges in order."""
    vocabulary = sorted(made.get_vocab().items(), key=lambda item: item[1])
    added = made.get_added_tokens_decoder()
    kinds = [1 if number not in added else 3 if added[number].special else 4 for _, number in vocabulary]
    return {"tokens": [token for token, _ in vocabulary], "token_type": kinds, **more}


def built(tmp_path: Path, **keys: Any) -> Any:
    """The file's tokenizer, saved and read as the engine reads it."""
    save_gguf(tmp_path / "tiny.gguf", "qwen3next", {"block_count": 1}, {"token_embd.weight": torch.ones(2, 2)}, **keys)
    tokenizer = build_tokenizer(Header(tmp_path / "tiny.gguf"))
    tokenizer.save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    return AutoTokenizer.from_pretrained(tmp_path / "folder")


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_ids_are_those_of_the_tokenizer(tmp_path: Path, pre: str) -> None:
    made = byte_level(SPLITS[pre], whole_first=pre == "lfm2")
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    ends = {"eos_token_id": made.token_to_id("<|im_end|>")}
    if pre != "dbrx":
        ends["bos_token_id"] = made.token_to_id("<|bos|>")
    tokenizer = built(tmp_path, **keys_of(made, model="gpt2", pre=pre, merges=merges, **ends))
    first = [ends["bos_token_id"]] if pre == "lfm2" else []  # llama.cpp begins texts of this kind with it unless told otherwise
    for text in TEXTS:
        assert tokenizer.encode(text) == first + made.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == "<|bos|>" * bool(first) + text
    assert tokenizer.eos_token == "<|im_end|>"


CUTS = {
    "qwen2": "aB中文c|'s| |1|2|3|4| स|्त|!/",
    "qwen35": "aB中文c|'s| |1|2|3|4| स्त|!/",
    "lfm2": "aB中文c|'s| |123|4| स|्त|!/",
    "tekken": "a|B中文c|'s| |1|2|3|4| स्त|!/",
    "gpt-4o": "a|B中文c's| |123|4| स्त|!/",
    "kimi-k2": "a|B|中文|c's| |123|4| स्त|!/",
    "gpt-2": "aB中文c|'s| 1234| स|्|त|!/",
}


@pytest.mark.parametrize("pre", CUTS)
def test_texts_are_cut_as_the_file_says(tmp_path: Path, pre: str) -> None:
    text = CUTS[pre].replace("|", "")
    tokenizer = built(tmp_path, model="gpt2", pre=pre, tokens=["a", "b", "ab"], token_type=[1, 1, 1], merges=["a b"])
    words = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[start:end] for _, (start, end) in words) == CUTS[pre]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_the_tokenizer(tmp_path: Path, prefix: bool) -> None:
    special = ["<unk>", "<s>", "</s>"]
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([*[normalizers.Prepend("▁")] * prefix, normalizers.Replace(" ", "▁")])
    made.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False))
    tokens = [token for token, _ in sorted(made.get_vocab().items(), key=lambda item: item[1])]
    numbers = [token for token in range(256) if f"<0x{token:02X}>" not in tokens]
    merged = {"".join(pair): rank for rank, pair in enumerate(json.loads(made.to_str())["model"]["merges"])}
    scores = [-float(merged.get(token, 1e6)) for token in tokens] + [0.0] * len(numbers)
    kinds = [2, 3, 3] + [1] * (len(tokens) - 3) + [6] * len(numbers)
    tokens += [f"<0x{number:02X}>" for number in numbers]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    keys = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds, "add_space_prefix": prefix}
    tokenizer = built(tmp_path, **keys, **ends)
    for text in ("two blanks and a tab", "we'll see  user", "café"):
        assert tokenizer.encode(text) == [1, *made.encode(text).ids]
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode("é§"), skip_special_tokens=True) == "é§"  # by its bytes


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model needs gpt2 or llama, got 'bert'"),
        ({"model": "gpt2", "tokens": ["a"], "pre": "afmoe"}, r"tokenizer\.ggml\.pre needs one of .*qwen2.*, got 'afmoe'"),
        (
            {"model": "gpt2", "tokens": ["a"], "pre": "qwen2"},
            r"tokenizer\.ggml\.merges needs the merges of byte-level BPE, got no such key",
        ),
    ],
)
def test_a_tokenizer_that_would_give_other_ids_is_refused(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        built(tmp_path, **keys)
