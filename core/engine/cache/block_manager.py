"""Hands pages to sequences: reference counts, reuse of equal prefixes, and a free list in least-recently-used order."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from functools import partial
from typing import NamedTuple, Protocol

from headway.core.contract.state import CHECKPOINT_TOKENS
from headway.core.engine.cache.checkpoints import Checkpoints
from headway.core.engine.cache.prefix_lookup import GroupPrefixes, KeptElsewhere
from headway.core.engine.data.groups import NULL_PAGE, CacheGroup
from headway.core.engine.data.page_mover import STATES
from headway.core.engine.data.pool import SMALLEST_CHUNK
from headway.core.engine.data.sequence import PageTable, PrefixCopy, Sequence
from headway.core.engine.data.state_slots import Checkpoint


class PageKeeper(Protocol):
    """Keeps contents of pages elsewhere before they are overwritten; told of every free page with a content to reuse."""

    def freed(self, page: int, group: int) -> None:
        """Note that no sequence holds the page any more, and that its content can be found in a group."""

    def taken(self, page: int) -> None:
        """Note that a free page is held again for its content."""

    def handed_out(self, page: int) -> None:
        """Note that a free page is about to be overwritten; its content can be found until this returns."""

    def forgotten(self, everywhere: bool) -> None:
        """Forget every content: none can be found or used any more once this returns; everywhere: nor what is on disk."""


class FreePages:
    """Reference counts, and the free pages in order: first those without a content to reuse, then those freed longest ago."""

    def __init__(self, num_pages: int, first: int = 0) -> None:
        """first: pages before this one are never handed out."""
        self.ref_counts = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(first, num_pages))
        self._first = first

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, page: int) -> bool:
        return page in self._free

    def num_among(self, pages: Iterable[int]) -> int:
        """Count the free ones of these pages. The count costs 30 ns per page: it is asked for while requests run."""
        return sum(map(self._free.__contains__, pages))

    def take(self, page: int) -> bool:
        """Hold a page once more. Returns whether it was free."""
        self.ref_counts[page] += 1
        if self.ref_counts[page] > 1:
            return False
        del self._free[page]
        return True

    def give(self, page: int) -> bool:
        """Hold a page once less. Returns whether it is free now; then it is the last to be handed out."""
        self.ref_counts[page] -= 1
        if self.ref_counts[page]:
            return False
        self._free[page] = None
        return True

    def put_first(self, page: int) -> None:
        """Make a free page the next to be handed out: there is nothing in it to reuse."""
        self._free.move_to_end(page, last=False)

    def hand_out(self) -> int:
        """Hand out the next free page, held once."""
        page, _ = self._free.popitem(last=False)
        self.ref_counts[page] = 1
        return page

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that every page is free or held exactly as often as `held` lists the page."""
        counts = [0] * len(self.ref_counts)
        for page in held:
            counts[page] += 1
        assert counts == self.ref_counts, "reference counts differ from what sequences hold"
        free = {page for page, count in enumerate(counts) if count == 0 and page >= self._first}
        assert set(self._free) == free, "a page leaked or is owned and free"


SHORTEST_FIRST_HIT = 8
"""Fewest tokens that a prefix hit must spare where no whole page is shared. With a hit a prompt extends a context instead of
being a plain prefill, and that costs more than the few tokens which any two prompts share by chance or through their template."""
_NEVER = sys.maxsize  # A number of tokens that no sequence reaches


class PagesUsed(NamedTuple):
    """Counts of one group's pages."""

    used: int
    cached: int
    """Pages that no sequence holds and whose content can be found."""
    given_back: int
    """Pages that sequences have given back behind the window since the start."""


class AbsentPage(NamedTuple):
    """A page of a sequence whose content is to be brought into the pool; or its state, whose group is STATES."""

    group: int
    place: int
    """Index in the sequence's table; 0 for a state."""
    page: int
    """Page of the pool that the content is to be copied into; of a state, the slot."""


class BlockManager:
    """Hands pages of the pool to sequences, in one table for each cache group. With one group a page is a block.

    A full page is named by the hash of its tokens and of all before it. A freed page keeps its content and name until it is
    handed out again, to whichever group, so an equal prefix finds it; the page that was freed longest ago goes first (after
    vLLM's automatic prefix caching). Shared pages are full, hence never written again. Where a page agrees only in part, that
    part is copied into a page of the sequence's own (copy on write; SGLang's radix cache splits its nodes instead), so prefix
    hits count by the token, whatever the page size.

    A windowed group gives a page back as soon as no later query sees any of it; the null page takes its place in the table.
    """

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: Items[CacheGroup] | None = None,
        smallest_chunk: int = SMALLEST_CHUNK,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """num_pages: null page included if windowed. smallest_chunk: see SMALLEST_CHUNK. checkpoints: kept states, or None."""
        self.groups = tuple(groups or (CacheGroup(block_size),))
        self.enable_prefix_caching = enable_prefix_caching
        self._smallest_chunk = smallest_chunk
        self._windowed = [number for number, group in enumerate(self.groups) if group.window is not None]
        self._unwindowed = [number for number, group in enumerate(self.groups) if group.window is None]
        first = NULL_PAGE + 1 if self._windowed else 0
        self.num_pages = num_pages - first
        self._pages = FreePages(num_pages, first)
        self.keeper: PageKeeper | None = None
        """Keeps contents of free pages beyond the pool; None: nothing does."""
        self.prefixes = [GroupPrefixes(group, block_size) for group in self.groups]
        self._given_back = [0] * len(self.groups)
        self.checkpoints = checkpoints

    @property
    def num_free(self) -> int:
        """Pages that no sequence holds, those with a reusable content included."""
        return len(self._pages)

    @property
    def num_cached(self) -> int:
        """Pages that no sequence holds and whose content can be found."""
        return sum(self._pages.num_among(prefixes.index) for prefixes in self.prefixes)

    def num_holders(self, page: int) -> int:
        """Number of sequences that hold a page."""
        return self._pages.ref_counts[page]

    def usage(self, holders: Iterable[Sequence]) -> list[PagesUsed]:
        """The pages that each group uses. holders: all sequences with pages."""
        tables = [seq.tables for seq in holders]
        used = [len({page for each in tables for page in each[number].held}) for number in range(len(self.groups))]
        cached = [self._pages.num_among(prefixes.index) for prefixes in self.prefixes]
        return [PagesUsed(*counts) for counts in zip(used, cached, self._given_back, strict=True)]

    def attach_prefix(self, seq: Sequence, partly: bool = True) -> int:
        """Give a sequence without pages those that already hold its start. Returns the number of tokens spared.

        A prefix must be held in every group. partly: the part of a further page that agrees counts as well; it is noted in
        `seq.prefix_copies` and must be copied before the step that computes the rest; the sequence holds the source until then.
        At least the last token is left to compute, since its logits are wanted.
        """
        assert not seq.tables, "a sequence is given its prefix before anything else"
        seq.tables = [PageTable(group.page_size) for group in self.groups]
        hits = self.enable_prefix_caching and not seq.computes_whole_prompt
        length = 0
        if hits and self.checkpoints is None:
            length = self.longest_hit(seq, partly)
        elif hits and self.checkpoints is not None:
            held, interval = self._longest_held(seq, seq.num_tokens - 1, False), self.checkpoints.interval
            seq.junction = held // interval * interval
            length = self._longest_checkpoint(seq, seq.junction, None)
        seq.num_computed = length
        if length == 0:
            return 0
        if self.checkpoints is not None:
            seq.restored_from = self.checkpoints.use(self.name_of_start(seq, length))
        for number, (prefixes, table) in enumerate(zip(self.prefixes, seq.tables, strict=True)):
            first, pages, source, count = prefixes.hit(seq, length)
            table.pages = [NULL_PAGE] * first + pages
            table.num_given_back = first
            table.num_published = len(table.pages)
            if table.pages:
                seq.table_changes.append((number, 0, list(table.pages)))
            for page in pages:
                self.take(page)
            if count:
                self.take(source)
                seq.prefix_copies.append(PrefixCopy(number, source, count))
        return length

    def attach_pages(self, seq: Sequence, length: int) -> list[AbsentPage] | None:
        """Give a sequence without pages those of its first `length` tokens, and where layers keep states, the slot of one.

        Pages that the pool holds are shared; the others are new and returned, for the caller to fill. A last page that is not
        whole, which only a sequence with a state has, and the state are among them, the state being the last. Until the caller
        sets `num_computed` to length, nothing of the sequence counts as computed. None, and nothing changed: there is no room.
        """
        seq.tables = [PageTable(group.page_size) for group in self.groups]
        seq.num_computed = length
        taken: list[int] = []
        absent: list[tuple[int, int]] = []
        for number, (group, prefixes, table) in enumerate(zip(self.groups, self.prefixes, seq.tables, strict=True)):
            first, end, whole = group.num_behind(length), -(-length // group.page_size), length // group.page_size
            table.pages = [NULL_PAGE] * end
            table.num_given_back = table.num_published = first
            for place in range(first, end):
                page = prefixes.find(seq, place) if place < whole else None
                if page is None:
                    absent.append((number, place))
                else:
                    table.pages[place] = page
                    taken.append(page)
                    self.take(page)
        able = self.has_room(seq, seq.num_to_compute, beside=len(absent))
        seq.num_computed = 0
        state = self._hold_state(seq, length) if able and self.checkpoints is not None else None
        if not able or (state is None and self.checkpoints is not None):
            for page in reversed(taken):
                self.give(page)
            seq.tables = []
            return None
        made = [AbsentPage(number, place, self.hand_out()) for number, place in absent]
        for number, place, page in made:
            seq.tables[number].pages[place] = page
        seq.table_changes = [(number, 0, list(table.pages)) for number, table in enumerate(seq.tables) if table.pages]
        return made if state is None else made + state

    def _hold_state(self, seq: Sequence, length: int) -> list[AbsentPage] | None:
        """Give a sequence the slot of the state after its first `length` tokens, and return the copy; None if no slot is free."""
        assert self.checkpoints is not None
        digest = self.name_of_start(seq, length)
        here = self.checkpoints.knows(digest)
        slot = seq.held_state = seq.restored_from = self.checkpoints.hold(digest)
        if slot is None:
            return None
        return [] if here else [AbsentPage(STATES, 0, slot)]

    def longest_hit(self, seq: Sequence, partly: bool, also: KeptElsewhere | None = None) -> int:
        """Length in tokens of the longest prefix that every group holds. also: pages and states that count as held."""
        if self.checkpoints is None:
            length = self._longest_held(seq, seq.num_tokens - 1, partly, also)
            return length if length >= min([SHORTEST_FIRST_HIT, *(group.page_size for group in self.groups)]) else 0
        interval = self.checkpoints.interval
        longest = self._longest_held(seq, seq.num_tokens - 1, False, also) if len(self.checkpoints) or also is not None else 0
        return self._longest_checkpoint(seq, longest // interval * interval, also)

    def _longest_checkpoint(self, seq: Sequence, longest: int, also: KeptElsewhere | None) -> int:
        """Length of the longest start, up to `longest` tokens, at whose end a state is kept.
        longest: tokens that every group holds; where the group has a window, a shorter start need not be."""
        assert self.checkpoints is not None
        windows = any(group.window is not None for group in self.groups)
        for length in range(longest, 0, -self.checkpoints.interval):
            digest = self.name_of_start(seq, length)
            known = self.checkpoints.knows(digest) or (also is not None and also(STATES, digest))
            if known and (not windows or self._longest_held(seq, length, False, also) == length):
                return length
        return 0

    def name_of_start(self, seq: Sequence, length: int) -> bytes:
        """The name of a sequence's first `length` tokens: the digest of the page that ends there, if one does."""
        return self.prefixes[0].digest_of_start(seq, length)

    def _longest_held(self, seq: Sequence, at_most: int, partly: bool, also: KeptElsewhere | None = None) -> int:
        """Length of the longest start, up to `at_most` tokens, of which every group holds the pages."""
        length = before = at_most
        while True:
            for number, prefixes in enumerate(self.prefixes):
                length = prefixes.longest(seq, length, partly, None if also is None else partial(also, number))
            if length == before or len(self.prefixes) == 1:
                break
            before = length
        return length

    def keep_states(self, seq: Sequence, count: int) -> None:
        """Reserve slots for the states that a step of `count` tokens is to leave: at the end of a prompt, where the prompt leaves
        another one, and, as long as slots are free, at the end of a chunk."""
        kept, first = self.checkpoints, seq.num_computed
        if kept is None or not self.enable_prefix_caching or first % CHECKPOINT_TOKENS or first + count > seq.num_tokens:
            return
        end, whole = first + count, first + count == seq.num_tokens
        last = (end - whole) // kept.interval * kept.interval  # an equal prompt computes at least its last token
        for position, evict in {last: whole, seq.junction: True}.items():
            if not first < position <= end or (position - first) % CHECKPOINT_TOKENS:
                continue
            digest = self.name_of_start(seq, position)
            slot = None if kept.knows(digest) else kept.hand_out(evict)
            if slot is not None:
                seq.checkpoints.append(Checkpoint(position - first, slot, digest))

    def states_kept(self, seq: Sequence) -> None:
        """Make the states findable that a launched step leaves, and let go of the one that the step has begun with."""
        self._let_state_go(seq)
        if self.checkpoints is not None:
            for each in seq.checkpoints:
                self.checkpoints.name(each.digest, each.slot)
        seq.checkpoints = []

    def _let_state_go(self, seq: Sequence) -> None:
        if seq.held_state is not None and self.checkpoints is not None:
            self.checkpoints.let_go(seq.held_state)
        seq.restored_from = seq.held_state = None

    def whole_chunk(self, seq: Sequence, count: int) -> int:
        """Tokens, up to `count`, of a part of a prompt that ends where a state can be kept, so that later parts keep theirs."""
        if self.checkpoints is None or not self.enable_prefix_caching or count >= seq.num_to_compute:
            return count
        interval = self.checkpoints.interval
        end = (seq.num_computed + count) // interval * interval
        return end - seq.num_computed if end > seq.num_computed else count

    def fitting(self, seq: Sequence, count: int) -> int:
        """Return the tokens, up to `count`, of a sequence's next chunk: fewer if only windowed groups lack room for all."""
        if not self._windowed or count <= self._smallest_chunk:
            return count
        free = self.num_free - sum(self._missing(seq, count, number) for number in self._unwindowed)
        if free < 0:
            return count

        def missing(tokens: int) -> int:
            return sum(self._missing(seq, tokens, number) for number in self._windowed)

        return max(bisect_right(range(count + 1), free, key=missing) - 1, self._smallest_chunk)

    def has_room(self, seq: Sequence, num_new_tokens: int, beside: int = 0) -> bool:
        """Return whether there are pages for these tokens of a sequence, in the smallest chunks, and `beside` further pages."""
        missing = beside
        for number, (group, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
            most = group.most_pages(seq.num_computed + num_new_tokens, self._smallest_chunk) - len(table.held)
            missing += min(self._missing(seq, num_new_tokens, number), max(most, 0))
        return missing <= self.num_free

    def _missing(self, seq: Sequence, num_new_tokens: int, number: int) -> int:
        pages = -(-(seq.num_computed + num_new_tokens) // self.groups[number].page_size)
        return max(pages - len(seq.tables[number].pages), 0)

    def reserve(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Make room for the next tokens of a sequence; False, and nothing changed, if there are too few free pages."""
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
                new = [self.hand_out() for _ in range(count)]
                seq.table_changes.append((number, held, new))
                pages += new
                held += count
            if held * table.page_size < capacity:
                capacity = held * table.page_size
        seq.capacity = capacity
        return True

    def advance(self, seq: Sequence, partly: bool = False) -> None:
        """Name the pages that the computed tokens have filled, so that others may share them, and give back what lies behind a
        window. Must be called after every step that reaches `seq.next_boundary`.

        partly: name the last pages as well, as far as they are filled: after a part of a prompt.
        """
        boundary = self._publish(seq, partly)
        if self._windowed:
            boundary = min(boundary, self._give_back(seq))
        seq.next_boundary = boundary

    def _give_back(self, seq: Sequence) -> int:
        """Give back the pages behind the windows; returns how many tokens must be known before there is more to give back."""
        known, boundary = seq.num_known, _NEVER
        for number in self._windowed:
            group, table = self.groups[number], seq.tables[number]
            first, behind = table.num_given_back, group.num_behind(known)
            if first < behind:
                for page in table.pages[first:behind]:
                    self.give(page)
                table.pages[first:behind] = [NULL_PAGE] * (behind - first)
                seq.table_changes.append((number, first, table.pages[first:behind]))
                self._given_back[number] += behind - first
                table.num_given_back = behind
            boundary = min(boundary, group.first_behind(behind + 1))
        return boundary

    def copies_launched(self, seq: Sequence) -> None:
        """Give back the pages that a sequence's prefix was copied from: the copies have been launched."""
        for copy in seq.prefix_copies:
            self.give(copy.source)
        seq.prefix_copies = []

    def release(self, seq: Sequence) -> None:
        """Take all pages of a sequence back, its end first: a start is shared more often, so it should be kept longer."""
        if seq.error is None and not seq.prefix_copies:  # else its last pages may not hold what they should
            self._publish(seq, partly=True)
        self.copies_launched(seq)
        for table in seq.tables:
            for page in reversed(table.held):
                self.give(page)
        seq.tables = []
        seq.table_changes = []
        seq.started = False
        seq.capacity = seq.num_computed = seq.num_unverified = 0
        seq.next_boundary = 0
        seq.newest_at = -1
        seq.state_index = 0
        seq.junction = 0
        self._let_state_go(seq)
        if self.checkpoints is not None:
            for each in seq.checkpoints:
                self.checkpoints.give_back(each.slot)
        seq.checkpoints = []

    def forget_prefixes(self, everywhere: bool = False) -> None:
        """Make every cached content unfindable; pages that sequences hold stay theirs. everywhere: on disk too."""
        if self.keeper is not None:
            self.keeper.forgotten(everywhere)
        if self.checkpoints is not None:
            self.checkpoints.clear()
        for prefixes in self.prefixes:
            for page in prefixes.index:
                if page in self._pages:  # nothing to reuse any more: hand it out first
                    self._pages.put_first(page)
            prefixes.index.clear()

    def _publish(self, seq: Sequence, partly: bool) -> int:
        """Name the pages that are filled; returns how many tokens must be known before there is another to name."""
        if not self.enable_prefix_caching:
            return _NEVER
        known, boundary = min(seq.num_computed, len(seq.token_ids)), _NEVER
        for table, prefixes in zip(seq.tables, self.prefixes, strict=False):  # a sequence that holds nothing has no tables
            size = table.page_size
            full = known // size
            for number in range(table.num_published, full):
                prefixes.name(seq, number, table.pages[number], size)
            table.num_published = full
            if partly and known % size:
                prefixes.name(seq, full, table.pages[full], known % size)
            if (full + 1) * size < boundary:
                boundary = (full + 1) * size
        return boundary

    def take(self, page: int) -> None:
        """Hold a page for its content."""
        if self._pages.take(page) and self.keeper is not None:
            self.keeper.taken(page)

    def give(self, page: int) -> None:
        """Hold a page no longer."""
        if self._pages.give(page):
            groups = [number for number, prefixes in enumerate(self.prefixes) if page in prefixes.index]
            if not groups:  # nothing to reuse
                self._pages.put_first(page)
            elif self.keeper is not None:
                self.keeper.freed(page, groups[0])

    def hand_out(self) -> int:
        """Hand out a free page, whose former content is forgotten."""
        page = self._pages.hand_out()
        if self.keeper is not None:
            self.keeper.handed_out(page)
        for prefixes in self.prefixes:
            prefixes.index.discard(page)
        return page

    def check_integrity(self, holders: list[Sequence]) -> None:
        """Assert that every page is free or held exactly as often as `holders` (all sequences with pages) hold it."""
        pages, group_of = list[int](), dict[int, int]()
        for seq in holders:
            held = [(number, page) for number, table in enumerate(seq.tables) for page in table.held]
            assert len({page for _, page in held}) == len(held), f"{seq.request_id} holds a page twice"
            for number, page in [*held, *((copy.group, copy.source) for copy in seq.prefix_copies)]:
                assert group_of.setdefault(page, number) == number, f"page {page} belongs to two groups"
                pages.append(page)
        self._pages.check_integrity(pages)
        if self.checkpoints is not None:
            states = [seq.held_state for seq in holders if seq.held_state is not None]
            self.checkpoints.check_integrity([each.slot for seq in holders for each in seq.checkpoints], states)
        named: list[int] = []
        for prefixes in self.prefixes:
            prefixes.index.check_integrity()
            named += prefixes.index
        assert len(set(named)) == len(named), "a page is named in two groups"
