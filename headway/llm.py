"""`LLM`: a model, an engine, and text in and out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from headway.core.contract.errors import ConfigError, PromptError
from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.engine.pool import parse_memory
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import TORCH_SAMPLING
from headway.core.select.selector import check_names
from headway.models.device_operations import fastest_sampling
from headway.models.loader import load_model
from headway.models.locate import DEFAULT_MODEL
from headway.outputs import RequestOutput
from headway.processor import OutputProcessor, Progress, RequestState
from headway.registry import Registry, create_registry
from headway.threads import set_threads
from headway.tuning.autotune import TableWish, costs_for
from headway.tuning.device import resolve_device
from headway.turns import Turns

Prompt = str | Sequence[int]


class LLM:
    """A model ready to generate. Arguments are named as vLLM's offline class names them, where it has them.

    Several threads may call one LLM: their requests share the batch, and each call returns its own.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        attn_backend: str = "auto",
        attn_options: Mapping[str, Mapping[str, str]] | None = None,
        workload: str = "chat",
        crossover_table: str | None = None,
        autotune_budget: float | None = None,
        kv_layout: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        block_size: int | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int = 256,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        kv_cache_memory: int | str | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        async_scheduling: bool | None = None,
        cudagraph_capture_sizes: Sequence[int] | None = None,
        deterministic: bool = False,
        seed: int = 0,
        num_threads: int | None = None,
        load_format: str = "auto",
        skip_tokenizer_init: bool = False,
        plugins: Iterable[object] = (),
        registry: Registry | None = None,
    ) -> None:
        """Load a model and set its engine up.

        model: smollm2, a folder with safetensors, a .gguf file, or a Hugging Face hub id.
        attn_backend: auto, a backend's name, or "prefill=NAME,decode=NAME"; a name that cannot run here is an error.
        attn_options: backend name -> option -> value. kv_layout: auto, nhd, hnd, vllm_5d, or a plugin's.
        workload: what auto expects to serve: chat, long, batch, or BATCHxINPUT+OUTPUT. crossover_table: the file whose times auto
        obeys; None: the one kept for this machine, measured at the first start in at most `autotune_budget` seconds (None: 20 on
        a GPU, 10 on a CPU; 0: not measured, the order that plugins propose). docs/crossover.md says how auto decides.
        dtype: auto, float32, bfloat16, float16. device: auto, cpu, cuda, cuda:N.
        kv_cache_memory: bytes of the pool, or a text such as "2GiB". gpu_memory_utilization: share of a GPU's memory for all.
        enforce_eager: no CUDA graphs. async_scheduling: launch a step before the last is read; None: on a GPU.
        cudagraph_capture_sizes: batch sizes whose decode is captured. num_threads: CPU threads; None: one a free core.
        load_format: auto, or dummy: random weights in the model's shapes, also those of qwen3-0.6b and llama-3-8b, which ship
        with Headway. skip_tokenizer_init: token ids in and out, no text.
        deterministic: the bits of a request's logits do not depend on what else is in its batch; slower.
        plugins: objects with hook implementations, registered beside installed ones. registry: instead of a new one.

        :raises HeadwayError: anything the caller can put right, in one line.
        """
        config = EngineConfig(
            attn_backend=attn_backend,
            attn_options=attn_options or {},
            workload=workload,
            kv_layout=kv_layout,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            kv_cache_memory=None if kv_cache_memory is None else parse_memory(kv_cache_memory),
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            async_scheduling=async_scheduling,
            cudagraph_capture_sizes=None if cudagraph_capture_sizes is None else tuple(cudagraph_capture_sizes),
            deterministic=deterministic,
            seed=seed,
        )
        self.registry = registry or create_registry(plugins)
        check_names(self.registry, attn_backend, kv_layout, config.attn_options)
        self.device = resolve_device(device)
        self.num_threads = set_threads(num_threads) if self.device.type == "cpu" else None
        self.model = load_model(model, dtype, self.device, load_format, skip_tokenizer_init, deterministic)
        specs, costs = self.model.decoder.attention_specs, None
        if not deterministic:  # which pins one backend, whatever is fastest
            wish = TableWish(None if crossover_table is None else Path(crossover_table), autotune_budget)
            costs = costs_for(specs, self.registry, attn_backend, wish)
        # The kernel applies the temperature unless a neighbour's top_k or top_p makes torch do it, which rounds otherwise.
        sampling = TORCH_SAMPLING if deterministic else fastest_sampling(self.device)
        self.engine = Engine(self.model.decoder, self.registry, config, self.model.eos_token_ids, sampling, costs)
        self.tokenizer = self.model.tokenizer
        self._processor = OutputProcessor(self.tokenizer)
        self._request_ids = count()
        self._turns = Turns()
        """Who may use the engine and the processor: calls from several threads take turns, a step each."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in their order.

        prompts: a text, token ids, or a list of either. sampling_params: one for all, or one for each; None: the defaults.

        :raises PromptError: an empty or too long prompt; it is found before anything runs, so nothing is lost.
        """
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
        """Complete one prompt and yield (new text of completion 0, output so far) after every step."""
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

    def chat_prompt(self, message: str) -> str:
        """A user's message in the model's own chat template, ready for `generate`.

        :raises ConfigError: the tokenizer brings no chat template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("chat", "a model whose tokenizer has a chat template", self.model.name, "leave --chat out")
        messages = [{"role": "user", "content": message}]
        text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return text

    def _add(
        self, prompts: Prompt | Sequence[Prompt], wishes: SamplingParams | Sequence[SamplingParams] | None, streamed: bool = False
    ) -> tuple[list[RequestState], Progress]:
        items = _prompts(prompts)
        params = [wishes or SamplingParams()] * len(items) if not isinstance(wishes, Sequence) else list(wishes)
        if len(params) != len(items):
            raise ConfigError("sampling_params", f"one, or one for each of the {len(items)} prompts", len(params))
        encoded = [self._encode(item, number) for number, item in enumerate(items)]
        if self.tokenizer is None and any(wish.stop for wish in params):
            raise ConfigError("stop", "a model with a tokenizer, to see texts", self.model.name, "stop_token_ids need none")
        requests, progress = [], Progress()
        with self._turns:
            for item, ids, wish in zip(items, encoded, params, strict=True):
                request_id = str(next(self._request_ids))
                self.engine.add_request(request_id, ids, wish)
                text = item if isinstance(item, str) else None
                requests.append(self._processor.add(request_id, text, ids, wish, progress, streamed))
        return requests, progress

    def _encode(self, prompt: Prompt, number: int) -> list[int]:
        try:
            ids = self._tokenize(prompt) if isinstance(prompt, str) else _token_ids(prompt)
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
    def _ended(self, requests: Sequence[RequestState]) -> Iterator[None]:
        """However a call is left, by the end, by an interrupt or because nobody listens any more, its requests end with it."""
        try:
            yield
        finally:
            with self._turns:
                for request in requests:
                    self._processor.remove(request.request_id)
                    self.engine.abort(request.request_id)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a text and a list of numbers are one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise PromptError("prompt", "a text, a list of token ids, or a list of either", repr(prompts))
    items = list(prompts)
    return [cast(Prompt, items)] if items and isinstance(items[0], Integral) else cast(list[Prompt], items)


def _token_ids(prompt: object) -> list[int]:
    items: list[Any] = list(prompt) if isinstance(prompt, Iterable) else [None]
    kinds = set(map(type, items))  # to ask the abstract class about each of a hundred thousand tokens takes 0.1 s
    if kinds == {int}:
        return items
    if not all(issubclass(kind, Integral) for kind in kinds):
        raise PromptError("prompt", "a text or a list of token ids", repr(prompt))
    return [int(token) for token in items]
