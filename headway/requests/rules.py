"""What an engine's options say of its requests: their default parameters, and the processors that change every batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

from headway.core.contract.errors import ConfigError
from headway.core.sampling.batch_processors import ENGINE_PROCESSORS
from headway.core.sampling.params import SamplingParams
from headway.core.system.text import shown


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
