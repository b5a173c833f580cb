"""Validation of a plugin's items, field by field. An error is one line with the plugin, the field and its value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from inspect import isabstract
from typing import Any, Final, NamedTuple

import torch

from headway.core.contract.backend import API_VERSION
from headway.core.contract.capabilities import FEATURES, RULE_FEATURES
from headway.core.contract.errors import PluginError
from headway.core.contract.kernel import GraphLevel, KernelInfo
from headway.core.contract.layer import Invariance
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.linear import FUSED, LinearKernel
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ALL_KINDS, ATTENTION, LINEAR, STATE, OperationKind
from headway.core.contract.rule import AttentionRule
from headway.core.contract.state import STATE_KINDS, StateLayout
from headway.core.contract.text_plugins import CallSyntax, ChatParserInfo, LogitsProcessorInfo, ProposerInfo, ReasoningSyntax
from headway.core.contract.weights import FORMATS
from headway.core.system.text import shown
from headway.registry.plugin_sources import HUB

RESERVED = ("auto", "reference")
"""Reserved names, which have a special meaning in options."""
_LONGEST: Final = 64
"""Maximum number of characters in a name. Names are shown in tables and command lines."""
_LONGEST_PATH: Final = 1024
"""Maximum number of characters in the name of a hub kernel, which may contain a path."""


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


_Rule = tuple[Callable[[Any], bool], str]
"""(function that returns whether a value is valid, description of valid values)."""
_TEXT: _Rule = (lambda found: isinstance(found, str), "a text")
_CALLABLE: _Rule = (callable, "callable")


class _Item(NamedTuple):
    """Rules for one type of item."""

    word: str
    taken: str
    """Error text if an item's name is already registered."""
    rules: Mapping[str, _Rule]


_ITEMS: Mapping[type, _Item] = {
    LayoutInfo: _Item("layout", "layout {name!r} is already registered as {known!r}", {"load_writer": _CALLABLE}),
    StateLayout: _Item("state layout", "{plugin}: state layout {name!r} is already registered as {known!r}", {}),
    KernelInfo: _Item(
        "{word}",
        "{word} name {name!r} of {owner} is already taken by {known_owner}: rename one of them",
        {
            "api_version": (lambda found: type(found) is int, f"a whole number, as {API_VERSION}"),
            "summary": _TEXT,
            "extra": _TEXT,
            "devices": (lambda found: _all_of(found, str), "a tuple of texts"),
            "load": _CALLABLE,
        },
    ),
    ProposerInfo: _Item(
        "proposer",
        "{plugin}: the proposer name {name!r} is already taken: rename one of them",
        {"summary": _TEXT, "make": _CALLABLE},
    ),
    LogitsProcessorInfo: _Item(
        "logits processor",
        "{plugin}: logits processor name {name!r} is already taken: rename one of them",
        {"summary": _TEXT, "load": _CALLABLE},
    ),
    AttentionRule: _Item("attention rule", "{plugin}: attention rule {name!r} is already registered: rename one of them", {}),
    ChatParserInfo: _Item(
        "parser",
        "{plugin}: parser of {item.reads} {name!r} is already registered: rename one of them",
        {
            "reads": (lambda found: found in ("calls", "reasoning"), '"calls" or "reasoning"'),
            "summary": _TEXT,
            "make": _CALLABLE,
            "recognizes": _CALLABLE,
            "make_id": _CALLABLE,
            "syntaxes": (lambda found: _all_of(found, CallSyntax), "a tuple of CallSyntax"),
            "marks": (lambda found: _all_of(found, str), "a tuple of texts"),
            "reasoning": (lambda found: isinstance(found, (ReasoningSyntax, type(None))), "a ReasoningSyntax"),
        },
    ),
}


def answers_of(hook: str, answers: Iterable[object], kind: type, plugin: str) -> list[Any]:
    """Return the items that one plugin's implementations of a hook returned.

    :raises PluginError: if an answer is not a list, or an item has the wrong type.
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


def named(item: Any) -> Any:
    """Return the object that stores an item's name: the layout for a LayoutInfo, else the item itself."""
    return item.layout if isinstance(item, LayoutInfo) else item


def check_items(items: Sequence[Any], known: Sequence[tuple[Any, str]], owner: str, plugin: str) -> None:
    """Check the items that a plugin returned from one hook. known: (registered item, owner) pairs. plugin: name for the error.

    :raises PluginError: if a field has the wrong type, an api_version is not supported, or a name is taken.
    """
    for number, item in enumerate(items):
        of = next((kind for kind in ALL_KINDS if isinstance(item, kind.info)), None)
        about = next(each for base, each in _ITEMS.items() if isinstance(item, base))
        word, kind = about.word.format(word=of and of.word), type(item).__name__
        if isinstance(item, LayoutInfo) and not isinstance(item.layout, CacheLayout):
            raise PluginError(f"{plugin}: LayoutInfo.layout must be a CacheLayout, got {item.layout!r}")
        own = named(item)
        _check_name(own.name, f"{plugin}: {type(own).__name__}.name")
        where = f"{plugin}: {word} {own.name!r}"
        for field, (ok, need) in about.rules.items():
            _need(ok(getattr(item, field)), f"{where}: {kind}.{field}", need, getattr(item, field))
        if of is not None and not of.oldest <= item.api_version <= API_VERSION:
            accepted = f"{API_VERSION}" + f" and serves those for {of.oldest}" * (of.oldest < API_VERSION)
            raise PluginError(
                f"{where} is written for api_version {item.api_version}, Headway has {accepted}: "
                f"install a release made for api_version {API_VERSION}"
            )
        others = [*known, *((each, owner) for each in items[:number])]
        for other, known_owner in ((named(each), known_owner) for each, known_owner in others):
            same = getattr(other, "reads", "") == getattr(own, "reads", "") and other.name == own.name
            if same or (isinstance(own, (CacheLayout, StateLayout)) and other == own):
                texts = {"word": word, "name": own.name, "known": other.name, "owner": owner, "known_owner": known_owner}
                raise PluginError(about.taken.format(item=item, plugin=plugin, **texts))


_SIZES = "a tuple of whole numbers, or None for any"
_TEXTS = "a frozenset of texts, not empty"


def _texts(found: object) -> bool:
    return _all_of(found, str, (set, frozenset))


def _pairs(found: object) -> bool:
    return isinstance(found, tuple) and all(_counts(pair) and len(pair) == 2 for pair in found)


def _layouts(kind: type) -> Sequence[_Rule]:
    return (
        (lambda found: found is None or _all_of(found, kind), f"a tuple of {kind.__name__}, or None for any"),
        (lambda found: found is None or bool(found), "not empty, or None for any"),
    )


_CLAIMS: Mapping[str, Sequence[_Rule]] = {
    "phases": [(lambda found: _all_of(found, Phase, (set, frozenset)) and bool(found), "a frozenset of Phase, not empty")],
    "dtypes": [(lambda found: _all_of(found, torch.dtype) and bool(found), "a tuple of torch.dtype, not empty")],
    "devices": [(lambda found: _all_of(found, str) and bool(found), 'a tuple of device types such as ("cuda",)')],
    "block_multiple": [(_is_count, "a whole number of at least 1")],
    "head_dims": [(lambda found: found is None or found == () or _counts(found), _SIZES)],
    "v_head_dims": [(lambda found: found is None or _pairs(found), "a tuple of pairs (head_dim, v_head_dim), or None for any")],
    "features": [(_texts, "a frozenset of texts")],
    "kinds": [
        (lambda found: _texts(found) and bool(found), _TEXTS),
        (lambda found: found <= set(STATE_KINDS), f"out of {', '.join(STATE_KINDS)}"),
    ],
    "max_draft_tokens": [(lambda found: found == 0 or _is_count(found), "a whole number of at least 0")],
    "formats": [
        (lambda found: _texts(found) and bool(found), _TEXTS),
        (lambda found: found <= set(FORMATS), f"out of {', '.join(FORMATS)}"),
    ],
    "fused": [(lambda found: _texts(found) and found <= set(FUSED), f"out of {', '.join(FUSED)}")],
    "activations": [(_texts, "a frozenset of texts")],
    "bool": [(lambda found: isinstance(found, bool), "True or False")],
    "Invariance": [(lambda found: isinstance(found, Invariance), "a member of Invariance")],
    "int | None": [(lambda found: found is None or _is_count(found), "a whole number of at least 1, or None for any")],
    "tuple[int, ...] | None": [(lambda found: found is None or _counts(found), _SIZES)],
    "tuple[torch.dtype, ...] | None": [
        (lambda found: found is None or _all_of(found, torch.dtype), "a tuple of torch.dtype, or None")
    ],
    "tuple[torch.dtype, ...]": [(lambda found: _all_of(found, torch.dtype), "a tuple of torch.dtype")],
    "tuple[CacheLayout, ...] | None": _layouts(CacheLayout),
    "tuple[StateLayout, ...] | None": _layouts(StateLayout),
}
"""Rules for the value of a capabilities field, keyed by the field's name or, for fields without an entry, by the field's
annotation."""
_METHODS: Mapping[str, Mapping[Phase, str]] = {
    ATTENTION.name: {Phase.PREFILL: "prefill", Phase.EXTEND: "prefill", Phase.DECODE: "decode"},
    STATE.name: {Phase.PREFILL: "scan", Phase.EXTEND: "scan", Phase.DECODE: "step"},
}
"""Kind of operation -> phase -> name of the method that the phase calls."""


def check_class(loaded: Any, kind: OperationKind, name: str, where: str) -> Any:
    """Check and return the class that a registration's `load` returned.

    name: registered name. where: kernel and owner, for the error.

    :raises PluginError: if the returned object is not a kernel class, or its claims are not valid.
    """
    base, claims = kind.kernel, kind.claims
    # a separate name, so that mypy does not narrow the type of `loaded`
    whole = isinstance(loaded, type) and issubclass(loaded, base)
    if not whole:
        raise PluginError(f"{where}: load() must return a subclass of {base.__name__}, got {loaded!r}")
    if isabstract(loaded):
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        raise PluginError(f"{where}: class {loaded.__name__} lacks {missing}")
    own_name = getattr(loaded, "name", None)
    _need(own_name == name, f"{where}: name", f"{name!r} as in its {kind.info.__name__}", own_name)
    own = getattr(loaded, "capabilities", None)
    if not isinstance(own, claims):
        raise PluginError(f"{where}: capabilities must be a {claims.__name__}, got {own!r}")
    if not isinstance(loaded.graph_level, GraphLevel):
        raise PluginError(f"{where}: graph_level must be a GraphLevel, got {loaded.graph_level!r}")
    _need(_is_tolerance(loaded.tolerance), f"{where}: tolerance", "a mapping of torch.dtype to numbers above 0", loaded.tolerance)
    claimed = {field.name: getattr(own, field.name) for field in fields(claims)}
    for field in fields(claims):
        for ok, need in _CLAIMS.get(field.name) or _CLAIMS[str(field.type)]:
            _need(ok(claimed[field.name]), f"{where}: capabilities.{field.name}", need, claimed[field.name])
    for phase, method in _METHODS.get(kind.name, {}).items():
        if phase in claimed["phases"] and getattr(loaded, method) is getattr(base, method):
            raise PluginError(f"{where}: capabilities.phases names {phase.value}, but class {loaded.__name__} has no {method}()")
    if kind is ATTENTION:
        known = FEATURES | RULE_FEATURES
        unknown = ", ".join(sorted(claimed["features"] - known))
        _need(not unknown, f"{where}: capabilities.features", f"out of {', '.join(sorted(known))}", unknown)
        _need(_is_options(loaded.options), f"{where}: options", "a mapping of texts to texts", loaded.options)
    fused = claimed["fused"] if kind is LINEAR else frozenset[str]()
    if fused and not hasattr(loaded, "compute"):  # only Headway's own kernels have this method
        _need("rotary" not in fused, f"{where}: capabilities.fused", "without rotary, which is Headway's own", "rotary")
        own_fused = loaded.apply_fused is not LinearKernel.apply_fused
        _need(own_fused, f"{where}: capabilities.fused", "empty for a class without apply_fused()", ", ".join(sorted(fused)))
    return loaded


def _check_name(name: object, what: str) -> None:
    longest = _LONGEST_PATH if isinstance(name, str) and name.startswith(HUB) else _LONGEST
    ok = isinstance(name, str) and 0 < len(name) <= longest and not any(sign in ",=" or sign.isspace() for sign in name)
    _need(ok, what, f"a text without blanks, commas or equals signs, of at most {longest} characters", name)
    _need(name not in RESERVED, what, f"none of the words {' and '.join(RESERVED)}", name)


def _need(ok: bool, what: str, need: str, got: object) -> None:
    if not ok:
        raise PluginError(f"{what} must be {need}, got {shown(got)}")
