"""`headway generate`: continue a prompt, or answer a message."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from headway.cli.engine_options import takes_engine_options, takes_sampling_options
from headway.cli.options import AdapterFolder, adapter_of
from headway.core.contract.errors import BackendError, ConfigError
from headway.core.sampling.params import SamplingParams
from headway.core.system.terminal import Terminal, for_standard_output
from headway.engine_args import help_texts

if TYPE_CHECKING:
    from headway.core.engine.cache.usage import CacheUsage
    from headway.core.engine.data.stats import EngineSnapshot
    from headway.llm import LLM
    from headway.outputs import RequestOutput


@takes_engine_options(*(name for name in help_texts() if name not in ("seed", "skip_tokenizer_init")))
@takes_sampling_options(max_tokens=64)
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue, or the message to answer with --chat.")],
    sampling: dict[str, Any],
    engine: dict[str, Any],
    lora: AdapterFolder = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to PROMPT and answer it.")] = False,
    stats: Annotated[
        bool,
        typer.Option("--stats", help="Show statistics while the engine runs, and times, steps and backends at the end."),
    ] = False,
    show_cache: Annotated[
        bool, typer.Option("--show-cache", help="Draw the blocks of the KV cache at the last token, by sequence and cache group.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object after the last token instead of text.")] = False,
) -> None:
    """Continue PROMPT, or answer it with --chat.

    By default, answers use the model's recommended sampling parameters and continuations use temperature 0.
    """
    SamplingParams(**sampling)  # report invalid parameters before loading the model
    adapter = adapter_of(lora, engine)
    if not prompt:
        raise ConfigError("prompt", "at least one character", "an empty text")
    err = Terminal(stderr=True)
    started = time.perf_counter()
    with err.status(f"loading {engine['model']}"):
        from headway.cli.engine_view import LiveStats
        from headway.hosting.stats_report import answer_line
        from headway.llm import LLM

        llm = LLM(**engine)
    loaded = time.perf_counter() - started
    request = llm.chat_prompt(prompt) if chat else prompt
    params = replace(llm.get_default_sampling_params() if chat else SamplingParams(temperature=0.0), **sampling)
    if not chat and not as_json and getattr(llm.tokenizer, "chat_template", None):
        err.print("PROMPT is continued as plain text; --chat answers it", style="dim", highlight=False, soft_wrap=True)
    usages: list[CacheUsage] = []

    def keep_usage() -> None:
        usage = llm.engine.cache_usage()
        if usage.sequences or not usages:  # after the last token no sequence holds blocks
            usages[:] = [usage]

    begun = llm.stats()
    with LiveStats(llm.stats, stats) as live:

        def after_step() -> None:
            live.refresh()
            if show_cache:
                keep_usage()

        output = _write(llm.stream(request, params, lora_request=adapter), params, not as_json, after_step)
    if usages:
        from headway.cli.engine_view import picture

        err.print(picture(usages[0]))
    if as_json:
        print(json.dumps(_record(prompt, output, loaded, llm), indent=2))
        return
    if params.logprobs is not None:
        _print_logprobs(err, output)
    if stats:
        _report(err, output, loaded, llm, begun)
    else:
        line = answer_line(output, llm.stats().totals - begun.totals, "--stats")
        err.print(line, style="dim", highlight=False, soft_wrap=True)
    if engine["speculate"] is not None or engine["speculative_model"] is not None:
        err.print(f"speculation: {_acceptance(llm)}", highlight=False, markup=False, soft_wrap=True)


def _write(
    stream: Iterable[tuple[str, RequestOutput]], params: SamplingParams, shown: bool, after_step: Callable[[], None]
) -> RequestOutput:
    """Generate and print completions: a single one as it grows, several at the end. :raises BackendError: if a backend failed in
    a step."""
    begun, last, streamed = False, None, shown and params.n == 1
    for text, output in stream:
        last = output
        after_step()
        text = text if begun else text.lstrip()  # a completion starts with the space after the prompt
        begun = begun or bool(text)
        if streamed:
            sys.stdout.write(for_standard_output(text))
            sys.stdout.flush()
    assert last is not None  # a stream yields at least once
    failed = next((each.error for each in last.outputs if each.error is not None), None)
    if streamed and (begun or failed is None):
        print(flush=True)
    if failed is not None:
        raise BackendError(failed)
    for completion in last.outputs if shown and not streamed else ():
        print(f"[{completion.index}] {for_standard_output(completion.text.lstrip())}", flush=True)
    return last


def _print_logprobs(err: Console, output: RequestOutput) -> None:
    """Print a line per token: its log-probability, and the most likely other tokens."""
    for completion in output.outputs:
        for token, place in zip(completion.token_ids, completion.logprobs or (), strict=False):
            others = "  ".join(f"{each.decoded_token!r} {each.logprob:.3f}" for other, each in place.items() if other != token)
            own = place[token]
            line = f"{own.decoded_token!r:>16} {own.logprob:8.3f} (rank {own.rank})  {others}"
            err.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)


def _record(prompt: str, output: RequestOutput, loaded: float, llm: LLM) -> dict[str, Any]:
    """Return the object for --json, with times in seconds. Its top level repeats the first completion's text and tokens."""
    first, tokens = output.outputs[0], sum(len(each.token_ids) for each in output.outputs)
    return {
        "prompt": prompt,
        "text": first.text,
        "token_ids": first.token_ids,
        "finish_reason": first.finish_reason,
        "completions": [asdict(each) for each in output.outputs],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": tokens,
        "tokens_per_second": tokens / _seconds(output),
        "time_to_first_token": output.metrics.time_to_first_token,
        "generation_time": _seconds(output),
        "load_time": loaded,
        "start_parts": llm.start_times.seconds,
        "attention": str(llm.engine.selection),
        "model_impl": llm.model.implementation,
        "draft_tokens": llm.engine.stats.num_draft_tokens,
        "accepted_draft_tokens": llm.engine.stats.num_accepted_tokens,
    }


def _acceptance(llm: LLM) -> str:
    """Return a sentence about speculation: how many draft tokens were accepted, and how many steps had no drafts."""
    stats = llm.engine.stats
    without = ", ".join(f"{count} {reason}" for reason, count in stats.steps_without_drafts.most_common())
    held = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens accepted in {stats.num_draft_steps} steps"
    return f"{held}; steps without drafts: {without or 'none'}"


def _seconds(output: RequestOutput) -> float:
    return (output.metrics.finished_time or output.metrics.arrival_time) - output.metrics.arrival_time


def _report(err: Console, output: RequestOutput, loaded: float, llm: LLM, begun: EngineSnapshot) -> None:
    """Print the --stats report of a complete text: times, counters since `begun`, and the model's implementation."""
    from headway.hosting.stats_report import stats_page

    tokens, seconds = sum(len(each.token_ids) for each in output.outputs), _seconds(output)
    rest = (
        f" ({tokens} tokens in {seconds:.2f} s, the first after {output.metrics.time_to_first_token * 1e3:.0f} ms; "
        f"{output.outputs[0].finish_reason}; loaded in {loaded:.1f} s)"
    )
    err.print(Text(f"{tokens / seconds:.1f} tokens/s", "bold").append(rest, "default"), highlight=False, soft_wrap=True)
    computed = f"model: computed by {llm.model.implementation}", llm.model.rounding, f"attention: {llm.engine.selection}"
    for line in [*stats_page(llm.stats(), begun), f"start      {llm.start_times}", *filter(None, computed)]:
        err.print(line, highlight=False, markup=False, soft_wrap=True)
