"""`AsyncLLM`: the engine in a thread or a process of its own, and requests as asynchronous iterators."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headway.core.contract.errors import HeadwayError
from headway.core.engine.loop import EngineLoop
from headway.core.engine.stats import EngineSnapshot
from headway.core.sampling.params import SamplingParams
from headway.driver import driver_of
from headway.engine_args import EngineArgs, takes_arguments_of
from headway.engine_host import EngineDeadError, EngineHost, Task, add_request, give_up, look
from headway.engine_process import EngineProcess
from headway.engine_state import EngineState
from headway.engine_thread import EngineThread
from headway.intake import CheckedRequest, check_streamed, quickly_checked, template_options
from headway.outputs import RequestOutput
from headway.prompts import Message, Prompt, alone
from headway.request_names import RequestName
from headway.streams import Mailbox, Mailboxes, RequestStream

if TYPE_CHECKING:
    from headway.llm import LLM

T = TypeVar("T")

_DRAIN_INTERVAL = 0.02
"""Seconds between two looks at what still runs."""
_TOKENISERS = 2
"""Threads that render templates and tokenise; the tokenizer's own code runs beside Python's."""


class AsyncLLM(EngineState):
    """A model whose requests come and go while it runs. Methods are named as those of vLLM's AsyncLLM.

    Prompts are tokenised in threads, the engine runs in another thread or in a process of its own, and texts are made on the
    caller's event loop. Coroutines of several event loops may use one AsyncLLM.
    """

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model and start its engine, which takes seconds to minutes. The options are those of LLM.

        :raises HeadwayError: anything the caller can put right, in one line.
        """
        self._start(EngineThread(driver_of(EngineArgs.of(*model, **options))))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, own_process: bool = False) -> Self:
        """With these options.

        own_process: run the engine in a process of its own, as `headway serve` does. Python's interpreter lock is then not shared
        by the engine's steps and what is done for each token here, and what ends that process leaves this one alone. Options and
        parameters must be such as can be pickled; `engine`, `driver` and functions as logits processors are for threads.
        """
        return cls.over(EngineProcess(partial(driver_of, engine_args)) if own_process else EngineThread(driver_of(engine_args)))

    @classmethod
    def over(cls, host: EngineHost) -> Self:
        """Over an engine that runs already; see `engine_host`."""
        made = cls.__new__(cls)
        made._start(host)
        return made

    @classmethod
    def from_llm(cls, llm: LLM) -> Self:
        """Over the model and the engine of an LLM, which may be used meanwhile: the requests of both share the batch."""
        return cls.over(EngineThread(llm.driver))

    def _start(self, host: EngineHost) -> None:
        super().__init__(host)
        self._tokenisers = ThreadPoolExecutor(_TOKENISERS, "headway-tokenise")
        self._draining = False
        host.listen(self._mailboxes.post, self._mailboxes.fail)
        self._stop = weakref.finalize(self, _stop, host, self._mailboxes, self._tokenisers)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; each item is the output so far, or what SamplingParams.output_kind says.

        The request ends with the iterator, and with the task that reads it: who stops listening need not abort it. prompt and
        sampling_params: see LLM.generate. request_id: a text that no unfinished request has; None: one is made. priority: see
        scheduling_policy.

        :raises PromptError: an empty or too long prompt, before the first item.
        :raises ConfigError: a parameter that cannot work, likewise.
        :raises EngineDeadError: a fault in the engine has ended it.
        """
        (request,) = await self.check(alone(prompt), sampling_params)
        stream = self.submit(request, request_id, priority=priority)
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
        priority: int = 0,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation in the model's chat template, as `generate` completes a prompt. template: see `chat_prompt`."""
        prompt = await self.chat_prompt(messages, **template)
        async with aclosing(self.generate(prompt, sampling_params, request_id, priority=priority)) as outputs:
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
    ) -> Prompt:
        """A conversation in the model's chat template, ready for `generate`; rendered and tokenised in a thread. See LLM.chat.

        :raises HeadwayError: the model has no chat template, or a message has another form.
        """
        options = template_options(add_generation_prompt, continue_final_message, chat_template, tools, chat_template_kwargs)
        return await self.in_thread(partial(self._host.intake.chat_prompt, messages, **options))

    async def check(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[CheckedRequest]:
        """Tokenise and check prompts in a thread, without queueing any: all are good for `submit`, or it raises.

        A few short prompts of token ids are checked at once: a thread would take longer to wake than that takes.

        :raises HeadwayError: as `generate`.
        """
        if quickly_checked(prompts):
            return self._host.intake.check(prompts, sampling_params)
        return await self.in_thread(partial(self._host.intake.check, prompts, sampling_params))

    def submit(self, request: CheckedRequest, request_id: str | None = None, *, priority: int = 0) -> RequestStream:
        """Queue a request that `check` returned, and return the stream of its outputs; call it on an event loop.

        The stream must be read to its end or closed; `generate` sees to that.

        :raises ConfigError: the id is taken.
        :raises EngineDeadError: the engine has ended or is being drained.
        """
        self.facts.limits.check_priority(priority)
        check_streamed(request.params)
        if self._draining:
            raise EngineDeadError("the engine takes no more requests, because it is being drained")
        box = self._mailboxes.of(asyncio.get_running_loop(), self.model.tokenizer, partial(give_up, self._host))
        name = self._host.names.claim(request_id)
        stream = box.open(name, request, partial(self._close, box, name))
        try:
            added = self._host.call(add_request(name.key, request.prompt_token_ids, request.resolved, priority))
        except (EngineDeadError, HeadwayError):
            stream.close()
            raise
        added.add_done_callback(partial(_tell, box, name.key))
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; their streams end with an output whose completions have finish_reason "abort".

        A request that is unknown or has ended is left alone.
        """
        for each in [request_id] if isinstance(request_id, str) else list(request_id):
            self._mailboxes.abort(each)
        await asyncio.sleep(0)  # which lets it happen

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, and wait until those that run have ended. timeout: seconds; None: however long it takes.

        Returns whether all have ended.
        """
        self._draining = True
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        while self.num_unfinished_requests and self.is_running:
            if deadline is not None and asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_DRAIN_INTERVAL)
        return True

    def shutdown(self) -> None:
        """End all requests, as `abort` does, and the engine's thread, after the step that it is in. This is for good."""
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model; None where it was loaded without one."""
        return self.model.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends: what `generate` takes where it is given none."""
        return self._host.intake.default_params()

    async def reset_prefix_cache(self) -> bool:
        """Forget the prompts that the cache holds; True, as vLLM's returns."""
        await self.ask(_forget_prefixes)
        return True

    async def stats(self) -> EngineSnapshot:
        """What the engine does at this moment and has done since it started, read between two steps. It raises as `ask`."""
        return await self.ask(EngineLoop.snapshot)

    async def ask(self, function: Callable[[EngineLoop], T]) -> T:
        """What a function finds that is called with the engine between two steps; EngineDeadError without one.

        It is called where the engine runs: another process needs a function of a module, or a partial of one.
        """
        return await self.have_done(look(function))

    async def have_done(self, task: Task[T], *, aside: bool = False) -> T:
        """What a task finds; see `engine_host`. aside: it is done beside the engine's steps, which it must not change."""
        return await asyncio.wrap_future((self._host.aside if aside else self._host.call)(task))

    async def in_thread(self, function: Callable[[], T]) -> T:
        """Call a function in one of the threads that tokenise.

        :raises EngineDeadError: the engine has ended.
        """
        await self.check_health()
        return await asyncio.get_running_loop().run_in_executor(self._tokenisers, function)

    def _close(self, box: Mailbox, name: RequestName) -> None:
        """After a stream was read to its end or given up."""
        if not box.remove(name.key).finished:
            give_up(self._host, name.key, None)
        self._host.names.release(name.request_id)


def _forget_prefixes(engine: EngineLoop) -> None:
    engine.blocks.forget_prefixes(everywhere=True)


def _tell(box: Mailbox, key: str, added: Future[None]) -> None:
    """Pass on that the engine has refused a request."""
    error = added.exception()
    if error is not None:
        box.post_failure(error, key)


def _stop(host: EngineHost, mailboxes: Mailboxes, tokenisers: ThreadPoolExecutor) -> None:
    host.stop()
    tokenisers.shutdown(wait=False, cancel_futures=True)
    host.leave(mailboxes.post, mailboxes.abort_all)
