"""The default sampling parameters of an engine's requests, and the processors that change every batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from headway.core.contract.errors import ConfigError
from headway.core.sampling.batch_processors import ENGINE_PROCESSORS
from headway.core.sampling.params import SamplingParams
from headway.core.system.files import read_text
from headway.core.system.json_text import parse_json
from headway.core.system.text import shown
from headway.models.checkpoints.locate import RECOMMENDED_SAMPLING

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
    """Return the parameters that a model recommends; SamplingParams() if it recommends none.

    They are read from generation_config.json as in vLLM; those that it leaves out, from `RECOMMENDED_SAMPLING`.

    folder: of generation_config.json. model: name that the model was loaded by.

    :raises ConfigError: a value that is not allowed, with the file's name.
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
    """The same parameters for the engine, which knows no texts: bad words become token ids.

    tokenizer: None where the model was loaded without one.

    :raises ConfigError: a parameter needs a tokenizer.
    """
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
    """The tokens of a word at the start of a text and, where the first token alone differs, in its middle (after a space)."""
    plain, spaced = (tuple(tokenizer(before + text.lstrip(), add_special_tokens=False)["input_ids"]) for before in ("", " "))
    if not plain:
        raise ConfigError("bad_words", "texts that the tokenizer knows", repr(text))
    same_rest = len(plain) == len(spaced) and plain[0] != spaced[0]
    return [plain, spaced] if same_rest else [plain]


def params_of_each(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int, default: SamplingParams
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts.

    :raises ConfigError: another number of them, or something else.
    """
    listed = list(given) if isinstance(given, Sequence) else [default if given is None else given] * count
    if len(listed) != count:
        raise ConfigError("sampling_params", f"one, or one for each of the {count} prompts", len(listed))
    wrong = [type(each).__name__ for each in listed if not isinstance(each, SamplingParams)]
    if wrong:
        raise ConfigError("sampling_params", "SamplingParams", f"a {wrong[0]}")
    return listed


class RequestRules(NamedTuple):
    """The options of an engine that concern its requests."""

    generation_config: str = "auto"
    """auto: requests without parameters take those that the model recommends; vllm: SamplingParams()."""
    processors: tuple[type[Any], ...] = ()
    """Classes of the processors that change every batch."""

    def apply(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a request for the engine, with the processors that change every batch.

        :raises ConfigError: a processor refuses them.
        """
        for each in self.processors:
            validate = getattr(each, "validate_params", None)
            try:
                if validate is not None:
                    validate(params)
            except ValueError as error:
                raise ConfigError("sampling_params", f"what {each.__name__} takes", str(error)) from error
        return replace(params, logits_processors=(*(params.logits_processors or ()), ENGINE_PROCESSORS))


def processor_classes(given: Iterable[object]) -> tuple[type[Any], ...]:
    """The classes that the option `logits_processors` names: as classes, or as MODULE:CLASS.

    :raises ConfigError: one that cannot be found, or is none.
    """
    return tuple(_processor_class(each) for each in given)


def _processor_class(given: object) -> type[Any]:
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
