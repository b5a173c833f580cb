"""`AsyncLLM`: an engine in its own thread or process, with requests as asynchronous iterators."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

from headway.compat.vllm_words import check_keywords, missing_attribute
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError, HeadwayError
from headway.core.engine.data.request_limits import CheckedRequest
from headway.core.engine.data.stats import EngineSnapshot
from headway.core.engine.loop import EngineLoop
from headway.core.sampling.params import SamplingParams
from headway.engine_args import EngineArgs, takes_arguments_of
from headway.hosting import live_model
from headway.hosting.driver import EngineDriver, driver_of
from headway.hosting.host import (
    EngineDeadError,
    EngineFacts,
    EngineHost,
    EngineThread,
    Task,
    abort_request,
    adapter_ids,
    query,
    read_adapter,
    register_adapter,
    remove_adapter,
)
from headway.hosting.process_host import EngineProcess
from headway.models.checkpoints.tokenizer import transformers_tokenizer
from headway.outputs import RequestOutput
from headway.requests.prompts import Message, Prompt, list_of_one
from headway.requests.streams import Mailbox, Mailboxes, RequestStream
from headway.requests.validation import RequestName, quickly_checked

if TYPE_CHECKING:
    from headway.llm import LLM

T = TypeVar("T")

_DRAIN_INTERVAL = 0.02  # Seconds between two checks for unfinished requests
_TOKENISERS = 2  # Threads that render templates and tokenize; the tokenizer's native code releases the GIL


class AsyncLLM:
    """A running model that takes requests at any time. Methods have the names of vLLM's AsyncLLM.

    Prompts are tokenized in threads, the engine runs in another thread or its own process, and text is decoded on the caller's
    event loop. Coroutines of several event loops may share one AsyncLLM.
    """

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model and start its engine (seconds to minutes). Options: see `LLM`. :raises HeadwayError: if an option is
        invalid."""
        self._start(EngineThread(driver_of(EngineArgs.of(*model, **options))))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, own_process: bool = False, **_: object) -> Self:
        """Return an AsyncLLM with these options. Other keywords, for vLLM's processes and reports, are ignored.

        own_process: run the engine in its own process, as `headway serve` does. The engine's steps then do not compete for the
        GIL with per-token work here, and this process survives a crash of the engine. Options and parameters must be picklable.
        `engine`, `driver` and logits processors that are functions require an engine in a thread.
        """
        return cls.over(EngineProcess(partial(driver_of, engine_args)) if own_process else EngineThread(driver_of(engine_args)))

    @classmethod
    def over(cls, host: EngineHost) -> Self:
        """Return an AsyncLLM for a running engine."""
        made = cls.__new__(cls)
        made._start(host)
        return made

    @classmethod
    def from_llm(cls, llm: LLM) -> Self:
        """Return an AsyncLLM for the engine of an LLM, which remains usable: requests of both share the batch."""
        return cls.over(EngineThread(llm.driver, owned=False))

    def _start(self, host: EngineHost) -> None:
        self.host = host
        """Host of the engine: a thread or a process."""
        self.model = host.model
        self._mailboxes = Mailboxes()
        self._tokenisers = ThreadPoolExecutor(_TOKENISERS, "headway-tokenise")
        self._draining = False
        host.add_client(self._mailboxes.post, self._mailboxes.fail)
        self._stop = weakref.finalize(self, _stop, host, self._mailboxes, self._tokenisers)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **others: object,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt. Yield the output so far, or the part that SamplingParams.output_kind selects.

        The request ends when the iterator or the task that reads it ends, so a caller that stops reading does not need to abort
        the request. prompt, sampling_params, lora_request: see LLM.generate. request_id: an id that no unfinished request uses;
        None generates an id. priority: see scheduling_policy. others: keywords of vLLM; unsupported ones are rejected.
        :raises PromptError: if the prompt is empty or too long; raised before the first output.
        :raises ConfigError: if a parameter is invalid; raised before the first output.
        :raises EngineDeadError: if the engine has ended.
        """
        if others:
            check_keywords("AsyncLLM.generate", others, ("prompt", "sampling_params", "request_id", "priority"))
        (request,) = await self.check(list_of_one(prompt), sampling_params, priority=priority, lora_request=lora_request)
        stream = self.submit(request, request_id)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def chat(
        self,
        messages: str | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation, using the model's chat template. Yield outputs as `generate` does. template: keywords of
        `chat_prompt`."""
        prompt = await self.chat_prompt(messages, **template)
        stream = self.generate(prompt, sampling_params, request_id, lora_request=lora_request, priority=priority)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                yield output

    async def chat_prompt(
        self,
        messages: str | Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        split_special_tokens: bool = False,
    ) -> Prompt:
        """Render and tokenize a conversation in a thread; see LLM.chat. :raises HeadwayError: if messages are invalid."""
        render = partial(
            self.host.validator.chat_prompt,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            split_special_tokens=split_special_tokens,
        )
        return await self.in_thread(render)

    async def text_prompt(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """Return a tokenized text in which names of control tokens are encoded as text. add_special_tokens: add the tokenizer's
        own special tokens, such as BOS.

        :raises HeadwayError: if the tokenizer cannot encode names of control tokens as text.
        """
        return await self.in_thread(partial(self.host.validator.text_prompt, text, add_special_tokens))

    async def infill_prompt(self, prefix: str, suffix: str, *, split_special_tokens: bool = False) -> Prompt:
        """Return the fill-in-the-middle prompt for the gap between two texts. split_special_tokens: encode names of control
        tokens as text.

        :raises ConfigError: if the model has no fill-in-the-middle tokens.
        """
        return await self.in_thread(partial(self.host.validator.infill_prompt, prefix, suffix, split_special_tokens))

    async def check(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | None = None,
    ) -> list[CheckedRequest]:
        """Tokenize and check prompts for `submit`, in a thread unless the prompts are few and short. Raises the same errors as
        `generate`."""
        validate = partial(self.host.validator.check, lora_request=lora_request, streamed=True)
        check = partial(validate, prompts, sampling_params, priority)
        return check() if quickly_checked(prompts) else await self.in_thread(check)

    def submit(self, request: CheckedRequest, request_id: str | None = None) -> RequestStream:
        """Queue a request that `check` returned. Return the stream of its outputs. Must be called on an event loop.

        The caller must read the stream to its end or close it, as `generate` does.
        :raises ConfigError: if the id is in use, or if the call comes from within an engine step and would wait for itself.
        :raises EngineDeadError: if the engine has ended or is being drained.
        """
        self.host.check_caller()
        if self._draining:
            raise EngineDeadError("the engine takes no more requests, because it is being drained")
        box = self._mailboxes.of(asyncio.get_running_loop(), self.model.tokenizer, partial(abort_request, self.host))
        name = self.host.names.claim(request_id)
        stream = box.open(name, request, partial(self._close, box, name))
        try:
            unnamed = request._replace(prompt=None)  # the engine does not need the text
            added = self.host.run_between_steps(query(partial(EngineLoop.add_request, request_id=name.key, request=unnamed)))
        except (EngineDeadError, HeadwayError):
            stream.close()
            raise
        added.add_done_callback(partial(_tell, box, name.key))
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with finish_reason "abort". Unknown and finished ids are ignored."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            self._mailboxes.abort(each)
        await asyncio.sleep(0)  # the mailboxes run in the next iteration of the loop

    async def drain(self, timeout: float | None = None) -> bool:
        """Reject new requests and wait for running ones. Return whether all have ended. timeout: seconds; None means no limit."""
        self._draining = True
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while self.num_unfinished_requests and self.is_running:
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_DRAIN_INTERVAL)
        return True

    def shutdown(self) -> None:
        """End all requests, as `abort` does, and stop the engine permanently after the current step."""
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> Any:
        """Return the model's transformers tokenizer; None if the model was loaded without one."""
        return transformers_tokenizer(self.model.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's recommended parameters, which `generate` and `chat` use by default."""
        return self.host.validator.default_params()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts. Return True, as vLLM does."""
        await self.query(partial(EngineLoop.forget_prefixes, everywhere=True))
        return True

    async def record(self) -> Path:
        """Write the last steps to a file for `headway replay`, between two steps, and return its path. Raises the same errors as
        `LLM.record` and `query`."""
        return await self.query(EngineLoop.record)

    async def stats(self) -> EngineSnapshot:
        """Return the engine's current statistics and its totals since the start, read between two steps. Raises the same errors
        as `query`."""
        return await self.query(EngineLoop.snapshot)

    async def query(self, function: Callable[[EngineLoop], T]) -> T:
        """Call a picklable function with the engine between steps; return its result. :raises EngineDeadError: if the engine has
        ended."""
        return await self.run_task(query(function))

    async def run_task(self, task: Task[T], *, concurrently: bool = False) -> T:
        """Call a task with the engine's driver. Raises the same errors as `query`. concurrently: run the task during steps; the
        task must not change the engine."""
        if not concurrently:
            self.host.check_caller()
        run = self.host.run_concurrently if concurrently else self.host.run_between_steps
        return await asyncio.wrap_future(run(task))

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of weights and KV cache until `wake_up`; see LLM.sleep. All requests must have ended."""
        await self.run_task(partial(live_model.sleep, level=level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory of weights and KV cache again; see LLM.wake_up."""
        await self.run_task(partial(live_model.wake_up, tags=tags))

    async def is_sleeping(self) -> bool:
        """Return whether the weights or the KV cache are asleep (freed)."""
        return await self.run_task(live_model.is_sleeping)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function, or a worker's method by name; see LLM.collective_rpc. For an engine in another process, the function
        must be picklable. timeout: maximum seconds to wait; None means no limit."""
        call = self.run_task(partial(live_model.collective_rpc, method=method, args=args, kwargs=kwargs))
        return await asyncio.wait_for(call, timeout)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter while the engine runs. Return True, as vLLM does. :raises EngineDeadError: if the engine has ended.
        :raises ConfigError: if the adapter is not supported or enable_lora is off."""
        await self.run_task(partial(read_adapter, lora_request=lora_request), concurrently=True)
        await self.run_task(partial(register_adapter, lora_request=lora_request))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter by its id; running requests keep using it. Return whether it existed. Raises the same errors as
        `run_task`."""
        return await self.run_task(query(partial(remove_adapter, lora_id=lora_id)))

    async def list_loras(self) -> set[int]:
        """Return the ids of the loaded adapters. Raises the same errors as `run_task`."""
        return await self.run_task(query(adapter_ids))

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine that do not change after its start."""
        return self.host.facts

    @property
    def driver(self) -> EngineDriver:
        """The driver of an engine in a thread of this process. :raises ConfigError: if the engine runs in another process."""
        if not isinstance(self.host, EngineThread):
            raise ConfigError("AsyncLLM", "own_process=False for its driver and engine", "an engine in another process")
        return self.host.driver

    @property
    def engine(self) -> EngineLoop:
        """The engine that `driver` runs. Raises the same errors as `driver`."""
        return self.driver.engine

    @property
    def is_running(self) -> bool:
        """True while the engine accepts requests."""
        return self.host.error is None

    @property
    def is_stopped(self) -> bool:
        """True after a fault or a shutdown."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """True after a fault has ended the engine."""
        return self.host.error is not None and self.host.error.__cause__ is not None

    @property
    def has_lost_engine(self) -> bool:
        """True after a fault has ended the engine permanently."""
        return self.errored and not self.host.is_restarting

    @property
    def failure(self) -> EngineDeadError | None:
        """The fault that ended the engine; None while it runs and after a shutdown."""
        return self.host.error if self.errored else None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Reason why the engine has ended; None while it runs."""
        return self.host.error

    async def check_health(self, step_timeout: float | None = None) -> None:
        """Check that the engine is alive. step_timeout: maximum seconds per step; None means no limit.
        :raises EngineDeadError: if the engine has ended, or no step has finished for longer than `step_timeout`."""
        if self.host.error is not None:
            raise self.host.error
        stalled = self.host.stalled_seconds
        if step_timeout is not None and stalled > step_timeout:
            raise EngineDeadError(f"the engine is stuck: no step has ended for {stalled:.0f} s (step_timeout={step_timeout:g})")

    @property
    def num_unfinished_requests(self) -> int:
        """Number of this AsyncLLM's requests whose stream has not ended."""
        return self._mailboxes.num_streams

    @property
    def num_waiting(self) -> int:
        """Number of sequences (completions of requests) in the engine that wait to start or to resume."""
        return self.host.num_sequences[1]

    @property
    def num_running(self) -> int:
        """Number of sequences that are running in the engine."""
        return self.host.num_sequences[0]

    def __getattr__(self, name: str) -> NoReturn:
        """Raise the error for a missing attribute, with a hint if vLLM has the attribute."""
        raise missing_attribute(name, type(self).__name__)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in one of the tokenizer threads. :raises EngineDeadError: if the engine has ended."""
        await self.check_health()
        return await asyncio.get_running_loop().run_in_executor(self._tokenisers, function)

    def _close(self, box: Mailbox, name: RequestName) -> None:
        """Forget a request whose stream was read to its end or closed."""
        if not box.remove(name.key).finished:
            abort_request(self.host, name.key, None)
        self.host.names.release(name.request_id)


def _tell(box: Mailbox, key: str, added: Future[None]) -> None:
    """Report the engine's rejection of a request to its stream."""
    error = added.exception()
    if error is not None:
        box.post(box.fail, error, key)


def _stop(host: EngineHost, mailboxes: Mailboxes, tokenisers: ThreadPoolExecutor) -> None:
    host.stop()
    tokenisers.shutdown(wait=False, cancel_futures=True)
    host.remove_client(mailboxes.post, mailboxes.abort_all)
