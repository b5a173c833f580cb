"""Self-test of a backend: a few small attention steps are compared with float64 results before the backend is timed, chosen or
used by name.

If a third-party backend passes for a layer, the pass is stored with the digest of its plugin, and the test is not repeated.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from headway.core.contract.backend import AttentionBackend, make_backend
from headway.core.contract.errors import ConfigError, known_cause
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.oracle.cases import Case, make_case, parse_case, reference, relative_error, run_backend
from headway.core.oracle.inputs import Numbers
from headway.core.select.kernels import DEFAULT_BLOCK_SIZES
from headway.core.system.files import cache_folder, write_whole
from headway.registry import Registry
from headway.registry.plugin_sources import HUB
from headway.registry.records import BUILTIN_OWNER
from headway.tuning.measure.workloads import Pair
from headway.tuning.table.schema import FAILED, KernelRecord


class SelfTestSteps(NamedTuple):
    """Steps of one backend instance. All steps have equal lengths; each step has different, shuffled blocks."""

    case: str
    """The sequences, in the grammar of `cases.parse_case`."""
    scores: tuple[str, ...]
    """Distribution of each step's scores, one of `cells.SCORES`."""
    decode_query_len: int = 1
    """Maximum number of query tokens per sequence in decode."""


CASES = {
    Phase.PREFILL: (SelfTestSteps("2q17_1q5", ("high",)),),
    Phase.EXTEND: (SelfTestSteps("1q7s20_1q16s33", ("low", "mean")),),
    Phase.DECODE: (SelfTestSteps("1q1s2_3q1s40", ("normal", "dominant")), SelfTestSteps("2q4s21", ("normal", "equal"), 8)),
}
_POISON = 1e4
"""Value in slots without a token: finite, because some kernels read them, and large enough to change any sum."""
SKIP = "HEADWAY_SKIP_SELF_TEST"
"""Environment variable: 1 skips the self-test of backends that the user names."""
_DIGEST_LENGTH = 16
log = logging.getLogger("headway")


def launch(registry: Registry, names: Sequence[str], spec: AttentionSpec, pairs: Sequence[Pair]) -> None:
    """Run every step of every backend and ignore errors, so that the kernels are compiled."""
    for name in names:
        for phase, cases in CASES.items():
            pair = _first_supported(registry, name, spec, pairs, phase)
            if pair is None:
                continue
            for steps in cases:
                with suppress(Exception, SystemExit):
                    backend, case, _ = next(_tries(registry, name, spec, pair, steps))
                    run_backend(backend, case)


def record_of(registry: Registry, name: str, available: bool, reason: str, kind: OperationKind = ATTENTION) -> KernelRecord:
    """Return a backend's record for a table: owner, version of the code, and the reason for its exclusion, if any."""
    owner, digest = registry.of(kind).entries[name].owner, plugin_digest(registry, name, kind)
    return KernelRecord(name=name, owner=owner, version=version_of(owner), available=available, reason=reason, digest=digest)


def plugin_digest(registry: Registry, name: str, kind: OperationKind = ATTENTION) -> str:
    """Return the hash of a backend's plugin files, as stored in tables; "" for built-ins and plugin objects."""
    return registry.digest_of(name, kind)[:_DIGEST_LENGTH]


def check_named(registry: Registry, names: Iterable[str], specs: Iterable[AttentionSpec]) -> None:
    """Run the self-test of third-party backends among `names`, for each distinct layer.

    $HEADWAY_SKIP_SELF_TEST=1 skips the self-test.

    :raises ConfigError: if an answer is wrong; the message contains the step, the numbers and advice.
    """
    if os.environ.get(SKIP) == "1":
        return
    pairs = [(info.layout, size) for size in DEFAULT_BLOCK_SIZES for info in registry.layouts.values()]
    for name in dict.fromkeys(names):
        entry = registry.backends.get(name)
        if entry is None or entry.owner == BUILTIN_OWNER or not registry.availability(name):
            continue
        phases = registry.backend(name).capabilities.phases
        for spec in dict.fromkeys(specs):
            if not any(_first_supported(registry, name, spec, pairs, phase) for phase in phases):
                continue  # the selector rejects it with all reasons
            if wrong := self_test(registry, name, spec, pairs):
                file = entry.owner.partition("@")[0] if "@" in entry.owner else "FILE.py"
                target = name if " " in entry.owner or name.startswith(HUB) else f"{file}:{registry.backend(name).__name__}"
                hint = f"headway check {target} says more; {SKIP}=1 runs it all the same"
                raise ConfigError(f"attention backend {name} of {entry.owner}", "right answers in its self-test", wrong, hint)


def self_test(registry: Registry, name: str, spec: AttentionSpec, pairs: Sequence[Pair], retry: bool = False) -> str:
    """Return the reason why a backend must not be used for a layer on this machine, or "" if the backend passes.

    Built-ins and plugin objects are tested at every call. retry: True to repeat the test even if a pass is stored.
    """
    passed = _passed_file(registry, name, spec, pairs)
    if not retry and passed is not None and os.path.exists(passed):  # False if the folder cannot be read
        return ""
    wrong = _test(registry, name, spec, pairs)
    if passed is not None and not wrong:
        log.info("attention backend %s of %s passed its self-test", name, registry.backends[name].owner)
        try:
            write_whole(passed, f"{name} {registry.backends[name].owner} {spec}\n".encode())
        except OSError as error:
            log.info("the self-test result of %s is not saved: %s", name, error)
    return wrong


def _passed_file(registry: Registry, name: str, spec: AttentionSpec, pairs: Sequence[Pair]) -> Path | None:
    """Return the file that records that this version of a third-party backend has passed, or None if the backend has no
    version."""
    owner = registry.backends[name].owner
    version = registry.digest_of(name) or owner.partition(" ")[2]  # the name and version of a distribution
    if owner == BUILTIN_OWNER or not version:
        return None
    gpu = torch.cuda.get_device_name(spec.device) if spec.device.type == "cuda" else ""
    first = [_first_supported(registry, name, spec, pairs, phase) for phase in CASES]
    facts = (name, owner, version, spec, gpu, torch.__version__, CASES, [pair and (pair[0].name, pair[1]) for pair in first])
    return cache_folder() / "self-tests" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.passed"


def _test(registry: Registry, name: str, spec: AttentionSpec, pairs: Sequence[Pair]) -> str:
    tested = False
    refusal = ""
    claimed = registry.backend(name).capabilities.phases
    for phase, cases in CASES.items():
        pair = _first_supported(registry, name, spec, pairs, phase)
        if pair is None:
            if phase in claimed and not refusal:  # another phase would give the same reason
                layout, size = pairs[0]
                refusal = registry.supports(name, spec, layout, size, phase).brief
            continue
        for steps in cases:
            tested = True
            wrong = _wrong(registry, name, spec, pair, steps)
            if wrong:
                return f"{FAILED}: {phase.value} {steps.case} on {pair[0].name} {pair[1]}: {wrong}"
    return "" if tested else refusal


def _first_supported(registry: Registry, name: str, spec: AttentionSpec, pairs: Sequence[Pair], phase: Phase) -> Pair | None:
    return next((pair for pair in pairs if registry.supports(name, spec, pair[0], pair[1], phase)), None)


def _tries(
    registry: Registry, name: str, spec: AttentionSpec, pair: Pair, steps: SelfTestSteps
) -> Iterator[tuple[AttentionBackend, Case, Numbers]]:
    layout, size = pair
    writer = registry.layout(layout.name).writer(spec.device)
    lens = parse_case(steps.case, steps.decode_query_len)
    backend = make_backend(registry.backend(name), spec, layout, size)
    for number, scores in enumerate(steps.scores):
        numbers = Numbers(spec, scores, torch.Generator())
        numbers = numbers if numbers.is_sensitive else Numbers(spec, "normal", numbers.generator)
        case = make_case(
            lens,
            spec,
            layout,
            size,
            writer,
            seed=number,
            poison=_POISON,
            decode_query_len=steps.decode_query_len,
            scores=numbers.scores,
        )
        yield backend, case, numbers


def _wrong(registry: Registry, name: str, spec: AttentionSpec, pair: Pair, steps: SelfTestSteps) -> str:
    try:
        for number, (backend, case, numbers) in enumerate(_tries(registry, name, spec, pair, steps)):
            found = relative_error(run_backend(backend, case), reference(case), case)
            tolerance = backend.tolerance[spec.dtype] + numbers.slack
            if not found <= tolerance:
                again = ", in a step of the lengths of the one before over other blocks" if number else ""
                return f"relative error {found:.2g}, tolerance {tolerance:.2g}, with {numbers.scores} scores{again}"
    except (Exception, SystemExit) as error:
        return describe_error(error)
    return ""


def describe_error(raised: BaseException) -> str:
    """Return an exception as one line."""
    if isinstance(raised, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    cause = known_cause(str(raised))
    return f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}{f' ({cause})' if cause else ''}"


def owners(registry: Registry, kind: OperationKind = ATTENTION) -> dict[str, tuple[str, ...]]:
    """Return backend -> (owner, installed version of the owner's distribution). The version is "" if it is unknown."""
    return {name: (entry.owner, version_of(entry.owner)) for name, entry in registry.of(kind).entries.items()}


def version_of(owner: str) -> str:
    """Return the version of the distribution that provides a backend."""
    try:
        return metadata.version("headway" if owner == BUILTIN_OWNER else owner)
    except (metadata.PackageNotFoundError, ValueError):
        return ""
