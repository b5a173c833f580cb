"""Request validation: a call's arguments are parsed, tokenized and checked once, before anything is queued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

from headway.core.contract.adapters import LoRARequest
from headway.core.contract.errors import ConfigError, PromptError
from headway.core.engine.data.request_limits import CheckedRequest, RequestLimits
from headway.core.engine.data.sequence import EmbeddedPrompt
from headway.core.sampling.batch_processors import ENGINE_PROCESSORS
from headway.core.sampling.params import RequestOutputKind, SamplingParams
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.models.checkpoints.locate import RECOMMENDED_SAMPLING
from headway.requests.chat_template import ControlTokens, chat_prompt
from headway.requests.prompts import Message, ParsedPrompt, Prompt, parse_prompts, whole_text

_DEFAULTS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in generation_config.json -> name in SamplingParams."""


def default_params(folder: Path, model: str = "") -> SamplingParams:
    """Return a model's recommended parameters, or SamplingParams() if it has none.

    They come from generation_config.json as in vLLM; parameters missing there come from `RECOMMENDED_SAMPLING`. folder: folder
    with generation_config.json. model: name by which the model was loaded.
    :raises ConfigError: if a value is invalid, with the file's name.
    """
    path = folder / "generation_config.json"
    read = parse_json(read_text(path), str(path), dict, any_number=True) if path.is_file() else {}
    read = {**RECOMMENDED_SAMPLING.get(model, {}), **read}
    try:
        return SamplingParams(**{ours: read[name] for name, ours in _DEFAULTS.items() if read.get(name) is not None})
    except ConfigError as error:
        what, need, got, _ = error.reason
        raise ConfigError(f"{path}: {what}", need, got, "correct it, or give the parameter yourself in each request") from None


def resolve(params: SamplingParams, tokenizer: Any, model: str) -> SamplingParams:
    """Return parameters with bad words as token ids. tokenizer: None if no tokenizer is loaded. :raises ConfigError: if a
    parameter needs a tokenizer that is not loaded."""
    if tokenizer is None:
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name):
                ids = {"stop": "stop_token_ids need none", "bad_words": "bad_words_token_ids need none"}
                raise ConfigError(name, "a model with a tokenizer, to see texts", model, ids.get(name, ""))
    if not params.bad_words:
        return params
    words = [tuple(word) for word in params.bad_words_token_ids or ()]
    for text in params.bad_words:
        words += word_token_ids(text, tokenizer)
    return replace(params, bad_words_token_ids=tuple(words))


def word_token_ids(text: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """Return the token ids of a word at the start of a text. If only the first token differs after a space, return the token ids
    after a space as well."""
    plain, spaced = (tuple(tokenizer(before + text.lstrip(), add_special_tokens=False)["input_ids"]) for before in ("", " "))
    if not plain:
        raise ConfigError("bad_words", "texts that the tokenizer knows", repr(text))
    same_rest = len(plain) == len(spaced) and plain[0] != spaced[0]
    return [plain, spaced] if same_rest else [plain]


def params_of_each(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts. :raises ConfigError: if the number of parameters or a type is wrong."""
    listed = _of_each("sampling_params", default if given is None else given, count)
    wrong = [type(each).__name__ for each in listed if not isinstance(each, SamplingParams)]
    if wrong:
        raise ConfigError("sampling_params", "SamplingParams", f"a {wrong[0]}")
    return listed


def _of_each(name: str, given: Any, count: int) -> list[Any]:
    """Return `count` values, given one value for all prompts or one per prompt. :raises ConfigError: if the number of values is
    wrong."""
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * count
    if len(listed) != count:
        raise ConfigError(name, f"one, or one for each of the {count} prompts", len(listed))
    return listed


class RequestRules(NamedTuple):
    """Options of an engine that apply to its requests."""

    generation_config: str = "auto"
    """Source of default parameters: auto uses the model's recommendation, vllm uses SamplingParams()."""
    processors: tuple[type[Any], ...] = ()
    """Classes of the logits processors that change every batch."""

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the engine's batch processors. :raises ConfigError: if a processor rejects them."""
        for each in self.processors:
            validate = getattr(each, "validate_params", None)
            try:
                if validate is not None:
                    validate(params)
            except ValueError as error:
                raise ConfigError("sampling_params", f"what {each.__name__} takes", str(error)) from error
        return replace(params, logits_processors=(*(params.logits_processors or ()), ENGINE_PROCESSORS))


def processor_class(given: object) -> type[Any]:
    """Return the class that an item of `logits_processors` specifies. given: the class, or its name as MODULE:CLASS. :raises
    ConfigError: if the item is invalid."""
    found = given
    if isinstance(given, str):
        module, _, name = given.partition(":")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError("logits_processors", "classes, or their places as MODULE:CLASS", f"{given!r} ({error})") from error
    if not isinstance(found, type) or not all(callable(getattr(found, each, None)) for each in ("apply", "update_state")):
        hint = "functions of one request belong into SamplingParams(logits_processors=[...])"
        raise ConfigError("logits_processors", "classes with apply and update_state", shown(given), hint)
    return found


class InfillTokens(NamedTuple):
    """Control tokens for fill-in-the-middle: the token before the prefix, before the suffix, and before the generated middle."""

    prefix: str
    suffix: str
    middle: str


FAMILIES: Final = (
    InfillTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite 4
    InfillTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    InfillTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    InfillTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)
"""Fill-in-the-middle tokens, one item per model family. All families put the prefix first.

Bavarian et al., "Efficient training of language models to fill in the middle", 2022.
"""
_ENDS: Final = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|endoftext|>")
"""Tokens with which some of these models end the generated middle."""


class Infill:
    """Builder of fill-in-the-middle prompts for one tokenizer."""

    def __init__(self, tokenizer: Any, model: str) -> None:
        """:raises ConfigError: if the tokenizer does not have the tokens of a known family."""
        known: Mapping[str, int] = tokenizer.get_vocab() if tokenizer is not None else {}
        found = next((each for each in FAMILIES if all(token in known for token in each)), None)
        if found is None:
            need = "a model with fill-in-the-middle tokens, such as Qwen-Coder, StarCoder, DeepSeek-Coder or CodeGemma"
            raise ConfigError("suffix", need, model, "leave suffix out")
        self._tokenizer = tokenizer
        self._ids = [known[token] for token in found]
        self.stop_token_ids = sorted({*self._ids, *(known[token] for token in _ENDS if token in known)})
        """Ids of the tokens that never occur in the generated middle and therefore end it."""

    def prompt(self, prefix: str, suffix: str, encode: Callable[[str], list[int]]) -> Prompt:
        """Return the prompt for a gap. encode: function from a text to token ids without special tokens. :raises PromptError: if
        a text is not valid Unicode."""
        prefix_id, suffix_id, middle_id = self._ids
        # BOS if the model has one; an end-of-text token does not belong in a prompt
        around = list(self._tokenizer("")["input_ids"])
        begun = [token for token in around if token != self._tokenizer.eos_token_id]
        ids = [*begun, prefix_id, *encode(whole_text(prefix)), suffix_id, *encode(whole_text(suffix, "suffix")), middle_id]
        return {"prompt": prefix, "prompt_token_ids": ids}


_NO_RULES = RequestRules()
_AT_ONCE = 8  # Maximum number of short prompts to check without a thread
_SHORT = 4096  # Maximum number of token ids of a short prompt; checking takes less than 50 us


class TextModel(NamedTuple):
    """Parts of a model that are needed to encode prompts and decode outputs."""

    name: str
    folder: Path
    tokenizer: Any
    """transformers' tokenizer. None if prompts and outputs are only token ids."""


class RequestValidator:
    """Validator for the requests of one engine, which does not check them again. Thread-safe."""

    def __init__(self, model: TextModel, limits: RequestLimits, rules: RequestRules = _NO_RULES) -> None:
        self.model = model
        self.tokenizer = model.tokenizer
        self.limits = limits
        self._rules = rules

    def check(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        streamed: bool = False,
    ) -> list[CheckedRequest]:
        """Parse, tokenize and check all prompts of a call (`LLM.generate`). streamed: True if outputs are returned as they grow.

        :raises PromptError: if a prompt is empty or too long.
        :raises ConfigError: if a parameter, priority or adapter is invalid.
        """
        parsed = parse_prompts(prompts)
        params = params_of_each(sampling_params, len(parsed), self._default_params)
        priorities = _of_each("priority", 0 if priority is None else priority, len(parsed))
        adapters = _of_each("lora_request", lora_request, len(parsed))
        resolved = {id(own): self._resolve(own, streamed) for own in params}  # most calls share one object
        return [
            self._checked(prompt, number, resolved[id(own)], first, adapter)
            for number, (prompt, own, first, adapter) in enumerate(zip(parsed, params, priorities, adapters, strict=True))
        ]

    def chat_prompt(self, messages: str | Sequence[Message], *, split_special_tokens: bool = False, **options: Any) -> Prompt:
        """Return a rendered conversation; see `chat_template.chat_prompt`. split_special_tokens: encode names of control tokens
        as text."""
        control_tokens = self.control_tokens if split_special_tokens else None
        return chat_prompt(self.tokenizer, self.model.name, messages, control_tokens=control_tokens, **options)

    def text_prompt(self, text: str, add_special_tokens: bool = True) -> Prompt:
        """Return a text as {"prompt", "prompt_token_ids"}, with names of control tokens encoded as text. :raises ConfigError: if
        the tokenizer does not support this encoding."""
        return {"prompt": text, "prompt_token_ids": self.control_tokens.encode_text(whole_text(text), add_special_tokens)}

    def infill_prompt(self, prefix: str, suffix: str, split_special_tokens: bool = False) -> Prompt:
        """Return the prompt for a gap. split_special_tokens: encode names of control tokens as text. :raises ConfigError: if the
        tokenizer does not support fill-in-the-middle prompts or this encoding."""

        def encode(text: str) -> list[int]:
            if split_special_tokens:
                return self.control_tokens.encode_text(text, False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        return self.infill.prompt(prefix, suffix, encode)

    @cached_property
    def infill(self) -> Infill:
        """Builder of fill-in-the-middle prompts. :raises ConfigError: if the tokenizer lacks the tokens."""
        return Infill(self.tokenizer, self.model.name)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Encoder that treats names of control tokens as text, created at its first use."""
        return ControlTokens(self.tokenizer)

    def default_params(self) -> SamplingParams:
        """Return the model's recommended parameters or vLLM's defaults, as the option generation_config selects."""
        return self._default_params.clone()

    @cached_property
    def _default_params(self) -> SamplingParams:
        if self._rules.generation_config == "vllm":
            return SamplingParams()
        return default_params(self.model.folder, self.model.name)

    def _resolve(self, params: SamplingParams, streamed: bool) -> SamplingParams:
        if streamed and params.num_drawn > params.n and params.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise ConfigError("best_of", f"None or n={params.n} in a stream", params.best_of, "or output_kind=FINAL_ONLY")
        own = self._rules.apply(params) if self._rules.processors else params
        return resolve(own.settled(), self.tokenizer, self.model.name)  # a copy: the caller may change its own later

    def _checked(
        self, prompt: ParsedPrompt, number: int, params: SamplingParams, priority: int, adapter: LoRARequest | None
    ) -> CheckedRequest:
        """Return a request for one prompt of a call, tokenized and checked. number: index of the prompt. params: parameters from
        `resolve`."""
        params = params if prompt.cache_salt is None else replace(params, cache_salt=prompt.cache_salt)
        try:
            ids = self._tokenize(prompt.text or "") if prompt.token_ids is None else prompt.token_ids
            most = self.limits.most_prompt_tokens(params)
            if most is not None:
                ids = EmbeddedPrompt.of(ids.rows[-most:]) if isinstance(ids, EmbeddedPrompt) else ids[-most:]
            return self.limits.checked(ids, params, priority, prompt.text, adapter)
        except PromptError as error:
            raise PromptError(f"prompt {number}", *error.reason[1:]) from None

    def _tokenize(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise PromptError("prompt", "token ids", "a text", f"{self.model.name} was loaded without a tokenizer")
        return list(self.tokenizer(whole_text(prompt))["input_ids"])


def quickly_checked(prompts: object) -> bool:
    """Return whether prompts are at most 8 short lists of token ids: waking a thread would take longer than checking them."""
    return isinstance(prompts, list) and len(prompts) <= _AT_ONCE and all(map(_short, prompts))


def _short(prompt: object) -> bool:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    return isinstance(ids, list) and 0 < len(ids) <= _SHORT and isinstance(ids[0], int)


class RequestName(NamedTuple):
    """The two names of an unfinished request."""

    request_id: str
    """The caller's id, which may be reused as soon as the request has ended."""
    key: str
    """The engine's name, never reused, so that late tokens of an abandoned request do not reach a new request with the same
    id."""


class RequestNames:
    """Names of the unfinished requests of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._numbers = map(str, count())
        self._guard = Lock()

    def claim(self, request_id: str | None = None) -> RequestName:
        """Reserve a request id until `release`; None picks a free one. :raises ConfigError: if the id is in use or not a text."""
        with self._guard:
            if request_id is None:
                request_id = key = next(each for each in self._numbers if each not in self._ids)
            elif not isinstance(request_id, str) or not request_id:
                raise ConfigError("request_id", "a text that is not empty", repr(request_id))
            elif request_id in self._ids:
                raise ConfigError("request_id", "an id not in use", repr(request_id))
            else:
                key = f"{request_id}~{next(self._numbers)}"
            self._ids.add(request_id)
        return RequestName(request_id, key)

    def release(self, request_id: str) -> None:
        """Free an id for another request."""
        with self._guard:
            self._ids.discard(request_id)
