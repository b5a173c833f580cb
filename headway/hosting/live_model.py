"""Operations on the model of a running engine: sleep, wake-up, and replacement of weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.core.contract.errors import ConfigError, made_by
from headway.core.engine.data.executor import CACHE, WEIGHTS
from headway.core.system.held_tensors import held_tensors
from headway.core.system.text import shown, truncated
from headway.models.loader import LOAD_FORMATS

if TYPE_CHECKING:
    from headway.hosting.driver import EngineDriver
    from headway.models.checkpoints.live_weights import LiveWeights

_LOST = "weights lost in sleep"


def live_weights(driver: EngineDriver, what: str) -> LiveWeights:
    """Return the replaceable weights of a driver's model. what: name of the operation, for the error message. :raises
    ConfigError: if the weights cannot be replaced."""
    model, on_disk = driver.assembly.model, driver.assembly.engine.config.kv_offload_dir
    if model.live_weights is None:
        need = "plain weights on one rank that Headway's decoder computes"
        raise ConfigError(what, need, f"{model.name}, {model.implementation}", "make a new LLM of the new weights")
    if on_disk is not None:
        raise ConfigError(what, "no kv_offload_dir, whose blocks are those of the old weights", str(on_disk))
    return model.live_weights


def sleep(driver: EngineDriver, level: int = 1) -> None:
    """Free the weights and the KV cache. Runs as a task of headway.hosting.host.

    level: 1 moves the weights to host memory; 2 frees them, to be read again on waking.

    :raises ConfigError: if the level is not 1 or 2, or the engine cannot sleep; see `EngineLoop.sleep`.
    """
    if isinstance(level, bool) or level not in (1, 2):
        raise ConfigError("level", "1 (weights in the host's memory) or 2 (weights are read again)", shown(level))
    lost: Sequence[Tensor] = ()
    if level == 2:
        lost = live_weights(driver, "sleep(level=2)").tensors
        if driver.assembly.model.decoder.expert_kinds:
            raise ConfigError("level", "1 for a model of experts, which are arranged on loading", 2)
    driver.engine.sleep(lost)
    if driver.assembly.draft is not None:
        driver.assembly.draft.engine.sleep()
    driver.task_state[_LOST] = level == 2


def wake_up(driver: EngineDriver, tags: Sequence[str] | None = None) -> None:
    """Allocate freed memory again. tags: "weights", "kv_cache" or both (also None). :raises ConfigError: if a tag is unknown."""
    for tag in tags if isinstance(tags, list | tuple) else () if tags is None else (tags,):
        if not isinstance(tags, list | tuple) or tag not in (WEIGHTS, CACHE):
            raise ConfigError("tags", f"a list of {WEIGHTS} and {CACHE}", shown(tag))
    for part in (WEIGHTS, CACHE):
        if tags is None or part in tags:
            for assembly in (driver.assembly, driver.assembly.draft):
                if assembly is not None:
                    assembly.engine.wake(part)
    if driver.task_state.get(_LOST) and WEIGHTS not in driver.engine.asleep:
        live_weights(driver, "wake_up").read_again()
        driver.task_state[_LOST] = False


def is_sleeping(driver: EngineDriver) -> bool:
    """Return whether the weights or the KV cache are asleep."""
    return bool(driver.engine.asleep)


def load_weights(driver: EngineDriver, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Replace weights and forget cached prefixes; see `LiveWeights.load`.

    :raises ModelError: if a tensor's shape differs from the weight's.
    :raises ConfigError: if weights are asleep or cannot be replaced, or a name is not a tensor of the model.
    """
    if WEIGHTS in driver.engine.asleep:
        raise ConfigError("load_weights", "weights that are awake", "sleeping ones", "wake_up(tags=['weights']) wakes them")
    driver.engine.read_launched()
    try:
        return live_weights(driver, "load_weights").load(weights)
    finally:
        driver.engine.forget_prefixes(everywhere=True)


class ServedModel:
    """The model of an engine, as a worker's `model_runner.model`."""

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver
        self.config = getattr(driver.assembly.model.decoder, "config", None)
        """Configuration of the decoder. None if transformers runs the model."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights, by their names in the checkpoint; see the module's `load_weights`."""
        return load_weights(self._driver, weights)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as stored in memory: merged, and in the order that the device's kernels read."""
        decoder = self._driver.assembly.model.decoder
        parts = getattr(decoder, "layers", decoder)
        yield from held_tensors(*(parts if isinstance(parts, list) else [parts])).items()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the model has no attribute {name!r}: it has load_weights, named_parameters and config")


class Worker:
    """Worker that `collective_rpc` passes to functions. An engine has one worker, in this process."""

    rank = local_rank = 0

    def __init__(self, driver: EngineDriver) -> None:
        self._driver = driver
        self.device: torch.device = driver.assembly.device
        self.vllm_config = driver.assembly.settings
        self.model_runner = SimpleNamespace(model=ServedModel(driver), device=self.device)

    def get_model(self) -> ServedModel:
        """Return the model."""
        found: ServedModel = self.model_runner.model
        return found

    def update_config(self, overrides: Mapping[str, Any]) -> None:
        """Set the source of the weights for `reload_weights`: load_config.load_format is "auto" or "dummy". :raises ConfigError:
        if the overrides are invalid."""
        given = overrides.get("load_config") if isinstance(overrides, Mapping) else None
        found = given.get("load_format") if isinstance(given, Mapping) and len(overrides) == len(given) == 1 else None
        if found not in LOAD_FORMATS:
            need = f"load_config with load_format, {' or '.join(LOAD_FORMATS)}"
            raise ConfigError("overrides", need, shown(overrides), "other options need a new LLM")
        live_weights(self._driver, "update_config").dummy = found == "dummy"

    def reload_weights(self) -> None:
        """Read the checkpoint again. Weights that a program has set are lost."""
        live_weights(self._driver, "reload_weights").read_again()
        self._driver.engine.forget_prefixes(everywhere=True)

    def sleep(self, level: int = 1) -> None:
        """Free the weights and the KV cache; see the module's `sleep`."""
        sleep(self._driver, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate freed memory again; see the module's `wake_up`."""
        wake_up(self._driver, tags)


def worker_of(driver: EngineDriver) -> Worker:
    """Return a driver's worker, of the class named by worker_extension_cls. :raises ConfigError: if no such class exists."""
    if "worker" not in driver.task_state:
        kind = _with_extension(driver.assembly.worker_extension)
        driver.task_state["worker"] = made_by("worker_extension_cls: the worker", lambda: kind(driver))
    made: Worker = driver.task_state["worker"]
    return made


def _with_extension(place: str) -> type[Worker]:
    if not place:
        return Worker
    module, _, name = place.replace(":", ".").rpartition(".")
    try:
        extension = getattr(import_module(module), name)
        return type("ExtendedWorker", (Worker, extension), {})
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError("worker_extension_cls", "a class as MODULE.CLASS", place, str(error)) from error


def collective_rpc(
    driver: EngineDriver, method: str | Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """Call a worker's method by name, or a function with the worker. Return a list with one result, since there is one rank.

    :raises ConfigError: if there are several ranks, the worker has no such method, or the arguments do not match the method.
    """
    ranks = driver.assembly.settings.parallel_config.tensor_parallel_size if driver.assembly.settings else 1
    if ranks > 1:
        raise ConfigError("collective_rpc", "tensor_parallel_size=1, whose one rank is this process", ranks)
    worker, named = worker_of(driver), dict(kwargs or {})
    if callable(method):
        return [method(worker, *args, **named)]
    found = getattr(worker, method, None)
    if not callable(found):
        methods = (name for name in dir(type(worker)) if not name.startswith("_") and callable(getattr(type(worker), name)))
        hint = "a function gets the worker as its first argument; worker_extension_cls names a class with more methods"
        raise ConfigError("method", f"{', '.join(methods)} or a function", shown(method), hint)
    _check_arguments(method, found, args, named)
    try:
        return [found(*args, **named)]
    except ConfigError as error:
        raise ConfigError(f"{error.reason.what} of {method}", *error.reason[1:]) from error


def _check_arguments(name: str, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that a method accepts these arguments. :raises ConfigError: if it does not."""
    try:
        signature = inspect.signature(method)
        signature.bind(*args, **kwargs)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        given = ", ".join(
            [*(shown(each, 30) for each in args), *(f"{key[:30]}={shown(value, 30)}" for key, value in kwargs.items())]
        )
        why = truncated(str(error), 100)
        raise ConfigError("args and kwargs", f"those of {name}({takes})", f"{name}({truncated(given, 200)}), {why}") from None
    except ValueError:  # a builtin without a signature: the call reports the error
        return
