"""The bytes of a completion's tokens join to its text, also where tokens are parts of characters."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headway.core.sampling.detokenizer import Detokenizer
from headway.requests.request_state import TextBytes, TokenBytes

SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["the quick brown fox, the lazy dog's tail.", "naïve café  über", "日本 日曜", "नमस्ते", "don't stop!\n\n\tnow"] * 3
PARTS = ["the ", "quick", " fox", "  ", "\n", "é", "ü", "日本", "日", "\U0001f469‍\U0001f467", "नम", "\U0001f642"]
PARTS += ["x", ".", "'t", "�", "Ā"]


def wrapped(made: Tokenizer) -> Any:
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("<0xE9>x", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    return wrapped(made)


def byte_fallback(prefix: bool) -> Any:
    """As Llama's: bytes of unknown characters, and with prefix a space before each text, which its decoder takes away."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thequickbrownfx日é", "▁t", "he", "▁the", "▁▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([*[normalizers.Prepend("▁")] * prefix, normalizers.Replace(" ", "▁")])
    stripped = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])
    return wrapped(made)


def metaspace() -> Any:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(WORDS, trainer)
    return wrapped(made)


def word_piece() -> Any:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(WORDS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False))
    return wrapped(made)


MADE = {
    "byte-level": byte_level(),
    "byte fallback": byte_fallback(prefix=False),
    "byte fallback behind a space": byte_fallback(prefix=True),
    "metaspace": metaspace(),
    "word pieces": word_piece(),
}
LOSSLESS = list(MADE)[:3]


def random_texts(count: int) -> list[str]:
    draw = Random(0)
    return ["".join(draw.choices(PARTS, k=draw.randint(1, 12))) for _ in range(count)]


def joined(tokenizer: Any, ids: Sequence[int], hides_special: bool) -> bytes:
    text = TextBytes(tokens := TokenBytes(tokenizer), hides_special)
    found = [text.take([token, 5])[0] for token in ids]
    return b"".join(own for token, own in zip(ids, found, strict=True) if not (hides_special and token in tokens.special))


@pytest.mark.parametrize("name", MADE)
def test_bytes_join_to_the_text(name: str) -> None:
    tokenizer, draw = MADE[name], Random(1)
    for text in random_texts(150):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if name in LOSSLESS:
            assert joined(tokenizer, ids, hides_special=True) == text.encode()
        for token in draw.choices([0, 1, 2, *tokenizer.get_added_vocab().values()], k=draw.randint(0, 3)):
            ids.insert(draw.randint(0, len(ids)) if name == "word pieces" else 0, token)
        for hides_special in (True, False):
            shown = Detokenizer(tokenizer, skip_special_tokens=hides_special)
            shown.extend(ids)
            assert joined(tokenizer, ids, hides_special) == shown.flush().encode(), (text, ids)


@pytest.mark.parametrize("name", MADE)
def test_every_token_has_the_bytes_that_it_adds_to_a_text(name: str) -> None:
    tokenizer, draw = MADE[name], Random(2)
    ids = list(range(len(tokenizer)))
    for _ in range(5):
        draw.shuffle(ids)
        whole = [token for token in ids if not ("fallback" in name and 3 <= token < 259)]  # one byte after another is no text
        assert joined(tokenizer, whole, hides_special=False).decode("utf-8", "replace") == tokenizer.decode(whole)


def test_a_token_of_a_byte_has_this_byte() -> None:
    for name in LOSSLESS[1:]:
        tokenizer = MADE[name]
        for first in (200, 259):
            text = TextBytes(TokenBytes(tokenizer), hides_special=True)
            text.take([first])
            assert text.take(range(3, 259)) == [bytes([byte]) for byte in range(256)], "whatever stands before"


def test_without_a_tokenizer_tokens_have_no_bytes() -> None:
    assert TextBytes(TokenBytes(None), hides_special=True).take([3, 4]) == [b"", b""]
