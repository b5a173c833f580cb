"""Prefix misses: why tokens of a prompt were computed although the engine has a prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items
from copy import copy
from typing import Final, TypeVar

from headway.core.engine.cache.prefix_lookup import GroupPrefixes, packed
from headway.core.engine.data.sequence import Sequence
from headway.core.engine.data.stats import EngineStats

_MOST_EVICTED = 2**15  # Maximum number of evicted pages whose names are remembered, in about 6 MB
_MOST_STARTS = 2**10  # Maximum number of first pages of prompts that are remembered

FOUND: Final = ("device", "offload")
"""Sources of the tokens that were found in the prefix cache. Every other source is the reason of a miss."""
CAPACITY: Final = "capacity"
WINDOW: Final = "window"
FORGOTTEN: Final = "forgotten"
"""Causes of an eviction: the page was needed for new tokens, or was needed after it had left its layers' window, or all prefixes
were forgotten."""

Value = TypeVar("Value")


class PrefixMisses:
    """Bounded memory of evicted pages and of the starts of prompts, from which the reason for a miss follows.

    The memory changes once per evicted page and once per prompt, never per token. A miss counts as `unseen` if its eviction is no
    longer remembered, or if the evicted page was not full.
    """

    def __init__(self, prefixes: Items[GroupPrefixes], stats: EngineStats) -> None:
        self._prefixes = prefixes
        self._stats = stats
        self._cause_of: OrderedDict[bytes, str] = OrderedDict()  # Name of an evicted page -> cause
        self._root_of: OrderedDict[bytes, tuple[bytes, bytes | None]] = OrderedDict()
        """First page's tokens -> root, and digest of the adapter, of the latest prompt with them."""

    def evicted(self, digest: bytes | None, cause: str) -> None:
        """Note that the content of a page can no longer be found. digest: name of the page, or None if it was not full."""
        self._stats.evictions[cause] += 1
        if digest is not None:
            _remember(self._cause_of, digest, cause, _MOST_EVICTED)

    def began(self, seq: Sequence) -> None:
        """Note that the first page of a sequence can be found."""
        if seq.embedded is None:  # the token ids of an embedded prompt are zeros
            adapter = seq.adapter.digest if seq.adapter else None
            _remember(self._root_of, self._start_of(seq), (seq.prefix_root, adapter), _MOST_STARTS)

    def sources(self, seq: Sequence, found: int, restored: int, held_reason: str) -> dict[str, int]:
        """Return the number of tokens of an admitted prompt by source: `device` and `offload` for found tokens, otherwise the
        reason why the tokens are computed. The numbers add up to the length of the prompt.

        found: number of tokens found. restored: number of these tokens that were restored from outside the pool. held_reason:
        reason why tokens between `found` and `seq.num_held`, which are cached, are computed.
        """
        end, held = seq.num_tokens - 1, max(seq.num_held, found)
        parts, place = {"device": found - restored, "offload": restored}, found
        for reason, until in ((held_reason, held), self._evicted_after(seq, held), self._under_other_root(seq, held)):
            if min(until, end) > place:
                parts[reason] = parts.get(reason, 0) + min(until, end) - place
                place = min(until, end)
        parts |= {"unseen": end - place, "last_token": 1}
        return {source: count for source, count in parts.items() if count}

    def _evicted_after(self, seq: Sequence, held: int) -> tuple[str, int]:
        """Return why the first page after `held` tokens was evicted, and the number of tokens up to the next page that was never
        seen."""
        found = "unseen", 0
        for prefixes in self._prefixes:
            size, cause, page = prefixes.group.page_size, "", held // prefixes.group.page_size
            while (page + 1) * size <= seq.num_tokens:
                digest = prefixes.digest(seq, page)
                if not prefixes.index.knows(digest):
                    if digest not in self._cause_of:
                        break
                    cause = cause or self._cause_of[digest]
                page += 1
            if cause and page * size > found[1]:
                found = "evicted" if cause == CAPACITY else cause, page * size
        return found

    def _under_other_root(self, seq: Sequence, held: int) -> tuple[str, int]:
        """Return the number of tokens that are cached for another adapter or with another salt, and which of the two differs."""
        known = None if held or seq.embedded is not None else self._root_of.get(self._start_of(seq))
        root, adapter = known or (seq.prefix_root, None)
        if root == seq.prefix_root:
            return "adapter", 0
        twin = copy(seq)
        twin.block_hashes = []
        twin.prefix_root = root
        reason = "salt" if adapter == (seq.adapter.digest if seq.adapter else None) else "adapter"
        return reason, self._prefixes[0].longest(twin, seq.num_tokens - 1, partly=True)

    def _start_of(self, seq: Sequence) -> bytes:
        return packed(seq.token_ids[: self._prefixes[0].group.page_size])


def _remember(memory: OrderedDict[bytes, Value], key: bytes, value: Value, most: int) -> None:
    """Add an entry as the latest, and drop the oldest entry beyond `most`."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > most:
        memory.popitem(last=False)
