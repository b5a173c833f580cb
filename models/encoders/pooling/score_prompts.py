"""What is put around a query and a document for models that score by their next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ScorePrompt:
    """A prompt in three parts, tokenised apart, as the model's authors do."""

    prefix: str
    body: str
    """With {instruction}, {query} and {document}."""
    suffix: str
    instruction: str
    """The one that the model's authors take where none is given."""

    def encode(self, tokenizer: Any, query: str, document: str, most: int | None) -> list[int]:
        """Tokens of the prompt. most: tokens at most, for which the body is cut; None: it is not."""
        body = _filled(self.body.replace("{instruction}", self.instruction), query, document)
        ends = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (self.prefix, self.suffix)]
        ids = list(tokenizer(body, add_special_tokens=False)["input_ids"])
        if most is not None:
            ids = ids[: max(most - len(ends[0]) - len(ends[1]), 0)]
        return [*ends[0], *ids, *ends[1]]


def _filled(body: str, query: str, document: str) -> str:
    """Put both texts into their places, whatever braces they hold."""
    before, _, rest = body.partition("{query}")
    between, _, after = rest.partition("{document}")
    return f"{before}{query}{between}{document}{after}"


QWEN3_RERANKER = ScorePrompt(
    prefix=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    ),
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
"""As the card of Qwen/Qwen3-Reranker-0.6B has it."""
