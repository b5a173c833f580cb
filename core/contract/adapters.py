"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685): the request's adapter, and the adapter slots of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headway.core.contract.errors import ConfigError

if TYPE_CHECKING:  # options need no torch
    from torch import Tensor

NO_ADAPTER = -1
"""Adapter slot index of a sequence or row that uses no adapter."""


LONGEST_NAME = 256
"""Maximum length of a model or adapter name in characters. Lists and errors repeat such names."""


def check_name(what: str, name: object) -> None:
    """Check a name that requests use for a model or an adapter.

    what: name of the option or field, for the error message.

    :raises ConfigError: if the name is empty or too long, or has unprintable characters.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(what, "a text that is not empty", repr(name)[:60])
    if len(name) > LONGEST_NAME:
        raise ConfigError(what, f"at most {LONGEST_NAME} characters", f"{len(name)}: {name[:60]!r}...")
    if not name.isprintable() or name != name.strip():
        raise ConfigError(what, "printable characters, without blanks around them", repr(name)[:60])


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request. Field names are vLLM's."""

    lora_name: str
    """Human-readable name of the adapter."""
    lora_int_id: int
    """ID of the adapter, at least 1. The engine identifies the adapter by this ID, so adapters in use need different IDs."""
    lora_path: str = ""
    """Adapter folder written by PEFT, or a Hugging Face hub ID."""
    long_lora_max_len: int | None = None
    """Ignored, as in current vLLM."""
    base_model_name: str | None = None
    """Name of the base model, only for display. Whether the adapter fits is decided by tensor shapes."""
    tensorizer_config_dict: Mapping[str, Any] | None = None
    """Not supported: adapters are read from safetensors."""
    load_inplace: bool = False
    """True to replace an adapter with the same ID in the engine."""

    def __post_init__(self) -> None:
        """:raises ConfigError: if the name is invalid, the ID or path is missing, or a tensorizer config is given."""
        check_name("lora_name", self.lora_name)
        if not isinstance(self.lora_int_id, int) or isinstance(self.lora_int_id, bool) or self.lora_int_id < 1:
            raise ConfigError("lora_int_id", "a whole number of at least 1", repr(self.lora_int_id))
        if not str(self.lora_path):
            raise ConfigError("lora_path", "the adapter's folder", "none")
        if self.tensorizer_config_dict:
            raise ConfigError("tensorizer_config_dict", "none, because adapters are read from safetensors", "one")
        object.__setattr__(self, "lora_path", str(self.lora_path))

    @property
    def name(self) -> str:
        """Alias of `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """Alias of `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """Alias of `lora_path`."""
        return self.lora_path


class AdapterSlots(NamedTuple):
    """Number and size of the adapter slots on a device."""

    number: int
    """Maximum number of adapters in one step."""
    max_rank: int
    """Maximum LoRA rank of an adapter."""


class HostAdapter(Protocol):
    """An adapter in host memory, in the representation that the model's slots use."""

    @property
    def digest(self) -> bytes:
        """Digest of the adapter's content."""


class ModelAdapters(Protocol):
    """Adapter slots of a model on one rank. Each slot holds one adapter."""

    @property
    def num_slots(self) -> int:
        """Maximum number of adapters in one step."""

    def read(self, request: LoRARequest) -> HostAdapter:
        """Read an adapter's folder into host memory. Any thread may call this, because no step uses the result yet.

        :raises HeadwayError: if the adapter is not supported; the message gives the reason.
        """

    def put(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter into a slot, in stream order: steps that were launched earlier use the slot's previous adapter."""

    def arrange(self) -> None:
        """Allocate the slots again, after the engine freed and re-allocated the memory of the model's weights."""

    def begin(self, slots: Tensor | None) -> None:
        """Set the adapter of each row for the model's next calls, until the next `begin`.

        slots: int32 [num_tokens] on the model's device: adapter slot of each row, or NO_ADAPTER. The model's kernels read the
        tensor when they run. None means that no row has an adapter; the model then computes as if it had no slots.
        """


@contextmanager
def rows_with(adapters: ModelAdapters | None, slots: Tensor | None) -> Iterator[None]:
    """Return a context in which the rows of model calls use the adapters in `slots`, as in `ModelAdapters.begin`.

    adapters: the model's adapter slots. If this is None, the context does nothing.
    """
    if adapters is None:
        yield
        return
    adapters.begin(slots)
    try:
        yield
    finally:
        adapters.begin(None)


def adapters_of(model: object) -> ModelAdapters | None:
    """Return a model's adapter slots, or None if it has none. The attribute `adapters` is optional."""
    found: ModelAdapters | None = getattr(model, "adapters", None)
    return found
