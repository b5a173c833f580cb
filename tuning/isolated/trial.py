"""Trials of third-party plugins, each in a child process, and the `create_registry` function that every command uses, which runs
these trials."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

import torch

from headway import registry
from headway.core.contract.errors import ConfigError
from headway.core.system.child import Child, ChildDied, python_command
from headway.registry.hookspecs import PROJECT
from headway.registry.isolation import TIMEOUT, Verdict, verdicts
from headway.registry.plugin_sources import InstalledPlugin, PluginSource, installed_plugins
from headway.registry.records import PluginPolicy
from headway.registry.registry import Registry
from headway.tuning.isolated.passport import PassportPolicy

CHILD = "headway.tuning.isolated.child"
"""Name of the module that the child process runs."""
SECONDS = {"cpu": 5.0, "cuda": 60.0}
"""Seconds from a plugin's import to the end of its self-test. On a GPU this includes compiling its kernels."""
SIDE_BY_SIDE = 4
"""Maximum number of plugins tried at the same time."""
_START = 120.0
"""Seconds for a child process to import torch from a cold disk."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HEADWAY_AUTOTUNE_BUDGET": "0"}


def create_registry(
    plugins: Mapping[str, object] | Iterable[object] = (),
    *,
    load_entry_points: bool = True,
    block: Iterable[str] = (),
    policy: str | None = None,
    retry: bool = False,
    require_passport: bool = False,
    device: str | None = None,
) -> Registry:
    """Create a registry: the built-ins first, then the given plugins, then entry points of the group "headway".

    plugins: modules or objects with hook implementations, backend classes, files (FILE.py or FILE.py:CLASS), kernels of the hub
    (hub:FOLDER or hub:OWNER/NAME), or a mapping of names to plugins. A given plugin that fails raises an error. block: names of
    entry points to ignore. policy: installed plugins to load (all, none, allow=A,B or block=A,B). None means $HEADWAY_PLUGINS.
    retry: True to repeat trials whose verdict is stored. require_passport: True to refuse every plugin without a passport for its
    code and for `device`, on which the kernels will run; None means the current GPU, or the CPU without a GPU.

    Each version of an installed plugin is first tried in a child process. A plugin that fails in the child or in this process is
    recorded in `failures`, and the start continues. A plugin file is tried once per content; because the user named the file, its
    failure raises an error. A kernel of the hub that fails in the child is recorded in `failures`.

    :raises ConfigError: if the policy is not valid, or if a file does not exist.
    :raises HeadwayError: if a given plugin cannot be registered.
    """
    return registry.create_registry(
        plugins,
        trial=try_plugins,
        load_entry_points=load_entry_points,
        block=block,
        policy=policy,
        retry=retry,
        passports=PassportPolicy(require_passport, device),
    )


def try_installed() -> None:
    """Try every installed plugin that the policy allows and that has no verdict, and store the verdicts. No plugin is imported
    into this process."""
    policy = PluginPolicy.of_environment()
    found = installed_plugins(PROJECT)
    verdicts([plugin for plugin in found if isinstance(plugin, InstalledPlugin) and policy.takes(plugin)], try_plugins)


def try_plugins(plugins: Sequence[PluginSource]) -> list[Verdict]:
    """Try each plugin in a separate process, several at a time, and return the verdicts.

    :raises ConfigError: if $HEADWAY_PLUGIN_TIMEOUT is not a number above 0.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seconds = timeout(device)
    requests = [
        {"name": plugin.name, "owner": plugin.owner, "file": plugin.target, "device": device, "seconds": seconds}
        for plugin in plugins
    ]
    count = min(SIDE_BY_SIDE, len(requests))
    with ExitStack() as running:
        rows = [(running.enter_context(_Tries(requests[first::count], _START + 2 * seconds))) for first in range(count)]
        found = [tries.verdicts() for tries in rows]
    return [found[number % count][number // count] for number in range(len(requests))]


class _Tries(AbstractContextManager["_Tries"]):
    """Plugins that one child process tries one after another. If a plugin ends the child, a new child tries the remaining
    plugins."""

    def __init__(self, requests: list[dict[str, Any]], seconds: float) -> None:
        self._requests = requests
        self._seconds = seconds
        self._child: Child | None = None
        self._start(0)

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.stop()

    def verdicts(self) -> list[Verdict]:
        found: list[Verdict] = []
        while len(found) < len(self._requests):
            try:
                if self._child is None:
                    self._start(len(found))
                assert self._child is not None
                found.append(Verdict.of(self._child.answer(self._seconds)))
            except (ChildDied, OSError, TypeError, KeyError) as error:  # a plugin may kill its parent
                found.append(Verdict(f"crashed during its trial: {error}", date=time.strftime("%Y-%m-%d %H:%M")))
                self.__exit__()
                self._child = None
        return found

    def _start(self, first: int) -> None:
        with suppress(OSError) if first == 0 else nullcontext():  # `verdicts` tries again and reports the failure
            self._child = Child(python_command(CHILD), _ENVIRONMENT)
            self._child.send({"try": self._requests[first:]})


def timeout(device: str) -> float:
    """Return the seconds that a plugin's trial may take.

    :raises ConfigError: if $HEADWAY_PLUGIN_TIMEOUT is not a number above 0.
    """
    text = os.environ.get(TIMEOUT, "").strip()
    with suppress(ValueError):
        seconds = float(text) if text else SECONDS[device]
        if 0 < seconds < float("inf"):
            return seconds
    raise ConfigError(TIMEOUT, "seconds above 0", repr(text))
