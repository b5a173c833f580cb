"""Adapters of low rank (LoRA; Hu et al. 2021, arXiv 2106.09685): which one a request names, and what a model does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headway.core.contract.errors import ConfigError

if TYPE_CHECKING:  # options need no torch
    from torch import Tensor

NO_ADAPTER = -1
"""Stands in place of a slot for a sequence, or a row, of the model alone."""


LONGEST_NAME = 256
"""Characters of a name that requests give as their model: lists and errors repeat it."""


def check_name(what: str, name: object) -> None:
    """Check a name by which requests call a model or an adapter. what: the option or field, for the error.

    :raises ConfigError: it is empty or too long, or has characters that cannot be shown.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(what, "a text that is not empty", repr(name)[:60])
    if len(name) > LONGEST_NAME:
        raise ConfigError(what, f"at most {LONGEST_NAME} characters", f"{len(name)}: {name[:60]!r}...")
    if not name.isprintable() or name != name.strip():
        raise ConfigError(what, "printable characters, without blanks around them", repr(name)[:60])


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, as requests name it. Fields are named as those of vLLM's class."""

    lora_name: str
    """A text by which people know the adapter."""
    lora_int_id: int
    """From 1; an engine knows an adapter by it, so that one number never stands for two adapters at a time."""
    lora_path: str = ""
    """The folder that peft has written, or a Hugging Face hub id."""
    long_lora_max_len: int | None = None
    """Not read, as vLLM's releases no longer do."""
    base_model_name: str | None = None
    """The model that the adapter was made for, to be shown; shapes alone decide whether it fits."""
    tensorizer_config_dict: Mapping[str, Any] | None = None
    """Refused: adapters are read from safetensors."""
    load_inplace: bool = False
    """Whether an adapter that the engine knows by the same number is replaced."""

    def __post_init__(self) -> None:
        """:raises ConfigError: no name or one that `check_name` refuses, no number, no path, or tensors in another form."""
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
        """The same as `lora_name`."""
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        """The same as `lora_int_id`."""
        return self.lora_int_id

    @property
    def path(self) -> str:
        """The same as `lora_path`."""
        return self.lora_path


class AdapterSlots(NamedTuple):
    """Room for adapters on a device."""

    number: int
    """Adapters that a step may use at a time."""
    max_rank: int
    """The largest rank of one."""


class HostAdapter(Protocol):
    """An adapter in host memory, in the form in which its model keeps it in a slot."""

    @property
    def digest(self) -> bytes:
        """What tells the adapter's content from any other's."""


class ModelAdapters(Protocol):
    """The slots of a model on one rank, each of which holds an adapter."""

    @property
    def num_slots(self) -> int:
        """Adapters that a step may use at a time."""

    def read(self, request: LoRARequest) -> HostAdapter:
        """Read an adapter's folder; touches nothing that a step uses, so that any thread may call it.

        :raises HeadwayError: the adapter cannot be served; the message names what and why.
        """

    def put(self, slot: int, adapter: HostAdapter) -> None:
        """Copy an adapter into a slot, in the order of the device's work: steps that were launched before see what was there."""

    def arrange(self) -> None:
        """Make again what lies beside the model's weights, whose memory was given back and is there anew."""

    def begin(self, slots: Tensor | None) -> None:
        """Say which adapter each row of the model's next calls has, until the next `begin`.

        slots: int32 [num_tokens] on the model's device, NO_ADAPTER for a row without one, read when the model's work runs; None:
        no row has any, and the model computes as if it had no slots.
        """


@contextmanager
def rows_with(adapters: ModelAdapters | None, slots: Tensor | None) -> Iterator[None]:
    """Let the rows of the model's calls have these adapters, see `ModelAdapters.begin`, and then none again.

    adapters: None: of a model without any; nothing is done.
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
    """Return a model's slots; None: it has none, and need not have the attribute `adapters`."""
    found: ModelAdapters | None = getattr(model, "adapters", None)
    return found
