"""Block manager: allocates pages, counts references, shares common prefixes, and evicts the least recently used page."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple, Protocol

from headway.core.contract.state import CHECKPOINT_TOKENS
from headway.core.engine.cache.checkpoints import Checkpoints
from headway.core.engine.cache.misses import CAPACITY, FORGOTTEN, WINDOW, PrefixMisses
from headway.core.engine.cache.prefix_lookup import BooksError, GroupPrefixes, StoredElsewhere
from headway.core.engine.data.groups import NULL_PAGE, CacheGroup
from headway.core.engine.data.page_mover import STATES
from headway.core.engine.data.pool import SMALLEST_CHUNK
from headway.core.engine.data.sequence import PageTable, PrefixCopy, Sequence
from headway.core.engine.data.state_slots import Checkpoint
from headway.core.engine.data.stats import EngineStats


class PageKeeper(Protocol):
    """Saves contents of pages elsewhere before they are overwritten. It is notified of every free page with reusable content."""

    def freed(self, page: int, group: int) -> None:
        """Note that no sequence references the page any more, and that prefix lookups in this group can find its content."""

    def acquired(self, page: int) -> None:
        """Note that a sequence references a free page again, to reuse its content."""

    def allocated(self, page: int) -> None:
        """Note that a free page will be overwritten. Prefix lookups can find its content until this call returns."""

    def forgotten(self, everywhere: bool) -> None:
        """Forget the contents of all pages, so that none of them is used after this call returns. everywhere: True to include
        contents on disk."""


class FreePages:
    """Reference counts, and the free pages in eviction order: pages without reusable content, then the least recently freed."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        """first: index of the first usable page. Earlier pages are never allocated."""
        self.ref_counts = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(first, num_pages))
        self._first = first

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, page: int) -> bool:
        return page in self._free

    def num_among(self, pages: Iterable[int]) -> int:
        """Return the number of free pages among these pages. The method is fast (30 ns per page), because it is called while
        requests run."""
        return sum(map(self._free.__contains__, pages))

    def acquire(self, page: int) -> bool:
        """Add a reference to a page. Returns whether the page was free."""
        self.ref_counts[page] += 1
        if self.ref_counts[page] > 1:
            return False
        del self._free[page]
        return True

    def drop(self, page: int) -> bool:
        """Drop a reference to a page. Returns whether the page is now free. A free page goes to the end of the eviction order."""
        self.ref_counts[page] -= 1
        if self.ref_counts[page]:
            return False
        self._free[page] = None
        return True

    def make_next(self, page: int) -> None:
        """Make a free page without reusable content the next to be allocated."""
        self._free.move_to_end(page, last=False)

    def allocate_page(self) -> int:
        """Allocate the next free page, with one reference."""
        page, _ = self._free.popitem(last=False)
        self.ref_counts[page] = 1
        return page

    def check_integrity(self, owners: Mapping[int, Items[str]]) -> None:
        """Check that every page is free, or has one reference for each of its owners. :raises BooksError: if one does not."""
        counts = [len(owners.get(page, ())) for page in range(len(self.ref_counts))]
        free = {page for page, count in enumerate(counts) if count == 0 and page >= self._first}
        if counts == self.ref_counts and self._free.keys() == free:
            return
        wrong = (
            each for each, count in enumerate(self.ref_counts) if counts[each] != count or (each in self._free) != (each in free)
        )
        page = next(wrong)
        named, got = ", ".join(owners.get(page, ())) or "none", self.ref_counts[page]
        state = "free" if page in self._free else "not free"
        need = "to be free" if page in free else f"{counts[page]} references and not to be free"
        raise BooksError(f"page {page}: needs {need}, got {got} references and {state}; owners: {named}")


SHORTEST_FIRST_HIT = 8
"""Minimum number of tokens in a prefix hit that shares no whole page. A hit makes a prompt extend a context instead of being a
plain prefill. This costs more than computing the few tokens that any two prompts share by chance or through their template."""
_NEVER = sys.maxsize  # More tokens than any sequence reaches


class PagesUsed(NamedTuple):
    """Page counts of one cache group."""

    used: int
    cached: int
    """Number of pages that no sequence references and whose content prefix lookups can find."""
    num_freed: int
    """Number of pages that sequences have freed since the engine's start because the pages left the attention window."""


class AbsentPage(NamedTuple):
    """A page or the state of a sequence, whose content must still be copied into the pool. The group of a state is STATES."""

    group: int
    place: int
    """Index of the page in the sequence's table. 0 for a state."""
    page: int
    """Target page in the pool; for a state, the target slot."""


class BlockManager:
    """Allocates pages of the pool to sequences, in one table per cache group. With one group, a page is a block.

    A full page is named by the hash of its tokens and of all earlier ones. A freed page keeps its content and name until it is
    allocated again, to any group, so that an equal prefix finds it; the least recently freed page is evicted first (after vLLM's
    automatic prefix caching). Shared pages are full, hence never written again. If a page matches only in part, that part is
    copied into a page of the new sequence (copy on write; SGLang's radix cache splits its nodes instead), so prefix hits have
    token granularity at any page size.

    A windowed group frees a page as soon as no later query sees any of it; the null page replaces it in the table.
    """

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: Items[CacheGroup] | None = None,
        smallest_chunk: int = SMALLEST_CHUNK,
        checkpoints: Checkpoints | None = None,
        stats: EngineStats | None = None,
        ahead: int = 0,
    ) -> None:
        """num_pages: number of pages, including reserved pages. smallest_chunk: see SMALLEST_CHUNK. checkpoints: index of saved
        states, or None. stats: counts evictions. ahead: see `LayerSpecs.ahead`."""
        self.groups = tuple(groups or (CacheGroup(block_size),))
        self.enable_prefix_caching = enable_prefix_caching
        self.ahead = ahead
        """Number of a prompt's first tokens that one step computes. Prefix hits contain all of them."""
        self._smallest_chunk = max(smallest_chunk, ahead)
        self._windowed = [number for number, group in enumerate(self.groups) if group.window is not None]
        self._unwindowed = [number for number, group in enumerate(self.groups) if group.window is None]
        first = NULL_PAGE + 1 if self._windowed else 0
        self.num_pages = num_pages - first
        self._pages = FreePages(num_pages, first)
        self.keeper: PageKeeper | None = None
        """Object that saves the contents of free pages outside the pool. None means that contents are not saved."""
        self.prefixes = [GroupPrefixes(group, block_size) for group in self.groups]
        self.misses = PrefixMisses(self.prefixes, EngineStats() if stats is None else stats)
        self._outside: set[int] = set()  # Free pages that left the window of their last sequence
        self._shortest_hit = max(min([SHORTEST_FIRST_HIT, *(group.page_size for group in self.groups)]), ahead)
        self._num_freed = [0] * len(self.groups)
        self.checkpoints = checkpoints

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence references, including pages with reusable content."""
        return len(self._pages)

    @property
    def num_cached(self) -> int:
        """Number of pages that no sequence references and whose content prefix lookups can find."""
        return sum(self._pages.num_among(prefixes.index) for prefixes in self.prefixes)

    def num_holders(self, page: int) -> int:
        """Return the number of sequences that reference a page."""
        return self._pages.ref_counts[page]

    def usage(self, holders: Iterable[Sequence]) -> list[PagesUsed]:
        """Return the page counts of each group. holders: all sequences with pages."""
        tables = [seq.tables for seq in holders]
        used = [len({page for each in tables for page in each[number].held}) for number in range(len(self.groups))]
        cached = [self._pages.num_among(prefixes.index) for prefixes in self.prefixes]
        return [PagesUsed(*counts) for counts in zip(used, cached, self._num_freed, strict=True)]

    def attach_prefix(self, seq: Sequence, partly: bool = True) -> int:
        """Attach the cached pages of the longest prefix hit to a sequence without pages. Returns the number of cached tokens.

        Every group must have the prefix cached. At least the last token is left to compute, because its logits are needed.

        partly: True to count the matching part of one more page. The copy of this part is listed in `seq.prefix_copies`, and must
        be made before the step that computes the remaining tokens. Until then, the sequence references the source page.
        """
        assert not seq.tables, "a sequence is given its prefix before anything else"
        seq.tables = [PageTable(group.page_size) for group in self.groups]
        length = held = 0
        if self.enable_prefix_caching and not seq.computes_whole_prompt:
            length = held = self._longest_cached(seq, seq.num_tokens - 1, partly and self.checkpoints is None)
            if self.checkpoints is not None:
                seq.junction = held // self.checkpoints.interval * self.checkpoints.interval
                length = self._longest_checkpoint(seq, seq.junction, None)
            elif held < self._shortest_hit:
                length = 0
        seq.num_held = held if partly else max(held, seq.num_held)
        seq.num_computed = length
        if length == 0:
            return 0
        if self.checkpoints is not None:
            seq.restored_from = self.checkpoints.use(self.name_of_start(seq, length))
        for number, (prefixes, table) in enumerate(zip(self.prefixes, seq.tables, strict=True)):
            first, pages, source, count = prefixes.hit(seq, length)
            table.pages = [NULL_PAGE] * first + pages
            table.num_freed_pages = first
            table.num_published = len(table.pages)
            if table.pages:
                seq.table_changes.append((number, 0, list(table.pages)))
            for page in pages:
                self.acquire(page)
            if count:
                self.acquire(source)
                seq.prefix_copies.append(PrefixCopy(number, source, count))
        return length

    def report_on(self, seq: Sequence) -> dict[str, int]:
        """Return the number of tokens of a prompt that is being admitted, by source; see `PrefixMisses.sources`."""
        if not self.enable_prefix_caching or seq.computes_whole_prompt:
            return {"prompt_logprobs" if self.enable_prefix_caching else "disabled": seq.num_tokens}
        short = seq.num_held < self._shortest_hit
        held_reason = "state" if self.checkpoints is not None else "short" if short else "no_page"
        return self.misses.sources(seq, seq.num_computed, seq.num_restored, held_reason)

    def attach_pages(self, seq: Sequence, length: int) -> list[AbsentPage] | None:
        """Attach pages for the first `length` tokens to a sequence without pages, and a state slot if the model has state layers.

        Pages found in the pool are shared. Missing pages are allocated and returned for the caller to fill. The result may
        include a partial last page (only for sequences with a state) and the state, which comes last. Until the caller sets
        `num_computed` to length, no token of the sequence counts as computed. Returns None, and changes nothing, if too few pages
        are free.
        """
        seq.tables = [PageTable(group.page_size) for group in self.groups]
        seq.num_computed = length
        acquired: list[int] = []
        absent: list[tuple[int, int]] = []
        for number, (group, prefixes, table) in enumerate(zip(self.groups, self.prefixes, seq.tables, strict=True)):
            first, end, whole = group.num_pages_before_window(length), -(-length // group.page_size), length // group.page_size
            table.pages = [NULL_PAGE] * end
            table.num_freed_pages = table.num_published = first
            for place in range(first, end):
                page = prefixes.find(seq, place) if place < whole else None
                if page is None:
                    absent.append((number, place))
                else:
                    table.pages[place] = page
                    acquired.append(page)
                    self.acquire(page)
        able = self.has_room(seq, seq.num_to_compute, extra_pages=len(absent))
        seq.num_computed = 0
        state = self._hold_state(seq, length) if able and self.checkpoints is not None else None
        if not able or (state is None and self.checkpoints is not None):
            for page in reversed(acquired):
                self.drop(page)
            seq.tables = []
            return None
        made = [AbsentPage(number, place, self.allocate_page()) for number, place in absent]
        for number, place, page in made:
            seq.tables[number].pages[place] = page
        seq.table_changes = [(number, 0, list(table.pages)) for number, table in enumerate(seq.tables) if table.pages]
        return made if state is None else made + state

    def _hold_state(self, seq: Sequence, length: int) -> list[AbsentPage] | None:
        """Reserve a slot for the state after a sequence's first `length` tokens. Returns the copy to make (none if the pool has
        this state), or None if no slot is free."""
        assert self.checkpoints is not None
        digest = self.name_of_start(seq, length)
        here = self.checkpoints.knows(digest)
        slot = seq.held_state = seq.restored_from = self.checkpoints.hold(digest)
        if slot is None:
            return None
        return [] if here else [AbsentPage(STATES, 0, slot)]

    def longest_hit(self, seq: Sequence, partly: bool, also: StoredElsewhere | None = None) -> int:
        """Return the length in tokens of the longest prefix cached in every group. also: function that finds content outside the
        pool."""
        if self.checkpoints is None:
            length = self._longest_cached(seq, seq.num_tokens - 1, partly, also)
            return length if length >= self._shortest_hit else 0
        interval = self.checkpoints.interval
        longest = self._longest_cached(seq, seq.num_tokens - 1, False, also) if len(self.checkpoints) or also is not None else 0
        return self._longest_checkpoint(seq, longest // interval * interval, also)

    def _longest_checkpoint(self, seq: Sequence, longest: int, also: StoredElsewhere | None) -> int:
        """Return the length of the longest prefix, up to `longest` tokens, that ends at a saved state.

        longest: length of a prefix that is cached in every group. A windowed group may lack the pages of a shorter prefix.
        """
        assert self.checkpoints is not None
        windows = any(group.window is not None for group in self.groups)
        for length in range(longest, 0, -self.checkpoints.interval):
            digest = self.name_of_start(seq, length)
            known = self.checkpoints.knows(digest) or (also is not None and also(STATES, digest))
            if known and (not windows or self._longest_cached(seq, length, False, also) == length):
                return length
        return 0

    def name_of_start(self, seq: Sequence, length: int) -> bytes:
        """Return the name of a sequence's first `length` tokens: their chained hash, which is also the digest of a page that ends
        after them."""
        return self.prefixes[0].digest_of_start(seq, length)

    def _longest_cached(self, seq: Sequence, at_most: int, partly: bool, also: StoredElsewhere | None = None) -> int:
        """Return the length of the longest prefix, up to `at_most` tokens, whose pages are cached in every group."""
        length = before = at_most
        while True:
            for number, prefixes in enumerate(self.prefixes):
                length = prefixes.longest(seq, length, partly, None if also is None else partial(also, number))
            if length == before or len(self.prefixes) == 1:
                break
            before = length
        return length

    def reserve_states(self, seq: Sequence, count: int) -> None:
        """Reserve slots for the states that a step of `count` tokens saves: at the end of a prompt, where the prompt diverges
        from another one, and at the end of a chunk if slots are free."""
        store, first = self.checkpoints, seq.num_computed
        if store is None or not self.enable_prefix_caching or first % CHECKPOINT_TOKENS or first + count > seq.num_tokens:
            return
        end, whole = first + count, first + count == seq.num_tokens
        last = (end - whole) // store.interval * store.interval  # an equal prompt computes at least its last token
        for position, evict in {last: whole, seq.junction: True}.items():
            if not first < position <= end or (position - first) % CHECKPOINT_TOKENS:
                continue
            digest = self.name_of_start(seq, position)
            slot = None if store.knows(digest) else store.allocate(evict)
            if slot is not None:
                seq.checkpoints.append(Checkpoint(position - first, slot, digest))

    def publish_states(self, seq: Sequence) -> None:
        """Publish the states that a launched step saves, and release the state that it started from."""
        self._release_state(seq)
        if self.checkpoints is not None:
            for each in seq.checkpoints:
                self.checkpoints.name(each.digest, each.slot)
        seq.checkpoints = []

    def _release_state(self, seq: Sequence) -> None:
        if seq.held_state is not None and self.checkpoints is not None:
            self.checkpoints.unhold(seq.held_state)
        seq.restored_from = seq.held_state = None

    def whole_chunk(self, seq: Sequence, count: int) -> int:
        """Return a chunk length, up to `count`, that ends at a position where a state can be saved, so that later chunks can save
        states too."""
        if self.checkpoints is None or not self.enable_prefix_caching or count >= seq.num_to_compute:
            return count
        interval = self.checkpoints.interval
        end = (seq.num_computed + count) // interval * interval
        return end - seq.num_computed if end > seq.num_computed else count

    def fitting(self, seq: Sequence, count: int) -> int:
        """Return the chunk length to compute: `count`, or less if windowed groups lack free pages for `count` tokens. A reduced
        length is at least the smallest chunk."""
        if not self._windowed or count <= self._smallest_chunk:
            return count
        free = self.num_free - sum(self._missing(seq, count, number) for number in self._unwindowed)
        if free < 0:
            return count

        def missing(tokens: int) -> int:
            return sum(self._missing(seq, tokens, number) for number in self._windowed)

        return max(bisect_right(range(count + 1), free, key=missing) - 1, self._smallest_chunk)

    def has_room(self, seq: Sequence, num_new_tokens: int, extra_pages: int = 0) -> bool:
        """Return whether enough pages are free to compute a sequence's new tokens in the smallest chunks, plus `extra_pages`
        pages."""
        missing = extra_pages
        for number, (group, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
            most = group.most_pages(seq.num_computed + num_new_tokens, self._smallest_chunk) - len(table.held)
            missing += min(self._missing(seq, num_new_tokens, number), max(most, 0))
        return missing <= self.num_free

    def _missing(self, seq: Sequence, num_new_tokens: int, number: int) -> int:
        pages = -(-(seq.num_computed + num_new_tokens) // self.groups[number].page_size)
        return max(pages - len(seq.tables[number].pages), 0)

    def reserve(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Reserve pages for a sequence's next tokens. Returns False, and changes nothing, if too few pages are free."""
        end, missing, capacity = seq.num_computed + num_new_tokens, 0, _NEVER
        for table in seq.tables:
            count = -(-end // table.page_size) - len(table.pages)
            if count > 0:
                missing += count
        if missing > len(self._pages):
            return False
        for number, table in enumerate(seq.tables):
            pages, held = table.pages, len(table.pages)
            count = -(-end // table.page_size) - held
            if count > 0:
                new = [self.allocate_page() for _ in range(count)]
                seq.table_changes.append((number, held, new))
                pages += new
                held += count
            if held * table.page_size < capacity:
                capacity = held * table.page_size
        seq.capacity = capacity
        return True

    def advance(self, seq: Sequence, partly: bool = False) -> None:
        """Publish the pages that computed tokens have filled, and free the pages that left the window.

        Must be called after every step that reaches `seq.next_boundary`. partly: True to publish partially filled last pages too,
        after a chunk of a prompt.
        """
        boundary = self._publish(seq, partly)
        if self._windowed:
            boundary = min(boundary, self._free_before_windows(seq))
        seq.next_boundary = boundary

    def _free_before_windows(self, seq: Sequence) -> int:
        """Free the pages that left the windows. Returns the number of known tokens at which more pages can be freed."""
        known, boundary = seq.num_known, _NEVER
        for number in self._windowed:
            group, table = self.groups[number], seq.tables[number]
            first, outside = table.num_freed_pages, group.num_pages_before_window(known)
            if first < outside:
                for page in table.pages[first:outside]:
                    self.drop(page)
                    if page in self._pages:
                        self._outside.add(page)
                table.pages[first:outside] = [NULL_PAGE] * (outside - first)
                seq.table_changes.append((number, first, table.pages[first:outside]))
                self._num_freed[number] += outside - first
                table.num_freed_pages = outside
            boundary = min(boundary, group.position_past_pages(outside + 1))
        return boundary

    def copies_launched(self, seq: Sequence) -> None:
        """Release the source pages of a sequence's prefix copies, once the copies have been launched."""
        for copy in seq.prefix_copies:
            self.drop(copy.source)
        seq.prefix_copies = []

    def release(self, seq: Sequence) -> None:
        """Free all pages of a sequence, last page first: prefixes are shared more often, so they should be evicted later."""
        if seq.error is None and not seq.prefix_copies:  # else its last pages may hold wrong data
            self._publish(seq, partly=True)
        self.copies_launched(seq)
        for table in seq.tables:
            for page in reversed(table.held):
                self.drop(page)
        seq.tables = []
        seq.table_changes = []
        seq.started = False
        seq.capacity = seq.num_computed = seq.num_unverified = seq.num_restored = 0
        seq.next_boundary = 0
        seq.newest_at = -1
        seq.state_index = 0
        seq.junction = 0
        self._release_state(seq)
        if self.checkpoints is not None:
            for each in seq.checkpoints:
                self.checkpoints.free(each.slot)
        seq.checkpoints = []

    def forget_prefixes(self, everywhere: bool = False) -> None:
        """Hide all cached contents from later lookups; sequences keep their pages. everywhere: True to include contents on
        disk."""
        if self.keeper is not None:
            self.keeper.forgotten(everywhere)
        if self.checkpoints is not None:
            self.checkpoints.clear()
        for prefixes in self.prefixes:
            for page in prefixes.index:
                self.misses.evicted(prefixes.index.digest_of(page), FORGOTTEN)
                if page in self._pages:  # no reusable content any more: allocate it first
                    self._pages.make_next(page)
            prefixes.index.clear()

    def _publish(self, seq: Sequence, partly: bool) -> int:
        """Publish filled pages. Returns the number of known tokens at which another page can be published."""
        if not self.enable_prefix_caching:
            return _NEVER
        known, boundary = min(seq.num_computed, len(seq.token_ids)), _NEVER
        for table, prefixes in zip(seq.tables, self.prefixes, strict=False):  # a sequence that holds nothing has no tables
            size = table.page_size
            full = known // size
            for number in range(table.num_published, full):
                prefixes.name(seq, number, table.pages[number], size)
            if table.num_published == 0 < full and prefixes is self.prefixes[0]:
                self.misses.began(seq)
            table.num_published = full
            if partly and known % size:
                prefixes.name(seq, full, table.pages[full], known % size)
            if (full + 1) * size < boundary:
                boundary = (full + 1) * size
        return boundary

    def acquire(self, page: int) -> None:
        """Add a reference to a page, to reuse its content."""
        if self._pages.acquire(page):
            self._outside.discard(page)
            if self.keeper is not None:
                self.keeper.acquired(page)

    def drop(self, page: int) -> None:
        """Drop a reference to a page."""
        if self._pages.drop(page):
            groups = [number for number, prefixes in enumerate(self.prefixes) if page in prefixes.index]
            if not groups:  # no reusable content
                self._pages.make_next(page)
            elif self.keeper is not None:
                self.keeper.freed(page, groups[0])

    def allocate_page(self) -> int:
        """Allocate a free page and forget its former content."""
        page = self._pages.allocate_page()
        if self.keeper is not None:
            self.keeper.allocated(page)
        for prefixes in self.prefixes:
            if page in prefixes.index:
                self.misses.evicted(prefixes.index.discard(page), WINDOW if page in self._outside else CAPACITY)
        self._outside.discard(page)
        return page

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Check that the books of pages balance: every page is free, or has the references that `holders` (all sequences with
        pages) imply; every name belongs to the page's content; and tables have room for the computed tokens.

        :raises BooksError: if they do not. The message names a page and its owners.
        """
        owners, group_of = dict[int, list[str]](), dict[int, int]()
        for seq in holders:
            owner = f"{seq.request_id}.{seq.index}"
            self._check_tables(seq, owner)
            held = [(number, page) for number, table in enumerate(seq.tables) for page in table.held]
            for number, page in [*held, *((copy.group, copy.source) for copy in seq.prefix_copies)]:
                owners.setdefault(page, []).append(owner)
                if group_of.setdefault(page, number) != number:
                    raise BooksError(f"page {page}: needs one group, got {group_of[page]} and {number}; owners: {owners[page]}")
        self._pages.check_integrity(owners)
        if self.checkpoints is not None:
            states = [seq.held_state for seq in holders if seq.held_state is not None]
            self.checkpoints.check_integrity([each.slot for seq in holders for each in seq.checkpoints], states)
        for number, prefixes in enumerate(self.prefixes):
            prefixes.check_integrity()
            for page in prefixes.index:
                if group_of.setdefault(page, number) != number:
                    raise BooksError(f"page {page}: named in group {number}, and owned or named in group {group_of[page]}")

    def _check_tables(self, seq: Sequence, owner: str) -> None:
        """Check that the tables of a sequence name pages of the pool, each once and with the sequence's content, and have room
        for its computed tokens."""
        first = len(self._pages.ref_counts) - self.num_pages
        for prefixes, table in zip(self.prefixes, seq.tables, strict=False):  # a sequence that holds nothing has no tables
            wrong = [page for page in table.held if not first <= page < first + self.num_pages]
            wrong += [page for page, count in Counter(table.held).items() if count > 1]
            wrong += [page for page in table.pages[: table.num_freed_pages] if page != NULL_PAGE]
            if wrong:
                raise BooksError(f"page {wrong[0]}: needs to be a page of the pool, once in a table; owners: {owner}")
            for place in range(table.num_freed_pages, min(table.num_published, len(table.pages))):
                digest = prefixes.index.digest_of(table.pages[place])
                if digest not in (None, prefixes.digest(seq, place)):
                    raise BooksError(f"page {table.pages[place]}: its name is of other tokens than page {place} of {owner}")
            room = len(table.pages) * table.page_size
            if not seq.num_computed <= room >= seq.capacity:
                need = f"room for {max(seq.num_computed, seq.capacity)} tokens"
                raise BooksError(f"page {table.pages[-1] if room else 'none'}: {owner} needs {need} in its table, got {room}")
