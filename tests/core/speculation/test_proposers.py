"""What is guessed, against a search through the whole text; and that what is remembered is bounded."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from headway.core.contract.errors import ConfigError, PluginError
from headway.core.contract.text_plugins import ProposerInfo, ProposerOptions
from headway.core.speculation.proposers import NgramProposer, SuffixIndex, SuffixProposer
from headway.registry import create_registry, hookimpl


def looked_up(tokens: list[int], longest: int, most: int) -> list[int]:
    """The latest earlier place of the longest suffix, by trying all."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return tokens[end : end + most]
    return []


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_ngram_finds_the_latest_of_the_longest_matches(longest: int) -> None:
    random = Random(longest)
    for vocabulary in (2, 5, 40):
        tokens = [random.randrange(vocabulary) for _ in range(9)]
        guesses = NgramProposer(longest).begin(len(tokens))
        for _ in range(60):
            assert list(guesses.propose(tokens, 5)) == looked_up(tokens, longest, 5)
            tokens += [random.randrange(vocabulary) for _ in range(random.randint(1, 4))]


def followed(text: list[int], context: list[int], depth: int, most: int, least: float) -> list[int]:
    """By the counts of a suffix tree: the most frequent child, again and again."""
    size = next((n for n in range(min(depth, len(context)), 0, -1) if occurs(text, context[-n:])), 0)
    if not size:
        return []
    match, found, probability = context[-size:], [], 1.0
    while len(found) < min(most, size):
        ends = [end for end in range(len(match), len(text)) if text[end - len(match) : end] == match]
        counts = Counter(text[end] for end in ends)
        if not counts:
            break
        token, count = counts.most_common(1)[0]
        probability *= count / counts.total()
        if probability < least:
            break
        found.append(token)
        match = [*match, token]
    return found


def occurs(text: list[int], match: list[int]) -> bool:
    """With something after it."""
    return any(text[end - len(match) : end] == match for end in range(len(match), len(text)))


def test_suffix_follows_the_most_frequent_child_as_a_suffix_tree_would() -> None:
    random = Random(0)
    for vocabulary in (3, 8, 30):
        tokens = [random.randrange(vocabulary) for _ in range(5)]
        index = SuffixIndex()
        index.begin()
        index.append(tokens)
        for _ in range(20):  # few enough that every place is looked at
            find_draft = index.find_draft(tokens, 6, 5, 1.0, 0.1)
            expected = followed(tokens, tokens, 6, 5, 0.1)
            assert len(find_draft.tokens) == len(expected)
            if find_draft.tokens != expected:  # two children are equally frequent
                assert find_draft.score > 0
            new = [random.randrange(vocabulary) for _ in range(random.randint(1, 3))]
            tokens += new
            index.append(new)


def test_suffix_keeps_as_many_finished_outputs_as_fit() -> None:
    proposer = SuffixProposer(ProposerOptions(suffix_decoding_max_cached_tokens=40))
    first, second = list(range(100, 120)), list(range(200, 220))

    def find_draft(start: list[int]) -> list[int]:
        return list(proposer.begin(3).propose([7, 8, 9, *start], 4))

    for output in (first, second):
        sequence = proposer.begin(3)
        sequence.propose([1, 2, 3, output[0]], 4)
        sequence.finish([1, 2, 3, *output])
    assert find_draft(first[:4]) == first[4:8]
    assert find_draft(second[5:9]) == second[9:13]
    assert find_draft([1, 2, 3]) == [], "a prompt is not remembered"
    proposer.begin(0).finish(list(range(300, 330)))
    assert find_draft(first[:4]) == find_draft(second[5:9]) == []
    assert find_draft([310, 311, 312]) == [313, 314, 315]
    assert proposer.begin(1).propose([310], 4) == [311], "one token is guessed for a match of one"


def test_dropped_texts_leave_no_ngram_behind() -> None:
    index, random = SuffixIndex(), Random(3)
    for _ in range(6):
        index.begin()
        index.append([random.randrange(4) for _ in range(200)])
    for _ in range(6):
        assert index.drop_oldest() == 200
    assert index.num_ngrams == 0


def test_a_guess_is_cheap_however_long_the_text() -> None:
    """By what is looked at, not by the clock: the places of an n-gram are bounded."""
    index = SuffixIndex()
    index.begin()
    index.append([5] * 20000)
    looked: list[int] = []

    class Watched(list[int]):
        def __getitem__(self, place: object) -> object:  # type: ignore[override]
            looked.append(1)
            return super().__getitem__(place)  # type: ignore[index]

    assert index.find_draft(Watched([5] * 24), 24, 7, 1.0, 0.1).tokens == [5] * 7
    assert len(looked) < 100


class Mine:
    @hookimpl
    def headway_register_proposers(self) -> list[ProposerInfo]:
        return [ProposerInfo("mine", "for tests", lambda options: NgramProposer(2))]


class Taken:
    @hookimpl
    def headway_register_proposers(self) -> list[ProposerInfo]:
        return [ProposerInfo("suffix", "for tests", lambda options: NgramProposer(2))]


def test_a_plugin_brings_a_proposer_and_a_bad_name_lists_all() -> None:
    registry = create_registry([Mine()], load_entry_points=False)
    assert registry.proposer("mine").summary == "for tests"
    with pytest.raises(ConfigError, match=r"speculate: needs one of ngram, suffix, mine, got 'eagle'"):
        registry.proposer("eagle")
    with pytest.raises(PluginError, match="the proposer name 'suffix' is already taken"):
        create_registry([Taken()], load_entry_points=False)
