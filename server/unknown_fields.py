"""Fields that a server does not know: what would change the answer is refused, the others are named in a header and the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar, Final

from pydantic import BaseModel, ConfigDict

from headway.core.contract.errors import ConfigError
from headway.core.system.text import shown

log = logging.getLogger("headway")

HEADER: Final = b"x-headway-ignored"
"""Header of an answer that lists the fields of its request which were ignored."""
_MOST_NAMED: Final = 20
_MOST_LOGGED: Final = 1000
"""Names of which the log tells, each once: clients make them up."""

_REFUSED: Final = {
    "use_beam_search": "false, because tokens are drawn or chosen one by one",
    "logits_processors": "none in a request; a server's are options of its engine",
    "functions": "none; tools has taken its place in OpenAI's API",
    "function_call": "none; tool_choice has taken its place in OpenAI's API",
    "audio": "none, because models here write text",
    "web_search_options": "none, because this server searches nothing",
    **dict.fromkeys(("image_data", "video_data", "audio_data", "multi_modal_data"), "none, because models here read text alone"),
    "lora_path": "none; the model that a request to /v1/completions names may be an adapter",
    "custom_logit_processor": "none in a request; a server's are options of its engine",
    "thinking_token_budget": "none; max_tokens bounds reasoning and answer together",
    "prompt_embeds": "none in a chat; /v1/completions takes them",
}
"""Fields of the APIs of OpenAI, vLLM and SGLang, old and new, without which the answer is another, and what they need here."""
_WITHOUT_EFFECT: Final = frozenset(
    (
        *("metadata", "store", "service_tier", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prediction", "length_penalty", "early_stopping", "request_id", "cache_salt", "betas", "guided_decoding_backend"),
        "spaces_between_special_tokens",
    )
)
"""Fields that change no answer here: who asks, how it is billed and kept, and parameters of beam search where none is run."""


class Fields(BaseModel):
    """A body that keeps the fields which it does not know."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    known_extras: ClassVar[frozenset[str]] = frozenset()
    """Further fields that are read by their names."""

    def unknown(self) -> Sequence[str]:
        """The names of fields with a value that are ignored.

        :raises ConfigError: one that would change the answer.
        """
        extra = self.model_extra
        if not extra:
            return ()
        for name, need in _REFUSED.items():
            if extra.get(name):
                raise ConfigError(name, need, shown(extra[name], 60))
        known = _WITHOUT_EFFECT | _REFUSED.keys() | self.known_extras
        return [name for name, value in extra.items() if value is not None and name not in known]


class IgnoredFields:
    """Names the ignored fields of a server's requests: each in the log once, and in a header."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def header(self, names: Sequence[str], path: str) -> list[tuple[bytes, bytes]]:
        """The header of the answer to a request with these ignored fields. path: of the request."""
        if not names:
            return []
        shown_names = [_safe(name) for name in names[:_MOST_NAMED]]
        new = [name for name in shown_names if name not in self._logged]
        if new and len(self._logged) < _MOST_LOGGED:
            self._logged.update(new)
            log.warning("%s: fields that this server does not know are ignored: %s", path, ", ".join(new))
        more = [f"and {len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        return [(HEADER, ", ".join([*shown_names, *more]).encode("latin-1"))]


def _safe(name: str) -> str:
    """A name that may stand in a header: printable ASCII, not long."""
    return "".join(each if each.isascii() and (each.isalnum() or each in "_-.") else "?" for each in name[:60])
