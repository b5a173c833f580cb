"""The registered kernels of each kind of operation: whose they are, whether they run here, and which layers they serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError, PluginError, UnknownBackendError
from headway.core.contract.experts import ExpertsKernel
from headway.core.contract.kernel import Kernel, KernelInfo
from headway.core.contract.layout import CacheLayout, LayoutInfo
from headway.core.contract.linear import LinearKernel
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, EXPERTS, LINEAR, STATE, OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateBackend, StateLayout, StateSpec
from headway.core.contract.support import YES, Reason, Support
from headway.core.system.logs import log_traceback, warn_once

B = TypeVar("B", bound=Kernel)
L = TypeVar("L")

Check = Callable[[Any, OperationKind, str, str], Any]
"""(what `load` returned, kind, name, whose) -> the class, if it is one of a kernel of that kind and name; else PluginError."""


class RankHook(NamedTuple):
    """A plugin's order of kernels that nobody has measured."""

    plugin: str
    owner: str
    function: Callable[..., object]
    takes: Sequence[str]
    """The function's parameters, out of spec, phase and candidates."""

    def order(self, spec: AttentionSpec | StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str] | None:
        """Return the candidates, best first; None leaves it to the next plugin.

        It raises whatever the plugin raises.

        :raises PluginError: the answer is no order of the candidates.
        """
        given = {"spec": spec, "phase": phase, "candidates": tuple(candidates)}
        answer = self.function(**{name: given[name] for name in self.takes})
        if answer is None:
            return None
        with suppress(TypeError):  # of what cannot be hashed
            if isinstance(answer, (list, tuple)) and Counter(answer) == Counter(candidates):
                return list(answer)
        raise PluginError(f"it must return an order of {list(candidates)}, got {answer!r}")


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A registered kernel and who brought it."""

    info: KernelInfo
    owner: str
    """"built-in", or the distribution (or object) that registered it."""


class KernelRegistry(Generic[B, L]):
    """The registered kernels of one kind of operation, and the layouts of what they keep."""

    def __init__(self, kind: OperationKind, check: Check, failures: Sequence[object]) -> None:
        """check: checks what a registration loads. failures: plugins that were left out."""
        self.kind = kind
        self._word = kind.word
        self._check = check
        self._failures = failures
        self._classes: dict[str, type[B]] = {}
        self._support: dict[str, Support] = {}
        self.entries: dict[str, KernelEntry] = {}
        self.layouts: dict[str, L] = {}
        self.rank_hooks: Sequence[RankHook] = ()
        """In the order in which they are asked."""

    def backend(self, name: str) -> type[B]:
        """Load a backend's class.

        :raises UnknownBackendError: nobody registered that name.
        :raises PluginError: its module does not load, or what it loads is not a backend.
        """
        if name not in self._classes:
            if name not in self.entries:
                found = {known: self.availability(known) for known in self.entries}
                states = {known: "available" if ok else f"unavailable: {ok.brief}" for known, ok in found.items()}
                raise UnknownBackendError(name, states, [str(failure) for failure in self._failures], self.kind.name)
            entry = self.entries[name]
            where = f"{self._word} {name} of {entry.owner}"
            try:
                loaded = entry.info.load()
            except (Exception, SystemExit) as error:
                log_traceback(f"{where} does not load", error)
                raise PluginError(f"{where} does not load: {type(error).__name__}: {error}") from error
            self._classes[name] = self._check(loaded, self.kind, name, where)
        return self._classes[name]

    def availability(self, name: str) -> Support:
        """Load and probe a backend, once, and return whether this machine can run it.

        :raises UnknownBackendError: nobody registered that name.
        """
        if name not in self._support:
            try:
                self._support[name] = _support(self.backend(name).available(), "available")
            except UnknownBackendError:
                raise
            except (Exception, SystemExit) as error:
                log_traceback(f"available() of {self._word} {name}", error)
                info = self.entries[name].info
                hint = f"pip install '{info.extra}'" if info.extra else ""
                missing = error.__cause__ if isinstance(error, PluginError) else error
                if isinstance(missing, ModuleNotFoundError) and missing.name:
                    package = missing.name.partition(".")[0]
                    self._support[name] = Support.no("import", f"the package {package}", "not installed", hint)
                else:
                    self._support[name] = Support.no("import", "a backend that loads and answers", error, hint)
        return self._support[name]

    def able(self, name: str, device_type: str) -> Support:
        """Return whether a backend serves a type of device and can run on this machine.

        One for a CPU alone is not probed for a GPU: that may take a compiler's time.
        """
        try:
            devices = self.backend(name).capabilities.devices
        except PluginError:  # availability says why it does not load
            return self.availability(name)
        probed = self.availability(name) if device_type in devices or "cuda" in devices else YES
        if probed and device_type not in devices:
            return Support.no("device", " or ".join(devices), device_type)
        return probed

    def meant_for(self, device_type: str) -> list[str]:
        """Return the names of those whose registration does not name other types of device; none of them is imported."""
        return [name for name, entry in self.entries.items() if device_type in (entry.info.devices or (device_type,))]

    def all_able(self, device_type: str) -> list[str]:
        """Return the names of those that serve a type of device and can run on this machine."""
        return [name for name in self.meant_for(device_type) if self.able(name, device_type)]

    def classes(self, device_type: str) -> list[type[B]]:
        """Return the classes of `all_able`."""
        return [self.backend(name) for name in self.all_able(device_type)]

    def supports(self, name: str, *asked: Any) -> Support:
        """Return whether a kernel can run here, and if so its own answer about a layer.

        asked: what its class's `supports` takes, the layer's spec first.
        """
        able = self.able(name, asked[0].device.type)
        if not able:
            return able
        try:
            kernel: Any = self.backend(name)  # whose `supports` takes what its kind of operation asks
            found = _support(kernel.supports(*asked), "supports")
        except (Exception, SystemExit) as error:
            log_traceback(f"supports() of {self._word} {name}", error)
            return Support.no("supports()", "an answer", f"{type(error).__name__}: {error}")
        return found if found else Support(tuple(map(self._with_known_layout, found.reasons)))

    def _with_known_layout(self, reason: Reason) -> Reason:
        """A reason whose hint is no layout that nobody registered: a backend may read those of another plugin."""
        option, _, layout = reason.hint.partition(" ")
        if option != "--kv-layout" or layout in self.layouts:
            return reason
        return reason._replace(hint=f"nobody has registered layout {layout}; headway plugins lists the plugins")

    def rank(self, spec: AttentionSpec | StateSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        """Candidates, best guess first, by the rank hook; third parties are asked before the built-in order.

        A hook that raises, or whose answer is no order of the candidates, is named in the log and passed over.
        """
        for hook in self.rank_hooks:
            try:
                answer = hook.order(spec, phase, candidates)
            except (Exception, SystemExit) as error:
                who = f"{self.kind.rank_hook}() of plugin {hook.plugin!r} of {hook.owner}"
                log_traceback(who, error)
                raised = str(error) if isinstance(error, PluginError) else f"it raised {type(error).__name__}: {error}"
                warn_once(f"{who} is passed over: {raised}")
                continue
            if answer is not None:
                return answer
        return list(candidates)


def _support(answer: object, method: str) -> Support:
    if not isinstance(answer, Support):
        raise PluginError(f"{method}() must return a Support, got {answer!r}")
    return answer


class Kernels:
    """The registered kernels of every kind; `headway.registry` fills it."""

    def __init__(self, check: Check, failures: Sequence[object]) -> None:
        """See `KernelRegistry`."""
        self.attention: KernelRegistry[AttentionBackend, LayoutInfo] = KernelRegistry(ATTENTION, check, failures)
        self.states: KernelRegistry[StateBackend, StateLayout] = KernelRegistry(STATE, check, failures)
        self.linear: KernelRegistry[LinearKernel, None] = KernelRegistry(LINEAR, check, failures)
        self.experts: KernelRegistry[ExpertsKernel, None] = KernelRegistry(EXPERTS, check, failures)
        self.kinds = (self.attention, self.states, self.linear, self.experts)
        self.backends = self.attention.entries
        self.layouts = self.attention.layouts

    def of(self, kind: OperationKind) -> KernelRegistry[Any, Any]:
        """Return the kernels of a kind of operation."""
        return next(kernels for kernels in self.kinds if kernels.kind is kind)

    def layout(self, name: str) -> LayoutInfo:
        """A layout by name.

        :raises ConfigError: nobody registered that name.
        """
        if name not in self.layouts:
            raise ConfigError("kv_layout", f"auto or one of {', '.join(self.layouts)}", repr(name))
        return self.layouts[name]

    def backend(self, name: str) -> type[AttentionBackend]:
        """Load an attention backend's class; see `KernelRegistry.backend`."""
        return self.attention.backend(name)

    def availability(self, name: str) -> Support:
        """Load and probe an attention backend, once, and return whether this machine can run it."""
        return self.attention.availability(name)

    def able(self, device: torch.device) -> list[str]:
        """The attention backends that serve a type of device and can run on this machine; see `KernelRegistry.all_able`."""
        return self.attention.all_able(device.type)

    def supports(self, name: str, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        """Whether a backend can run here and can serve this layer in this phase."""
        return self.attention.supports(name, spec, layout, block_size, phase)
