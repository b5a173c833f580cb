"""`LLM`: a model, an engine, and text in and out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, cast

from tqdm import tqdm

from headway.asked import default_params, params_of, resolve
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.contract.latent import expanded_specs, latent_layers
from headway.core.engine.engine import Engine
from headway.core.engine.host_rows import HostRows
from headway.core.engine.specs import cache_specs
from headway.core.sampling.grammar import GrammarCompiler
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING
from headway.core.select.request import parse_backend_request
from headway.core.select.selector import check_names
from headway.core.speculation.proposer import ProposerOptions
from headway.engine_args import EngineArgs, takes_arguments_of
from headway.heap import freeze_heap
from headway.models.device_operations import compile_ahead, fastest_sampling
from headway.models.loader import load_model
from headway.outputs import RequestOutput
from headway.processor import OutputProcessor
from headway.progress import Progress, RequestState
from headway.prompts import Message, ParsedPrompt, Prompt, chat_prompt, parse_prompts
from headway.threads import set_threads
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.device import resolve_device
from headway.tuning.experts import choose_experts
from headway.tuning.named import check_named
from headway.turns import Turns
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
        args = EngineArgs.of(*model, **options)
        config, deterministic = args.engine_config(), args.deterministic
        self.registry = args.make_registry()
        check_names(self.registry, config.attn_backend, config.kv_layout, config.attn_options)
        speculate = None if config.speculate is None else self.registry.proposer(config.speculate)
        self.device = resolve_device(args.device)
        ahead = compile_ahead(self.device)
        self.num_threads = set_threads(args.num_threads) if self.device.type == "cpu" else None
        self.model = load_model(
            args.model,
            args.dtype,
            self.device,
            args.load_format,
            args.skip_tokenizer_init,
            deterministic,
            args.model_impl,
            args.compiles_on(self.device.type),
        )
        decoder, costs = self.model.decoder, None
        specs = cache_specs(decoder.attention_specs, config.kv_cache_dtype, decoder.kv_scales)
        check_named(self.registry, parse_backend_request(config.attn_backend).values(), specs)
        if not deterministic:  # which pins one backend, whatever is fastest
            table = TableRequest(None if args.crossover_table is None else Path(args.crossover_table), args.autotune_budget)
            expanded = expanded_specs(specs, latent_layers(decoder))
            costs = costs_for(specs, self.registry, config.attn_backend, table, ahead, expanded)
            choose_experts(decoder.expert_kinds, table.seconds(self.device), ahead)
        # torch's operations are those with which deterministic mode was shown to keep a request's bits.
        sampling = TORCH_SAMPLING if deterministic else fastest_sampling(self.device)
        eos = self.model.eos_token_ids
        self.tokenizer = self.model.tokenizer
        grammars = None if self.tokenizer is None else GrammarCompiler(self.tokenizer, decoder.vocab_size, eos)
        hosts = HostRows(grammars, self.registry.logits_processors)
        made_for, scales = (config, eos, sampling, costs), decoder.kv_scales
        proposer = None if speculate is None else speculate.make(ProposerOptions())
        self.engine = Engine(decoder, self.registry, *made_for, proposer, compile_ahead=ahead, hosts=hosts, kv_scales=scales)
        self._processor = OutputProcessor(self.tokenizer)
        self._request_ids = count()
        self._turns = Turns()
        """Who may use the engine and the processor: calls from several threads take turns, a step each."""
        freeze_heap()

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
                with self._turns:
                    self._step(progress)
                bar.update(progress.num_finished - bar.n)
                bar.set_postfix_str(f"{progress.num_tokens / (time.perf_counter() - started):.1f} tok/s", refresh=False)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[tuple[str, RequestOutput]]:
        """Complete one prompt and yield (new text of completion 0, output so far) after every step.

        :raises ConfigError: best_of is larger than n, for which completion is returned shows at the end alone.
        """
        if sampling_params is not None and sampling_params.num_drawn > sampling_params.n:
            raise ConfigError(
                "best_of", f"None or n={sampling_params.n} in a stream", sampling_params.best_of, "see LLM.generate"
            )
        requests, progress = self._add([prompt], sampling_params, streamed=True)
        (request,) = requests
        shown, finished = 0, False
        with self._ended(requests):
            while not finished:
                with self._turns:
                    self._step(progress)
                    output, text = request.output(), request.completions[0].text.safe_text
                finished = output.finished
                text = output.outputs[0].text if finished else text
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
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        prompts = [
            chat_prompt(self.tokenizer, self.model.name, cast("Sequence[Message]", each), **options) for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model; None where it was loaded without one."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends: what `generate` takes where it is given none."""
        return default_params(self.model.folder)

    def reset_prefix_cache(self) -> bool:
        """Forget the prompts that the cache holds; True, as vLLM's returns."""
        with self._turns:
            self.engine.blocks.forget_prefixes()
        return True

    def __getattr__(self, name: str) -> NoReturn:
        """Reached for names that are not there: those of vLLM's LLM are answered with what comes nearest."""
        raise missing_attribute(name)

    def chat_prompt(self, messages: str | Sequence[Message]) -> Prompt:
        """A user's message, or a list of messages, in the model's own chat template: ready for `generate` and `stream`.

        :raises HeadwayError: the model has no chat template, or a message has another form.
        """
        return chat_prompt(self.tokenizer, self.model.name, messages)

    def _add(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        streamed: bool = False,
    ) -> tuple[list[RequestState], Progress]:
        items = parse_prompts(prompts)
        params = params_of(sampling_params, len(items), self.get_default_sampling_params())
        encoded = [self._encode(item, number, own) for number, (item, own) in enumerate(zip(items, params, strict=True))]
        resolved = {id(own): resolve(own, self.tokenizer, self.model.name) for own in params}  # most calls share one
        requests: list[RequestState] = []
        progress = Progress()
        with self._turns, self._ended_if_refused(requests):
            for item, ids, own in zip(items, encoded, params, strict=True):
                request_id = str(next(self._request_ids))
                self.engine.add_request(request_id, ids, resolved[id(own)])
                requests.append(self._processor.add(request_id, item.text, ids, own, progress, streamed))
        return requests, progress

    def _encode(self, prompt: ParsedPrompt, number: int, params: SamplingParams) -> list[int]:
        try:
            ids = self._tokenize(prompt.text or "") if prompt.token_ids is None else prompt.token_ids
            ids = ids[-(params.truncate_prompt_tokens or 0) :]
            self.engine.limits.check(ids)
        except PromptError as error:
            raise PromptError(f"prompt {number}", *error.reason[1:]) from None
        return ids

    def _tokenize(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise PromptError("prompt", "token ids", "a text", f"{self.model.name} was loaded without a tokenizer")
        return list(self.tokenizer(prompt)["input_ids"])

    def _step(self, progress: Progress) -> None:
        """Run one step, unless another call's steps have finished this call's requests. All requests advance with it."""
        if not progress.finished:
            for request_id, index in self._processor.process(self.engine.step()):
                self.engine.abort(request_id, index)

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
            with self._turns:
                self._end(requests)

    def _end(self, requests: Sequence[RequestState]) -> None:
        for request in requests:
            self._processor.remove(request.request_id)
            self.engine.abort(request.request_id)
