"""The hooks a plugin may implement. They are called at start-up only, never in a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pluggy

from headway.core.contract.backend import BackendInfo
from headway.core.contract.chat_parsers import ChatParserInfo
from headway.core.contract.kernel import KernelInfo
from headway.core.contract.layout import LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.sampling_plugins import LogitsProcessorInfo, ProposerInfo
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateBackendInfo, StateLayout, StateSpec

PROJECT = "headway"
"""pluggy's project name, and the entry-point group plugins are found in."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def headway_register_layouts() -> Iterable[LayoutInfo]:
    """Return the cache layouts this plugin brings, each with its one writer."""


@hookspec
def headway_register_backends() -> Iterable[BackendInfo]:
    """Return the attention backends this plugin brings; no kernel library may be imported to answer."""


@hookspec
def headway_register_kernels() -> Iterable[KernelInfo]:
    """Return the kernels that this plugin brings, of any kind; no kernel library may be imported to answer.

    Items: BackendInfo, StateBackendInfo, LinearKernelInfo, ExpertsKernelInfo; of Headway's own also AllReduceKernelInfo.
    """


@hookspec
def headway_register_state_layouts() -> Iterable[StateLayout]:
    """Return the layouts this plugin brings for the states of layers that keep one."""


@hookspec
def headway_register_state_backends() -> Iterable[StateBackendInfo]:
    """Return the backends this plugin brings for layers with a state; no kernel library may be imported to answer."""


@hookspec
def headway_register_logits_processors() -> Iterable[LogitsProcessorInfo]:
    """Return the logits processors this plugin brings, which requests name in `SamplingParams.logits_processors`."""


@hookspec(firstresult=True)
def headway_rank_backends(spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> Sequence[str] | None:
    """Order `candidates` best first for a layer and phase that nobody has measured; None leaves it to the next plugin."""


@hookspec(firstresult=True)
def headway_rank_state_backends(spec: StateSpec, phase: Phase, candidates: Sequence[str]) -> Sequence[str] | None:
    """Order `candidates` best first for a layer with a state that nobody has measured; None leaves it to the next plugin."""


@hookspec
def headway_register_proposers() -> Iterable[ProposerInfo]:
    """Return what this plugin brings to guess tokens with, for `speculate`; see docs/speculation.md."""


@hookspec
def headway_register_chat_parsers() -> Iterable[ChatParserInfo]:
    """Return the parsers this plugin brings, of calls of tools and of reasoning in the text that a family of models writes."""
