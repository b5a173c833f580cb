"""The fields of `SamplingParams` as flags that commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from headway.cli.options import in_place_of
from headway.core.contract.errors import ConfigError
from headway.core.system.files import read_text

Command = Callable[..., None]

PANEL: Final = "Sampling"
"""Panel of a command's help that lists the flags."""


class _Flag(NamedTuple):
    """A field on a command line. None as default: the command's own default, or the field's."""

    field: str
    kind: Any
    help: str
    spelled: str = ""
    """The flag, where it is not the field's name."""

    @property
    def name(self) -> str:
        return self.spelled or "--" + self.field.replace("_", "-")


_FLAGS: Final = (
    _Flag("max_tokens", int, "Most tokens to write."),
    _Flag("min_tokens", int, "No end before this many tokens."),
    _Flag("temperature", float, "0 takes the most likely token every time."),
    _Flag("top_p", float, "Sample from the smallest set of tokens that reaches this probability."),
    _Flag("top_k", int, "Sample from this many most likely tokens; -1: from all."),
    _Flag("min_p", float, "Drop tokens less likely than this times the most likely one."),
    _Flag("repetition_penalty", float, "Above 1: makes tokens of prompt and text less likely."),
    _Flag("presence_penalty", float, "-2 to 2: taken from the logits of tokens that the text holds."),
    _Flag("frequency_penalty", float, "-2 to 2: the same, once for each time that it holds them."),
    _Flag("seed", int, "Makes sampled text repeatable."),
    _Flag("n", int, "Texts for the prompt, which is computed once."),
    _Flag("stop", list[str], "A text that ends the completion. Repeatable."),
    _Flag("ignore_eos", bool, "Go on past the model's end-of-text token."),
    _Flag("logprobs", int, "Show each token's log-probability, and those of this many most likely ones."),
)
_FORMS: Final = (
    _Flag("json", str, "A JSON schema that the text obeys: a file, or the schema itself.", "--json-schema"),
    _Flag("regex", str, "A regular expression that the text matches."),
    _Flag("choice", list[str], "A text that may be the answer. Repeatable: the completion is one of them."),
    _Flag("grammar", str, "A grammar that the text follows, in Lark's notation or llama.cpp's: a file, or the grammar itself."),
)


def takes_sampling_options(*without: str, **defaults: object) -> Callable[[Command], Command]:
    """Give a command these flags in the place of its parameter `sampling`, a dict for SamplingParams of the given ones.

    without: fields that make no sense for the command. defaults: of the command, where they are not the field's.
    """
    flags = [flag for flag in (*_FLAGS, *_FORMS) if flag.field not in without]

    def decorate(command: Command) -> Command:
        parameters = in_place_of("sampling", command, [_parameter(flag, defaults.get(flag.field)) for flag in flags])

        def run(**values: Any) -> None:
            given = {flag: values.pop(_word(flag)) for flag in flags}
            command(**values, sampling=_sampling(given))

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__module__ = command.__module__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _word(flag: _Flag) -> str:
    return flag.name.lstrip("-").replace("-", "_")


def _parameter(flag: _Flag, default: object) -> inspect.Parameter:
    switch = flag.kind is bool
    option = typer.Option(flag.name, help=flag.help, rich_help_panel=PANEL)
    kind = bool if switch else flag.kind | None
    default = False if switch else default
    return inspect.Parameter(_word(flag), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _sampling(given: dict[_Flag, Any]) -> dict[str, Any]:
    """Make the arguments of SamplingParams from the flags that were given.

    :raises ConfigError: a form that is not well-formed, or several of them.
    """
    from headway.core.sampling.structured import StructuredOutputsParams

    chosen = {flag: value for flag, value in given.items() if value is not None and value is not False and value != []}
    forms = [flag for flag in chosen if flag in _FORMS]
    sampling = {flag.field: value for flag, value in chosen.items() if flag not in _FORMS}
    if len(forms) > 1:
        raise ConfigError(forms[1].name, "one form of the text alone", f"{forms[0].name} as well")
    for flag in forms:
        text = _text_of(flag.name, chosen[flag]) if flag.field in ("json", "grammar") else chosen[flag]
        form: dict[str, Any] = {flag.field: text}
        sampling["structured_outputs"] = StructuredOutputsParams(**form)
    return sampling


def _text_of(option: str, given: str) -> str:
    """The text of a file, or the given text itself: a schema is an object, and the rules of a grammar have colons.

    :raises ConfigError: neither is there.
    """
    try:
        return read_text(Path(given))
    except (OSError, ValueError) as error:
        if given.lstrip().startswith("{") or (":" in given and option == "--grammar"):
            return given
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(option, "a file that can be read, or the text itself", f"{given!r} ({reason})") from None
