"""Answers of other APIs that are chats in another form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headway.outputs import CompletionOutput
from headway.server.openai.answers import Answer
from headway.server.openai.chat import ChatAnswer

SHARED_FIELDS: Final = (
    *("seed", "presence_penalty", "frequency_penalty", "logit_bias", "min_p", "repetition_penalty", "min_tokens", "priority"),
    *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "allowed_token_ids", "bad_words"),
    *("structured_outputs", "split_special_tokens", "chat_template_kwargs", "truncate_prompt_tokens"),
)
"""Fields of a chat that these APIs do not have and take all the same."""


def text_parts(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """The content of a chat's message of these texts: one, or parts, which are joined as the chat template wants it."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


class ConvertedAnswer(Answer):
    """Writes a chat's answer in another form: the chat reads the text, and this writes what was read."""

    def __init__(self, chat: ChatAnswer, name: str = "") -> None:
        """name: see `Answer`."""
        super().__init__(chat.body, chat.model, name)
        self.chat = chat

    def check_ended(self, new: CompletionOutput) -> None:
        """See `Answer`."""
        self.chat.check_ended(new)
