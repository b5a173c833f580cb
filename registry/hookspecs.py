"""Hooks that a plugin may implement. They are called only at start, never in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pluggy

from headway.core.contract.backend import BackendInfo
from headway.core.contract.kernel import KernelInfo
from headway.core.contract.layout import LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.rule import AttentionRule
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateBackendInfo, StateLayout, StateSpec
from headway.core.contract.text_plugins import ChatParserInfo, LogitsProcessorInfo, ProposerInfo

PROJECT = "headway"
"""pluggy's project name, and the entry-point group of plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def headway_register_layouts() -> Iterable[LayoutInfo]:
    """Return the plugin's cache layouts, each with its writer."""


@hookspec
def headway_register_backends() -> Iterable[BackendInfo]:
    """Return the plugin's attention backends. The hook must not import a kernel library."""


@hookspec
def headway_register_kernels() -> Iterable[KernelInfo]:
    """Return the plugin's kernels of any kind. The hook must not import a kernel library.

    The items are BackendInfo, StateBackendInfo, LinearKernelInfo and ExpertsKernelInfo; Headway's own kernels may also be
    AllReduceKernelInfo.
    """


@hookspec
def headway_register_state_layouts() -> Iterable[StateLayout]:
    """Return the plugin's layouts for the states of state layers."""


@hookspec
def headway_register_state_backends() -> Iterable[StateBackendInfo]:
    """Return the plugin's backends for state layers. The hook must not import a kernel library."""


@hookspec
def headway_register_logits_processors() -> Iterable[LogitsProcessorInfo]:
    """Return the plugin's logits processors, which requests name in `SamplingParams.logits_processors`."""


@hookspec(firstresult=True)
def headway_rank_backends(spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> Sequence[str] | None:
    """Order `candidates` best first for a layer and phase without measured times. None leaves the order to the next plugin."""


@hookspec(firstresult=True)
def headway_rank_state_backends(spec: StateSpec, phase: Phase, candidates: Sequence[str]) -> Sequence[str] | None:
    """Order `candidates` best first for a state layer without measured times. None leaves the order to the next plugin."""


@hookspec
def headway_register_proposers() -> Iterable[ProposerInfo]:
    """Return the plugin's proposers of draft tokens, for `speculate`; see docs/speculation.md."""


@hookspec
def headway_register_attention_rules() -> Iterable[AttentionRule]:
    """Return the plugin's attention rules, which `attention_rules` and config.json name; see docs/attention-rules.md."""


@hookspec
def headway_register_chat_parsers() -> Iterable[ChatParserInfo]:
    """Return the plugin's parsers for the tool calls and reasoning in the output of a model family."""
