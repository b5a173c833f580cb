"""Beam search in the server: each beam sends a request for one token per step, and one answer contains the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from headway.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence, next_tokens, take_tokens
from headway.core.contract.errors import ConfigError
from headway.core.engine.data.request_limits import CheckedRequest
from headway.core.sampling.detokenizer import Detokenizer, NoTokenizer
from headway.core.sampling.params import SamplingParams
from headway.core.system.text import shown
from headway.outputs import CompletionOutput, RequestMetrics, RequestOutput
from headway.requests.streams import RequestStream
from headway.server.openai.reply import Receive, Reply, Send
from headway.server.openai.requests import SamplingRequest
from headway.server.service import Ticket

_ONE_BY_ONE: Final = (
    *("best_of", "stop", "stop_token_ids", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "presence_penalty"),
    *("frequency_penalty", "prompt_logprobs", "response_format", "structured_outputs", "suffix", "tools"),
    *("prompt_embeds", "echo", "cache_salt"),
)
"""Fields about sampling or about text around the completion, which beam search does not support."""


def check_fields(body: SamplingRequest) -> None:
    """Check a request for fields that beam search does not support. :raises ConfigError: if the request has such a field."""
    hint = "leave it out, or use_beam_search"
    if body.stream:
        raise ConfigError("stream", "false beside use_beam_search, whose texts are known at the end", "true", hint)
    for name, value in (*((name, getattr(body, name, None)) for name in _ONE_BY_ONE), *body.older_form.items()):
        if value:
            raise ConfigError(name, "nothing beside use_beam_search", shown(value, 60), hint)
    if body.repetition_penalty not in (None, 1):
        raise ConfigError("repetition_penalty", "1 beside use_beam_search", shown(body.repetition_penalty), hint)


def reply_of(body: SamplingRequest) -> type[Reply]:
    """Return the reply class for a chat or a completion, which depends on whether it uses beam search."""
    return BeamReply if body.use_beam_search else Reply


class BeamReply(Reply):
    """Reply to a beam search request, sent as a whole."""

    async def _serve(self, ticket: Ticket, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        check_fields(self._body)
        requests = await self._prepare()
        searches = [self._search(each) for each in requests]
        if self._service.is_paused and not await self._wait_resumed(receive):
            return
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch(receive))
        times = RequestMetrics(began, None, None, time.perf_counter())
        cached: list[int] = []
        while inputs := next_tokens(searches):
            outputs = await self._step(requests[0], inputs[0], inputs[1])
            if outputs is None:
                return
            ticket.begun()
            if times.first_token_time is None:
                times.first_token_time = time.perf_counter()
                cached = [each.num_cached_tokens for each in outputs]  # in the first step a prompt has one beam
            take_tokens(searches, outputs)
        times.finished_time = time.perf_counter()
        made = zip(requests, searches, cached or [0] * len(requests), strict=True)
        outputs = [self._output(number, times, request, search, count) for number, (request, search, count) in enumerate(made)]
        await self._send_whole(self._answer.whole(outputs), send)

    def _search(self, request: CheckedRequest) -> BeamSearch:
        facts, body = self._service.llm.facts, self._body
        room = facts.limits.max_model_len - len(request.prompt_token_ids)
        params = BeamSearchParams(
            beam_width=body.n or 1,
            max_tokens=request.params.max_tokens or room,
            ignore_eos=bool(body.ignore_eos),
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
        )
        return BeamSearch(request.prompt_token_ids, params, facts.eos_token_ids, room)

    async def _step(
        self, first: CheckedRequest, prompts: Sequence[Sequence[int]], wanted: SamplingParams
    ) -> list[RequestOutput] | None:
        """Return the next token of each beam, or None if the client has disconnected. :raises ApiError: if a step failed."""
        llm = self._service.llm
        inputs: list[Any] = [{"prompt_token_ids": each} for each in prompts]
        checked = await llm.check(inputs, wanted, priority=first.priority, lora_request=first.lora_request)
        if self._left:
            return None
        self._streams = [llm.submit(each) for each in checked]
        self._note_running()
        outputs = [await _finished(each) for each in self._streams]
        found = [each for each in outputs if each is not None]
        for each in found:
            self._answer.check_ended(each.outputs[0])
        return found if len(found) == len(outputs) else None

    def _output(
        self, number: int, times: RequestMetrics, request: CheckedRequest, search: BeamSearch, cached: int
    ) -> RequestOutput:
        """Return a search's result as completions of its prompt, and record its metrics."""
        kept = search.best(None).sequences
        completions = [self._completion(index, each, len(search.prompt)) for index, each in enumerate(kept)]
        written = sum(len(each.token_ids) for each in completions)
        prompt = list(request.prompt_token_ids)
        output = RequestOutput(
            request_id=f"{self._answer.id}-{number}",
            prompt=request.prompt,
            prompt_token_ids=prompt,
            outputs=completions,
            finished=True,
            metrics=times,
            num_cached_tokens=cached,
            lora_request=request.lora_request,
        )
        reasons = [str(each.finish_reason) for each in completions]
        longest = max(len(each.token_ids) for each in completions)
        self._service.metrics.finished(times, len(prompt), written, reasons, longest, self._body.most_tokens)
        self._trace(request.params, output, written)
        return output

    def _completion(self, index: int, beam: BeamSearchSequence, start: int) -> CompletionOutput:
        """Return a beam as a completion. start: number of prompt tokens."""
        tokens = beam.tokens[start:]
        text = Detokenizer(
            self._service.llm.get_tokenizer() or NoTokenizer(), skip_special_tokens=self._body.skip_special_tokens is not False
        )
        text.extend(tokens)
        places = zip(tokens, beam.logprobs, strict=False)  # the token that ends a beam may be left out
        logprobs = [{token: likely[token], **likely} for token, likely in places]
        return CompletionOutput(
            index=index,
            text=text.flush(),
            token_ids=tokens,
            cumulative_logprob=beam.cum_logprob,
            logprobs=logprobs,
            finish_reason=beam.finish_reason,
            stop_reason=None,
        )


async def _finished(stream: RequestStream) -> RequestOutput | None:
    """Return the last output of a stream, or None if the stream was closed before the request finished."""
    async for output in stream:
        if output.finished:
            return output
    return None
