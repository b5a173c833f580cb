"""Incremental text equals the whole text, never shows half a character, and ends before a stop text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.sampling.detokenizer import Detokenizer


class ByteTokenizer:
    """One token a byte: the hardest case, since most characters beyond ASCII are split."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


@pytest.mark.slow
@given(st.text(max_size=40))
def test_pieces_join_to_the_whole_and_never_end_in_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    shown = ""
    for byte in text.encode():
        detokenizer.append(byte)
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
        assert text.startswith(shown)
    assert detokenizer.flush() == text


def test_an_incomplete_end_is_shown_only_when_nothing_more_comes() -> None:
    detokenizer = Detokenizer(ByteTokenizer())
    for byte in "né".encode()[:-1]:
        detokenizer.append(byte)
    assert detokenizer.text == "n"
    assert detokenizer.flush() == "n\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("stop", ["END", "\n\n", "é"])
def test_the_text_ends_before_a_stop_text_and_nothing_of_it_is_shown_early(stop: str) -> None:
    detokenizer = Detokenizer(ByteTokenizer(), [stop, "never comes"])
    stopped, shown = False, ""
    for byte in f"some text{stop}and more".encode():
        stopped = detokenizer.append(byte)
        assert detokenizer.safe_text.startswith(shown)
        shown = detokenizer.safe_text
        assert stop[0] not in shown.removeprefix("some text")
        if stopped:
            break
    assert stopped
    assert detokenizer.flush() == "some text"


def test_text_that_only_looked_like_a_stop_is_shown_in_the_end() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), ["ENDING"])
    for byte in b"the END":
        detokenizer.append(byte)
    assert detokenizer.safe_text == "the "
    assert detokenizer.flush() == "the END"


def test_bytes_that_are_no_text_end_tokenizers_own_stream_and_not_ours() -> None:
    """Why `Detokenizer` is not tokenizers' DecodeStream; when this fails, that stream may take its place."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {name: number for number, name in enumerate(["<unk>", "k", "i", "<0x6B>", "<0x69>", "<0xA6>", " the"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokens = [vocab[name] for name in ("<0x6B>", "<0x69>", "<0xA6>", " the")]
    stream = decoders.DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(tokenizer, token) for token in tokens]
    detokenizer = Detokenizer(tokenizer)
    for token in tokens:
        detokenizer.append(token)
    assert detokenizer.flush().endswith(" the")


@pytest.mark.parametrize("pieces", [["the E", "N", "D of it"], ["the ", "END of it"], ["t", "he", " END"]], ids=str)
def test_a_stop_text_is_found_across_tokens_and_may_stay(pieces: list[str]) -> None:
    for include, expected in ((False, "the "), (True, "the END")):
        detokenizer = Detokenizer(Pieces(pieces), ["never", "END"], include_stop=include)
        stopped = [detokenizer.append(number) for number in range(len(pieces))]
        assert any(stopped)
        assert (detokenizer.text, detokenizer.stopped_by) == (expected, "END")


class Pieces:
    """Token n is the n-th of some texts."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(self._pieces[token] for token in token_ids)


def test_no_stop_text_counts_before_there_are_enough_tokens() -> None:
    detokenizer = Detokenizer(Pieces(["a END", " b", " END", " c END d"]), ["END"], min_tokens=3)
    assert [detokenizer.append(number) for number in range(4)] == [False, False, False, True]
    assert detokenizer.text == "a END b END c "


def test_the_stop_text_that_begins_first_ends_the_text() -> None:
    detokenizer = Detokenizer(Pieces(["x", "bcd"]), ["cd", "bc"])
    assert [detokenizer.append(0), detokenizer.append(1)] == [False, True]
    assert (detokenizer.text, detokenizer.stopped_by) == ("x", "bc")
