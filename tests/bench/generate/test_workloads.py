"""Random work: the same every time, of the lengths that were asked for, and nano-vllm's to the token."""

from __future__ import annotations

import pytest

from headway.bench.generate.workloads import Nano, RandomTokens, Requests, random_workloads
from headway.core.contract.errors import ConfigError


def test_nanos_work_is_that_of_its_own_script() -> None:
    work = Nano().requests(151936)
    assert (len(work.prompts), work.num_prompt_tokens, work.num_output_tokens) == (256, 142_827, 133_966)
    assert work.prompts[0][:3] == [6311, 6890, 663]  # the first draws after random.seed(0) and the first length
    assert all(100 <= size <= 1024 for size in (*map(len, work.prompts), *work.output_lens))
    assert Nano().max_len == max(len(p) + n for p, n in zip(work.prompts, work.output_lens, strict=True)) == 2011
    assert Nano().temperature == 0.6


def test_random_tokens_have_the_lengths_and_stay_in_the_vocabulary() -> None:
    work = RandomTokens(3, 200, 7)
    requests = work.requests(50)
    assert [len(prompt) for prompt in requests.prompts] == [200] * 3
    assert requests.output_lens == [7] * 3
    assert {token for prompt in requests.prompts for token in prompt} == set(range(50))
    assert len({tuple(prompt) for prompt in requests.prompts}) == 3, "equal prompts would share their cache"
    assert requests == work.requests(50)
    assert (work.label, work.max_len) == ("3 x 200/7", 207)


def test_halfway_a_sequence_has_half_of_its_output_behind_it() -> None:
    assert Requests([[1, 2, 3], [4]], [8, 5]).halfway() == [[1, 2, 3, 1, 2, 3, 1], [4, 4, 4]]


@pytest.mark.parametrize(
    ("inputs", "outputs", "labels"),
    [
        ("8", None, ["1 x 8/8", "4 x 8/8"]),
        ("8,16", None, ["1 x 8/8", "4 x 8/8", "1 x 16/16", "4 x 16/16"]),
        ("8, 16", "2,3", ["1 x 8/2", "4 x 8/2", "1 x 16/3", "4 x 16/3"]),
        ("8,16", "5", ["1 x 8/5", "4 x 8/5", "1 x 16/5", "4 x 16/5"]),
        ("8", "5,6", ["1 x 8/5", "4 x 8/5", "1 x 8/6", "4 x 8/6"]),
    ],
)
def test_lists_make_a_grid(inputs: str, outputs: str | None, labels: list[str]) -> None:
    assert [each.label for each in random_workloads("1,4", inputs, outputs, 0.0)] == labels


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        (("0", "8", None), "--batch-size: needs whole numbers from 1 to 1,048,576"),
        (("1,", "8", None), "--batch-size"),
        (("1", "8k", None), "--input-len"),
        (("1", "8", "-3"), "--output-len"),
        (("1", "8,9,10", "1,2"), "--output-len: needs one length, or one for each of the 3"),
    ],
)
def test_other_lists_are_refused(lists: tuple[str, str, str | None], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        random_workloads(*lists, 0.0)
