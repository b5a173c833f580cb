"""Reasoning between two marks, before the answer."""

from __future__ import annotations

from headway.core.chat.text_source import PieceWriter, TextSource, Waiting
from headway.core.contract.chat_parsers import ReasoningSyntax


class ThinkReader:
    """Reads the reasoning and passes on the content that follows."""

    def __init__(self, tags: ReasoningSyntax, prompt: str) -> None:
        self._tags = tags
        self._begun = tags.begun(prompt)

    def __call__(self, source: TextSource, writer: PieceWriter) -> Waiting:
        """See `Program`."""
        tags, begun = self._tags, self._begun
        if begun is not False:
            source.keep()
            yield from source.space()
            found = yield from source.starts((tags.opens,))
            before = source.kept()
            if found or begun or tags.assumed:
                yield from self._reasoning(source, writer)
            else:
                writer.content(before)
        yield from source.everything(writer.content)

    def _reasoning(self, source: TextSource, writer: PieceWriter) -> Waiting:
        """Read up to the mark that closes; white space around it is nobody's."""
        held = ""

        def write(text: str) -> None:
            nonlocal held
            text = held + text
            kept = text.rstrip()
            held = text[len(kept) :]
            writer.reasoning(kept)

        yield from source.space()
        mark = yield from source.until((self._tags.closes, *self._tags.ends_before), write)
        if mark in self._tags.ends_before:
            writer.content(mark)
        yield from source.space()
