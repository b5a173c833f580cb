"""`headway generate`: continue a prompt, token by token, and say how fast."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from headway.cli.options import parse_attn_options, parse_block_size
from headway.core.contract.errors import BackendError, ConfigError
from headway.core.sampling.params import SamplingParams
from headway.outputs import RequestOutput


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    model: Annotated[str, typer.Option(help="smollm2, a folder, a .gguf file, or a Hugging Face hub id.")] = "smollm2",
    attn_backend: Annotated[str, typer.Option(help="auto, NAME, or prefill=NAME,decode=NAME; see: headway backends.")] = "auto",
    attn_opt: Annotated[list[str] | None, typer.Option(help="An option of a backend: NAME.key=value. Repeatable.")] = None,
    workload: Annotated[str, typer.Option(help="What auto expects: chat, long, batch, or BATCHxINPUT+OUTPUT.")] = "chat",
    crossover_table: Annotated[str | None, typer.Option(help="A table whose times auto obeys; default: this machine's.")] = None,
    autotune_budget: Annotated[float | None, typer.Option(min=0, help="Seconds to measure at the first start.")] = None,
    no_autotune: Annotated[bool, typer.Option("--no-autotune", help="Measure nothing: the order plugins propose.")] = False,
    kv_layout: Annotated[str, typer.Option(help="Cache layout: auto, nhd, hnd, vllm_5d, or a plugin's.")] = "auto",
    block_size: Annotated[str, typer.Option(help="Tokens in a cache block: auto, or a multiple of 8.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; -1: all.")] = -1,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this times the likeliest.")] = 0.0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="The same bits alone and in any batch; slower.")] = False,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the completion. Repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end of text.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and output.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of a step; longer prompts go in chunks.")] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse the cache of equal beginnings.")] = True,
    kv_cache_memory: Annotated[str | None, typer.Option(help="Size of the cache, such as 2GiB.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory for model and cache.")] = 0.9,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default one a free core.")] = None,
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights in the model's shapes.")] = "auto",
) -> None:
    """Write on from PROMPT, token by token; then say how fast."""
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
    )
    if not prompt:
        raise ConfigError("prompt", "at least one character", "an empty text")
    options = parse_attn_options(attn_opt or [])
    size = parse_block_size(block_size)
    err = Console(stderr=True)
    started = time.perf_counter()
    with err.status(f"loading {model}"):
        from headway.llm import LLM

        llm = LLM(
            model,
            attn_backend=attn_backend,
            attn_options=options,
            workload=workload,
            crossover_table=crossover_table,
            autotune_budget=0.0 if no_autotune else autotune_budget,
            kv_layout=kv_layout,
            block_size=size,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            num_threads=num_threads,
            load_format=load_format,
            deterministic=deterministic,
        )
    loaded = time.perf_counter() - started
    shown = False
    last: RequestOutput | None = None
    for text, output in llm.stream(llm.chat_prompt(prompt) if chat else prompt, params):
        text = text if shown else text.lstrip()  # a completion starts with the space after the prompt
        shown = shown or bool(text)
        sys.stdout.write(text)
        sys.stdout.flush()
        last = output
    error = last.outputs[0].error if last is not None else None
    if shown or error is None:
        print(flush=True)
    if error is not None:
        raise BackendError(error)
    if last is not None:
        _report(err, last, loaded)
    err.print(f"attention: {llm.engine.selection}", highlight=False, markup=False, soft_wrap=True)


def _report(err: Console, output: RequestOutput, loaded: float) -> None:
    tokens, metrics = len(output.outputs[0].token_ids), output.metrics
    seconds = (metrics.finished_time or metrics.arrival_time) - metrics.arrival_time
    err.print(
        f"[bold]{tokens / seconds:.1f} tokens/s[/] ({tokens} tokens in {seconds:.2f} s, the first after "
        f"{metrics.time_to_first_token * 1e3:.0f} ms; {output.outputs[0].finish_reason}; loaded in {loaded:.1f} s)",
        highlight=False,
        soft_wrap=True,
    )
