"""What a plugin hands in, checked field by field: a mistake is one line that names the plugin, the field and what it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from inspect import isabstract
from typing import Any, Final, TypeVar

import torch

from headway.core.contract.backend import API_VERSION, AttentionBackend
from headway.core.contract.capabilities import FEATURES, Capabilities
from headway.core.contract.chat_parsers import CallSyntax, ChatParserInfo, ReasoningSyntax
from headway.core.contract.errors import PluginError
from headway.core.contract.experts import ExpertsKernel
from headway.core.contract.kernel import GraphLevel, KernelInfo
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.linear import FUSED, LinearKernel
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ALL_REDUCE, ATTENTION, EXPERTS, LINEAR, STATE, OperationKind
from headway.core.contract.ranks import AllReduceKernel
from headway.core.contract.sampling_plugins import LogitsProcessorInfo, ProposerInfo
from headway.core.contract.state import STATE_KINDS, StateBackend, StateCapabilities, StateLayout
from headway.core.contract.weights import FORMATS
from headway.core.system.text import shown

C = TypeVar("C", bound=AttentionBackend | StateBackend)

RESERVED = ("auto", "reference")
"""Words with a meaning of their own where a name is asked for."""
_SWITCHES = (
    "value_in_key",
    "dense_prefill",
    "reads_whole_blocks",
    "reads_live_slots",
    "contiguous_blocks",
    "exact_host_lengths",
    "shares_plans",
    "lse",
    "batch_invariant",
)


_EXPERTS_SWITCHES = ("biases", "ungated", "clamped", "partial")


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


def check_kernel_info(info: KernelInfo, of: OperationKind, plugin: str) -> None:
    """:raises PluginError: an api_version that this contract does not include, or a field of the wrong kind."""
    kind, oldest = type(info).__name__, of.oldest
    _check_name(info.name, f"{plugin}: {kind}.name")
    where = f"{plugin}: {of.word} {info.name!r}"
    if type(info.api_version) is not int:
        raise PluginError(f"{where}: {kind}.api_version must be a whole number, as {API_VERSION}, got {info.api_version!r}")
    if not oldest <= info.api_version <= API_VERSION:
        accepted = f"{API_VERSION}" + f" and serves those for {oldest}" * (oldest < API_VERSION)
        raise PluginError(
            f"{where} is written for api_version {info.api_version}, Headway has {accepted}: "
            f"install a release made for api_version {API_VERSION}"
        )
    for field in ("summary", "extra"):
        if not isinstance(getattr(info, field), str):
            raise PluginError(f"{where}: {kind}.{field} must be a text, got {getattr(info, field)!r}")
    if not isinstance(info.devices, tuple) or not all(isinstance(each, str) for each in info.devices):
        raise PluginError(f"{where}: {kind}.devices must be a tuple of texts, got {info.devices!r}")
    if not callable(info.load):
        raise PluginError(f"{where}: {kind}.load must be callable, got {info.load!r}")


def check_state_layout(layout: StateLayout, plugin: str) -> None:
    """:raises PluginError: a name that is none; its axes were checked when it was made."""
    _check_name(layout.name, f"{plugin}: StateLayout.name")


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


def check_chat_parser_info(info: ChatParserInfo, plugin: str) -> None:
    """:raises PluginError: a field of the wrong kind."""
    _check_name(info.name, f"{plugin}: ChatParserInfo.name")
    where = f"{plugin}: parser {info.name!r}: ChatParserInfo"
    _need(info.reads in ("calls", "reasoning"), f"{where}.reads", '"calls" or "reasoning"', info.reads)
    _need(isinstance(info.summary, str), f"{where}.summary", "a text", info.summary)
    for field in ("make", "recognizes", "make_id"):
        _need(callable(getattr(info, field)), f"{where}.{field}", "callable", getattr(info, field))
    _need(_all_of(info.syntaxes, CallSyntax), f"{where}.syntaxes", "a tuple of CallSyntax", info.syntaxes)
    _need(_all_of(info.marks, str), f"{where}.marks", "a tuple of texts", info.marks)
    _need(isinstance(info.reasoning, (ReasoningSyntax, type(None))), f"{where}.reasoning", "a ReasoningSyntax", info.reasoning)


def check_backend_class(loaded: object, name: str, where: str) -> type[AttentionBackend]:
    """Check and return the class that `BackendInfo.load` returned.

    name: that it is registered by. where: the backend and its owner, for the error.

    :raises PluginError: no backend class, or one whose claims cannot be read.
    """
    backend: type[AttentionBackend] = _whole_class(loaded, ATTENTION, name, where)
    _check_claims(backend.capabilities, where)
    _check_methods(backend, AttentionBackend, {"prefill": _PROMPTS, "decode": {Phase.DECODE}}, where)
    _need(_is_options(backend.options), f"{where}: options", "a mapping of texts to texts", backend.options)
    return backend


def check_state_backend_class(loaded: object, name: str, where: str) -> type[StateBackend]:
    """Check and return the class that `StateBackendInfo.load` returned; see `check_backend_class`."""
    backend: type[StateBackend] = _whole_class(loaded, STATE, name, where)
    _check_state_claims(backend.capabilities, where)
    _check_methods(backend, StateBackend, {"scan": _PROMPTS, "step": {Phase.DECODE}}, where)
    return backend


def check_linear_class(loaded: object, name: str, where: str) -> type[LinearKernel]:
    """Check and return the class that `LinearKernelInfo.load` returned; see `check_backend_class`."""
    kernel: type[LinearKernel] = _whole_class(loaded, LINEAR, name, where)
    _check_rules(
        kernel.capabilities,
        [
            *_WEIGHT_RULES,
            ("group_sizes", lambda found: found is None or _counts(found), _SIZES),
            ("max_rows", lambda found: found is None or _is_count(found), "a whole number of at least 1, or None for any"),
            ("fused", lambda found: _all_of(found, str, (set, frozenset)) and found <= set(FUSED), f"out of {', '.join(FUSED)}"),
            *((field, lambda found: isinstance(found, bool), "True or False") for field in ("zeros", "order")),
        ],
        where,
    )
    return kernel


def check_experts_class(loaded: object, name: str, where: str) -> type[ExpertsKernel]:
    """Check and return the class that `ExpertsKernelInfo.load` returned; see `check_backend_class`."""
    kernel: type[ExpertsKernel] = _whole_class(loaded, EXPERTS, name, where)
    _check_rules(
        kernel.capabilities,
        [
            *_WEIGHT_RULES,
            ("max_tokens", lambda found: found is None or _is_count(found), "a whole number of at least 1, or None for any"),
            *(
                (field, lambda found: isinstance(found, bool), "True or False")
                for field in ("biases", "ungated", "clamped", "partial")
            ),
        ],
        where,
    )
    return kernel


def check_all_reduce_class(loaded: object, name: str, where: str) -> type[AllReduceKernel]:
    """Check and return the class that `AllReduceKernelInfo.load` returned; see `check_backend_class`."""
    kernel: type[AllReduceKernel] = _whole_class(loaded, ALL_REDUCE, name, where)
    _check_rules(kernel.capabilities, _DEVICE_RULES[1:], where)
    return kernel


def _whole_class(loaded: Any, kind: OperationKind, name: str, where: str) -> Any:
    base, claims = kind.kernel, kind.claims
    whole = isinstance(loaded, type) and issubclass(loaded, base)  # a name of its own: mypy must not narrow what was loaded
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
    return loaded


_Rule = tuple[str, Callable[[Any], bool], str]
"""A field of capabilities, whether its value will do, and what it must be."""
_DEVICE_RULES: tuple[_Rule, ...] = (
    ("dtypes", lambda found: _all_of(found, torch.dtype) and bool(found), "a tuple of torch.dtype, not empty"),
    ("devices", lambda found: _all_of(found, str) and bool(found), 'a tuple of device types such as ("cuda",)'),
)
_SHARED_RULES: tuple[_Rule, ...] = (
    ("phases", lambda found: _all_of(found, Phase, (set, frozenset)) and bool(found), "a frozenset of Phase, not empty"),
    ("layouts", lambda found: found is None or bool(found), "not empty, or None for any"),
    *_DEVICE_RULES,
)
_WEIGHT_RULES: tuple[_Rule, ...] = (
    ("formats", lambda found: _all_of(found, str, (set, frozenset)) and bool(found), "a frozenset of texts, not empty"),
    ("formats", lambda found: found <= set(FORMATS), f"out of {', '.join(FORMATS)}"),
    *_DEVICE_RULES,
)
_SIZES = "a tuple of whole numbers, or None for any"


def _check_rules(claims: object, rules: Iterable[_Rule], where: str) -> None:
    for field, ok, what in rules:
        value = getattr(claims, field)
        _need(ok(value), f"{where}: capabilities.{field}", what, value)


def _check_state_claims(claims: StateCapabilities, where: str) -> None:
    def layouts(found: object) -> bool:
        return found is None or _all_of(found, StateLayout)

    rules: list[_Rule] = [
        ("layouts", layouts, "a tuple of StateLayout, or None for any"),
        *_SHARED_RULES,
        ("kinds", lambda found: _all_of(found, str, (set, frozenset)) and bool(found), "a frozenset of texts, not empty"),
        ("kinds", lambda found: found <= set(STATE_KINDS), f"out of {', '.join(STATE_KINDS)}"),
        ("convolution", lambda found: isinstance(found, bool), "True or False"),
        ("state_dtypes", lambda found: _all_of(found, torch.dtype), "a tuple of torch.dtype"),
        ("key_dims", lambda found: found is None or _counts(found), _SIZES),
        ("value_dims", lambda found: found is None or _counts(found), _SIZES),
        ("max_draft_tokens", lambda found: found == 0 or _is_count(found), "a whole number of at least 0"),
    ]
    _check_rules(claims, rules, where)


def _check_claims(claims: Capabilities, where: str) -> None:
    def layouts(found: object) -> bool:
        return found is None or _all_of(found, CacheLayout)

    def pairs(found: object) -> bool:
        return isinstance(found, tuple) and all(_counts(pair) and len(pair) == 2 for pair in found)

    rules: list[_Rule] = [
        ("layouts", layouts, "a tuple of CacheLayout, or None for any"),
        *_SHARED_RULES,
        ("kv_dtypes", lambda found: _all_of(found, torch.dtype), "a tuple of torch.dtype"),
        ("block_multiple", _is_count, "a whole number of at least 1"),
        ("head_dims", lambda found: found is None or found == () or _counts(found), _SIZES),
        ("v_head_dims", lambda found: found is None or pairs(found), "a tuple of pairs (head_dim, v_head_dim), or None for any"),
        ("max_group_size", lambda found: found is None or _is_count(found), "a whole number of at least 1, or None for any"),
        ("features", lambda found: _all_of(found, str, (set, frozenset)), "a frozenset of texts"),
        *((field, lambda found: isinstance(found, bool), "True or False") for field in _SWITCHES),
    ]
    _check_rules(claims, rules, where)
    unknown = sorted(claims.features - FEATURES)
    _need(not unknown, f"{where}: capabilities.features", f"out of {', '.join(sorted(FEATURES))}", ", ".join(unknown))


_PROMPTS = {Phase.PREFILL, Phase.EXTEND}


def _check_methods(backend: type[C], base: Any, methods: Mapping[str, set[Phase]], where: str) -> None:
    """A phase that is declared has its method; methods: by name, the phases that it serves."""
    for phase in Phase:
        for method in (method for method, phases in methods.items() if phase in phases & backend.capabilities.phases):
            if getattr(backend, method) is getattr(base, method):
                raise PluginError(
                    f"{where}: capabilities.phases names {phase.value}, but class {backend.__name__} has no {method}()"
                )


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
