"""Sampling parameters of one request."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, Self

from headway.core.contract.errors import ConfigError, refuses_unknown_fields
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.text import shown

MOST_COMPLETIONS: Final = 16384
"""Maximum of n and best_of, equal to vLLM's default (VLLM_MAX_N_SEQUENCES). Each completion is a sequence in the engine's
memory."""
MOST_LISTED: Final = 2**24
"""Maximum length of a list of token ids: larger than any vocabulary."""
MOST_BIAS = 100.0
"""Maximum absolute value of a logit_bias. A larger value would make a token's probability 0 or 1."""

_BEAMS: Final = "LLM.beam_search(prompts, BeamSearchParams(...)) searches; best_of draws several completions"
_ELSEWHERE: Final = {
    "logit_processors": "it is called logits_processors",
    "use_beam_search": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "stream_interval": "leave it out: LLM.stream yields after every step",
    "spaces_between_special_tokens": "True or False: tokenizers of the tokenizers library write no spaces there either way",
    "flat_logprobs": "not supported: logprobs come as dicts by token id",
    "logprob_token_ids": "not supported yet: logprobs=-1 returns those of all tokens",
    "prompt_logprob_token_ids": "not supported yet: prompt_logprobs=-1 returns those of all tokens",
    "prompt_logprob_start": "not supported yet: prompt_logprobs covers the whole prompt",
    "repetition_detection": "not supported yet: repetition_penalty makes repeated tokens less likely",
    "thinking_token_budget": "not supported yet: max_tokens bounds the whole completion",
    "skip_reading_prefix_cache": "not supported for one request: enable_prefix_caching=False is for all",
    "max_new_tokens": "it is called max_tokens",
    "do_sample": "temperature=0 is greedy",
}
"""Parameter name in vLLM or transformers -> hint for the error about this parameter."""
_NO_EFFECT: Final[Mapping[str, tuple[object, ...]]] = {
    "spaces_between_special_tokens": (True, False),
    **dict.fromkeys(("flat_logprobs", "use_beam_search", "early_stopping", "skip_reading_prefix_cache", "skip_clone"), (False,)),
    "length_penalty": (1.0,),
    "stream_interval": (1,),
    "prompt_logprob_start": (0,),
}
"""vLLM's name for a parameter -> values, besides None, that request Headway's default behaviour."""

LogitsProcessor = Callable[..., Any]
"""Function (token_ids, logits) -> logits, or (prompt_token_ids, token_ids, logits) -> logits. token_ids: the request's output so
far. logits: logits of the next token, float32 [vocab_size], on the engine's device."""


class RequestOutputKind(Enum):
    """Content of each output of a streamed request. The names and values are vLLM's."""

    CUMULATIVE = 0
    """All output so far."""
    DELTA = 1
    """Only the part that is new since the previous output."""
    FINAL_ONLY = 2
    """The complete output, once, after the request has ended."""


def _in_our_names(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keywords of a call without vLLM's keywords that have no effect, and with guided_decoding under its newer
    name."""
    kept = {
        name: value
        for name, value in given.items()
        if name not in _NO_EFFECT or (value is not None and value not in _NO_EFFECT[name])
    }
    if "guided_decoding" in kept:
        kept.setdefault("structured_outputs", kept.pop("guided_decoding"))
    return kept


@refuses_unknown_fields(_ELSEWHERE, "docs/sampling.md", _in_our_names)
@dataclass
class SamplingParams:
    """Sampling parameters of a request, with vLLM's names and meanings. An invalid value raises ConfigError and never reaches the
    engine.

    Attributes that are set later are checked too. The contents of lists are checked again when a request uses the object. A
    queued request uses the parameters with which it was added, even if the object is changed later.
    """

    n: int = 1
    """Number of completions for the prompt. The prompt is prefilled once for all completions."""
    temperature: float = 1.0
    """Sampling temperature. 0 means that the most likely token is always taken."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities sum to at least this value."""
    top_k: int = -1
    """Sample from this many most likely tokens. -1 or 0 means all."""
    min_p: float = 0.0
    """Exclude tokens less likely than this fraction of the most likely one's probability."""
    seed: int | None = None
    """Random seed, which makes the request repeatable in any batch. With None or vLLM's -1, a seed is drawn from the engine's
    random generator."""
    stop: tuple[str, ...] | list[str] | str | None = None
    """Texts that end the completion. A stop text is removed from the output."""
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    """Tokens that end the completion, in addition to the model's end-of-text tokens."""
    ignore_eos: bool = False
    """True to continue past the model's end-of-text tokens."""
    max_tokens: int | None = 16
    """Maximum number of output tokens. None means as many as the model's maximum length allows."""
    min_tokens: int = 0
    """Minimum number of output tokens before an end-of-text token, stop token or stop text ends the completion."""
    best_of: int | None = None
    """Number of completions that are computed. The n completions with the largest sum of log-probabilities are returned. None
    means n."""
    repetition_penalty: float = 1.0
    """Number by which positive logits are divided, and negative logits multiplied, for tokens in the prompt and output (Keskar et
    al. 2019)."""
    presence_penalty: float = 0.0
    """Value subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Value subtracted from the logits of tokens that occur in the output, once per occurrence."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> value added to its logit, from -100 to 100."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be sampled. None means all tokens."""
    bad_words: Sequence[str] | None = ()
    """Texts that must not appear in the output. A text's last token is excluded if the output ends with its other tokens."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = ()
    """Token ids of the bad words. `LLM` sets this field from bad_words."""
    logits_processors: Sequence[str | LogitsProcessor] | None = ()
    """Functions that change the logits before a token is sampled, or names under which plugins registered such functions."""
    extra_args: Mapping[str, Any] | None = None
    """Arguments for a plugin's logits processor."""
    structured_outputs: StructuredOutputsParams | None = None
    logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned, in addition to the sampled token's. -1 means all."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens whose log-probabilities are returned for each prompt token except the first, like `logprobs`.
    The prompt is then computed without the prefix cache."""
    include_stop_str_in_output: bool = False
    """True to keep the stop text, or the text of the stop token, at the end of the output."""
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    """Number of the prompt's last tokens to keep. -1 means as many as fit in the model's maximum length with max_tokens."""
    cache_salt: str | None = None
    """Text that keeps this request's prefixes apart: it shares cached prefixes only with requests that have the same salt."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Content of each output of AsyncLLM. LLM.generate always returns whole outputs."""

    def __post_init__(self) -> None:
        self._make_lists()
        self._check_counts()
        self._need("temperature", _number(self.temperature) and self.temperature >= 0, "a number of at least 0", "0 is greedy")
        self._need("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1", "1 keeps every token")
        self._need("top_k", _whole(self.top_k) and self.top_k >= -1, "a whole number of at least -1", "-1 keeps every token")
        self._need("min_p", _number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1")
        self._need("seed", self.seed is None or is_seed(self.seed), SEED_RANGE)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        penalty = self.repetition_penalty
        self._need("repetition_penalty", _number(penalty) and penalty > 0, "a number above 0", "1 changes nothing")
        self._need("repetition_penalty", 2.0**-100 <= penalty <= 2.0**100, "a number from 2**-100 to 2**100", "1 changes nothing")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            self._need(name, _number(value) and -2 <= value <= 2, "a number from -2 to 2", "0 changes nothing")
        self._check_tokens()
        form = self.structured_outputs
        self._need("structured_outputs", form is None or isinstance(form, StructuredOutputsParams), "a StructuredOutputsParams")
        self._need("extra_args", self.extra_args is None or isinstance(self.extra_args, Mapping), "a mapping")
        self._need("output_kind", isinstance(self.output_kind, RequestOutputKind), f"one of {_OUTPUT_KINDS}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            self._need(name, isinstance(getattr(self, name), bool), "True or False")
        self._need("stop", self.detokenize or not self.stop, "detokenize=True beside it", "stop_token_ids needs no text")
        known = all(callable(each) or isinstance(each, str) for each in self.logits_processors or ())
        self._need("logits_processors", known, "a list of functions, or of names that plugins registered")
        self.__dict__["_checked"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_checked" not in self.__dict__:  # __init__ sets the fields one by one, and checks them together
            object.__setattr__(self, name, value)
            return
        name = "structured_outputs" if name == "guided_decoding" else name
        self.__dict__.update(vars(replace(self, **{name: value})))

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Return parameters made from the arguments that are not None."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def settled(self) -> Self:
        """Return a copy for a request. :raises ConfigError: if a list was changed to an invalid value after it was checked."""
        return replace(self) if any(getattr(self, name) for name in _FILLED) else self.clone()

    def clone(self) -> Self:
        """Return a copy whose attributes can be changed independently. Functions are shared with the original."""
        made = copy.copy(self)
        for name in _FILLED:
            value = getattr(self, name)
            if value is not None:
                made.__dict__[name] = list(value)
        for name in ("logit_bias", "extra_args"):
            value = getattr(self, name)
            if value is not None:
                made.__dict__[name] = dict(value)
        return made

    def _make_lists(self) -> None:
        self._need("stop", isinstance(self.stop, (str, tuple, list, type(None))), "a text or a list of texts")
        object.__setattr__(self, "stop", [self.stop] if isinstance(self.stop, str) else list(self.stop or ()))
        for name, need in _LISTS.items():
            value = getattr(self, name)
            self._need(name, value is None or _listed(value), need)
            object.__setattr__(self, name, list(value or ()))
        self._need("stop", all(map(_text, self.stop or ())), "texts of Unicode that are not empty")
        self._need("bad_words", all(map(_text, self.bad_words or ())), "texts of Unicode that are not empty")

    def _check_counts(self) -> None:
        self._need("n", _whole(self.n) and 1 <= self.n <= MOST_COMPLETIONS, f"a whole number from 1 to {MOST_COMPLETIONS}")
        most = self.max_tokens
        self._need("max_tokens", most is None or (_whole(most) and most >= 1), "a whole number of at least 1, or None")
        room = "at least 0" if most is None else f"from 0 to max_tokens={most}"
        fits = _whole(self.min_tokens) and 0 <= self.min_tokens <= (self.min_tokens if most is None else most)
        self._need("min_tokens", fits, f"a whole number, {room}")
        best = self.best_of
        self._need(
            "best_of",
            best is None or (_whole(best) and self.n <= best <= MOST_COMPLETIONS),
            f"a whole number from n={self.n} to {MOST_COMPLETIONS}, or None",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            fits = value is None or (_whole(value) and value >= -1)
            self._need(name, fits, "a whole number of at least -1, or None", "-1 returns all")
        kept = self.truncate_prompt_tokens
        fits = kept is None or (_whole(kept) and (kept >= 1 or kept == -1))
        self._need("truncate_prompt_tokens", fits, "a whole number of at least 1, -1, or None", "-1 keeps what there is room for")
        salt = self.cache_salt
        self._need("cache_salt", salt is None or (isinstance(salt, str) and salt != ""), "a text that is not empty, or None")

    def _check_tokens(self) -> None:
        self._need("stop_token_ids", _ids(self.stop_token_ids), "token ids")
        if self.allowed_token_ids is not None:
            allowed = self.allowed_token_ids
            self._need("allowed_token_ids", _filled_with_ids(allowed), "a list of at least one token id, or None")
            object.__setattr__(self, "allowed_token_ids", list(allowed))
        words = self.bad_words_token_ids or ()
        self._need("bad_words_token_ids", all(map(_filled_with_ids, words)), "lists of at least one token id")
        bias = self.logit_bias
        fits = bias is None or (
            isinstance(bias, Mapping)
            and _ids(tuple(bias))
            and all(_number(value) and abs(value) <= MOST_BIAS for value in bias.values())
        )
        self._need("logit_bias", fits, f"a mapping from token ids to numbers from {-MOST_BIAS:g} to {MOST_BIAS:g}")

    def _need(self, name: str, ok: bool, need: str, hint: str = "") -> None:
        if not ok:
            raise ConfigError(name, need, shown(getattr(self, name)), hint)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0

    @property
    def num_drawn(self) -> int:
        """Number of completions that the engine computes, which may exceed n."""
        return self.n if self.best_of is None else self.best_of


_LISTS: Final = {
    "stop_token_ids": "a list of token ids",
    "bad_words": "a list of texts",
    "bad_words_token_ids": "a list of lists of token ids",
    "logits_processors": "a list of functions, or of names that plugins registered",
}
"""Field whose value is a list (empty if given as None) -> description of its valid values."""
_FILLED: Final = ("stop", "allowed_token_ids", *_LISTS)  # Fields that hold a list, which a program may change in place

_OUTPUT_KINDS: Final = ", ".join(map(str, RequestOutputKind))

SEED_RANGE = "a whole number from -2**63 to 2**63 - 1"


def is_seed(value: object) -> bool:
    """Return whether torch's generators accept a value as seed."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(values: Sequence[object] | None) -> bool:
    return all(_whole(value) and value >= 0 for value in values or ())  # type: ignore[operator]


def _text(value: object) -> bool:
    """Return whether a value is a non-empty text without unpaired surrogates, so that a tokenizer accepts it."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _listed(value: object) -> bool:
    """Return whether a value is a sequence of at most MOST_LISTED items, and not a text or bytes."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
        return False
    try:
        return len(value) <= MOST_LISTED
    except OverflowError:
        return False


def _filled_with_ids(value: Any) -> bool:
    return _listed(value) and len(value) > 0 and _ids(value)


def _number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
