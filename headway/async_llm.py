"""`AsyncLLM`: the engine in a thread or a process of its own, and requests as asynchronous iterators."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
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
    keep_adapter,
    query,
    read_adapter,
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

_DRAIN_INTERVAL = 0.02  # Seconds between two checks for requests that still run
_TOKENISERS = 2  # Threads that render templates and tokenise; the tokenizer's native code does not hold Python's lock


class AsyncLLM:
    """A running model whose requests come and go. Methods are named as those of vLLM's AsyncLLM.

    Prompts are tokenised in threads, the engine runs in another thread or in a process of its own, and texts are made on the
    caller's event loop. Coroutines of several event loops may use one AsyncLLM.
    """

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model and start its engine (seconds to minutes); options as LLM's. :raises HeadwayError: a caller's mistake."""
        self._start(EngineThread(driver_of(EngineArgs.of(*model, **options))))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, own_process: bool = False, **_: object) -> Self:
        """Make an AsyncLLM with these options.

        own_process: run the engine in a process of its own, as `headway serve` does. Its steps then do not share Python's lock
        with the work for each token here, and a fault that ends that process leaves this one alone. Options and parameters must
        be picklable; `engine`, `driver` and functions as logits processors need a thread. Keywords beside it concern vLLM's
        processes and reports, and are not read.
        """
        return cls.over(EngineProcess(partial(driver_of, engine_args)) if own_process else EngineThread(driver_of(engine_args)))

    @classmethod
    def over(cls, host: EngineHost) -> Self:
        """Make an AsyncLLM over an engine that runs already."""
        made = cls.__new__(cls)
        made._start(host)
        return made

    @classmethod
    def from_llm(cls, llm: LLM) -> Self:
        """Make an AsyncLLM over the engine of an LLM, which stays usable: the requests of both share the batch."""
        return cls.over(EngineThread(llm.driver, owned=False))

    def _start(self, host: EngineHost) -> None:
        self.host = host
        """What runs the engine, in a thread or a process."""
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
        """Complete a prompt; each item is the output so far, or what SamplingParams.output_kind says.

        The request ends with the iterator, and with the task that reads it: a caller who stops reading need not abort it. prompt,
        sampling_params, lora_request: see LLM.generate. request_id: a text that no unfinished request has; None: one is made.
        priority: see scheduling_policy. others: keywords of vLLM's; those that ask for something are refused.

        :raises PromptError: an empty or too long prompt, before the first item.
        :raises ConfigError: a parameter that cannot work, likewise.
        :raises EngineDeadError: the engine has ended.
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
        """Answer a conversation in the model's chat template, as `generate` completes a prompt. template: see `chat_prompt`."""
        prompt = await self.chat_prompt(messages, **template)
        asked = self.generate(prompt, sampling_params, request_id, lora_request=lora_request, priority=priority)
        async with aclosing(asked) as outputs:
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
        """Render and tokenise a conversation in a thread; see LLM.chat. :raises HeadwayError: no template, or bad messages."""
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
        """Tokenise a text in a thread, control token names as text. add_special_tokens: add the tokenizer's own, such as BOS.
        :raises HeadwayError: the model's tokenizer cannot do that."""
        return await self.in_thread(partial(self.host.validator.text_prompt, text, add_special_tokens))

    async def infill_prompt(self, prefix: str, suffix: str, *, split_special_tokens: bool = False) -> Prompt:
        """Return the prompt for a gap between two texts, tokenised in a thread. split_special_tokens: control names are text.
        :raises ConfigError: the model has no tokens for that."""
        return await self.in_thread(partial(self.host.validator.infill_prompt, prefix, suffix, split_special_tokens))

    async def check(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | None = None,
    ) -> list[CheckedRequest]:
        """Tokenise and check prompts for `submit` in a thread; a few short prompts of token ids here, which is faster.
        :raises HeadwayError: as `generate`."""
        asked = partial(self.host.validator.check, lora_request=lora_request, streamed=True)
        check = partial(asked, prompts, sampling_params, priority)
        return check() if quickly_checked(prompts) else await self.in_thread(check)

    def submit(self, request: CheckedRequest, request_id: str | None = None) -> RequestStream:
        """Queue a request that `check` returned, and return the stream of its outputs; call it on an event loop.

        The stream must be read to its end or closed; `generate` sees to that.

        :raises ConfigError: the id is taken, or a step of the engine makes this call and would wait for itself.
        :raises EngineDeadError: the engine has ended or is being drained.
        """
        self.host.check_caller()
        if self._draining:
            raise EngineDeadError("the engine takes no more requests, because it is being drained")
        box = self._mailboxes.of(asyncio.get_running_loop(), self.model.tokenizer, partial(abort_request, self.host))
        name = self.host.names.claim(request_id)
        stream = box.open(name, request, partial(self._close, box, name))
        try:
            unnamed = request._replace(prompt=None)  # a text need not travel
            added = self.host.run_between_steps(query(partial(EngineLoop.add_request, request_id=name.key, request=unnamed)))
        except (EngineDeadError, HeadwayError):
            stream.close()
            raise
        added.add_done_callback(partial(_tell, box, name.key))
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with finish_reason "abort". An unknown or ended request is left alone."""
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            self._mailboxes.abort(each)
        await asyncio.sleep(0)  # the mailboxes act in the next round of the loop

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until the running ones end; return whether all have. timeout: seconds; None: no limit."""
        self._draining = True
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while self.num_unfinished_requests and self.is_running:
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_DRAIN_INTERVAL)
        return True

    def shutdown(self) -> None:
        """End all requests, as `abort` does, and the engine, for good, after the step that runs now."""
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> Any:
        """Return transformers' tokenizer of the model; None if the model was loaded without one."""
        return transformers_tokenizer(self.model.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model recommends; `generate` and `chat` use them if none are given."""
        return self.host.validator.default_params()

    async def reset_prefix_cache(self) -> bool:
        """Forget the prompts that the cache holds; True, as vLLM's returns."""
        await self.query(partial(EngineLoop.forget_prefixes, everywhere=True))
        return True

    async def stats(self) -> EngineSnapshot:
        """The engine's figures, at this moment and since its start, read between two steps. Raises as `query`."""
        return await self.query(EngineLoop.snapshot)

    async def query(self, function: Callable[[EngineLoop], T]) -> T:
        """Call a picklable function with the engine between steps, and return its result. :raises EngineDeadError: it ended."""
        return await self.run_task(query(function))

    async def run_task(self, task: Task[T], *, concurrently: bool = False) -> T:
        """Call a task with the engine's driver; otherwise as `query`. concurrently: beside steps, without changing the engine."""
        if not concurrently:
            self.host.check_caller()
        run = self.host.run_concurrently if concurrently else self.host.run_between_steps
        return await asyncio.wrap_future(run(task))

    async def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and cache back until `wake_up`; see LLM.sleep. Requests must have ended before."""
        await self.run_task(partial(live_model.sleep, level=level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back; see LLM.wake_up."""
        await self.run_task(partial(live_model.wake_up, tags=tags))

    async def is_sleeping(self) -> bool:
        """Whether weights or cache sleep."""
        return await self.run_task(live_model.is_sleeping)

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function or method of the worker (LLM.collective_rpc), picklable for another process. timeout: seconds."""
        call = self.run_task(partial(live_model.collective_rpc, method=method, args=args, kwargs=kwargs))
        return await asyncio.wait_for(call, timeout)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter beside the engine's steps; return True, as vLLM does. :raises EngineDeadError: the engine has ended.
        :raises ConfigError: it cannot be served, or the engine was started without enable_lora."""
        await self.run_task(partial(read_adapter, lora_request=lora_request), concurrently=True)
        await self.run_task(partial(keep_adapter, lora_request=lora_request))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that use it go on with it. False: none has this number. Raises as `run_task`."""
        return await self.run_task(query(partial(remove_adapter, lora_id=lora_id)))

    async def list_loras(self) -> set[int]:
        """The numbers of the adapters that have been read. Raises as `run_task`."""
        return await self.run_task(query(adapter_ids))

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine."""
        return self.host.facts

    @property
    def driver(self) -> EngineDriver:
        """Return the driver of an engine in a thread of this process. :raises ConfigError: the engine runs in another process."""
        if not isinstance(self.host, EngineThread):
            raise ConfigError("AsyncLLM", "own_process=False for its driver and engine", "an engine in another process")
        return self.host.driver

    @property
    def engine(self) -> EngineLoop:
        """The engine of `driver`."""
        return self.driver.engine

    @property
    def is_running(self) -> bool:
        """True while the engine serves requests."""
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
        """True after a fault has ended the engine for good: nobody starts it again."""
        return self.errored and not self.host.is_restarting

    @property
    def failure(self) -> EngineDeadError | None:
        """The fault that has ended the engine; None while it runs, and after a shutdown."""
        return self.host.error if self.errored else None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine has ended; None while it runs."""
        return self.host.error

    async def check_health(self, step_timeout: float | None = None) -> None:
        """Check that the engine can serve. step_timeout: seconds that a step may take; None: any.
        :raises EngineDeadError: the engine has ended, or has not come to the end of a step for longer than `step_timeout`."""
        if self.host.error is not None:
            raise self.host.error
        stalled = self.host.stalled_seconds
        if step_timeout is not None and stalled > step_timeout:
            raise EngineDeadError(f"the engine is stuck: no step has ended for {stalled:.0f} s (step_timeout={step_timeout:g})")

    @property
    def num_unfinished_requests(self) -> int:
        """Requests of this AsyncLLM whose stream has not ended."""
        return self._mailboxes.num_streams

    @property
    def num_waiting(self) -> int:
        """Sequences (completions of requests) in the engine that have not begun, or wait to go on."""
        return self.host.num_sequences[1]

    @property
    def num_running(self) -> int:
        """Sequences in the engine that its steps advance."""
        return self.host.num_sequences[0]

    def __getattr__(self, name: str) -> NoReturn:
        """Called for attributes that are lacking: for those of vLLM's the error names what comes nearest."""
        raise missing_attribute(name, type(self).__name__)

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in one of the threads that tokenise. :raises EngineDeadError: the engine has ended."""
        await self.check_health()
        return await asyncio.get_running_loop().run_in_executor(self._tokenisers, function)

    def _close(self, box: Mailbox, name: RequestName) -> None:
        """Forget a request whose stream was read to its end or given up."""
        if not box.remove(name.key).finished:
            abort_request(self.host, name.key, None)
        self.host.names.release(name.request_id)


def _tell(box: Mailbox, key: str, added: Future[None]) -> None:
    """Pass a refusal of the engine on to the stream of its request."""
    error = added.exception()
    if error is not None:
        box.post(box.fail, error, key)


def _stop(host: EngineHost, mailboxes: Mailboxes, tokenisers: ThreadPoolExecutor) -> None:
    host.stop()
    tokenisers.shutdown(wait=False, cancel_futures=True)
    host.remove_client(mailboxes.post, mailboxes.abort_all)
