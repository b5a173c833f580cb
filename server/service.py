"""The parts of a server that all requests share: the engine, the queue and the figures."""

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

_ENDED_INTERVAL: Final = 0.02  # Seconds between two looks at whether requests have ended
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def chat_format_of(llm: AsyncLLM, options: ServerOptions) -> ChatFormat:
    """Return the model's chat format, completed by the options. :raises ConfigError: an unknown name of a parser."""
    return ChatFormat.of(
        llm.get_tokenizer(),
        tool_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        auto=options.enable_auto_tool_choice,
        parsers=options.chat_parsers,
        template=options.template_text,
    )


class RunningAnswer(NamedTuple):
    """An answer that the engine works on."""

    id: str
    """The client's, which other answers may have too."""
    request_ids: Sequence[str]
    """The engine's, one for each prompt."""


class Service(Admission):
    """One engine and its clients; for the server's event loop alone."""

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
        """The token that the server's own chat template writes after an answer; the engine knows that of the model's."""
        self.running: dict[str, RunningAnswer] = {}
        """Key of the answer to each request that the engine has -> the answer."""
        self._resumed: asyncio.Event | None = None
        self._is_stopping = False
        self.is_asleep = False
        """Whether the engine sleeps, and requests are refused."""
        self.num_unsubmitted = 0
        """Requests that the engine does not know of yet: they are being tokenised."""

    def default_params(self) -> SamplingParams:
        """Return the defaults of requests, by `generation_config`. :raises ConfigError: a value in the file is not allowed."""
        where = self.options.generation_config
        if where == "auto":
            return self.llm.get_default_sampling_params()
        return SamplingParams() if where == "vllm" else default_params(Path(where))

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Read the body of a request for the model, and check the model's name; raises as `read_body` and `check_model`."""
        body = await read_body(request, kind, self.options)
        self.check_model(body.model)  # type: ignore[attr-defined]
        return body

    @property
    def is_paused(self) -> bool:
        """Whether requests wait before the engine hears of them."""
        return self._resumed is not None

    def pause(self) -> None:
        """Let no request go on to the engine until `resume`."""
        self._resumed = self._resumed or asyncio.Event()

    def resume(self) -> None:
        """Let requests go on."""
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    async def resumed(self) -> None:
        """Wait until requests may go on. :raises ApiError: the server is being stopped, so that nobody can resume it any more."""
        while self._resumed is not None:
            if self._is_stopping:
                raise ApiError(503, "the server is shutting down", retry_after=1)
            await self._resumed.wait()

    def stop(self) -> None:
        """Refuse the requests that wait for a paused server."""
        self._is_stopping = True
        if self._resumed is not None:
            self._resumed.set()

    async def ended(self) -> None:
        """Wait until no request is in the engine, or requests may go on."""
        while self.running and self.is_paused:
            await asyncio.sleep(_ENDED_INTERVAL)

    def splits(self, asked: bool | None) -> bool:
        """Whether the names of control tokens are text in a chat. asked: what its request says."""
        return self.options.split_special_tokens if asked is None else asked

    def recommended_sampling(self) -> dict[str, Any]:
        """The sampling parameters among them that the model recommends, for the page; none: it recommends nothing."""
        given, plain = self.default_params(), SamplingParams()
        return {name: value for name in _SAMPLING if (value := getattr(given, name)) != getattr(plain, name)}

    def check_room(self) -> None:
        """See Admission; a sleeping engine has room for nothing."""
        if self.is_asleep:
            raise ApiError(503, "the engine sleeps; POST /wake_up wakes it", code="asleep")
        super().check_room()


class Ticket:
    """A request's place in the queue, until its first token or its end."""

    def __init__(self, service: Service) -> None:
        """Let a request in; raises as `check_room`."""
        service.check_room()
        self._service = service
        self._waits = self._unsubmitted = True
        service.num_queued += 1
        service.num_unsubmitted += 1

    def submitted(self) -> None:
        """Note that the engine knows of the request."""
        if self._unsubmitted:
            self._unsubmitted = False
            self._service.num_unsubmitted -= 1

    def begun(self) -> None:
        """Note that the request has its first token, or has ended."""
        self.submitted()
        if self._waits:
            self._waits = False
            self._service.num_queued -= 1
