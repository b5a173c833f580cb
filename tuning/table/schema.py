"""The file of measured times of all kinds of operations, `headway.table/1` (docs/crossover.md), and the machine they are of.

Checked whenever it is read, without torch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, SerializeAsAny, model_validator

from headway.core.contract.layer import describe, fault_of
from headway.core.system.provenance import Origin
from headway.core.system.text import shown

if TYPE_CHECKING:
    import torch

    from headway.core.contract.spec import AttentionSpec
    from headway.core.contract.state import StateSpec

_TYPES: Final = ("cpu", "cuda")


class DeviceIdentity(BaseModel):
    """Device and software, nothing measured: enough for answers that are right or wrong."""

    model_config = ConfigDict(extra="forbid")

    type: str
    """The device's torch.device.type."""
    name: str
    compute_capability: str | None = None
    """"9.0"; None on a CPU."""
    sm_count: int | None = None
    """Streaming multiprocessors; None on a CPU."""
    memory_gib: float | None = None
    driver: str | None = None
    """Version of the GPU's driver."""
    clock_mhz: int | None = None
    """Highest clock the streaming multiprocessors may run at, as the driver tells it."""
    threads: int | None = None
    """CPU threads torch uses; None on a GPU."""
    python: str
    torch: str
    cuda: str | None = None
    """The CUDA version torch was built for."""
    libraries: dict[str, str]
    """Distribution -> version, of LIBRARIES that are installed."""
    compilers: dict[str, str] | None = None
    """ptxas, nvrtc and cublas -> version of what makes or brings the GPU's code, of ptxas with its path; empty on a CPU. None in
    files of before this field, whose compilers are unknown."""
    date: str
    """UTC, ISO 8601."""

    def compilers_beside(self, other: DeviceIdentity) -> list[tuple[str, str, str]]:
        """Return (compiler, version here, version in `other`) of each that either has; "unknown" in files without the field."""
        names = dict.fromkeys([*(self.compilers or {}), *(other.compilers or {})])
        return [(name, _version(self.compilers, name), _version(other.compilers, name)) for name in names]

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        """A type that was edited no longer agrees with what only a GPU, or only a CPU, has."""
        if self.type not in _TYPES:
            raise ValueError(f"type: needs {' or '.join(_TYPES)}, got {shown(self.type)}")
        gpu = [name for name in ("compute_capability", "sm_count") if getattr(self, name) is not None]
        if self.type == "cpu" and gpu:
            raise ValueError(f"type: needs a GPU's, because {gpu[0]} is given, got cpu")
        if self.type == "cuda" and (self.compute_capability is None or self.threads is not None):
            why = "threads are given" if self.threads is not None else "no compute_capability is given"
            raise ValueError(f"type: needs cpu, because {why}, got cuda")
        return self


def _version(compilers: dict[str, str] | None, name: str) -> str:
    return "unknown" if compilers is None else compilers.get(name, "none")


class DeviceInfo(DeviceIdentity):
    """Device, software and measured limits; figures of two files compare only where these are equal."""

    copy_gbps: float
    """Measured rate of a large copy on the device, bytes read plus bytes written, 1e9 a second."""
    matrix_tflops: float
    """Measured rate of a large square matrix product on random data."""
    matrix_dtype: str
    """Element type of that product: that of the run."""


SCHEMA: Final = "headway.table/1"
PhaseName = Literal["prefill", "extend", "decode", "verify", "generate", "scan", "step", "rows", "tokens", "bytes"]
"""generate: whole generations (level engine). scan and step: of layers with a state. The last three are the axes of
linear layers, experts and all-reduce."""
COUNTED: Final[tuple[PhaseName, ...]] = ("rows", "tokens", "bytes")
"""Phases whose points are one number."""
Status = Literal["ok", "tie", "oom", "unsupported", "incorrect", "error", "dropped"]
TIMED: Final = ("ok", "tie", "dropped")

Count = Annotated[int, Field(gt=0)]
Microseconds = Annotated[FiniteFloat, Field(gt=0)]
_STRICT = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

PointKey = tuple[str, str]
"""(phase, case)."""


class LayerRecord(BaseModel, ABC):
    """The layer that a table's times hold for; a subclass for each kind of operation."""

    model_config = _STRICT
    kind: ClassVar[str]
    """Kind of operation; `CrossoverTable.kind`."""
    named: ClassVar[str]
    """Name of such layers in reports."""
    kernels: ClassVar[str] = "kernels"
    """Name of their kernels in reports."""
    phases: ClassVar[tuple[PhaseName, ...]]
    """Phases of the kind's cells."""

    @property
    def key(self) -> object:
        """Everything that times depend on."""
        return tuple(self.model_dump().values())

    @property
    @abstractmethod
    def sizes(self) -> str:
        """The layer as a part of a file's name, for people who read it."""


class SpecRecord(LayerRecord):
    """The attention layer the times hold for; fields as in core.spec.AttentionSpec."""

    kind: ClassVar[str] = "attention"
    named: ClassVar[str] = "attention layer"
    kernels: ClassVar[str] = "attention backends"
    phases: ClassVar[tuple[PhaseName, ...]] = ("prefill", "extend", "decode", "verify", "generate")

    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    scale: FiniteFloat
    dtype: Literal["float32", "bfloat16", "float16"]
    kv_dtype: Literal["float32", "bfloat16", "float16", "fp8_e4m3", "int8_per_token_head"]
    """Element type of the cache."""
    k_scale: FiniteFloat = 1.0
    v_scale: FiniteFloat = 1.0
    sliding_window: Count | None = None
    softcap: FiniteFloat | None = None
    alibi_slopes: list[FiniteFloat] | None = None
    sinks: list[FiniteFloat] | None = None
    v_head_dim: int = Field(default=0, ge=0)
    """0: as head_dim, also in files of before 2026-11-22."""
    value_in_key: bool = False
    dense: bool = False
    causal: bool = True
    """True, too, in files of before 2026-11-25."""

    @model_validator(mode="after")
    def _is_a_layer(self) -> Self:
        if fault := fault_of(self, self.v_head_dim or self.head_dim, self.kv_dtype != self.dtype):
            raise ValueError(fault)
        return self

    @classmethod
    def of(cls, spec: AttentionSpec) -> SpecRecord:
        """A layer as a record; its device stands elsewhere."""
        from headway.core.contract.spec import DTYPE_NAMES, KV_DTYPE_NAMES

        found = {name: getattr(spec, name) for name in cls.model_fields}
        found |= {name: float(found[name]) for name in ("scale", "k_scale", "v_scale")}
        found |= {name: each and list(each) for name in ("alibi_slopes", "sinks") for each in [found[name]]}
        found |= {"dtype": DTYPE_NAMES[spec.dtype], "kv_dtype": KV_DTYPE_NAMES[spec.cache_dtype]}
        return cls(**found | {"v_head_dim": 0 if spec.v_head_dim == spec.head_dim else spec.v_head_dim})

    def to_spec(self, device: torch.device) -> AttentionSpec:
        """The layer again, on a device."""
        from headway.core.contract.spec import DTYPES, KV_DTYPES, AttentionSpec

        found = self.model_dump()
        found |= {name: None if found[name] is None else tuple(found[name]) for name in ("alibi_slopes", "sinks")}
        kv_dtype = None if self.kv_dtype == self.dtype else {**DTYPES, **KV_DTYPES}[self.kv_dtype]
        return AttentionSpec(**found | {"dtype": DTYPES[self.dtype], "kv_dtype": kv_dtype, "device": device})

    @property
    def key(self) -> tuple[object, ...]:
        """Everything that times depend on: of scale, soft-cap, slopes and sinks only whether they are there."""
        features = (self.softcap is not None, self.alibi_slopes is not None, self.sinks is not None)
        heads: tuple[object, ...] = (self.num_heads, self.num_kv_heads, self.head_dim)
        if self.v_head_dim or self.value_in_key:
            heads += (self.v_head_dim, self.value_in_key)
        if self.dense:
            heads += ("dense",)
        if not self.causal:
            heads += ("bidirectional",)
        return (*heads, self.dtype, self.kv_dtype, self.sliding_window, *features)

    @property
    def sizes(self) -> str:
        return f"{self.num_heads}-{self.num_kv_heads}-{self.head_dim}-{self.dtype}"

    def __str__(self) -> str:
        return describe(self, self.v_head_dim or self.head_dim, self.dtype, self.kv_dtype)


_Size = Annotated[int, Field(ge=0)]


class StateSpecRecord(LayerRecord):
    """The part of a StateSpec that times depend on; factors such as its scale take none."""

    kind: ClassVar[str] = "state"
    named: ClassVar[str] = "layer with a state"
    kernels: ClassVar[str] = "state backends"
    phases: ClassVar[tuple[PhaseName, ...]] = ("scan", "step")

    recurrence: str
    """`StateSpec.kind`."""
    num_heads: _Size
    num_key_heads: _Size
    key_dim: _Size
    value_dim: _Size
    conv_channels: _Size
    conv_width: _Size
    activation: Literal["silu", "none"]
    dtype: Literal["float32", "bfloat16", "float16"]
    state_dtype: Literal["float32", "bfloat16", "float16"]
    qk_norm: bool

    @classmethod
    def of(cls, spec: StateSpec) -> StateSpecRecord:
        """A layer as a record; its device stands elsewhere."""
        from headway.core.contract.spec import DTYPE_NAMES

        sizes = ("num_heads", "num_key_heads", "key_dim", "value_dim", "conv_channels", "conv_width", "activation", "qk_norm")
        dtypes = {name: DTYPE_NAMES[getattr(spec, name)] for name in ("dtype", "state_dtype")}
        return cls.model_validate({name: getattr(spec, name) for name in sizes} | dtypes | {"recurrence": spec.kind})

    @property
    def sizes(self) -> str:
        return f"{self.recurrence}-{self.num_heads or self.conv_channels}-{self.key_dim}-{self.value_dim}-{self.dtype}"

    def __str__(self) -> str:
        conv = f"convolution of {self.conv_channels} x {self.conv_width}" if self.conv_channels else ""
        if not self.num_heads:
            return f"{conv} {self.dtype}"
        heads = f"{self.recurrence} {self.num_heads}/{self.num_key_heads} heads x {self.key_dim}/{self.value_dim} {self.dtype}"
        return f"{heads}, {self.state_dtype} states{f', {conv}' if conv else ''}"


class CountedRecord(LayerRecord):
    """A layer, or a sum over ranks, whose times depend on one number: the cell's `batch`."""

    layer: str
    """Everything that tells such layers apart, in words."""

    @property
    def sizes(self) -> str:
        return slug(self.layer)

    def __str__(self) -> str:
        return self.layer


class LinearRecord(CountedRecord):
    """A linear layer over a quantised weight: its form, shape and dtype."""

    kind: ClassVar[str] = "linear"
    named: ClassVar[str] = "linear layer"
    phases: ClassVar[tuple[PhaseName, ...]] = ("rows",)


class ExpertsRecord(CountedRecord):
    """A layer of experts: its configuration, dtype and forms of quantised weights."""

    kind: ClassVar[str] = "experts"
    named: ClassVar[str] = "layer of experts"
    phases: ClassVar[tuple[PhaseName, ...]] = ("tokens",)


class RanksRecord(CountedRecord):
    """A sum over ranks: their number."""

    kind: ClassVar[str] = "all_reduce"
    named: ClassVar[str] = "sum over ranks"
    phases: ClassVar[tuple[PhaseName, ...]] = ("bytes",)


RECORDS: Final[dict[str, type[LayerRecord]]] = {
    record.kind: record for record in (SpecRecord, StateSpecRecord, LinearRecord, ExpertsRecord, RanksRecord)
}
"""Kind of operation -> the record of its layers."""


CRASHED, HUNG, FAILED = "crashed the measuring process", "hung the measuring process", "self-test"
"""How the reason of a kernel begins that ended the process that measured it, gave it no answer, or computed something else."""


def slug(text: str) -> str:
    """Return a text as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48]


class KernelRecord(BaseModel):
    """A kernel that was asked to take part, such as an attention backend."""

    model_config = _STRICT

    name: str
    owner: str
    """"built-in", or the distribution that brought it."""
    version: str = ""
    """Version of that distribution."""
    available: bool
    reason: str = ""
    """Why it took no part, or failed its self-test; empty otherwise."""
    digest: str = ""
    """Hash of the files of the plugin that brought it, by which a repaired one is told; empty for built-ins and objects, and in
    files of before 2026-11-24."""

    @property
    def usable(self) -> bool:
        """Whether `auto` may take the kernel."""
        return self.available and not self.reason


class Cell(BaseModel):
    """One kernel at one point, over one layout and block size. Only an answer that was right has a time."""

    model_config = _STRICT

    phase: PhaseName
    case: str
    """A case of headway.core.oracle.cases' grammar; for a generation, input_len and input_len + output_len of each request; the
    number of rows, tokens or bytes."""
    batch: Count
    """Sequences; or rows, tokens or bytes."""
    query_len: Count = 1
    """Mean over the sequences; of a generation the input's."""
    kv_len: Count = 1
    """Mean over the sequences; of a generation input and output; of a layer with a state as query_len."""
    kernel: str
    layout: str | None = None
    """None, as block_size: no cache is read, the time holds for all of them (a dense prefill)."""
    block_size: Count | None = None
    """None with a layout: states lie in slots, not in blocks."""
    status: Status
    """tie: within the noise of the fastest, which is a tie then too. dropped: a clear loser, roughly timed or given up."""
    reason: str = ""
    variant: str = ""
    """The kernel's own name for what ran."""
    graph: bool = False
    """Whether it was timed as the replay of a CUDA graph captured at the table's graph_len."""
    median_us: Microseconds | None = None
    """One layer's call; of a generation, all of it."""
    p20_us: Microseconds | None = None
    p80_us: Microseconds | None = None
    drift: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """How much longer the slowest round of runs took than the fastest, as a share; None where there was one round, or in a
    file of before 2026-11-22."""
    plan_us: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Host time of a step's plan, shared by the layers."""
    host_us: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Host time of one layer's call; None on a CPU and in a graph."""
    between: bool = False
    """Whether the point was added between neighbours of the grid, because the fastest kernel is another at each of them."""
    prior: bool = False
    """Whether the time was not measured here: it is a shipped table's, scaled by points that were. False in files of before
    2026-11-26."""
    relative_error: Annotated[FiniteFloat, Field(ge=0)] | None = None
    tolerance: Annotated[FiniteFloat, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _times_belong_to_right_answers(self) -> Self:
        timed = self.median_us is not None
        if timed and self.status not in TIMED:
            raise ValueError(f"a cell that is {self.status} has no median_us: {self.median_us}")
        if not timed and self.status in ("ok", "tie"):
            raise ValueError(f"a cell that is {self.status} needs a median_us")
        spread = self.p20_us, self.p80_us
        counted = spread == (None, None) and self.phase in COUNTED
        if self.median_us is not None and not counted and not (spread[0] or 0) <= self.median_us <= (spread[1] or 0):
            raise ValueError(f"p20_us <= median_us <= p80_us: {self.p20_us}, {self.median_us}, {self.p80_us}")
        if (self.status in ("ok", "tie")) == bool(self.reason):
            raise ValueError(f"a cell has a reason if and only if it is neither ok nor tie: {self.status}, {self.reason!r}")
        if self.kv_len < self.query_len:
            raise ValueError(f"kv_len counts the new tokens too: query_len {self.query_len}, kv_len {self.kv_len}")
        if (self.layout is None) != (self.block_size is None) and (self.layout is None or self.phase not in ("scan", "step")):
            raise ValueError(f"layout and block_size are both given or both null: {self.layout}, {self.block_size}")
        return self

    @property
    def point(self) -> PointKey:
        """What was measured, whoever ran the measurement."""
        return self.phase, self.case

    @property
    def key(self) -> tuple[object, ...]:
        """Return the key that is unique to a cell in its table."""
        return self.point, self.kernel, self.layout, self.block_size

    @property
    def layer_us(self) -> float | None:
        """What a layer costs a step: where kernels are launched one by one, the host may be the slower of the two."""
        return None if self.median_us is None else max(self.median_us, self.host_us or 0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens of a generation over its time."""
        if self.median_us is None or self.phase != "generate":
            return None
        return self.batch * (self.kv_len - self.query_len) / self.median_us * 1e6


class PriorRecord(BaseModel):
    """The shipped table from which a table has what was not measured here."""

    model_config = _STRICT

    device: DeviceIdentity
    """Where it was measured."""
    origin: Origin | None
    date: str
    differs: list[str] = []
    """What was other there than here, in words."""
    checked: list[str] = []
    """Points that were measured here to check it, such as "decode 1q1s256"; none: it is taken unchecked."""
    disagreed: list[str] = []
    """The points among them at which it was wrong, with the reason. Around them nothing of it is taken."""
    corrected: list[str] = []
    """The points among them at which some kernels took longer or shorter than by it, with the factors: around them its times of
    these kernels are multiplied by those."""
    device_scale: dict[PhaseName, Annotated[FiniteFloat, Field(gt=0)]] = {}
    """Phase -> the factor of its times on the device."""
    host_scale: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    """The factor of its times on the host."""

    @property
    def made(self) -> str:
        """When, where and with what it was measured, in words."""
        driver = f"driver {self.device.driver}, " if self.device.driver else ""
        origin = f", {self.origin}" if self.origin is not None else ""
        return f"shipped table of {self.date[:10]} ({self.device.name}, {driver}torch {self.device.torch}{origin})"

    def __str__(self) -> str:
        if not self.checked:
            return f"{self.made}, not checked here"
        wrong = f", wrong at {len(self.disagreed)}" if self.disagreed else ""
        corrected = f", corrected around {len(self.corrected)}" if self.corrected else ""
        return f"{self.made}, checked here at {len(self.checked)} points{wrong}{corrected}"


class CrossoverTable(BaseModel):
    """One run, or several merged: one device, one kind of layer (or, at level engine, one model)."""

    model_config = _STRICT

    schema_: Literal["headway.table/1"] = Field(default=SCHEMA, alias="schema")
    kind: str = "attention"
    """Kind of operation."""
    level: Literal["kernel", "engine"] = "kernel"
    date: str
    """UTC, ISO 8601: the start of the (last) run."""
    command: str
    origin: Origin | None = None
    """The code that made it; None in files of before 2026-11-22."""
    busy: str = ""
    """What other processes took of the CPU when the run began or ended; empty where that was too little to matter."""
    complete: bool
    """False: the run was interrupted, or its budget ended; `--resume` goes on."""
    cut_short: bool = False
    """Whether the run never came to its end: it was interrupted or killed, or the disk was full."""
    model: str = ""
    """Level engine."""
    device: DeviceIdentity
    spec: SerializeAsAny[LayerRecord]
    graph_len: Count | None = None
    """kv_len at which decode graphs were captured; None: none were."""
    noise: Annotated[FiniteFloat, Field(ge=0, lt=1)]
    """Relative spread of the times: below it a step keeps the kernel in use."""
    prior: PriorRecord | None = None
    """Where cells that are marked so come from; None: all were measured here, as in files of before 2026-11-26."""
    kernels: list[KernelRecord]
    cells: list[Cell]

    @model_validator(mode="after")
    def _one_cell_each(self) -> Self:
        if self.kind != self.spec.kind:
            raise ValueError(f"spec: needs one of kind {self.kind}, got one of kind {self.spec.kind}")
        seen = set()
        names = {record.name for record in self.kernels}
        for number, cell in enumerate(self.cells):
            if cell.key in seen:
                raise ValueError(f"cells.{number} is there twice: {cell.kernel} at {cell.phase} {cell.case}")
            if cell.kernel not in names:
                raise ValueError(f"cells.{number}: {cell.kernel!r} is not in kernels")
            if cell.phase not in self.spec.phases:
                raise ValueError(f"cells.{number}: phase {cell.phase} in a table of kind {self.kind}")
            if (cell.phase == "generate") != (self.level == "engine"):
                raise ValueError(f"cells.{number}: phase {cell.phase} in a table of level {self.level}")
            seen.add(cell.key)
        return self

    @property
    def attention(self) -> SpecRecord:
        """The layer of a table of attention."""
        assert isinstance(self.spec, SpecRecord)
        return self.spec

    @property
    def title(self) -> str:
        """Device and layer in one line."""
        what = f"{self.model}, {self.spec}" if self.model else str(self.spec)
        return f"{self.device.name}, {what}"


def without_refusals(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of one point, without the unplaced ones that only say why a kernel has no time, where the same kernel has another.

    Such a cell speaks for the layouts of the run that wrote it; a cell with a layout, or with a time, says more.
    """
    told = {cell.kernel for cell in cells if cell.layout is not None or cell.median_us is not None}
    return [cell for cell in cells if cell.layout is not None or cell.median_us is not None or cell.kernel not in told]


def points(cells: Sequence[Cell]) -> dict[PointKey, list[Cell]]:
    """Cells by point, in the order in which they were measured."""
    found: dict[PointKey, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.point, []).append(cell)
    return found
