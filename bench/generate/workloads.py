"""Workloads of the end-to-end benchmark: random token ids, all sent at once, with fixed output lengths; and short texts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Final, Protocol

from headway.core.contract.errors import ConfigError


@dataclass(frozen=True)
class Requests:
    """Prompts, and the number of tokens to generate for each, ignoring end-of-text."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        """Total number of tokens in all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Total number of tokens in all outputs."""
        return sum(self.output_lens)

    def halfway(self) -> list[list[int]]:
        """Return each sequence with half of its output: the prompt, followed by the prompt's tokens again as output."""
        return [
            prompt + [prompt[at % len(prompt)] for at in range(output_len // 2)]
            for prompt, output_len in zip(self.prompts, self.output_lens, strict=True)
        ]


class RequestSet(Protocol):
    """Workload of one row of the result: a set of requests."""

    @property
    def label(self) -> str:
        """The workload's name in tables and files."""

    @property
    def batch_size(self) -> int:
        """Number of requests."""

    @property
    def lengths(self) -> tuple[int, int] | None:
        """(input_len, output_len) if all requests have the same lengths, else None."""

    @property
    def temperature(self) -> float:
        """Sampling temperature. 0 is greedy."""

    @property
    def max_len(self) -> int:
        """Maximum tokens of a request, prompt plus output."""

    def requests(self, vocab_size: int) -> Requests:
        """Return the requests, which are the same for every call."""


@dataclass(frozen=True)
class RandomTokens:
    """batch_size requests with input_len random tokens, which generate output_len tokens each."""

    batch_size: int
    input_len: int
    output_len: int
    temperature: float = 0.0

    @property
    def label(self) -> str:
        """Short description of the workload, such as "16 x 512/512"."""
        return f"{self.batch_size} x {self.input_len}/{self.output_len}"

    @property
    def lengths(self) -> tuple[int, int]:
        """(input_len, output_len)."""
        return self.input_len, self.output_len

    @property
    def max_len(self) -> int:
        """Number of tokens of every request, prompt plus output."""
        return self.input_len + self.output_len

    def requests(self, vocab_size: int) -> Requests:
        """Return token ids from the whole vocabulary, with a fixed seed."""
        draw = Random(0).randrange
        prompts = [[draw(vocab_size) for _ in range(self.input_len)] for _ in range(self.batch_size)]
        return Requests(prompts, [self.output_len] * self.batch_size)


@dataclass(frozen=True)
class Nano:
    """Workload of nano-vllm's bench.py: 256 requests with 100 to 1,024 input and output tokens; 133,966 output tokens in all.

    Random numbers are drawn in that script's order with the same generator and seed, so lengths and ids are identical.
    """

    temperature: float = 0.6
    label = "nano"
    batch_size = 256
    lengths = None

    @property
    def max_len(self) -> int:
        """Number of tokens of the longest request, prompt plus output."""
        drawn = self.requests(0)
        return max(len(prompt) + size for prompt, size in zip(drawn.prompts, drawn.output_lens, strict=True))

    def requests(self, vocab_size: int) -> Requests:
        """Return token ids 0 to 10,000 for any vocabulary; sending them fails if the vocabulary is smaller."""
        draw = Random(0).randint
        prompts = [[draw(0, 10000) for _ in range(draw(100, 1024))] for _ in range(self.batch_size)]
        return Requests(prompts, [draw(100, 1024) for _ in range(self.batch_size)])


def random_workloads(batch_size: str, input_len: str, output_len: str | None, temperature: float) -> list[RequestSet]:
    """Return every batch size with every pair of lengths; each text is a number or a list such as "1,16,64".

    Input and output lengths are paired in order; a single length is paired with all lengths of the other list. output_len: None
    means outputs as long as inputs.
    :raises ConfigError: if a text is invalid or the lists have different numbers of lengths.
    """
    batches, inputs = parse_sizes("--batch-size", batch_size), parse_sizes("--input-len", input_len)
    outputs = parse_sizes("--output-len", output_len) if output_len else inputs
    if len(inputs) != len(outputs) and 1 not in (len(inputs), len(outputs)):
        raise ConfigError("--output-len", f"one length, or one for each of the {len(inputs)} of --input-len", output_len)
    count = max(len(inputs), len(outputs))
    pairs = zip(inputs * (count // len(inputs)), outputs * (count // len(outputs)), strict=True)
    return [RandomTokens(batch, *pair, temperature) for pair, batch in product(pairs, batches)]


_MOST: Final = 1 << 20
"""Maximum number of requests and of tokens per request; larger prompts would take minutes to generate."""


def parse_sizes(option: str, text: str) -> list[int]:
    """Return integers from a text such as "1,16,64". :raises ConfigError: if the text has a different format."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 and 0 < int(part) <= _MOST for part in parts):
        raise ConfigError(option, f"whole numbers from 1 to {_MOST:,}, such as 16 or 1,16,64", repr(text))
    return [int(part) for part in parts]


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "Water boils at a lower temperature on a high mountain because",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "To make a good cup of tea, first",
    "In 1969, two men walked on the Moon for the first time. When they came back, they told the world that",
    "A list of things to pack for a week by the sea: a towel, a hat, sun cream, a book,",
    "Dear Sir or Madam,\n\nI am writing to ask whether",
    "The difference between a virus and a bacterium is that a virus",
    "Q: What is the largest planet of the solar system?\nA:",
    "Rain had been falling for nine days when the river left its bed. The people of the lower town carried what they could "
    "up the hill, to the school, where the teachers had pushed the desks together and lit the stove. Nobody slept much. In the "
    "morning",
    "Photosynthesis",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "The recipe says: melt the butter in a pan over a low heat, add the flour, and stir until it is smooth. Then pour in the "
    "milk a little at a time, stirring all the while, and when the sauce is thick enough to coat the spoon, take it off the "
    "heat and",
    "If every even number greater than two is the sum of two primes, then ten is the sum of",
]


def take_prompts(count: int) -> list[str]:
    """Return `count` different prompts: first the built-in prompts, then numbered variations of them."""
    rounds = -(-count // len(PROMPTS))
    texts = [prompt if turn == 0 else f"{turn}. {prompt}" for turn in range(rounds) for prompt in PROMPTS]
    return texts[:count]
