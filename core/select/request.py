"""What a user asks of --attn-backend, phase by phase."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headway.core.contract.errors import ConfigError
from headway.core.contract.metadata import Phase

BackendRequest = Mapping[Phase, str]
"""What a user asked for each phase: a backend's name or "auto"."""


def request_for(name: str, phases: Iterable[Phase]) -> str:
    """What to ask for so that a backend serves the phases that it claims, and auto the others."""
    served = set(phases)
    prompts = {Phase.PREFILL, Phase.EXTEND}
    if prompts <= served and Phase.DECODE not in served:
        return f"prefill={name},decode=auto"
    return f"prefill=auto,decode={name}" if Phase.DECODE in served and not prompts <= served else name


def parse_backend_request(text: str) -> BackendRequest:
    """Read --attn-backend; "prefill" covers EXTEND as well.

    :raises ConfigError: text is not auto, NAME, or prefill=NAME,decode=NAME.
    """
    text = text.strip()
    if "=" not in text and "," not in text and text:
        return dict.fromkeys(Phase, text)
    request = {}
    for part in text.split(","):
        key, _, name = (piece.strip() for piece in part.partition("="))
        if key not in ("prefill", "decode") or not name or key in request:
            raise ConfigError("attn_backend", "auto, NAME, or prefill=NAME,decode=NAME", repr(text))
        request[key] = name
    prefill, decode = request.get("prefill", "auto"), request.get("decode", "auto")
    return {Phase.PREFILL: prefill, Phase.EXTEND: prefill, Phase.DECODE: decode}
