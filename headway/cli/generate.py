"""`headway generate`: continue a prompt, or answer it, and say how fast."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from headway.cli.engine_options import takes_engine_options
from headway.core.contract.errors import BackendError, ConfigError
from headway.core.sampling.params import SamplingParams
from headway.core.system.terminal import Terminal
from headway.core.system.text import harmless
from headway.engine_args import help_texts

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.core.engine.usage import CacheUsage
    from headway.llm import LLM
    from headway.outputs import RequestOutput
    from headway.prompts import Prompt


@takes_engine_options(*(name for name in help_texts() if name not in ("seed", "skip_tokenizer_init")))
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; with --chat, the message to answer.")],
    engine: dict[str, Any],
    chat: Annotated[bool, typer.Option("--chat", help="Put PROMPT into the model's chat template and answer it.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token every time.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the smallest set of tokens that reaches this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; -1: from all.")] = -1,
    min_p: Annotated[float, typer.Option(help="Drop tokens less likely than this times the most likely one.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the completion. Repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end-of-text token.")] = False,
    show_cache: Annotated[
        bool, typer.Option("--show-cache", help="Draw the cache's blocks as they were at the last token, by sequence and group.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the text is complete.")] = False,
) -> None:
    """Continue PROMPT, token by token; then say how fast."""
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
    err = Terminal(stderr=True)
    started = time.perf_counter()
    with err.status(f"loading {engine['model']}"):
        from headway.llm import LLM

        llm = LLM(**engine)
    loaded = time.perf_counter() - started
    request = llm.chat_prompt(prompt) if chat else prompt
    usages: list[CacheUsage] = []

    def look() -> None:
        usage = llm.engine.cache_usage()
        if usage.sequences or not usages:  # after the last token nobody holds anything
            usages[:] = [usage]

    output = _write(llm, request, params, not as_json, look if show_cache else None)
    if usages:
        from headway.cli.cache_picture import picture

        err.print(picture(usages[0]))
    if as_json:
        print(json.dumps(_record(prompt, output, loaded, llm), indent=2))
        return
    _report(err, output, loaded)
    if engine["speculate"] is not None:
        err.print(f"speculation: {_guesses(llm)}", highlight=False, markup=False, soft_wrap=True)
    err.print(f"model: computed by {llm.model.implementation}", highlight=False, markup=False, soft_wrap=True)
    err.print(f"attention: {llm.engine.selection}", highlight=False, markup=False, soft_wrap=True)


def _write(
    llm: LLM, request: Prompt, params: SamplingParams, shown: bool, after_step: Callable[[], None] | None
) -> RequestOutput:
    """Generate, and show the text as it grows.

    :raises BackendError: a backend raised in the middle of a step.
    """
    begun, last, watched = False, None, sys.stdout.isatty()
    for text, output in llm.stream(request, params):
        last = output
        if after_step is not None:
            after_step()
        text = text if begun else text.lstrip()  # a completion starts with the space after the prompt
        begun = begun or bool(text)
        if shown:
            sys.stdout.write(harmless(text, keep="\n\t") if watched else text)
            sys.stdout.flush()
    assert last is not None  # a stream yields at least once
    error = last.outputs[0].error
    if shown and (begun or error is None):
        print(flush=True)
    if error is not None:
        raise BackendError(error)
    return last


def _record(prompt: str, output: RequestOutput, loaded: float, llm: LLM) -> dict[str, Any]:
    """What --json prints; times are in seconds."""
    completion = output.outputs[0]
    return {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(completion.token_ids),
        "tokens_per_second": len(completion.token_ids) / _seconds(output),
        "time_to_first_token": output.metrics.time_to_first_token,
        "generation_time": _seconds(output),
        "load_time": loaded,
        "attention": str(llm.engine.selection),
        "model_impl": llm.model.implementation,
        "draft_tokens": llm.engine.stats.num_draft_tokens,
        "accepted_draft_tokens": llm.engine.stats.num_accepted_tokens,
    }


def _guesses(llm: LLM) -> str:
    """What became of the guesses."""
    stats = llm.engine.stats
    without = ", ".join(f"{count} {reason}" for reason, count in stats.steps_without_drafts.most_common())
    held = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} guesses held in {stats.num_draft_steps} steps"
    return f"{held}; steps without: {without or 'none'}"


def _seconds(output: RequestOutput) -> float:
    return (output.metrics.finished_time or output.metrics.arrival_time) - output.metrics.arrival_time


def _report(err: Console, output: RequestOutput, loaded: float) -> None:
    tokens, seconds = len(output.outputs[0].token_ids), _seconds(output)
    rest = (
        f" ({tokens} tokens in {seconds:.2f} s, the first after {output.metrics.time_to_first_token * 1e3:.0f} ms; "
        f"{output.outputs[0].finish_reason}; loaded in {loaded:.1f} s)"
    )
    err.print(Text(f"{tokens / seconds:.1f} tokens/s", "bold").append(rest, "default"), highlight=False, soft_wrap=True)
