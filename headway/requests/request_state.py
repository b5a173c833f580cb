"""State of unfinished requests (completions, texts, token bytes, log-probabilities), updated from the engine's deltas."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from headway.core.engine.data.request_limits import CheckedRequest
from headway.core.engine.data.step import OutputDelta
from headway.core.sampling.detokenizer import Detokenizer, NoTokenizer, Tokenizer
from headway.core.sampling.logprobs import Logprob, TokenLogprobs
from headway.core.sampling.params import RequestOutputKind, SamplingParams
from headway.models.checkpoints.tokenizer import PlainTokenizer
from headway.outputs import CompletionOutput, LogprobsByToken, RequestMetrics, RequestOutput


@dataclass
class Progress:
    """Progress counts over all requests of one call."""

    num_completions: int = 0
    num_finished: int = 0
    num_tokens: int = 0

    @property
    def finished(self) -> bool:
        """True if all completions of the call's requests have ended."""
        return self.num_finished == self.num_completions


class Completion:
    """State of one completion."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self._params = params
        self._tokenizer = tokenizer
        shown, keeps_stop = tokenizer if params.detokenize else NoTokenizer(), params.include_stop_str_in_output
        self.text = Detokenizer(shown, params.stop or (), keeps_stop, params.min_tokens, params.skip_special_tokens)
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._scores: list[float] = []
        self._logprobs: list[LogprobsByToken] = []
        self._shown = (0, 0, False)  # Tokens and characters that `new_output` has returned, and whether it has returned the end

    @property
    def score(self) -> float:
        """Sum of the log-probabilities of the completion's tokens, by which best_of ranks completions."""
        return sum(self._scores)

    def take(self, delta: OutputDelta) -> None:
        """Add the tokens of one step."""
        self.token_ids += delta.new_token_ids
        self.finish_reason = delta.finish_reason
        self.error = delta.error
        for each in delta.logprobs:
            self._scores.append(each.logprobs[0])
            if self._params.logprobs is not None:
                self._logprobs.append(by_token(each, self._tokenizer))
        if delta.finish_reason == "stop" and delta.new_token_ids[-1] in (self._params.stop_token_ids or ()):
            self.stop_reason = delta.new_token_ids[-1]

    def read(self, watched: bool) -> bool:
        """Detokenize the new tokens if the completion has ended or is watched. Return whether a stop text has ended the
        completion. watched: True if each token must be checked for stop texts."""
        text, tokens = self.text, self.token_ids
        if not (watched or self.finish_reason):
            return False
        hidden = self.finish_reason == "stop" and not self._params.include_stop_str_in_output
        new = tokens[text.num_tokens : -1 if hidden else None]  # the token that ends a text is not part of it
        if not watched:
            text.extend(new)
            return False
        for token in new:
            if text.append(token) and self.error is None:
                for each in (tokens, self._scores, self._logprobs):
                    del each[text.num_tokens :]
                self.finish_reason = "stop"
                self.stop_reason = text.stopped_by
                return True
        return False

    @property
    def shown_text(self) -> str:
        """The completion's text. While it runs, an ending that may become a stop text is left out."""
        return self.text.safe_text if self.finish_reason is None else self.text.text

    def output(self, index: int) -> CompletionOutput:
        """Return the whole completion so far. index: index of the completion in the output."""
        return self._output(index, self.shown_text, 0)

    def new_output(self) -> CompletionOutput | None:
        """Return the tokens and text since the last call, or None if there are none."""
        text, (tokens, characters, ended) = self.shown_text, self._shown
        self._shown = (len(self.token_ids), len(text), self.finish_reason is not None)
        if self._shown == (tokens, characters, ended):
            return None
        return self._output(self.index, text[characters:], tokens)

    def _output(self, index: int, text: str, first: int) -> CompletionOutput:
        scored = self._params.logprobs is not None
        return CompletionOutput(
            index,
            text,
            self.token_ids[first:],
            self.score if scored else None,
            self._logprobs[first:] if scored else None,
            self.finish_reason,
            self.stop_reason,
            self.error,
        )


class RequestState:
    """State of one request, from the engine's deltas so far."""

    def __init__(self, request_id: str, request: CheckedRequest, tokenizer: Tokenizer, progress: Progress) -> None:
        self.request_id = request_id
        self.prompt = request.prompt
        self.lora_request = request.lora_request
        self.prompt_token_ids = list(request.prompt_token_ids)
        self.params = params = request.params
        self.completions = [Completion(index, params, tokenizer) for index in range(params.num_drawn)]
        self.watched = bool(params.stop)
        """True if each token is detokenized at once to detect stop texts. Otherwise tokens are detokenized only when an output is
        made or at the end."""
        self._changed = False
        self.num_cached_tokens = 0
        self.cache_report: Mapping[str, int] = {}
        self._plain = False
        """True if a delta only needs to add tokens: no stop texts are watched for, and the first token has already set times and
        counts."""
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[LogprobsByToken | None] = [None]
        self._progress = progress
        progress.num_completions += params.num_drawn
        self._num_unfinished = params.num_drawn
        self.arrival_time = time.perf_counter()
        self.first_token_time: float | None = None
        self.scheduled_time: float | None = None
        self.finished_time: float | None = None

    @property
    def finished(self) -> bool:
        """True if all completions have ended."""
        return self._num_unfinished == 0

    def take(self, delta: OutputDelta, now: float) -> bool:
        """Process a delta at time `now`. Return whether a stop text ends the completion, which the caller must then abort."""
        completion = self.completions[delta.completion]
        self._changed = True
        if completion.finish_reason is not None:  # already ended by a stop text, before the engine was notified
            return False
        if self._plain and delta.finish_reason is None and not delta.logprobs:  # most deltas only add a token
            completion.token_ids += delta.new_token_ids
            self._progress.num_tokens += len(delta.new_token_ids)
            return False
        if delta.new_token_ids and self.first_token_time is None:
            self.first_token_time = now
            self.num_cached_tokens = delta.num_cached_tokens
            self.cache_report = delta.cache_report or {}
            self.scheduled_time = delta.admitted_time
            self._plain = not self.watched
        self._prompt_logprobs += [by_token(each, self._tokenizer) for each in delta.prompt_logprobs]
        completion.take(delta)
        self._progress.num_tokens += len(delta.new_token_ids)
        stopped = completion.read(self.watched)
        if completion.finish_reason is not None:
            self._ended(completion, now)
        return stopped

    def abort(self) -> None:
        """End the running completions with finish_reason "abort"."""
        now = time.perf_counter()
        self._changed = True
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.finish_reason = "abort"
                completion.read(self.watched)
                self._ended(completion, now)

    def _ended(self, completion: Completion, now: float) -> None:
        completion.text.flush()
        self._num_unfinished -= 1
        self._progress.num_finished += 1
        if self.finished:
            self.finished_time = now

    @property
    def has_news(self) -> bool:
        """True if `next_output` would return something new, according to the request's output_kind."""
        return self._changed and (self.finished or self.params.output_kind is not RequestOutputKind.FINAL_ONLY)

    def next_output(self) -> RequestOutput:
        """Return the next output of a stream: everything so far or only what is new, according to the request's output_kind."""
        if self.params.output_kind is not RequestOutputKind.DELTA:
            self._changed = False
            return self.output()
        return self._output(self.news())

    def news(self) -> list[CompletionOutput]:
        """Return the new tokens and text of each completion since the last call."""
        self._changed = False
        self._read()
        return [new for completion in self.completions if (new := completion.new_output()) is not None]

    def output(self) -> RequestOutput:
        """Return the whole output so far; with best_of, only the n completions with the largest sums of log-probabilities."""
        shown = self.completions
        if len(shown) > self.params.n:
            shown = sorted(shown, key=lambda each: (each.error is not None, -each.score))[: self.params.n]
        self._read()
        return self._output([completion.output(index) for index, completion in enumerate(shown)])

    def _read(self) -> None:
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.read(watched=True)

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            self.finished,
            RequestMetrics(self.arrival_time, self.first_token_time, self.finished_time, self.scheduled_time),
            self.num_cached_tokens,
            None if self.params.prompt_logprobs is None else list(self._prompt_logprobs),
            self.lora_request,
            self.cache_report,
        )


def by_token(found: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsByToken:
    """Return token id -> log-probability and text of the token, for one position."""
    ranks = (found.rank, *range(1, len(found.token_ids)))
    listed: LogprobsByToken = {}
    for token, logprob, rank in zip(found.token_ids, found.logprobs, ranks, strict=True):
        listed.setdefault(token, Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False)))
    return listed


_REMEMBERED: Final = 8192  # Number of tokens whose text is cached; most texts contain fewer different tokens


class OutputProcessor:
    """The requests of one engine, for any client that drives the engine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """tokenizer: None if only tokens are needed; all texts are then empty."""
        self._tokenizer = fastest_decoder(tokenizer)
        self._requests: dict[str, RequestState] = {}

    def add(self, request_id: str, request: CheckedRequest, progress: Progress, key: str | None = None) -> RequestState:
        """Add a request. progress: counts of its call. key: the engine's name for the request; None means `request_id`."""
        state = RequestState(request_id, request, self._tokenizer, progress)
        self._requests[request_id if key is None else key] = state
        return state

    def remove(self, key: str) -> None:
        """Forget a request; later deltas for it are dropped."""
        self._requests.pop(key, None)

    @property
    def keys(self) -> list[str]:
        """The engine's names for all requests that have not been removed."""
        return list(self._requests)

    def abort(self, key: str) -> None:
        """End a request for which the engine will return no more tokens."""
        state = self._requests.get(key)
        if state is not None:
            state.abort()

    def process(self, deltas: Iterable[OutputDelta]) -> list[tuple[str, int]]:
        """Process a step's deltas. Return completions (key, index) that a stop text has ended, for the engine to abort."""
        now = time.perf_counter()
        stopped = []
        for delta in deltas:
            state = self._requests.get(delta.request_id)
            if state is not None and state.take(delta, now) and delta.finish_reason is None:
                stopped.append((delta.request_id, delta.completion))
        return stopped


class DirectTokenizer:
    """The tokenizers library's decoder, four times as fast as transformers' tokenizer. Caches the texts of single tokens."""

    def __init__(self, backend: Any) -> None:
        self._decode = backend.decode
        self._one = lru_cache(_REMEMBERED)(lambda token, skip_special_tokens: backend.decode([token], skip_special_tokens))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) == 1:
            return str(self._one(token_ids[0], skip_special_tokens))
        return str(self._decode(token_ids, skip_special_tokens)) if token_ids else ""


def fastest_decoder(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the fastest object that decodes as `tokenizer` does. tokenizer: None makes every text empty."""
    if tokenizer is None:
        return NoTokenizer()
    if isinstance(tokenizer, PlainTokenizer):
        return DirectTokenizer(tokenizer.backend_tokenizer)
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    plain = isinstance(tokenizer, Fast) and kind.decode is Fast.decode and kind._decode is Fast._decode
    if not plain or tokenizer.clean_up_tokenization_spaces:  # type: ignore[attr-defined]
        return tokenizer
    return DirectTokenizer(tokenizer.backend_tokenizer)  # type: ignore[attr-defined]


_REMEMBERED_TOKENS: Final = 8192  # Number of token pairs whose bytes are cached
_PART: Final = "\N{REPLACEMENT CHARACTER}"  # Text of an incomplete UTF-8 character
_BYTE_NAME: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # Name of a single-byte token in sentencepiece vocabularies


def _byte_of_sign() -> dict[str, int]:
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_SIGN: Final = _byte_of_sign()


class TokenBytes:
    """Bytes of each token of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: transformers' tokenizer. None means that no token has bytes."""
        self._tokenizer = tokenizer
        self._decoder = fastest_decoder(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self.special = frozenset(token for token, each in added.items() if each.special)
        """Special tokens, which are left out of most texts."""
        self.of = lru_cache(_REMEMBERED_TOKENS)(self._of)
        """Cached function (token, previous token) -> bytes of the token. None as the previous token marks the first token of a
        text."""

    def _of(self, token: int, before: int | None) -> bytes:
        text = self._decode(token)
        name = str(self._tokenizer.convert_ids_to_tokens(token)) if self._tokenizer is not None else ""
        byte = _BYTE_NAME.fullmatch(name)
        if byte is not None and text != name:
            return bytes.fromhex(byte[1]) if text or before is not None else b""  # a space that the decoder removes
        if _PART in text and all(sign in _BYTE_OF_SIGN for sign in name):
            return bytes(_BYTE_OF_SIGN[sign] for sign in name)
        if before is not None:
            text = self._decode(before, token)[len(self._decode(before)) :]
        return text.encode("utf-8", "replace")

    def _decode(self, *token_ids: int) -> str:
        return self._decoder.decode(list(token_ids), skip_special_tokens=False)


class TextBytes:
    """Bytes of the tokens of one completion, token by token.

    Without hidden special tokens, the bytes of all tokens join to the UTF-8 text. The first token therefore has no leading space
    if the tokenizer's decoder removes this space from the start of a text, as sentencepiece decoders do.
    """

    def __init__(self, tokens: TokenBytes, hides_special: bool) -> None:
        self._tokens = tokens
        self._hidden = tokens.special if hides_special else frozenset()
        self._before: int | None = None

    def take(self, candidates: Sequence[int]) -> list[bytes]:
        """Return the bytes of each candidate for the next token. The first candidate is the chosen token."""
        found = [self._tokens.of(token, self._before) for token in candidates]
        if candidates[0] not in self._hidden:
            self._before = candidates[0]
        return found
