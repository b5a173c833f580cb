"""What Headway lacks of vLLM's, in the words that several tables of names share."""

from __future__ import annotations

from typing import Final

TEXT_ALONE: Final = "not supported yet, because models read text alone"
NO_TRANSFER: Final = "not supported: caches are not handed from engine to engine; docs/offload.md has what outlives a request"


def of_each(names: str, hint: str) -> dict[str, str]:
    """The same hint for several names, which spaces part."""
    return dict.fromkeys(names.split(), hint)
