"""`LLM`: a model, an engine, and text in and out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import cast

from tqdm import tqdm

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.engine.engine import Engine
from headway.core.engine.sequence import Sequence as EngineSequence
from headway.core.sampling.detokenizer import Detokenizer, NoTokenizer
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING
from headway.core.select.selector import check_names
from headway.engine_args import EngineArgs, takes_arguments_of
from headway.models.device_operations import fastest_sampling
from headway.models.loader import load_model
from headway.outputs import CompletionOutput, RequestMetrics, RequestOutput
from headway.prompts import Message, ParsedPrompt, Prompt, chat_prompt, parse_prompts
from headway.registry import create_registry
from headway.threads import set_threads
from headway.tuning.autotune import TableWish, costs_for
from headway.tuning.device import resolve_device


@dataclass
class _Request:
    """A request under way: its sequences and their growing texts."""

    request_id: str
    prompt: str | None
    seqs: list[EngineSequence]
    texts: list[Detokenizer]
    watched: bool
    """Whether somebody reads the text as it grows, or a stop text may come; else it is made when the sequence ends."""

    def output(self) -> RequestOutput:
        """What the caller sees."""
        first = self.seqs[0]
        finished = all(seq.finished for seq in self.seqs)
        starts = [seq.first_token_time for seq in self.seqs if seq.first_token_time is not None]
        ends = [seq.finish_time for seq in self.seqs if seq.finish_time is not None]
        metrics = RequestMetrics(first.arrival_time, min(starts, default=None), max(ends) if finished else None)
        completions = [
            CompletionOutput(seq.index, text.text, seq.output_token_ids, seq.finish_reason, seq.error)
            for seq, text in zip(self.seqs, self.texts, strict=True)
        ]
        return RequestOutput(
            self.request_id, self.prompt, first.prompt_token_ids, completions, finished, metrics, first.num_cached_tokens
        )


class LLM:
    """A model ready to generate. Arguments are named as vLLM's offline class names them, where it has them."""

    @takes_arguments_of(EngineArgs)
    def __init__(self, *model: object, **options: object) -> None:
        """Load a model and set its engine up. The options are those of `EngineArgs`; docs/options.md lists them.

        :raises HeadwayError: anything the caller can put right, in one line.
        """
        args = EngineArgs.of(*model, **options)
        config, deterministic = args.engine_config(), args.deterministic
        self.registry = args.registry or create_registry(args.plugins)
        check_names(self.registry, config.attn_backend, config.kv_layout, config.attn_options)
        self.device = resolve_device(args.device)
        self.num_threads = set_threads(args.num_threads) if self.device.type == "cpu" else None
        self.model = load_model(args.model, args.dtype, self.device, args.load_format, args.skip_tokenizer_init, deterministic)
        specs, costs = self.model.decoder.attention_specs, None
        if not deterministic:  # which pins one backend, whatever is fastest
            wish = TableWish(None if args.crossover_table is None else Path(args.crossover_table), args.autotune_budget)
            costs = costs_for(specs, self.registry, config.attn_backend, wish)
        # The kernel applies the temperature unless a neighbour's top_k or top_p makes torch do it, which rounds otherwise.
        sampling = TORCH_SAMPLING if deterministic else fastest_sampling(self.device)
        self.engine = Engine(self.model.decoder, self.registry, config, self.model.eos_token_ids, sampling, costs)
        self.tokenizer = self.model.tokenizer
        self._request_ids = count()
        self._requests: dict[EngineSequence, _Request] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in their order.

        prompts: a text, token ids (also an array), {"prompt": text}, {"prompt_token_ids": ids}, a tokenizer's output, or a list
        of these. sampling_params: one for all, or one for each; None: the defaults.

        :raises PromptError: an empty or too long prompt; it is found before anything runs, so nothing is lost.
        """
        requests = self._add(prompts, sampling_params)
        with tqdm(total=sum(len(request.seqs) for request in requests), desc="Processed prompts", disable=not use_tqdm) as bar:
            started, tokens = time.perf_counter(), 0
            for finished, new_tokens in self._steps(requests):
                tokens += new_tokens
                bar.update(finished)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.1f} tok/s", refresh=False)
        return [request.output() for request in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[tuple[str, RequestOutput]]:
        """Complete one prompt and yield (new text of completion 0, output so far) after every step."""
        (request,) = requests = self._add([prompt], sampling_params, streamed=True)
        shown, finished = 0, False
        steps = self._steps(requests)
        while not finished:
            next(steps, None)  # nothing is left to step if another call's steps have finished this request too
            output = request.output()
            finished = output.finished
            text = output.outputs[0].text if finished else request.texts[0].safe_text
            yield text[shown:], output
            shown = len(text)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several, in the model's own chat template; the outputs come in their order.

        messages: a list of {"role": ..., "content": ...}, or a list of such lists.

        :raises HeadwayError: the model has no chat template, or a message has another form.
        """
        one = all(isinstance(message, Mapping) for message in messages)
        conversations = [messages] if one else messages
        prompts = [
            chat_prompt(self.tokenizer, self.model.name, cast("Sequence[Message]", each), add_generation_prompt)
            for each in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: str | Sequence[Message]) -> Prompt:
        """A user's message, or a list of messages, in the model's own chat template: ready for `generate` and `stream`.

        :raises HeadwayError: the model has no chat template, or a message has another form.
        """
        return chat_prompt(self.tokenizer, self.model.name, messages)

    def _add(
        self, prompts: Prompt | Sequence[Prompt], wishes: SamplingParams | Sequence[SamplingParams] | None, streamed: bool = False
    ) -> list[_Request]:
        items = parse_prompts(prompts)
        params = [wishes or SamplingParams()] * len(items) if not isinstance(wishes, Sequence) else list(wishes)
        if len(params) != len(items):
            raise ConfigError("sampling_params", f"one, or one for each of the {len(items)} prompts", len(params))
        encoded = [self._encode(item, number) for number, item in enumerate(items)]
        if self.tokenizer is None and any(wish.stop for wish in params):
            raise ConfigError("stop", "a model with a tokenizer, to see texts", self.model.name, "stop_token_ids need none")
        tokenizer = NoTokenizer() if self.tokenizer is None else self.tokenizer
        requests = []
        for item, ids, wish in zip(items, encoded, params, strict=True):
            request_id = str(next(self._request_ids))
            seqs = self.engine.add_request(request_id, ids, wish)
            texts = [Detokenizer(tokenizer, wish.stop or ()) for _ in seqs]
            requests.append(_Request(request_id, item.text, seqs, texts, watched=streamed or bool(wish.stop)))
            self._requests.update(dict.fromkeys(seqs, requests[-1]))
        return requests

    def _encode(self, prompt: ParsedPrompt, number: int) -> list[int]:
        try:
            ids = self._tokenize(prompt.text or "") if prompt.token_ids is None else prompt.token_ids
            self.engine.check_prompt(ids)
        except PromptError as error:
            raise PromptError(f"prompt {number}", *error.reason[1:]) from None
        return ids

    def _tokenize(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise PromptError("prompt", "token ids", "a text", f"{self.model.name} was loaded without a tokenizer")
        return list(self.tokenizer(prompt)["input_ids"])

    def _steps(self, requests: Sequence[_Request]) -> Iterator[tuple[int, int]]:
        """Run the engine until the requests are done; yields (sequences finished, tokens made) a step.

        Other requests in the engine advance with them. A caller that stops listening, or is interrupted, leaves nothing behind.
        """
        seqs = [seq for request in requests for seq in request.seqs]
        try:
            while not all(seq.finished for seq in seqs):
                stepped = self.engine.step()
                for seq in stepped:
                    self._read(seq)
                yield sum(seq.finished for seq in stepped), len(stepped)
        finally:
            for seq in seqs:
                del self._requests[seq]
                if not seq.finished:
                    self.engine.finish(seq, "abort")

    def _read(self, seq: EngineSequence) -> None:
        """Detokenise what a step added."""
        request = self._requests.get(seq)
        if request is None or not (request.watched or seq.finished):
            return
        text = request.texts[seq.index]
        end = -1 if seq.finish_reason == "stop" else None  # the token that ends a text is not part of it
        tokens = seq.token_ids[seq.num_prompt_tokens + text.num_tokens : end]
        if not request.watched:
            text.extend(tokens)
        elif any(text.append(token) for token in tokens) and seq.error is None:
            self.engine.finish(seq, "stop")
        if seq.finished:
            text.flush()
