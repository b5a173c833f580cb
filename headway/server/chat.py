"""The answer of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs

from headway.outputs import CompletionOutput, RequestOutput
from headway.server.answers import ChunkedAnswer, chat_logprobs, extras, num_written, usage
from headway.server.requests import ChatRequest


class ChatAnswer(ChunkedAnswer):
    """Writes the answer to a ChatRequest."""

    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    around: ClassVar[tuple[str, str]] = ('"delta":{"content":', '},"logprobs":null')

    def __init__(self, body: ChatRequest, model: str) -> None:
        super().__init__(body, model, bool(body.logprobs))
        self._most, self._logprobs = body.top_logprobs or 0, bool(body.logprobs)
        content = body.messages[-1].get("content") if body.echo and body.messages else ""
        self._echo = content if isinstance(content, str) else ""

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Write the role, and the last message where the request wants an echo."""
        choice = {"index": index, "delta": {"role": "assistant", "content": self._echo}, "logprobs": None, "finish_reason": None}
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = output().prompt_token_ids
        return self.chunk([choice])

    def choice(self, index: int, new: CompletionOutput) -> dict[str, Any]:
        """See `Answer`."""
        return {
            "index": index,
            "delta": {"content": new.text} if new.text or new.token_ids else {},
            "logprobs": self._logprobs_of(new),
            "finish_reason": new.finish_reason,
            **extras(self.body, new),
        }

    def _logprobs_of(self, new: CompletionOutput) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return chat_logprobs(new.logprobs or [], self._most, self.body.return_tokens_as_token_ids)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Answer`."""
        (output,) = outputs
        choices = []
        for new in output.outputs:
            listed = self._logprobs_of(new)
            choice = Choice(
                index=new.index,
                message=ChatCompletionMessage(role="assistant", content=self._echo + new.text, refusal=None),
                logprobs=None if listed is None else ChoiceLogprobs.model_validate(listed),
                finish_reason=new.finish_reason,  # type: ignore[arg-type]
                **extras(self.body, new),
            )
            choices.append(choice)
        more = {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}
        answer = ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage([(output, num_written(output))]),
            **more,  # type: ignore[arg-type]
        )
        return answer.model_dump_json(exclude_unset=True).encode()
