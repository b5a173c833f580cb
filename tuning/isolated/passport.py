"""Passports of kernels, `headway.passport/1`: results of the conformance kit stored next to a plugin's code, and their check at a
start.

A passport is evidence and not trust: anyone can write one. It never replaces the plugin's trial or the self-test.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from headway.core.contract.errors import HeadwayError
from headway.core.system.json_files import ResultFile
from headway.core.system.logs import warn_once
from headway.core.system.provenance import Origin
from headway.registry.isolation import Verdict
from headway.registry.plugin_sources import HUB, PluginSource
from headway.tuning.measure.device import identify_device, resolve_device
from headway.tuning.table.compare import identity_rows
from headway.tuning.table.files import read_table, stored_tables
from headway.tuning.table.schema import DeviceIdentity, Microseconds, PhaseName

_STRICT = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
KindName = Literal["attention", "state", "linear", "experts"]
Level = Literal["batch", "chunk", "phase"]
"""Levels of determinism: bits that do not depend on the other sequences of a batch, the chunks of a prompt, or the phase."""


class PassportCell(BaseModel):
    """Result of one cell of the conformance kit."""

    model_config = _STRICT

    name: Annotated[str, Field(pattern=r"^[a-z_]+:\S+$")]
    """Name of the cell, as for `headway check --cell`."""
    verdict: Literal["passed", "failed", "skipped"]
    error: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Largest relative error. None if nothing was measured or the error was not finite."""
    tolerance: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Maximum error with which the cell passes."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.verdict == "passed" and self.error is not None and not self.error <= (self.tolerance or 0.0):
            raise ValueError(
                f"{self.name} passed with an error of {self.error:.2g}, above its tolerance {self.tolerance or 0:.2g}"
            )
        return self


class PassportTime(BaseModel):
    """Time of a kernel at one point of a crossover table, compared with the fastest kernel measured there."""

    model_config = _STRICT

    layer: str
    phase: PhaseName
    case: str
    layer_us: Microseconds
    fastest: str
    """Name of the fastest kernel, which may be this kernel."""
    fastest_us: Microseconds


class KernelRecords(BaseModel):
    """Results of one kernel."""

    model_config = _STRICT

    name: str
    """Name under which the kernel is registered. "hub:" for a kernel of the hub, whose name depends on how it is given."""
    kind: KindName
    quick: bool
    """True if each claimed value was tested once, instead of each pair of values."""
    cells: Annotated[list[PassportCell], Field(min_length=1)]
    determinism: dict[Level, bool] = {}
    """Level -> whether the kernel keeps its bits. Levels that were not tested are missing."""
    times: list[PassportTime] = []


class Passport(ResultFile):
    """Results of the conformance kit for the kernels of one plugin on one device."""

    model_config = _STRICT
    written_by: ClassVar[str] = "headway check NAME --passport FILE"

    schema_: Literal["headway.passport/1"] = Field(default="headway.passport/1", alias="schema")
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the plugin's files: `PluginSource.content_digest`."""
    library: str
    """Owner of the plugin: its distribution with version, its file, or its folder."""
    origin: Origin
    date: str
    device: DeviceIdentity
    """Device, driver, and versions of torch, Triton, ptxas and other libraries."""
    kernels: Annotated[list[KernelRecords], Field(min_length=1)]

    @property
    def failed(self) -> list[str]:
        """Names of the cells that failed."""
        return [cell.name for kernel in self.kernels for cell in kernel.cells if cell.verdict == "failed"]


def kernel_name(name: str) -> str:
    """Return the name of a kernel in a passport, which does not depend on the path of a folder."""
    return HUB if name.startswith(HUB) else name


class PassportPolicy:
    """Check of plugins against their passports at a start."""

    def __init__(self, required: bool = False, device: str | None = None) -> None:
        """required: True to refuse plugins without a passport that applies. device: device of the engine, as for
        `resolve_device`."""
        self._required = required
        self._device = device
        self._found: dict[str, Passport] = {}
        """Plugin name -> its passport, if it applies."""

    @cached_property
    def _here(self) -> DeviceIdentity:
        return identify_device(resolve_device(self._device))

    def refusal(self, plugin: PluginSource) -> str:
        """Return the reason why a plugin must not be used, or "". Report a passport that does not apply, or that is
        for other versions."""
        path = plugin.passport
        fault = "has no files, and so no passport" if path is None else f"has no passport {path}"
        if path is not None and path.exists():
            fault = self._fault(plugin, path)
            if fault and not self._required:
                warn_once(f"plugin {plugin.name}: {fault}; it is ignored")
        hint = "headway check NAME --passport FILE writes one; without require_passport it is not needed"
        return f"{fault} ({hint})" if fault and self._required else ""

    def _fault(self, plugin: PluginSource, path: Path) -> str:
        try:
            passport, digest, here = Passport.read(path), plugin.content_digest(), self._here
        except (HeadwayError, OSError) as error:
            return f"its passport cannot be read: {error}"
        made = passport.device
        if digest != passport.digest:
            return f"its passport {path} is for code with the digest {passport.digest[:16]}, and the code here has {digest[:16]}"
        if (made.type, made.name) != (here.type, here.name):
            return f"its passport {path} is for {made.name} ({made.type}), and this is {here.name} ({here.type})"
        if self._required and passport.failed:
            return f"its passport {path} reports {len(passport.failed)} failed cells, first {passport.failed[0]}"
        for kernel in passport.kernels if self._required else ():
            names, passed = [cell.name for cell in kernel.cells], {cell.verdict for cell in kernel.cells} >= {"passed"}
            if not passed or len(set(names)) < len(names):
                what = "has the same cell twice" if passed else "has no passed cell"
                return f"its passport {path} {what} for {kernel.name}"
        self._found[plugin.name] = passport
        rows = [f"{what} {was or 'none'} (here {now or 'none'})" for what, was, now in identity_rows(made, here)]
        if rows:
            warn_once(f"plugin {plugin.name}: its passport was made with {', '.join(rows)}")
        return ""

    def without(self, plugin: PluginSource, kernels: Sequence[tuple[str, str]], verdict: Verdict) -> list[tuple[str, str]]:
        """Return the kernels that lack a required passport, and report differences between the passport and the verdict."""
        passport = self._found.get(plugin.name)
        if passport is None:
            return list(kernels) if self._required else []
        wrong, tried = verdict.remarks, bool(verdict.date)
        if tried and bool(wrong) != bool(passport.failed):
            claimed = f"{len(passport.failed)} of {sum(len(kernel.cells) for kernel in passport.kernels)} cells failed"
            local = f"reports: {wrong[0]}" if wrong else "found nothing wrong"
            warn_once(f"plugin {plugin.name}: its passport reports that {claimed}, and the trial here {local}")
        known = {(kernel.kind, kernel.name) for kernel in passport.kernels}
        return [(kind, name) for kind, name in kernels if self._required and (kind, kernel_name(name)) not in known]


def known_times(name: str, kind: str, digest: str, device: DeviceIdentity) -> list[PassportTime]:
    """Return a kernel's times in the stored crossover tables of a device, compared with the fastest kernel at each point.

    digest: result of `PluginSource.digest`; times of other versions of the plugin are not used.
    """
    found: list[PassportTime] = []
    for path in stored_tables(kind):
        with suppress(HeadwayError):
            table = read_table(path, kind)
            same = [each for each in table.kernels if each.digest and digest.startswith(each.digest)]
            own = {each.name for each in same if kernel_name(each.name) == kernel_name(name)}
            timed = [(cell.layer_us, cell) for cell in table.cells if cell.layer_us is not None and cell.source == "measured"]
            points = dict.fromkeys(cell.point for _, cell in timed if cell.kernel in own and table.device.name == device.name)
            for point in points:
                here = [(us, cell.kernel) for us, cell in timed if cell.point == point]
                layer_us = min(us for us, kernel in here if kernel in own)
                fastest_us, fastest = min(here)
                phase, case = point
                times = {"layer_us": layer_us, "fastest": fastest, "fastest_us": fastest_us}
                found.append(PassportTime.model_validate({"layer": str(table.spec), "phase": phase, "case": case, **times}))
    return found
