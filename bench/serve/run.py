"""Run of a load test: conversations are sent to a server at a rate, all at once or one by one."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from headway.bench.serve.client import RequestSender, ServerAnswer
from headway.bench.serve.load import ClientConversation, Load, arrivals, conversations, words
from headway.bench.serve.results import ServeCell, Spread

Mode = Literal["online", "offline", "naive"]


@dataclass(frozen=True)
class ServePlan:
    """Mode and limits of one cell."""

    mode: Mode
    rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    """Maximum number of concurrent conversations. The time that further conversations wait counts as lateness of the client, not
    as server time."""


@dataclass(frozen=True)
class Sending:
    """Fields that all requests share."""

    model: str
    endpoint: Literal["completions", "chat"] = "completions"
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of every request body."""


async def run_cell(
    client: RequestSender,
    load: Load,
    plan: ServePlan,
    sending: Sending,
    limits: Mapping[str, float],
    on_answer: Callable[[], None] = lambda: None,
) -> ServeCell:
    """Send a load and return the results. limits: see ServeReport.limits_ms. on_answer: called after each answer."""
    talks = conversations(load)
    rate = plan.rate if plan.mode == "online" else float("inf")
    due = arrivals(len(talks), rate, plan.burstiness, load.seed)
    room = asyncio.Semaphore(1 if plan.mode == "naive" else plan.max_concurrency or len(talks))
    start = time.perf_counter()

    async def talk(number: int) -> tuple[list[ServerAnswer], float]:
        await asyncio.sleep(max(start + due[number] - time.perf_counter(), 0))
        async with room:
            late = time.perf_counter() - start - due[number]
            return await _converse(client, talks[number], sending, on_answer), late

    found = await asyncio.gather(*map(talk, range(len(talks))))
    answers = [answer for listed, _ in found for answer in listed]
    lateness = [late for _, late in found] if plan.mode == "online" else []
    ended = max((answer.ended for answer in answers), default=start)  # exclude the client's own work after the last answer
    return summary(plan, answers, ended - start, lateness, limits)


async def _converse(
    client: RequestSender, talk: ClientConversation, sending: Sending, on_answer: Callable[[], None]
) -> list[ServerAnswer]:
    """Return the answers of one conversation, turn by turn, up to the first failure."""
    answers: list[ServerAnswer] = []
    chat = sending.endpoint == "chat"
    history: list[int] = list(talk.prefix)
    messages = [{"role": "system", "content": words(talk.prefix)}] if talk.prefix else []
    for new_ids in talk.messages:
        history += new_ids
        messages.append({"role": "user", "content": words(new_ids)})
        body: dict[str, Any] = {
            "model": sending.model,
            **({"messages": messages} if chat else {"prompt": history}),
            "max_tokens": talk.output_len,
            "temperature": sending.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"return_token_ids": True} if len(talk.messages) > 1 and not chat else {}),
            **sending.extra,
        }
        answer = await client.ask(f"/v1/{'chat/' if chat else ''}completions", body)
        answers.append(answer)
        on_answer()
        if answer.error:
            break
        history = history + (answer.token_ids or new_ids[: talk.output_len])
        messages = [*messages, {"role": "assistant", "content": answer.text}]
    return answers


def summary(
    plan: ServePlan, answers: Sequence[ServerAnswer], seconds: float, late: Sequence[float], limits: Mapping[str, float]
) -> ServeCell:
    """Return the results of a cell."""
    good = [answer for answer in answers if not answer.error]
    meeting = [answer for answer in good if all(times(answer).get(name, 0.0) <= most for name, most in limits.items())]
    online = plan.mode == "online"
    tokens = sum(answer.output_tokens for answer in good)
    per_token = [1e-3 * found["tpot"] for answer in good if "tpot" in (found := times(answer))]
    return ServeCell(
        mode=plan.mode,
        rate=plan.rate if online else None,
        burstiness=plan.burstiness if online else None,
        completed=len(good),
        failed=len(answers) - len(good),
        errors=dict(Counter(answer.error for answer in answers if answer.error).most_common(10)),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=tokens / seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        output_tokens=tokens,
        cached_tokens=sum(answer.cached_tokens for answer in good),
        time_to_first_token_ms=Spread.of([answer.token_times[0] - answer.sent for answer in good]),
        time_per_output_token_ms=Spread.of(per_token),
        inter_token_latency_ms=Spread.of([b - a for answer in good for a, b in pairwise(answer.token_times)]),
        end_to_end_ms=Spread.of([answer.token_times[-1] - answer.sent for answer in good]),
        lateness_ms=Spread.of(late),
        goodput=len(meeting) / seconds if limits else None,
        good_share=len(meeting) / len(answers) if limits and answers else None,
    )


def times(answer: ServerAnswer) -> dict[str, float]:
    """Return limit name -> the request's time in milliseconds."""
    first, last = answer.token_times[0], answer.token_times[-1]
    found = {"ttft": 1e3 * (first - answer.sent), "e2e": 1e3 * (last - answer.sent)}
    if answer.output_tokens > 1:
        found["tpot"] = 1e3 * (last - first) / (answer.output_tokens - 1)
    return found
