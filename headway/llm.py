"""`LLM`: a model, an engine, and text in and out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from tqdm import tqdm

from headway.assembly import assemble
from headway.core.contract.errors import ConfigError
from headway.core.sampling.params import SamplingParams
from headway.driver import EngineDriver
from headway.engine_args import EngineArgs, takes_arguments_of
from headway.intake import check_streamed, template_options
from headway.outputs import RequestOutput
from headway.processor import OutputProcessor
from headway.progress import Progress, RequestState
from headway.prompts import Message, Prompt
from headway.vllm_names import check_keywords, missing_attribute


class LLM:
    """A model ready to generate. Arguments are named as vLLM's offline class names them, where it has them.

    Several threads may call one LLM: their requests share the batch, and each call returns its own.
    """

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model and set its engine up. The options are those of `EngineArgs`; docs/options.md lists them.

        :raises HeadwayError: anything the caller can put right, in one line.
        """
        assembly = assemble(EngineArgs.of(*model, **options))
        self.registry, self.device, self.num_threads, self.model, self.engine = assembly
        self.tokenizer = self.model.tokenizer
        self.driver = EngineDriver(assembly)
        """What this LLM and others share that run on its engine; see AsyncLLM.from_llm."""
        self._processor = OutputProcessor(self.tokenizer)
        self.driver.listen(self._processor.process)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **others: object,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in their order.

        prompts: a text, token ids (also an array), {"prompt": text}, {"prompt_token_ids": ids}, a tokenizer's output, or a list
        of these. sampling_params: one for all, or one for each; None: `get_default_sampling_params`. others: keywords of vLLM's,
        of which those that ask for something are refused.

        A request whose schema cannot be compiled, or whose logits processor raises, ends alone, with finish_reason "error".

        :raises PromptError: an empty or too long prompt; it is found before anything runs, so nothing is lost.
        :raises ConfigError: a keyword or a parameter that cannot work, likewise.
        """
        check_keywords("LLM.generate", others, ("prompts", "sampling_params", "use_tqdm"))
        requests, progress = self._add(prompts, sampling_params)
        with (
            self._ended(requests),
            tqdm(total=progress.num_completions, desc="Processed prompts", disable=not use_tqdm) as bar,
        ):
            started = time.perf_counter()
            while not progress.finished:
                with self.driver.turns:
                    self._step(progress)
                bar.update(progress.num_finished - bar.n)
                bar.set_postfix_str(f"{progress.num_tokens / (time.perf_counter() - started):.1f} tok/s", refresh=False)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[tuple[str, RequestOutput]]:
        """Complete one prompt and yield (new text of completion 0, output so far) after every step.

        :raises ConfigError: best_of is larger than n, for which completion is returned shows at the end alone.
        """
        if sampling_params is not None:
            check_streamed(sampling_params)
        requests, progress = self._add([prompt], sampling_params)
        (request,) = requests
        shown, finished = 0, False
        with self._ended(requests):
            while not finished:
                with self.driver.turns:
                    self._step(progress)
                    output = request.output()
                finished, text = output.finished, output.outputs[0].text
                yield text[shown:], output
                shown = len(text)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: object,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, in the model's own chat template; the outputs come in their order.

        messages: a list of {"role": ..., "content": ...}, or a list of such lists. continue_final_message: go on with the last
        message instead of answering it. chat_template: in place of the model's. tools, chat_template_kwargs: for the template.

        :raises HeadwayError: the model has no chat template, or a message has another form.
        """
        known = ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "tools", "chat_template_kwargs")
        check_keywords("LLM.chat", others, ("sampling_params", "use_tqdm", *known))
        one = all(isinstance(message, Mapping) for message in messages)
        conversations = [messages] if one else messages
        options = template_options(add_generation_prompt, continue_final_message, chat_template, tools, chat_template_kwargs)
        prompts = [self.driver.intake.chat_prompt(cast("Sequence[Message]", each), **options) for each in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model; None where it was loaded without one."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends: what `generate` takes where it is given none."""
        return self.driver.intake.default_params()

    def reset_prefix_cache(self) -> bool:
        """Forget the prompts that the cache holds; True, as vLLM's returns."""
        with self.driver.turns:
            self.engine.blocks.forget_prefixes()
        return True

    def __getattr__(self, name: str) -> NoReturn:
        """Reached for names that are not there: those of vLLM's LLM are answered with what comes nearest."""
        raise missing_attribute(name)

    def chat_prompt(self, messages: str | Sequence[Message]) -> Prompt:
        """A user's message, or a list of messages, in the model's own chat template: ready for `generate` and `stream`.

        :raises HeadwayError: the model has no chat template, or a message has another form.
        """
        return self.driver.intake.chat_prompt(messages)

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[RequestState], Progress]:
        checked = self.driver.intake.check(prompts, sampling_params)
        requests: list[RequestState] = []
        progress = Progress()
        with self.driver.turns, self._ended_if_refused(requests):
            for each in checked:
                request_id = self.driver.claim()
                requests.append(self._processor.add(request_id, each.prompt, each.prompt_token_ids, each.params, progress))
                self.engine.add_request(request_id, each.prompt_token_ids, each.resolved)
        return requests, progress

    def _step(self, progress: Progress) -> None:
        """Run one step, unless another call's steps have finished this call's requests. All requests advance with it."""
        if not progress.finished:
            self.driver.step()

    @contextmanager
    def _ended_if_refused(self, requests: list[RequestState]) -> Iterator[None]:
        """Where one request of a call is refused, those before it do not run either."""
        try:
            yield
        except ConfigError:
            self._end(requests)
            raise

    @contextmanager
    def _ended(self, requests: Sequence[RequestState]) -> Iterator[None]:
        """However a call is left, by the end, by an interrupt or because nobody listens any more, its requests end with it."""
        try:
            yield
        finally:
            with self.driver.turns:
                self._end(requests)

    def _end(self, requests: Sequence[RequestState]) -> None:
        for request in requests:
            self._processor.remove(request.request_id)
            self.engine.abort(request.request_id)
            self.driver.release(request.request_id)
