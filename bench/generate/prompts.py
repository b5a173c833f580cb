"""Sixteen prompts of mixed length: what the end-to-end benchmark and the token-for-token tests write on from."""

from __future__ import annotations

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
    """`count` prompts: those above, then numbered variations of them, all different."""
    rounds = -(-count // len(PROMPTS))
    texts = [prompt if turn == 0 else f"{turn}. {prompt}" for turn in range(rounds) for prompt in PROMPTS]
    return texts[:count]
