"""`LLM`: a model with its engine, which generates text, embeddings and scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property, partial
from typing import Any, Self, overload

from tqdm import tqdm

from headway.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, search
from headway.compat.vllm_views import ModelSettings
from headway.compat.vllm_words import check_keywords
from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.sampling.params import SamplingParams
from headway.engine_args import EngineArgs, find_pooling_model, takes_arguments_of
from headway.hosting.assembly import Assembly, assemble, checked_registry
from headway.hosting.driver import EngineDriver, record_on_signal
from headway.llm_engine import EngineAccess, LLMEngine
from headway.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from headway.pooling.assembly import PoolingAssembly, PoolingClient, assemble_pooling
from headway.requests.chat_template import list_of_messages
from headway.requests.prompts import FORMS, Message, Prompt, is_one
from headway.requests.request_state import OutputProcessor, Progress, RequestState


class LLM(EngineAccess):
    """Model ready to generate, embed or score, with vLLM's argument names. Several threads may use one LLM; their requests run in
    the same batch."""

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model. Options: see `EngineArgs` (docs/options.md). :raises HeadwayError: if an option is invalid."""
        args = EngineArgs.of(*model, **options)
        self._driver: EngineDriver | None = None
        self._pooling: PoolingClient | None = None
        registry = checked_registry(args)
        found = find_pooling_model(args)
        made: Assembly | PoolingAssembly
        if found is not None:
            made = pooled = assemble_pooling(args, found, registry)
            self._pooling = PoolingClient(pooled)
        else:
            made = assembly = assemble(args, registry)
            self._driver = EngineDriver(assembly)
            self._processor = OutputProcessor(assembly.model.tokenizer)
            self._driver.add_listener(self._processor.process)
            if args.record_steps:
                record_on_signal(self._driver)
        self.registry = made.registry
        self.device = made.device
        self.num_threads = made.num_threads
        self.tokenizer = made.model.tokenizer
        self.start_times = made.start
        """Duration of each part of the start, in seconds."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an LLM with these options."""
        return cls(**{each.name: getattr(engine_args, each.name) for each in fields(engine_args)})

    @property
    def driver(self) -> EngineDriver:
        """The driver, shared with AsyncLLMs of the same engine (from_llm). :raises ConfigError: if the model is a pooling
        model."""
        if self._driver is None:
            raise self.pooling.generates_not()
        return self._driver

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """An `LLMEngine` for the same engine; its requests share the batch. Raises the same errors as `driver`."""
        return LLMEngine.over(self.driver)

    @property
    def model_config(self) -> ModelSettings:
        """The model's sizes and options under vLLM's names. Raises the same errors as `driver`."""
        return self.llm_engine.vllm_config.model_config

    @property
    def pooling(self) -> PoolingClient:
        """The pooling model and its engine. :raises ConfigError: if the model generates text."""
        if self._pooling is None:
            hint = "runner='pooling' makes vectors of a decoder's last states"
            raise ConfigError(
                "LLM.embed and LLM.score", "a model that is pooled", f"{self.model.name}, which generates text", hint
            )
        return self._pooling

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Complete prompts. Return one output per prompt, in order.

        prompts: a text, token ids (also an array), {"prompt": text}, {"prompt_token_ids": ids}, a tokenizer's output, or a list
        of these. sampling_params: one for all or one per prompt; None means `get_default_sampling_params`. priority: one for all
        or one per prompt; see scheduling_policy. lora_request: an adapter for all or one per prompt, None meaning the base model;
        see docs/lora.md. prompt_token_ids: the prompts, under vLLM's older name. others: keywords of vLLM; unsupported ones are
        rejected.

        If a request's schema cannot be compiled or its logits processor raises, only this request ends, with finish_reason
        "error".
        :raises PromptError: if a prompt is empty or too long; checked before any request runs.
        :raises ConfigError: if a keyword, parameter or adapter is invalid; checked before any request runs.
        """
        if others:
            check_keywords("LLM.generate", others, ("prompts", "sampling_params", "use_tqdm", "priority"))
        given = prompts if prompt_token_ids is None else prompt_token_ids
        if given is None:
            raise PromptError("prompt", FORMS, "None")
        requests, progress = self._add(given, sampling_params, priority, lora_request)
        with self._ended(requests), tqdm(total=progress.num_completions, desc="Processed prompts", disable=not use_tqdm) as bar:
            started = time.perf_counter()
            while not progress.finished:
                with self.driver.lock:
                    self._step(progress)
                bar.update(progress.num_finished - bar.n)
                bar.set_postfix_str(f"{progress.num_tokens / (time.perf_counter() - started):.1f} tok/s", refresh=False)
        return [request.output() for request in requests]

    @overload
    def stream(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompts: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[tuple[str, RequestOutput]]: ...

    @overload
    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]: ...

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> Iterator[tuple[str | int, RequestOutput]]:
        """Complete one or several prompts. Yield an output whenever a step has added tokens to a prompt's completions.

        Yields (new text of completion 0, output) for one prompt, and (index of the prompt, output) for a list. An output contains
        all completions so far, or the part that SamplingParams.output_kind selects. Requests end when the iterator is closed, or
        by `abort` from any thread.
        :raises ConfigError: if best_of is larger than n, since the best completions are only known at the end.
        """
        requests, progress = self._add(prompts, sampling_params, priority, lora_request, streamed=True)
        one, shown = len(requests) == 1 and is_one(prompts), 0
        with self._ended(requests):
            unread = dict(enumerate(requests))
            while unread:
                with self.driver.lock:
                    self._step(progress)
                    outputs = [(index, state.next_output()) for index, state in unread.items() if state.has_news]
                for index, output in outputs:
                    if output.finished:
                        del unread[index]
                    text = requests[0].completions[0].shown_text if one else ""
                    yield (text[shown:] if one else index), output
                    shown = len(text)

    def abort(self, request_id: str | Iterable[str] | None = None) -> None:
        """End requests of `stream` and `generate` from any thread, with finish_reason "abort". None ends all; unknown ids are
        ignored."""
        with self.driver.lock:
            ids = self._processor.keys if request_id is None else request_id
            for each in [ids] if isinstance(ids, str) else ids:
                self._processor.abort(each)
                self.engine.abort(each)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        split_special_tokens: bool = False,
        **others: object,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, using the model's chat template. Return one output per conversation, in order.

        messages: a list of {"role": ..., "content": ...}, or a list of such lists.
        lora_request: see `generate`.
        continue_final_message: continue the last message instead of answering it.
        chat_template: template that replaces the model's template.
        tools, chat_template_kwargs: variables for the template.
        split_special_tokens: encode names of control tokens in messages as text.
        :raises HeadwayError: if the model has no chat template or a message is invalid.
        """
        template: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "split_special_tokens": split_special_tokens,
        }
        check_keywords("LLM.chat", others, ("messages", "sampling_params", "use_tqdm", *template))
        given = [messages] if isinstance(messages, str) else list_of_messages(messages)
        conversations = [given] if all(isinstance(each, Mapping) for each in given) else given
        prompts = [self.driver.validator.chat_prompt(each, **template) for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        **others: object,
    ) -> list[BeamSearchOutput]:
        """Find the most likely continuations of prompts by beam search. Return one output per prompt, in order. prompts,
        lora_request, others: as in `generate`, with one adapter for all.
        :raises PromptError: if a prompt is empty or too long.
        :raises ConfigError: if a keyword is invalid, or twice the beam_width exceeds max_logprobs."""
        check_keywords("LLM.beam_search", others, ("prompts", "params", "use_tqdm", "concurrency_limit"))
        driver, limits = self.driver, self.driver.validator.limits
        wanted = SamplingParams(max_tokens=1, logprobs=2 * params.beam_width)
        checked = driver.validator.check(prompts, wanted, lora_request=lora_request)
        ids = [request.prompt_token_ids for request in checked]
        searches = [BeamSearch(each, params, self.model.eos_token_ids, limits.max_model_len - len(each)) for each in ids]
        search(searches, partial(self.generate, use_tqdm=use_tqdm, lora_request=lora_request))
        return [each.best(self.tokenizer, lora_request) for each in searches]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        **others: object,
    ) -> list[EmbeddingRequestOutput]:
        """Return one embedding per prompt, in order.

        prompts: as in `generate`.
        dimensions: number of embedding elements to keep, if the model supports shortened embeddings.
        truncate_prompt_tokens: maximum number of tokens of a prompt, -1 for the model's limit; None rejects longer prompts.
        pooling_params: object that replaces the keywords dimensions and truncate_prompt_tokens.
        others: see `generate`.
        :raises PromptError: if a prompt is empty or too long; checked before any prompt runs.
        :raises ConfigError: if the model generates or scores, or a parameter is invalid.
        """
        check_keywords("LLM.embed", others, ("prompts", "dimensions", "truncate_prompt_tokens", "use_tqdm"))
        if pooling_params is not None:
            dimensions, truncate_prompt_tokens = pooling_params.dimensions, pooling_params.truncate_prompt_tokens
        return self.pooling.run(self.pooling.jobs.embed(prompts, dimensions, truncate_prompt_tokens), use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        **others: object,
    ) -> list[ScoringRequestOutput]:
        """Score documents for queries. Return one output per document. data_1: a query for all documents, or one per document.
        data_2: a document or several. A classifier with one label reads both texts; for an embedding model the score is the
        cosine of the embeddings. truncate_prompt_tokens, others: see `embed`.
        :raises PromptError: if two texts together are too long.
        :raises ConfigError: if the model generates, or a parameter is invalid.
        """
        check_keywords("LLM.score", others, ("data_1", "data_2", "truncate_prompt_tokens", "use_tqdm"))
        return self.pooling.run(self.pooling.jobs.score(data_1, data_2, truncate_prompt_tokens), use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        **others: object,
    ) -> list[ClassificationRequestOutput]:
        """Return each prompt's label probabilities. Arguments: see `embed`. :raises PromptError: if a prompt is empty or too
        long.
        :raises ConfigError: if the model is not a classifier."""
        check_keywords("LLM.classify", others, ("prompts", "use_tqdm", "pooling_params"))
        return self.pooling.run(
            self.pooling.jobs.classify(prompts, (pooling_params or PoolingParams()).truncate_prompt_tokens), use_tqdm
        )

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        **others: object,
    ) -> list[PoolingRequestOutput]:
        """Return a reward model's or token classifier's results for each token or step of a prompt.

        Each output's data is float32 [tokens, labels], or [steps, labels] for a model that scores steps. Arguments: see `embed`.
        :raises PromptError: if a prompt is empty or too long; checked before any prompt runs.
        :raises ConfigError: if the model does not score tokens or steps.
        """
        check_keywords("LLM.reward", others, ("prompts", "use_tqdm", "pooling_params"))
        return self.pooling.run(
            self.pooling.jobs.reward(prompts, (pooling_params or PoolingParams()).truncate_prompt_tokens), use_tqdm
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[PoolingRequestOutput]:
        """Return embeddings, classes, rewards or token embeddings as tensors. pooling_task: vLLM's name of the task; None means
        the model's own task."""
        task = self.pooling.jobs.pooling_task(pooling_task)
        if task == "token_embed":
            check_keywords("LLM.encode", others, ("prompts", "use_tqdm", "pooling_params", "pooling_task"))
            pooling_options = pooling_params or PoolingParams()
            job = self.pooling.jobs.embed_tokens(prompts, pooling_options.dimensions, pooling_options.truncate_prompt_tokens)
            return self.pooling.run(job, use_tqdm)
        if task == "token_classify":
            return self.reward(prompts, pooling_params, use_tqdm=use_tqdm, **others)
        made: Sequence[EmbeddingRequestOutput | ClassificationRequestOutput]
        made = (self.classify if task == "classify" else self.embed)(
            prompts, pooling_params=pooling_params, use_tqdm=use_tqdm, **others
        )
        return [PoolingRequestOutput.of(each) for each in made]

    def chat_prompt(self, messages: str | Sequence[Message]) -> Prompt:
        """Render a message or a list of messages in the model's chat template.

        :raises HeadwayError: if the model has no chat template or a message is invalid.
        """
        return self.driver.validator.chat_prompt(messages)

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        streamed: bool = False,
    ) -> tuple[list[RequestState], Progress]:
        """Check all requests of a call, then queue either all of them or none."""
        check = self.driver.validator.check
        checked = check(prompts, sampling_params, priority, lora_request=lora_request, streamed=streamed)
        requests, progress = list[RequestState](), Progress()
        with self.driver.lock:
            try:
                for request in checked:
                    request_id = self.driver.names.claim().request_id
                    requests.append(self._processor.add(request_id, request, progress))
                    self.driver.engine.add_request(request_id, request)
            except BaseException:  # the engine rejected one, an interrupt, or out of memory
                self._end(requests)
                raise
        return requests, progress

    def _step(self, progress: Progress) -> None:
        """Run one step for the requests of all calls, unless steps of other calls have already finished this call's requests."""
        if not progress.finished:
            self.driver.step()

    @contextmanager
    def _ended(self, requests: Sequence[RequestState]) -> Iterator[None]:
        """End a call's requests on exit: when the call returns, is interrupted, or its iterator is closed."""
        try:
            yield
        finally:
            self.driver.call_between_steps(partial(self._end, requests))

    def _end(self, requests: Sequence[RequestState]) -> None:
        for request in requests:
            self._processor.remove(request.request_id)
            self.driver.engine.abort(request.request_id)
            self.driver.names.release(request.request_id)
