"""/v1/chat/completions: how an answer looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs

from headway.outputs import CompletionOutput, RequestOutput
from headway.server.logprobs import chat_logprobs
from headway.server.requests import ChatRequest
from headway.server.shapes import Shape, extras, num_written, usage


class ChatShape(Shape):
    """Answers a ChatRequest."""

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    around: ClassVar[tuple[str, str]] = ('"delta":{"content":', '},"logprobs":null')

    def __init__(self, asked: ChatRequest, model: str) -> None:
        super().__init__(asked, model, bool(asked.logprobs))
        self._most, self._logprobs = asked.top_logprobs or 0, bool(asked.logprobs)
        content = asked.messages[-1].get("content") if asked.echo and asked.messages else ""
        self._echo = content if isinstance(content, str) else ""

    def begin(self, index: int, output: Callable[[], RequestOutput]) -> bytes:
        """Who speaks."""
        choice = {"index": index, "delta": {"role": "assistant", "content": self._echo}, "logprobs": None, "finish_reason": None}
        if self.asked.return_token_ids:
            choice["prompt_token_ids"] = output().prompt_token_ids
        return self.chunk([choice])

    def choice(self, index: int, new: CompletionOutput) -> dict[str, Any]:
        """See `Shape`."""
        return {
            "index": index,
            "delta": {"content": new.text} if new.text or new.token_ids else {},
            "logprobs": self._logprobs_of(new),
            "finish_reason": new.finish_reason,
            **extras(self.asked, new),
        }

    def _logprobs_of(self, new: CompletionOutput) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        return chat_logprobs(new.logprobs or [], self._most, self.asked.return_tokens_as_token_ids)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """See `Shape`."""
        (output,) = outputs
        choices = []
        for new in output.outputs:
            listed = self._logprobs_of(new)
            choice = Choice(
                index=new.index,
                message=ChatCompletionMessage(role="assistant", content=self._echo + new.text, refusal=None),
                logprobs=None if listed is None else ChoiceLogprobs.model_validate(listed),
                finish_reason=new.finish_reason,  # type: ignore[arg-type]
                **extras(self.asked, new),
            )
            choices.append(choice)
        more = {"prompt_token_ids": output.prompt_token_ids} if self.asked.return_token_ids else {}
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
