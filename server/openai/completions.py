"""The answer of /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

from headway.outputs import CompletionOutput, RequestOutput
from headway.server.openai.answers import ChunkedAnswer, completion_logprobs, extras, prompt_extras, usage
from headway.server.openai.requests import CompletionRequest


class CompletionAnswer(ChunkedAnswer):
    """Writes the answer to a CompletionRequest."""

    prefix = "cmpl-"
    chunk_object = "text_completion"
    around: ClassVar[tuple[str, str]] = ('"text":', ',"logprobs":null')

    def __init__(self, body: CompletionRequest, model: str, decode: Callable[[list[int]], str], name: str = "") -> None:
        """model, name: see `Answer`. decode: the text of tokens, special ones included."""
        super().__init__(body, model, body.logprobs is not None, name)
        self._echo = body.echo
        self._most = body.logprobs
        self._decode = decode
        self._prompt_only = body.echo and body.max_tokens == 0
        self._offsets: dict[int, int] = {}
        """Index of a choice -> its characters so far."""

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write the prompt, where the request wants an echo."""
        if not (self._echo or self.body.return_token_ids):
            return b""
        text, listed = self._prompt(index, output()) if self._echo else ("", None)
        choice = {"index": index, "text": text, "logprobs": listed, "finish_reason": None}
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output().prompt_token_ids
        return self.chunk([choice])

    def _prompt(self, index: int, output: RequestOutput) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text, and the log-probabilities of its tokens."""
        ids = output.prompt_token_ids
        text = output.prompt if output.prompt is not None else self._decode(ids)
        if self._most is None:
            return text, None
        found = completion_logprobs(output.prompt_logprobs or [], ids, 0, self._most, *self._naming)
        self._offsets[index] = len(text)
        return text, found[0]

    @property
    def _naming(self) -> tuple[bool, Callable[[int], str]]:
        return self.body.return_tokens_as_token_ids, lambda token: self._decode([token])

    def choice(self, index: int, new: CompletionOutput) -> dict[str, Any]:
        """See `Answer`."""
        if self._prompt_only:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": new.finish_reason and "length"}
        return {
            "index": index,
            "text": new.text,
            "logprobs": self._logprobs_of(index, new),
            "finish_reason": new.finish_reason,
            **extras(self.body, new),
        }

    def _logprobs_of(self, index: int, new: CompletionOutput) -> dict[str, Any] | None:
        if self._most is None:
            return None
        offset = self._offsets.get(index, 0)
        listed, self._offsets[index] = completion_logprobs(new.logprobs or [], new.token_ids, offset, self._most, *self._naming)
        return listed

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Answer`."""
        choices, used = [], []
        for number, output in enumerate(outputs):
            written = 0
            for new in output.outputs:
                index = number * (self.body.n or 1) + new.index
                text, before = self._prompt(index, output) if self._echo else ("", None)
                choice = {**self.choice(index, new), **prompt_extras(self.body, output)}
                choice["text"] = text + choice["text"]
                choice["logprobs"] = _joined(before, choice["logprobs"])
                choices.append(CompletionChoice(**choice))
                written += 0 if self._prompt_only else len(new.token_ids)
            used.append((output, written))
        answer = Completion(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage(used),
        )
        return answer.model_dump_json(exclude_unset=True).encode()


def _joined(before: dict[str, Any] | None, after: dict[str, Any] | None) -> Logprobs | None:
    """Join the log-probabilities of a prompt and of its completion.

    Without validation: the first token of a prompt has none, which OpenAI's API allows and openai's type does not.
    """
    if before is not None and after is not None:
        after = {name: before[name] + after[name] for name in after}
    found = after or before
    return None if found is None else Logprobs.model_construct(**found)
