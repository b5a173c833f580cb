"""What plugins make for the engine: a constructor that raises, or makes something else, is named in one line."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch

from headway.backends.sdpa import SDPA
from headway.backends.states.torch_states import TorchStates
from headway.contract import NHD, AttentionSpec, LayoutInfo, PluginError
from headway.core.contract.backend import AttentionBackend, make_backend
from headway.core.contract.errors import ConfigError, made_by, with_arguments
from headway.core.contract.state import StateBackend, make_state_backend

SPEC = AttentionSpec(2, 1, 16, 0.25)


class Odd(BaseException):
    """Neither an Exception nor an exit."""


def raises(error: BaseException) -> Callable[..., None]:
    def __init__(self: object, *arguments: object) -> None:
        raise error

    return __init__


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"__init__": raises(RuntimeError("two\nlines"))}, "RuntimeError: two lines$"),
    ({"__init__": raises(SystemExit(3))}, "SystemExit: 3$"),
    ({"__init__": raises(Odd())}, "Odd$"),
    ({"__init__": lambda self: None}, r"TypeError: .* takes 1 positional argument"),
    (
        {"__init__": lambda self, *arguments: None},
        r"it lacks spec, layout.*: its __init__ must call super\(\).__init__\(spec, layout",
    ),
    ({"__new__": lambda cls, *arguments: 7}, "its class must make an instance of (Attention|State)Backend, got int$"),
]


@pytest.mark.parametrize(("members", "words"), FAULTS)
def test_a_backends_constructor_is_named(members: dict[str, Any], words: str) -> None:
    attention: type[AttentionBackend] = type("Attention", (SDPA,), {"name": "mine", **members})
    with pytest.raises(PluginError, match=rf"^attention backend mine \(.*\.Attention\) cannot be made: {words}"):
        make_backend(attention, SPEC, NHD, 16)
    state: type[StateBackend] = type("State", (TorchStates,), {"name": "mine", **members})
    with pytest.raises(PluginError, match=rf"^state backend mine \(.*\.State\) cannot be made: {words}"):
        make_state_backend(state, SPEC, NHD)  # type: ignore[arg-type]


def test_options_of_a_backend_are_refused_as_ever() -> None:
    with pytest.raises(ConfigError, match="^--attn-opt"):
        make_backend(SDPA, SPEC, NHD, 16, {"nope": "1"})


@pytest.mark.parametrize("writer", [lambda device: None, lambda: None, lambda device: 1 / 0])
def test_the_writer_of_a_layout_is_named(writer: Any) -> None:
    with pytest.raises(PluginError, match="^the writer of layout nhd cannot be made: "):
        LayoutInfo(NHD, writer).writer(torch.device("cpu"))


def test_an_interrupt_of_the_user_is_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        made_by("a part", lambda: raises(KeyboardInterrupt())(None))
    found: list[BaseException] = []

    def elsewhere() -> None:  # where no user interrupts
        try:
            made_by("a part", lambda: raises(KeyboardInterrupt())(None))
        except BaseException as error:
            found.append(error)

    thread = Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert [str(error) for error in found] == ["a part cannot be made: KeyboardInterrupt"]


NAMES = ("attn_backend", "kv_layout", "block_size", "kv_cache_dtype", "dtype", "max_model_len")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("kv_layout: needs x, got y (--kv-layout x)", 'kv_layout: needs x, got y (kv_layout="x")'),
        (
            "nearest fix: --attn-backend prefill=auto,decode=x --kv-layout nhd --block-size 16",
            'nearest fix: attn_backend="prefill=auto,decode=x", kv_layout="nhd", block_size=16',
        ),
        ("choose another --dtype", "choose another dtype"),
        ("--max-model-len: needs 3, got 4", "max_model_len: needs 3, got 4"),
        ("a smaller --max-model-len or --block-size 8, or fewer", "a smaller max_model_len or block_size=8, or fewer"),
        ("--unknown 3 (--block-size)", "--unknown 3 (block_size)"),
        ("type headway check NAME --dtype float32", "type headway check NAME --dtype float32"),
    ],
)
def test_flags_are_written_as_arguments(text: str, written: str) -> None:
    assert with_arguments(text, NAMES) == written


def test_the_command_line_keeps_its_flags() -> None:
    error = ConfigError("kv_layout", "x", "y", "--kv-layout x")
    error.name_arguments(NAMES)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == 'kv_layout: needs x, got y (kv_layout="x")'
    assert again.on_command_line == "kv_layout: needs x, got y (--kv-layout x)"
