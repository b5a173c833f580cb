"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.core.sampling.logprobs import Logprob
from headway.outputs import LogprobsByToken

LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have; as vLLM writes it."""


def chat_logprobs(places: Sequence[LogprobsByToken], most: int, as_ids: bool) -> dict[str, Any]:
    """`logprobs` of a chat's choice. most: of top_logprobs. as_ids: tokens as "token_id:123"."""
    content = []
    for place in places:
        entries = [_entry(token, found, as_ids) for token, found in place.items()]
        likely = [entry for entry, found in zip(entries, place.values(), strict=True) if (found.rank or 0) <= most]
        likely.sort(key=lambda each: -each["logprob"])
        content.append({**entries[0], "top_logprobs": likely[:most]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    places: Sequence[LogprobsByToken | None], token_ids: Sequence[int], offset: int, most: int, as_ids: bool, decode: Any
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion's choice, and the offset of what follows.

    places: one for each of token_ids; None: of the first token of a prompt. offset: characters before them. decode: text of a
    token.
    """
    listed: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for place, token in zip(places, token_ids, strict=False):
        text = decode(token) if place is None else place[token].decoded_token or ""
        listed["text_offset"].append(offset)
        listed["tokens"].append(_name(token, text, as_ids))
        offset += len(text)
        if place is None:
            listed["token_logprobs"].append(None)
            listed["top_logprobs"].append(None)
            continue
        listed["token_logprobs"].append(_finite(place[token]))
        top = {_name(each, found.decoded_token or "", as_ids): _finite(found) for each, found in list(place.items())[: most + 1]}
        listed["top_logprobs"].append(top if most else None)
    return listed, offset


def _entry(token: int, found: Logprob, as_ids: bool) -> dict[str, Any]:
    text = found.decoded_token or ""
    return {"token": _name(token, text, as_ids), "logprob": _finite(found), "bytes": list(text.encode("utf-8", "replace"))}


def _name(token: int, text: str, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else text


def _finite(found: Logprob) -> float:
    return max(found.logprob, LOWEST)
