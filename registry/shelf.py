"""Backends of one kind by name: whose they are, their classes once they are loaded, and whether this machine can run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headway.core.contract.backend import AttentionBackend, BackendInfo
from headway.core.contract.errors import PluginError, UnknownBackendError
from headway.core.contract.state_backend import StateBackend, StateBackendInfo
from headway.core.contract.support import YES, Support
from headway.core.system.logs import log_traceback
from headway.registry.records import PluginFailure
from headway.registry.validate import check_backend_info

I_co = TypeVar("I_co", bound=BackendInfo | StateBackendInfo, covariant=True)
I = TypeVar("I", bound=BackendInfo | StateBackendInfo)
B = TypeVar("B", bound=AttentionBackend | StateBackend)


@dataclass(frozen=True, slots=True)
class BackendEntry(Generic[I_co]):
    """A registered backend and who brought it."""

    info: I_co
    owner: str
    """"built-in", or the distribution (or object) that registered it."""


class BackendShelf(Generic[I, B]):
    """Backends for layers with attention, or those for layers with a state."""

    def __init__(
        self, kind: str, word: str, check: Callable[[object, str, str], type[B]], failures: Sequence[PluginFailure]
    ) -> None:
        """kind: for errors, "attention" or "state"; word: what one is called; check: checks a class that `load` returned;
        failures: plugins that are left out."""
        self._kind = kind
        self._word = word
        self._check = check
        self._failures = failures
        self._classes: dict[str, type[B]] = {}
        self._support: dict[str, Support] = {}
        self.entries: dict[str, BackendEntry[I]] = {}

    def check_new(self, infos: Sequence[I], owner: str, where: str) -> None:
        """Check what a plugin registers. where: the plugin and its owner, for the error.

        :raises PluginError: a field of the wrong kind, or a name that is taken already or given twice.
        """
        for info in infos:
            check_backend_info(info, where)
        names = [info.name for info in infos]
        for name in names:
            known = self.entries.get(name)
            if known is not None or names.count(name) > 1:
                taken = known.owner if known else owner
                raise PluginError(f"{self._word} name {name!r} of {owner} is already taken by {taken}: rename one of them")

    def add(self, infos: Sequence[I], owner: str) -> None:
        """Register backends that `check_new` has passed."""
        self.entries.update({info.name: BackendEntry(info, owner) for info in infos})

    def backend(self, name: str) -> type[B]:
        """Load a backend's class.

        :raises UnknownBackendError: nobody registered that name.
        :raises PluginError: its module does not load, or what it loads is not a backend.
        """
        if name not in self._classes:
            if name not in self.entries:
                found = {known: self.availability(known) for known in self.entries}
                states = {known: "available" if ok else f"unavailable: {ok.brief}" for known, ok in found.items()}
                raise UnknownBackendError(name, states, [str(failure) for failure in self._failures], self._kind)
            entry = self.entries[name]
            where = f"{self._word} {name} of {entry.owner}"
            try:
                loaded = entry.info.load()
            except (Exception, SystemExit) as error:
                log_traceback(f"{where} does not load", error)
                raise PluginError(f"{where} does not load: {type(error).__name__}: {error}") from error
            self._classes[name] = self._check(loaded, name, where)
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

    def supports(self, name: str, device_type: str, ask: Callable[[type[B]], Support]) -> Support:
        """Return whether a backend can run on a type of device, and if so what it answers when it is asked about a layer."""
        able = self.able(name, device_type)
        if not able:
            return able
        try:
            return _support(ask(self.backend(name)), "supports")
        except (Exception, SystemExit) as error:
            log_traceback(f"supports() of {self._word} {name}", error)
            return Support.no("supports()", "an answer", f"{type(error).__name__}: {error}")


def _support(answer: object, method: str) -> Support:
    if not isinstance(answer, Support):
        raise PluginError(f"{method}() must return a Support, got {answer!r}")
    return answer
