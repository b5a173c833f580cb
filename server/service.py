"""State that all requests of a server share: the engine, the queue and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from starlette.requests import Request

from headway.async_llm import AsyncLLM
from headway.core.chat.template import token_after_answer
from headway.core.sampling.params import SamplingParams
from headway.requests.chats import ChatFormat
from headway.requests.request_state import TokenBytes
from headway.requests.validation import default_params
from headway.server.errors import ApiError, Fields, IgnoredFields
from headway.server.middleware import Admission
from headway.server.openai.params import ParamsMaker
from headway.server.operators.metrics import Metrics
from headway.server.operators.tracing import Tracing, tracing_to
from headway.server.options import ServerOptions
from headway.server.routing import read_body

Body = TypeVar("Body", bound=Fields)

_ENDED_INTERVAL: Final = 0.02  # Seconds between two checks whether requests have ended
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def chat_format_of(llm: AsyncLLM, options: ServerOptions) -> ChatFormat:
    """Return the model's chat format with the options applied. :raises ConfigError: if a parser name is unknown."""
    return ChatFormat.of(
        llm.get_tokenizer(),
        tool_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        auto=options.enable_auto_tool_choice,
        parsers=options.chat_parsers,
        template=options.template_text,
    )


class RunningAnswer(NamedTuple):
    """An answer that the engine is generating."""

    id: str
    """Id of the answer as the client knows it. Other answers may have the same id."""
    request_ids: Sequence[str]
    """The engine's ids, one per prompt."""


class Service(Admission):
    """One engine and its clients. For use only in the server's event loop."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        super().__init__([*options.served_model_names] or [llm.model.name], options)
        self.llm = llm
        self.adapters.update({each.lora_name: each for each in options.lora_modules})
        self.metrics = Metrics(self.names[0], llm.facts.block_size)
        endpoint = options.otlp_traces_endpoint
        self.tracing: Tracing | None = None if endpoint is None else tracing_to(endpoint, self.names[0])
        self.ignored_fields = IgnoredFields()
        self.params_maker = ParamsMaker(self.default_params())
        self.chat_format = chat_format_of(llm, options)
        self.token_bytes = TokenBytes(llm.get_tokenizer())
        own = options.template_text
        self.template_end = None if own is None else token_after_answer(llm.get_tokenizer(), own)
        """Token that the server's own chat template writes after an answer. The engine knows the corresponding token of the
        model's template."""
        self.running: dict[str, RunningAnswer] = {}
        """Key of an answer -> the answer, for each answer that the engine is generating."""
        self._resumed: asyncio.Event | None = None
        self._is_stopping = False
        self.is_asleep = False
        """True while the engine sleeps and requests are rejected."""
        self.num_unsubmitted = 0
        """Number of requests that are being tokenized and not yet in the engine."""

    def default_params(self) -> SamplingParams:
        """Return the default parameters of requests, according to `generation_config`. :raises ConfigError: if a value in the
        file of default parameters is invalid."""
        where = self.options.generation_config
        if where == "auto":
            return self.llm.get_default_sampling_params()
        return SamplingParams() if where == "vllm" else default_params(Path(where))

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Return a request's body after checking the model's name. Raises the same errors as `read_body` and `check_model`."""
        body = await read_body(request, kind, self.options)
        self.check_model(body.model)  # type: ignore[attr-defined]
        return body

    @property
    def is_paused(self) -> bool:
        """True if new requests wait instead of going to the engine."""
        return self._resumed is not None

    def pause(self) -> None:
        """Hold back new requests from the engine until `resume`."""
        self._resumed = self._resumed or asyncio.Event()

    def resume(self) -> None:
        """Let requests continue."""
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    async def resumed(self) -> None:
        """Wait until requests may continue. :raises ApiError: if the server is stopping."""
        while self._resumed is not None:
            if self._is_stopping:
                raise ApiError(503, "the server is shutting down", retry_after=1)
            await self._resumed.wait()

    def stop(self) -> None:
        """Reject the requests that wait for a paused server."""
        self._is_stopping = True
        if self._resumed is not None:
            self._resumed.set()

    async def ended(self) -> None:
        """Wait until no request is in the engine, or the server is resumed."""
        while self.running and self.is_paused:
            await asyncio.sleep(_ENDED_INTERVAL)

    def splits(self, requested: bool | None) -> bool:
        """Return whether names of control tokens are treated as text in a chat. requested: the request's value, or None."""
        return self.options.split_special_tokens if requested is None else requested

    def recommended_sampling(self) -> dict[str, Any]:
        """Return the model's recommended sampling parameters that differ from the defaults, for the web UI."""
        given, plain = self.default_params(), SamplingParams()
        return {name: value for name in _SAMPLING if (value := getattr(given, name)) != getattr(plain, name)}

    def check_room(self) -> None:
        """Check for room in the queue, as `Admission` does. A sleeping engine has no room."""
        if self.is_asleep:
            raise ApiError(503, "the engine sleeps; POST /wake_up wakes it", code="asleep")
        super().check_room()


class Ticket:
    """A request's place in the queue, until its first token or its end."""

    def __init__(self, service: Service) -> None:
        """Admit a request. Raises the same errors as `check_room`."""
        service.check_room()
        self._service = service
        self._waits = self._unsubmitted = True
        service.num_queued += 1
        service.num_unsubmitted += 1

    def submitted(self) -> None:
        """Record that the engine has the request."""
        if self._unsubmitted:
            self._unsubmitted = False
            self._service.num_unsubmitted -= 1

    def begun(self) -> None:
        """Record that the request has its first token or has ended."""
        self.submitted()
        if self._waits:
            self._waits = False
            self._service.num_queued -= 1
