"""Encoding of texts so that names of control tokens in them stay text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from headway.core.chat.template import is_control
from headway.core.contract.errors import ConfigError
from headway.core.system.json_text import parse_json
from headway.requests.prompts import Message

_TRUSTED: Final = frozenset(("system", "developer", "assistant"))  # Roles whose messages the application or the model writes


class ControlTokens:
    """Encoder for texts in which the names of control tokens, such as "<|im_end|>", are text.

    A copy of the tokenizer, otherwise identical, has unguessable names for the control tokens. The chat template still writes its
    own control tokens. `protect` hides names within messages before the template is applied. `encode` then gives the template's
    tokens their secret names and restores the messages' text before the copy encodes both. The whole text is encoded at once, so
    a text without such names gets the same tokens as from the original tokenizer.

    Control tokens are special tokens, and added tokens that the chat template writes. Thread-safe.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Copy a transformers tokenizer (up to a second). :raises ConfigError: if the tokenizer is not based on the tokenizers
        library."""
        self._nonce = secrets.token_hex(16)
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        template = str(getattr(tokenizer, "chat_template", None) or "")
        if not hasattr(backend, "to_str"):
            raise _unable(f"a {type(tokenizer).__name__}")
        described = parse_json(backend.to_str(), "tokenizer", any_number=True)
        ids = {
            each["content"]: each["id"]
            for each in described["added_tokens"]
            if is_control(each["content"], each["special"], template)
        }
        self._secrets = {name: f"{self._nonce}t{token}t" for name, token in ids.items()}
        self._tokenizer = _renamed(described, self._secrets)
        for name, token in ids.items():
            if self._tokenizer.token_to_id(self._secrets[name]) != token:
                raise _unable(f"one whose token {name!r} cannot be told from others")
        names = sorted(self._secrets, key=len, reverse=True)
        self._starts = {name[:end] for name in names for end in range(1, len(name))}
        self._ends = {name[start:] for name in names for start in range(1, len(name))}
        self._longest = max(map(len, names), default=0)
        listed = "|".join(map(re.escape, names)) or "(?!)"
        hidden = rf"{self._nonce}h([0-9a-f]*)h"
        self._name = re.compile(listed)
        self._hidden = re.compile(hidden)
        self._either = re.compile(f"{hidden}|({listed})")

    def protect(self, messages: Iterable[Message]) -> list[Mapping[str, Any]]:
        """Hide the names of control tokens in the messages whose role is not system, developer or assistant."""
        return [
            {key: self._hide(value) if isinstance(value, str) and key != "role" else value for key, value in each.items()}
            if each["role"] not in _TRUSTED
            else each
            for each in messages
        ]

    def encode(self, rendered: str) -> tuple[str, list[int]]:
        """Return the rendered text with the original words of protected messages, and its token ids."""

        def replaced(found: re.Match[str]) -> str:
            return bytes.fromhex(found[1]).decode() if found[2] is None else self._secrets[found[2]]

        ids = self._tokenizer.encode(self._either.sub(replaced, rendered), add_special_tokens=False).ids
        return self._hidden.sub(lambda found: bytes.fromhex(found[1]).decode(), rendered), ids

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids without encoding any part of the text as a control token. add_special_tokens: add the
        tokenizer's own special tokens, such as BOS."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def _hide(self, text: str) -> str:
        """Hide control token names, and partial names at either end that adjacent text could complete."""
        words = text.strip()
        before, _, after = text.partition(words) if words else ("", "", text)
        head = next((words[:size] for size in self._sizes(words) if words[:size] in self._ends), "")
        words = words[len(head) :]
        tail = next((words[-size:] for size in self._sizes(words) if words[-size:] in self._starts), "")
        words = words[: len(words) - len(tail)]
        return before + self._mark(head) + self._name.sub(lambda found: self._mark(found[0]), words) + self._mark(tail) + after

    def _sizes(self, words: str) -> Sequence[int]:
        return range(min(self._longest, len(words)), 0, -1)

    def _mark(self, text: str) -> str:
        """Return a replacement for a text, made of lower-case letters and digits, which templates do not change."""
        return f"{self._nonce}h{text.encode().hex()}h" if text else ""


def _renamed(described: dict[str, Any], names: Mapping[str, str]) -> Any:
    """Return a tokenizer made from its description, with some tokens renamed. The tokenizer's model cannot produce the renamed
    tokens from text."""
    from tokenizers import Tokenizer

    model = described["model"]
    described["truncation"] = described["padding"] = None
    for each in described["added_tokens"]:
        each["content"] = names.get(each["content"], each["content"])
    vocab = model.get("vocab", {})
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:  # Unigram: pairs of a token and its score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [each for each in model["merges"] if _joined(each) not in names]
    try:
        return Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises nothing more specific
        raise _unable(f"one that does not let itself be copied: {error}") from error


def _joined(merge: str | Sequence[str]) -> str:
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)


def _unable(got: str) -> ConfigError:
    return ConfigError("split_special_tokens", "a tokenizer of the tokenizers library (tokenizer.json)", got, "leave it out")
