"""Headers of .gguf files that do not fit the file: refused in one line, at once, without memory for what they claim."""

from __future__ import annotations

import json
import random
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from gguf_models import save_gguf
from headway.core.contract.errors import ModelError
from headway.models.checkpoints.gguf.header import Header
from headway.models.checkpoints.gguf.hybrid_convert import build_tokenizer

pytest.importorskip("gguf")

gguf = pytest.importorskip("gguf")
TENSORS = {"token_embd.weight": ((8, 64), "F32"), "blk.0.ffn_up.weight": ((96, 64), "Q8_0"), "output_norm.weight": ((64,), "F16")}


def packed(tensors: list[dict[str, Any]], alignment: int = 32, counts: tuple[int, int] | None = None, keys: bytes = b"") -> bytes:
    """A header with a text, an array of texts, `keys` and these tensors: name, shape (innermost first), kind, offset."""
    text = lambda each: struct.pack("<Q", len(each)) + each  # noqa: E731
    found = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    found += text(b"tokens") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + text(b"") + text("é".encode()) + keys
    found += text(b"general.alignment") + struct.pack("<II", 4, alignment)
    for each in tensors:
        found += text(each["name"].encode()) + struct.pack("<I", len(each["shape"]))
        found += struct.pack(f"<{len(each['shape'])}Q", *each["shape"]) + struct.pack("<IQ", each["kind"], each["offset"])
    number, count = counts or (len(tensors), 3 + bool(keys))
    head = b"GGUF" + struct.pack("<IQQ", 3, number, count) + found
    return head + bytes(-len(head) % alignment)


def placed() -> tuple[list[dict[str, Any]], int]:
    """Three tensors one after the other, and the bytes of their data."""
    placed, offset = [], 0
    for name, (shape, kind) in TENSORS.items():
        number = gguf.GGMLQuantizationType[kind]
        columns, size = gguf.GGML_QUANT_SIZES[number]
        placed.append({"name": name, "shape": list(shape[::-1]), "kind": int(number), "offset": offset})
        offset += -(-int(numpy.prod(shape)) // columns * size // 32) * 32
    return placed, offset


def refused(path: Path, content: bytes) -> str:
    """The error of a file, or "" if it is fine; it takes neither time nor memory."""
    from headway.models.checkpoints.gguf.layout import check_layout

    path.write_bytes(content)
    start = time.perf_counter()
    tracemalloc.start()
    try:
        check_layout(path)
        return ""
    except ModelError as error:
        return str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 1 << 20
        assert time.perf_counter() - start < 2


CHANGES: dict[str, tuple[int, dict[str, Any], str]] = {
    "a type of fewer bytes": (
        0,
        {"kind": 1},
        "token_embd.weight' of type F16, .*1024 bytes .*got 2048 up to tensor blk.0.ffn_up",
    ),
    "a type of more bytes": (1, {"kind": 0}, "ffn_up.weight' of type F32, .*24576 bytes .*got 6528 up to tensor output_norm"),
    "a neighbour's type": (1, {"kind": 7}, "ffn_up.weight' of type Q5_1, .*4608 bytes"),
    "more bytes than the file has": (
        2,
        {"kind": 0},
        "output_norm.weight' of type F32, .*256 bytes .*got 128 up to the file's end",
    ),
    "fewer bytes than the file has": (2, {"shape": [32]}, "output_norm.weight' of type F16, .*64 bytes .*got 128"),
    "an unknown type": (1, {"kind": 4}, "needs one of GGML's types .*got type 4"),
    "rows that are no whole blocks": (1, {"shape": [48, 128]}, "multiple of 32 in type Q8_0, got .48, 128."),
    "another shape": (0, {"shape": [64, 9]}, r"shape \[64, 9\], .*needs 2304 bytes .*got 2048"),
    "an axis beyond 64 bits of elements": (0, {"shape": [2**40, 2**40]}, "token_embd.weight.*got 2048"),
    "an axis of nothing": (0, {"shape": [64, 0]}, "axes above 0"),
    "many axes": (0, {"shape": [1] * 9}, "at most 4 axes, got 9"),
    "an overlap": (1, {"offset": 2016}, "token_embd.weight.*2048 bytes .*got 2016"),
    "a gap": (1, {"offset": 2080}, "token_embd.weight.*2048 bytes .*got 2080"),
    "an offset between steps": (1, {"offset": 2049}, "ffn_up.weight' of type Q8_0, .*at offset 2049, needs"),
    "an offset beyond the file": (2, {"offset": 2**62}, "ffn_up.weight.*6528 bytes"),
    "no first tensor": (0, {"offset": 32}, "offset 0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_has_the_bytes_that_its_type_and_shape_need(tmp_path: Path, change: str) -> None:
    tensors, size = placed()
    assert not refused(tmp_path / "fine.gguf", packed(tensors) + bytes(size))
    number, changed, told = CHANGES[change]
    tensors[number] |= changed
    assert re.search(told, refused(tmp_path / "m.gguf", packed(tensors) + bytes(size)))


ALIGNMENTS = {
    1: "steps of 1",
    8: "steps of 8",
    16: "steps of 16",
    4096: "steps of 4096",
    24: "a power of two",
    0: "a power of two",
}


def aligned(tensors: list[dict[str, Any]], said: int) -> bytes:
    """A header whose data begin at a multiple of 32, and whose key says another number."""
    key = b"alignment" + struct.pack("<II", 4, 32)
    pads = (struct.pack("<Q", count) + bytes(count) + struct.pack("<IB", 7, 1) for count in range(1, 33))
    header = next(found for pad in pads if (found := packed(tensors, keys=pad)).endswith(bytes(31)))
    return header.replace(key, key[:-4] + struct.pack("<I", said))


def test_counts_and_lengths_are_compared_with_the_file(tmp_path: Path) -> None:
    tensors, size = placed()
    data = bytes(size)
    name = struct.pack("<Q", 2**60) + b"x"
    key = struct.pack("<Q", 1) + b"x"
    for content, told in (
        (packed(tensors, counts=(10**9, 3)), "the number of tensors needs at most "),
        (packed(tensors, counts=(3, 10**9)), "the number of keys needs at most "),
        (packed(tensors, keys=name), f"the name of a key needs {2**60} bytes"),
        (packed(tensors, keys=key + struct.pack("<IIQ", 9, 4, 10**12)), "the length of key 'x' needs at most "),
        (packed(tensors, keys=key + struct.pack("<IIQ", 9, 8, 2**63)), "the length of key 'x' needs at most "),
        (packed(tensors, keys=key + struct.pack("<IIQ", 9, 9, 1)), "an array of numbers or texts"),
        (packed(tensors, keys=key + struct.pack("<IQ", 8, 2**60)), f"key 'x' needs {2**60} bytes"),
        (packed(tensors, keys=key + struct.pack("<IQ", 99, 0)), "type 99"),
        *((aligned(tensors, said), told) for said, told in ALIGNMENTS.items()),
        (b"GGUF", "do not begin as one"),
    ):
        assert told in refused(tmp_path / "m.gguf", content + data * (len(content) > 24)), told


def test_a_file_cut_anywhere_or_with_any_byte_changed_is_refused_or_fine(tmp_path: Path) -> None:
    tensors, size = placed()
    head = packed(tensors)
    draw = random.Random(0)
    for cut in (*range(0, len(head), 7), len(head) + 5, len(head) + size - 33):
        assert refused(tmp_path / "m.gguf", (head + bytes(size))[:cut])
    for _ in range(100):
        changed = bytearray(head + bytes(size))
        for place in draw.choices(range(len(head)), k=2):
            changed[place] = draw.randrange(256)
        refused(tmp_path / "m.gguf", bytes(changed))


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
    """Tokenizer keys as llama.cpp's converter writes them: tokens by id, their types, and merges in order."""
    vocabulary = sorted(made.get_vocab().items(), key=lambda item: item[1])
    added = made.get_added_tokens_decoder()
    kinds = [1 if number not in added else 3 if added[number].special else 4 for _, number in vocabulary]
    return {"tokens": [token for token, _ in vocabulary], "token_type": kinds, **more}


def built(tmp_path: Path, **keys: Any) -> Any:
    """The file's tokenizer, saved and read as the engine reads it."""
    save_gguf(tmp_path / "tiny.gguf", "qwen3next", {"block_count": 1}, {"token_embd.weight": torch.ones(2, 2)}, **keys)
    build_tokenizer(Header(tmp_path / "tiny.gguf")).save_pretrained(tmp_path / "folder")
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
