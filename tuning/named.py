"""A third-party backend that a user names is tried before it serves: once for each version of its distribution."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable

import torch

from headway.core.contract.errors import ConfigError
from headway.core.contract.folders import cache_folder
from headway.core.contract.spec import AttentionSpec
from headway.core.select.selector import DEFAULT_BLOCK_SIZES
from headway.core.system.files import write_whole
from headway.registry import Registry
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.selftest import self_test

SKIP = "HEADWAY_SKIP_SELF_TEST"
log = logging.getLogger("headway")


def check_named(registry: Registry, names: Iterable[str], specs: Iterable[AttentionSpec]) -> None:
    """Hold the third-party backends among `names` to a few small steps of each distinct layer.

    A pass is remembered in the cache folder for a backend that a distribution brings; one from an object is tried at every start.
    $HEADWAY_SKIP_SELF_TEST=1 leaves it out.

    :raises ConfigError: an answer is wrong, with the step, the numbers and what to do.
    """
    if os.environ.get(SKIP) == "1":
        return
    for name in dict.fromkeys(names):
        entry = registry.backends.get(name)
        if entry is None or entry.owner == BUILTIN_OWNER or not registry.availability(name):
            continue
        for spec in dict.fromkeys(specs):
            _check(registry, name, entry.owner, spec)


def _check(registry: Registry, name: str, owner: str, spec: AttentionSpec) -> None:
    version = owner.partition(" ")[2]  # the owner of an entry point is its distribution's name and version
    key = hashlib.sha256(repr((name, owner, version, spec, torch.__version__)).encode()).hexdigest()[:24]
    passed = cache_folder() / "self-tests" / f"{key}.passed"
    if version and os.path.exists(passed):  # False in a folder that may not be read
        return
    pairs = [(info.layout, size) for size in DEFAULT_BLOCK_SIZES for info in registry.layouts.values()]
    if not any(
        registry.supports(name, spec, *pair, phase) for pair in pairs for phase in registry.backend(name).capabilities.phases
    ):
        return  # the selector refuses it, with every reason
    wrong = self_test(registry, name, spec, pairs)
    if wrong:
        file = owner.partition("@")[0] if "@" in owner else "FILE.py"
        target = name if version else f"{file}:{registry.backend(name).__name__}"
        hint = f"headway check {target} says more; {SKIP}=1 runs it all the same"
        raise ConfigError(f"attention backend {name} of {owner}", "right answers in its self-test", wrong, hint)
    log.info("attention backend %s of %s passed its self-test", name, owner)
    if version:
        try:
            write_whole(passed, f"{name} {owner} {spec}\n".encode())
        except OSError as error:
            log.info("self-test of %s is not remembered: %s", name, error)
