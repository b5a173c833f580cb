"""Built-in proposers of draft tokens, and the step times from which the number of draft tokens is chosen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from headway.core.contract.text_plugins import ProposerInfo, ProposerOptions

WIDTHS = (2, 4, 8)
"""Numbers of query tokens per sequence for which verifications are captured. Other numbers are rounded up."""
MAX_VERIFIED = 256
"""Maximum query tokens of a captured verification."""
PLAIN = 1
"""Width of a step for which no drafts were requested."""
NO_DRAFTS = 0
"""Width of a step for which the proposers found no drafts. The host waited for the previous step without a benefit."""

_RATE, _FALL = 0.1, 0.3
"""Weights of the newest time in a running mean: if the time is above the mean, and if it is below. The second weight is larger
because other work on the machine only makes steps longer, and because a width that seems too slow is seldom tried again."""
_OUTLIER = 1.5  # Maximum of a step's time, as a multiple of the mean: a longer step was delayed by something else
_NEEDED = 4  # Steps before a mean is used; until then the minimum is kept, because the first steps take longer

AttentionTime = Callable[[int, int, int], float]
"""Function (sequences, query tokens of each, cached plus new tokens of each) -> microseconds of a step's attention, infinite if
unknown."""


def width_of(query_len: int) -> int:
    """Return the width of a step whose longest verification has this many query tokens."""
    return next((width for width in WIDTHS if width >= query_len), query_len)


def is_captured(num_seqs: int, query_len: int) -> bool:
    """Return whether a graph is captured for this verification. Graphs are captured for each width, with numbers of sequences
    that are powers of two."""
    return width_of(query_len) << (num_seqs - 1).bit_length() <= MAX_VERIFIED


@cache
def size_class(num_seqs: int) -> int:
    """Return the class of steps that take about as long as steps of this many sequences: two classes per octave."""
    return round(2 * math.log2(num_seqs))


class StepTimes:
    """Durations of steps in seconds, keyed by size class of the number of sequences, and by width."""

    def __init__(self, attention: AttentionTime | None = None) -> None:
        """attention: looks up times in a crossover table. None means no table."""
        self._attention = attention
        self._means: dict[tuple[int, int], tuple[float, int]] = {}  # Mean seconds and number of steps, by size class and width

    def note(self, num_seqs: int, width: int, seconds: float) -> None:
        """Record the seconds from the end of the previous step to the end of a step of this width."""
        key = size_class(num_seqs), width
        mean, count = self._means.get(key, (seconds, 0))
        if count < _NEEDED:
            self._means[key] = min(mean, seconds), count + 1
            return
        seconds = min(seconds, _OUTLIER * mean)
        rate = _RATE if seconds > mean else _FALL
        self._means[key] = mean + rate * (seconds - mean), count + 1

    def of(self, num_seqs: int, widths: Iterable[int], kv_len: int = 1) -> dict[int, float]:
        """Return width -> seconds of a step, with PLAIN first. Empty if plain steps of this size have not been measured.

        An unmeasured width is estimated as a plain step plus the additional attention time in the crossover table. Without a
        table, the estimate is the time of a plain step.
        """
        plain = self._measured(num_seqs, PLAIN)
        if plain is None:
            return {}
        return {PLAIN: plain} | {width: self._verify_seconds(num_seqs, width, kv_len, plain) for width in widths}

    def _verify_seconds(self, num_seqs: int, width: int, kv_len: int, plain: float) -> float:
        measured = self._measured(num_seqs, width)
        if measured is not None:
            return measured
        plain = max(plain, self._measured(num_seqs, NO_DRAFTS) or 0.0)
        if self._attention is None:
            return plain
        longer = self._attention(num_seqs, width, kv_len + width - 1) - self._attention(num_seqs, 1, kv_len)
        return plain + (1e-6 * max(longer, 0.0) if math.isfinite(longer) else 0.0)

    def is_measured(self, num_seqs: int, width: int) -> bool:
        """Return whether the time of a width is measured rather than estimated."""
        return self._measured(num_seqs, width) is not None

    def forget(self, num_seqs: int) -> None:
        """Forget the times of steps of this size with drafts. The cause of slow steps may have ended, which only new steps with
        drafts can show."""
        middle = size_class(num_seqs)
        for size, width in list(self._means):
            if abs(size - middle) <= 1 and width != PLAIN:
                del self._means[size, width]

    def _measured(self, num_seqs: int, width: int) -> float | None:
        """Return the mean duration, in seconds, of steps of this size class or of a neighbouring class. None if not measured."""
        middle, means = size_class(num_seqs), self._means
        for size in (middle, middle - 1, middle + 1):
            found = means.get((size, width))
            if found is not None and found[1] >= _NEEDED:
                return found[0]
        return None


_ANCHORS = (3, 1)  # Lengths of the indexed n-grams, longest first
_MOST_PLACES = 32  # Latest places of an n-gram to examine: bounds the cost of a draft and the precision of counts


class ScoredDraft(NamedTuple):
    """A draft. score: the sum of its tokens' probabilities, which is the expected number of accepted tokens."""

    tokens: list[int]
    score: float


EMPTY_DRAFT = ScoredDraft([], 0.0)


class SuffixIndex:
    """Index of earlier occurrences of a token sequence and of their continuations: the counts of a suffix tree without the tree.

    A suffix tree that grows token by token has a node for every prefix of every suffix, or needs extra work to avoid these nodes.
    The required counts, of how often each token followed the longest match, can be computed from the positions of the match. So
    the index stores the texts and the positions of their short n-grams. A search narrows down the positions token by token, like
    a descent in the tree. Only the newest text grows, at its end. Texts are dropped as a whole, oldest first.
    """

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._newest = -1
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # The places of each n-gram, (text, position after it)

    def begin(self) -> None:
        """Begin a new text, to which `append` adds."""
        self._newest += 1
        self._texts[self._newest] = []

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the end of the newest text."""
        text, places = self._texts[self._newest], self._places
        first = len(text)
        text += tokens
        for size in _ANCHORS:
            # An n-gram is indexed once a token follows it: the last one when the text grows.
            for end in range(max(first, size), len(text)):
                listed = places.setdefault(tuple(text[end - size : end]), [])
                listed.append((self._newest, end))
                if len(listed) > 2 * _MOST_PLACES:
                    del listed[:_MOST_PLACES]

    def drop_oldest(self) -> int:
        """Forget the oldest text. Returns its number of tokens."""
        number = next(iter(self._texts))
        text = self._texts.pop(number)
        for size in _ANCHORS:
            for end in range(size, len(text)):
                key = tuple(text[end - size : end])
                listed = self._places.get(key)
                if listed is not None and listed[0][0] <= number:
                    kept = [place for place in listed if place[0] > number]
                    if kept:
                        self._places[key] = kept
                    else:
                        del self._places[key]
        return len(text)

    @property
    def num_ngrams(self) -> int:
        """Number of distinct n-grams in the index."""
        return len(self._places)

    def find_draft(self, context: Sequence[int], depth: int, most: int, factor: float, least: float) -> ScoredDraft:
        """Return the continuation of the longest match of the context's end: repeatedly the most frequent next token.

        depth: maximum length of the match, in tokens. most: maximum number of draft tokens. factor: maximum number of draft
        tokens per matched token. least: minimum probability of the continuation (Oliaro et al. 2024, arXiv 2411.04975).
        """
        places, length = self._longest_match(context, depth)
        if not places:
            return EMPTY_DRAFT
        found = [(self._texts[text], end) for text, end in places]
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        for step in range(min(most, int(factor * length))):
            following = Counter(text[end + step] for text, end in found if end + step < len(text))
            if not following:
                break
            token, count = following.most_common(1)[0]
            probability *= count / following.total()
            if probability < least:
                break
            tokens.append(token)
            score += probability
            found = [(text, end) for text, end in found if end + step < len(text) and text[end + step] == token]
        return ScoredDraft(tokens, score)

    def _longest_match(self, context: Sequence[int], depth: int) -> tuple[list[tuple[int, int]], int]:
        """Return the end positions of the longest match of the context's end, and the length of the match."""
        size = len(context)
        for length in _ANCHORS:
            listed = self._places.get(tuple(context[size - length :])) if size >= length else None
            if listed:
                break
        else:
            return [], 0
        places = listed[-_MOST_PLACES:]
        while length < min(depth, size):
            before = context[size - 1 - length]
            longer = [place for place in places if place[1] > length and self._texts[place[0]][place[1] - 1 - length] == before]
            if not longer:
                break
            places = longer
            length += 1
        return places, length


class FinishedOutputs:
    """The newest finished outputs, up to a total number of tokens."""

    def __init__(self, most_tokens: int) -> None:
        self.occurrences = SuffixIndex()
        self._most = most_tokens
        self._num_tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Add an output, and forget the oldest outputs until the rest fits."""
        if len(tokens) < 2:  # no token follows another
            return
        tokens = tokens[-self._most :]
        self.occurrences.begin()
        self.occurrences.append(tokens)
        self._num_tokens += len(tokens)
        while self._num_tokens > self._most:
            self._num_tokens -= self.occurrences.drop_oldest()


class NgramProposer:
    """Prompt lookup (Saxena 2023): proposes what followed the last few tokens earlier in the same sequence."""

    def __init__(self, longest: int = 4) -> None:
        self._longest = longest

    def begin(self, num_prompt_tokens: int) -> SequenceNgrams:
        return SequenceNgrams(self._longest)


class SequenceNgrams:
    """N-grams of one sequence, each with the position after its latest occurrence."""

    def __init__(self, longest: int) -> None:
        self._after: list[dict[int, int]] = [{} for _ in range(longest)]
        """For each n-gram length, a mapping from the hash of an n-gram to the position after its latest occurrence."""
        self._num_read = 0

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        self._read(token_ids)
        end = len(token_ids)
        for size in range(min(len(self._after), end - 1), 0, -1):
            position = self._after[size - 1].get(hash(tuple(token_ids[end - size :])))
            # Detects hash collisions: a wrong draft would be rejected, but would cost time.
            if position is not None and token_ids[position - size : position] == token_ids[end - size :]:
                return token_ids[position : position + most]
        return ()

    def _read(self, token_ids: Sequence[int]) -> None:
        """Index all n-grams that are followed by a token, which excludes n-grams that end with the newest token."""
        for size, after in enumerate(self._after, start=1):
            for end in range(max(self._num_read, size), len(token_ids)):
                after[hash(tuple(token_ids[end - size : end]))] = end
        self._num_read = len(token_ids)

    def finish(self, token_ids: Sequence[int]) -> None:
        """Do nothing; see SequenceProposer.finish."""


class SuffixProposer:
    """Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975) with the counts of each sequence and of all finished outputs."""

    def __init__(self, options: ProposerOptions | None = None) -> None:
        self._options = options or ProposerOptions()
        self._remembered = FinishedOutputs(self._options.suffix_decoding_max_cached_tokens)

    def begin(self, num_prompt_tokens: int) -> SequenceSuffixes:
        return SequenceSuffixes(self._options, self._remembered, num_prompt_tokens)


class SequenceSuffixes:
    """Suffixes of one sequence, and the suffixes of finished outputs, which all sequences use together."""

    def __init__(self, options: ProposerOptions, remembered: FinishedOutputs, num_prompt_tokens: int) -> None:
        self._options = options
        self._remembered = remembered
        self._num_prompt_tokens = num_prompt_tokens
        self._own = SuffixIndex()
        self._own.begin()
        self._num_read = 0

    def propose(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Return the draft with the higher expected number of accepted tokens: from this sequence, or from finished outputs."""
        self._own.append(token_ids[self._num_read :])
        self._num_read = len(token_ids)
        context = token_ids[-self._options.suffix_decoding_max_tree_depth :]
        own, shared = self._draft_from(self._own, context, most), self._draft_from(self._remembered.occurrences, context, most)
        return max(own, shared, key=lambda find_draft: find_draft.score).tokens

    def _draft_from(self, occurrences: SuffixIndex, context: Sequence[int], most: int) -> ScoredDraft:
        options = self._options
        factor, least = options.suffix_decoding_max_spec_factor, options.suffix_decoding_min_token_prob
        return occurrences.find_draft(context, options.suffix_decoding_max_tree_depth, most, factor, least)

    def finish(self, token_ids: Sequence[int]) -> None:
        self._remembered.add(token_ids[self._num_prompt_tokens :])


def _ngram(options: ProposerOptions) -> NgramProposer:
    return NgramProposer(options.prompt_lookup_max)


BUILTIN = (
    ProposerInfo("ngram", "what followed the longest earlier match of the last few tokens in the same sequence", _ngram),
    ProposerInfo(
        "suffix", "what most often followed the longest match, in the same sequence and in finished outputs", SuffixProposer
    ),
)
"""The built-in proposers; `speculate` accepts their names."""
