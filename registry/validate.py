"""What a plugin hands in, checked field by field: a mistake is one line that names the plugin, the field and what it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from inspect import isabstract
from typing import Any, Final

import torch

from headway.core.contract.backend import API_VERSION, AttentionBackend, BackendInfo, GraphLevel
from headway.core.contract.capabilities import FEATURES, Capabilities
from headway.core.contract.errors import PluginError
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.sampling_plugins import LogitsProcessorInfo, ProposerInfo
from headway.core.system.text import shown

RESERVED = ("auto", "reference")
"""Words with a meaning of their own where a name is asked for."""
_SWITCHES = (
    "value_in_key",
    "dense_prefill",
    "reads_whole_blocks",
    "reads_live_slots",
    "contiguous_blocks",
    "exact_host_lengths",
    "lse",
    "batch_invariant",
)


def answers_of(hook: str, answers: Iterable[object], kind: type, plugin: str) -> list[Any]:
    """The items that one plugin's implementations of a hook returned.

    :raises PluginError: an answer is no list, or an item is of another type.
    """
    items: list[object] = []
    for answer in answers:
        if isinstance(answer, (str, bytes, Mapping)) or not isinstance(answer, Iterable):
            raise PluginError(f"{plugin}: {hook}() must return a list of {kind.__name__}, got {answer!r}")
        items += answer
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            raise PluginError(
                f"{plugin}: item {number} of {hook}() must be a {kind.__name__}, got {type(item).__name__} {item!r}"
            )
    return items


def check_layout_info(info: LayoutInfo, plugin: str) -> None:
    """:raises PluginError: a field of the wrong kind."""
    if not isinstance(info.layout, CacheLayout):
        raise PluginError(f"{plugin}: LayoutInfo.layout must be a CacheLayout, got {info.layout!r}")
    _check_name(info.layout.name, f"{plugin}: CacheLayout.name")
    if not callable(info.load_writer):
        raise PluginError(
            f"{plugin}: layout {info.layout.name!r}: LayoutInfo.load_writer must be callable, got {info.load_writer!r}"
        )


def check_proposer_info(info: ProposerInfo, plugin: str) -> None:
    """:raises PluginError: a field of the wrong kind."""
    _check_name(info.name, f"{plugin}: ProposerInfo.name")
    if not isinstance(info.summary, str):
        raise PluginError(f"{plugin}: proposer {info.name!r}: ProposerInfo.summary must be a text, got {info.summary!r}")
    if not callable(info.make):
        raise PluginError(f"{plugin}: proposer {info.name!r}: ProposerInfo.make must be callable, got {info.make!r}")


def check_backend_info(info: BackendInfo, plugin: str) -> None:
    """:raises PluginError: another api_version, or a field of the wrong kind."""
    _check_name(info.name, f"{plugin}: BackendInfo.name")
    if info.api_version != API_VERSION or isinstance(info.api_version, bool):
        raise PluginError(
            f"{plugin}: backend {info.name!r} is written for api_version {info.api_version}, Headway has {API_VERSION}: "
            f"install a release made for api_version {API_VERSION}"
        )
    for field in ("summary", "extra"):
        if not isinstance(getattr(info, field), str):
            raise PluginError(
                f"{plugin}: backend {info.name!r}: BackendInfo.{field} must be a text, got {getattr(info, field)!r}"
            )
    if not callable(info.load):
        raise PluginError(f"{plugin}: backend {info.name!r}: BackendInfo.load must be callable, got {info.load!r}")


def check_processor_info(info: LogitsProcessorInfo, plugin: str) -> None:
    """:raises PluginError: a field of the wrong kind."""
    _check_name(info.name, f"{plugin}: LogitsProcessorInfo.name")
    if not isinstance(info.summary, str):
        raise PluginError(
            f"{plugin}: logits processor {info.name!r}: LogitsProcessorInfo.summary must be a text, got {info.summary!r}"
        )
    if not callable(info.load):
        raise PluginError(
            f"{plugin}: logits processor {info.name!r}: LogitsProcessorInfo.load must be callable, got {info.load!r}"
        )


def check_backend_class(loaded: object, name: str, where: str) -> type[AttentionBackend]:
    """Check and return the class that `BackendInfo.load` returned.

    name: that it is registered by. where: the backend and its owner, for the error.

    :raises PluginError: no backend class, or one whose claims cannot be read.
    """
    if not (isinstance(loaded, type) and issubclass(loaded, AttentionBackend)):
        raise PluginError(f"{where}: load() must return a subclass of AttentionBackend, got {loaded!r}")
    if isabstract(loaded):
        raise PluginError(f"{where}: class {loaded.__name__} lacks {', '.join(sorted(loaded.__abstractmethods__))}")
    _need(
        getattr(loaded, "name", None) == name, f"{where}: name", f"{name!r} as in its BackendInfo", getattr(loaded, "name", None)
    )
    claims = getattr(loaded, "capabilities", None)
    if not isinstance(claims, Capabilities):
        raise PluginError(f"{where}: capabilities must be a Capabilities, got {claims!r}")
    _check_claims(claims, where)
    _check_methods(loaded, claims, where)
    if not isinstance(loaded.graph_level, GraphLevel):
        raise PluginError(f"{where}: graph_level must be a GraphLevel, got {loaded.graph_level!r}")
    _need(_is_options(loaded.options), f"{where}: options", "a mapping of texts to texts", loaded.options)
    _need(_is_tolerance(loaded.tolerance), f"{where}: tolerance", "a mapping of torch.dtype to numbers above 0", loaded.tolerance)
    return loaded


def _check_claims(claims: Capabilities, where: str) -> None:
    def need(field: str, ok: Callable[[Any], bool], what: str) -> None:
        value = getattr(claims, field)
        _need(ok(value), f"{where}: capabilities.{field}", what, value)

    need("phases", lambda found: _all_of(found, Phase, (set, frozenset)) and bool(found), "a frozenset of Phase, not empty")
    need("layouts", lambda found: found is None or _all_of(found, CacheLayout), "a tuple of CacheLayout, or None for any")
    need("layouts", lambda found: found is None or bool(found), "not empty, or None for any")
    need("dtypes", lambda found: _all_of(found, torch.dtype) and bool(found), "a tuple of torch.dtype, not empty")
    need("kv_dtypes", lambda found: _all_of(found, torch.dtype), "a tuple of torch.dtype")
    need("devices", lambda found: _all_of(found, str) and bool(found), 'a tuple of device types such as ("cuda",)')
    need("block_multiple", _is_count, "a whole number of at least 1")
    need("head_dims", lambda found: found is None or _counts(found), "a tuple of whole numbers, or None for any")
    need(
        "v_head_dims",
        lambda found: found is None or (isinstance(found, tuple) and all(_counts(pair) and len(pair) == 2 for pair in found)),
        "a tuple of pairs (head_dim, v_head_dim), or None for any",
    )
    need("max_group_size", lambda found: found is None or _is_count(found), "a whole number of at least 1, or None for any")
    need("features", lambda found: _all_of(found, str, (set, frozenset)), "a frozenset of texts")
    unknown = sorted(claims.features - FEATURES)
    _need(not unknown, f"{where}: capabilities.features", f"out of {', '.join(sorted(FEATURES))}", ", ".join(unknown))
    for field in _SWITCHES:
        need(field, lambda found: isinstance(found, bool), "True or False")


def _check_methods(backend: type[AttentionBackend], claims: Capabilities, where: str) -> None:
    """A phase that is declared has its method."""
    needed = {phase: "decode" if phase is Phase.DECODE else "prefill" for phase in Phase if phase in claims.phases}
    for phase, method in needed.items():
        if getattr(backend, method) is getattr(AttentionBackend, method):
            raise PluginError(f"{where}: capabilities.phases names {phase.value}, but class {backend.__name__} has no {method}()")


_LONGEST: Final = 64
"""Characters of a name, which stands in tables and on command lines."""


def _check_name(name: object, what: str) -> None:
    ok = isinstance(name, str) and 0 < len(name) <= _LONGEST and not any(sign in ",=" or sign.isspace() for sign in name)
    _need(ok, what, f"a text without blanks, commas or equals signs, of at most {_LONGEST} characters", name)
    _need(name not in RESERVED, what, f"none of the words {' and '.join(RESERVED)}", name)


def _need(ok: bool, what: str, need: str, got: object) -> None:
    if not ok:
        raise PluginError(f"{what} must be {need}, got {shown(got)}")


def _all_of(found: object, kind: type, container: tuple[type, ...] = (tuple,)) -> bool:
    return isinstance(found, container) and isinstance(found, Iterable) and all(isinstance(item, kind) for item in found)


def _counts(found: object) -> bool:
    return isinstance(found, tuple) and bool(found) and all(map(_is_count, found))


def _is_count(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 1


def _is_options(found: object) -> bool:
    return isinstance(found, Mapping) and all(isinstance(text, str) for pair in found.items() for text in pair)


def _is_tolerance(found: object) -> bool:
    return isinstance(found, Mapping) and all(
        isinstance(dtype, torch.dtype) and isinstance(bound, (int, float)) and math.isfinite(bound) and bound > 0
        for dtype, bound in found.items()
    )
