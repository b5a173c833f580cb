"""Schema of table files for all kinds of operations, `headway.table/1` (docs/crossover.md), and of the machine's identity.

The schema is checked whenever a file is read. This module does not import torch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, SerializeAsAny, model_validator

from headway.core.contract.errors import ConfigError
from headway.core.contract.layer import describe, fault_of
from headway.core.system.provenance import Origin
from headway.core.system.text import shown

if TYPE_CHECKING:
    import torch

    from headway.core.contract.spec import AttentionSpec
    from headway.core.contract.state import StateSpec

_TYPES: Final = ("cpu", "cuda")


class DeviceIdentity(BaseModel):
    """Identity of a device and its software, without measured rates."""

    model_config = ConfigDict(extra="forbid")

    type: str
    """Type of the device, as in torch.device.type."""
    name: str
    compute_capability: str | None = None
    """CUDA compute capability, such as "9.0"; None on a CPU."""
    sm_count: int | None = None
    """Number of SMs; None on a CPU."""
    memory_gib: float | None = None
    driver: str | None = None
    """Version of the GPU driver."""
    clock_mhz: int | None = None
    """Maximum SM clock in MHz, as reported by the driver."""
    threads: int | None = None
    """Number of CPU threads that torch uses; None on a GPU."""
    python: str
    torch: str
    cuda: str | None = None
    """CUDA version for which torch was built."""
    libraries: dict[str, str]
    """Distribution -> version, for the distributions in LIBRARIES that are installed."""
    compilers: dict[str, str] | None = None
    """ptxas, nvrtc and cublas -> version; the version of ptxas includes its path. Empty on a CPU. None means unknown, in files
    older than this field."""
    date: str
    """Date and time of the measurement: UTC, ISO 8601."""

    def compiler_pairs(self, other: DeviceIdentity) -> list[tuple[str, str, str]]:
        """Return (compiler, version here, version in `other`) for each compiler that at least one of the two has. For files
        without this field, the version is "unknown"."""
        names = dict.fromkeys([*(self.compilers or {}), *(other.compilers or {})])
        return [(name, _version(self.compilers, name), _version(other.compilers, name)) for name in names]

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        """Reject a device type that contradicts the fields that only a GPU, or only a CPU, has. Such a file has been edited."""
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


class DeviceRates(BaseModel):
    """Measured rates of a device."""

    model_config = ConfigDict(extra="forbid")

    copy_gbps: Annotated[FiniteFloat, Field(gt=0)]
    """As in `DeviceInfo`."""
    matrix_tflops: Annotated[FiniteFloat, Field(gt=0)]
    """As in `DeviceInfo`."""


class DeviceInfo(DeviceIdentity):
    """Device, software and measured rates. Results of two files are comparable only if all these values are equal."""

    copy_gbps: float
    """Measured rate of a large copy on the device, in units of 1e9 bytes per second; bytes read and bytes written both count."""
    matrix_tflops: float
    """Measured rate of a large square GEMM of random data, in TFLOP/s."""
    matrix_dtype: str
    """Dtype of the GEMM measured for `matrix_tflops`, which is the run's dtype."""


SCHEMA: Final = "headway.table/1"
PhaseName = Literal["prefill", "extend", "decode", "verify", "generate", "scan", "step", "rows", "tokens", "bytes"]
"""Phases of all kinds of tables. generate: requests from input to last output token (level engine). scan, step: state layers.
rows, tokens, bytes: axes of linear layers, experts and all-reduce."""
COUNTED: Final[tuple[PhaseName, ...]] = ("rows", "tokens", "bytes")
"""Phases whose points are one number."""
Status = Literal["ok", "tie", "oom", "unsupported", "incorrect", "error", "dropped"]
Source = Literal["measured", "prior", "derived"]
TIMED: Final = ("ok", "tie", "dropped")

Count = Annotated[int, Field(gt=0)]
Microseconds = Annotated[FiniteFloat, Field(gt=0)]
_STRICT = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

PointKey = tuple[str, str]
"""(phase, case)."""


class LayerRecord(BaseModel, ABC):
    """Identity of the layer that a table's times apply to, with one subclass per kind of operation."""

    model_config = _STRICT
    kind: ClassVar[str]
    """Kind of operation, as in `CrossoverTable.kind`."""
    named: ClassVar[str]
    """Name of such layers in reports."""
    kernels: ClassVar[str] = "kernels"
    """Name of the kernels of such layers in reports."""
    phases: ClassVar[tuple[PhaseName, ...]]
    """Phases that cells of this kind may have."""

    @property
    def key(self) -> object:
        """All values on which the layer's times depend."""
        return tuple(self.model_dump().values())

    @property
    @abstractmethod
    def sizes(self) -> str:
        """The layer's sizes as a readable part of a file name."""


class SpecRecord(LayerRecord):
    """The attention layer to which a table's times apply. Fields as in core.contract.spec.AttentionSpec."""

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
    rule: str | None = None
    """Name and digest of the attention rule. Times of a layer with another rule do not apply."""
    v_head_dim: int = Field(default=0, ge=0)
    """Dimension of a value head. 0 means head_dim, as in all files before 2026-11-22."""
    value_in_key: bool = False
    dense: bool = False
    causal: bool = True
    """True for causal attention, as in all files before 2026-11-25."""

    @model_validator(mode="after")
    def _is_a_layer(self) -> Self:
        if fault := fault_of(self, self.v_head_dim or self.head_dim, self.kv_dtype != self.dtype):
            raise ValueError(fault)
        return self

    @classmethod
    def of(cls, spec: AttentionSpec) -> SpecRecord:
        """Return the record of a layer, without its device."""
        from headway.core.contract.spec import DTYPE_NAMES, KV_DTYPE_NAMES

        found = {name: getattr(spec, name) for name in cls.model_fields}
        found |= {name: float(found[name]) for name in ("scale", "k_scale", "v_scale")}
        found |= {name: each and list(each) for name in ("alibi_slopes", "sinks") for each in [found[name]]}
        found |= {"rule": None if spec.rule is None else str(spec.rule)}
        found |= {"dtype": DTYPE_NAMES[spec.dtype], "kv_dtype": KV_DTYPE_NAMES[spec.cache_dtype]}
        return cls(**found | {"v_head_dim": 0 if spec.v_head_dim == spec.head_dim else spec.v_head_dim})

    def to_spec(self, device: torch.device) -> AttentionSpec:
        """Return the layer of this record on a device.

        :raises ConfigError: if the layer has an attention rule, which is code that the record does not contain.
        """
        if self.rule is not None:
            raise ConfigError("table", "a layer without an attention rule", self.rule)
        from headway.core.contract.spec import DTYPES, KV_DTYPES, AttentionSpec

        found = self.model_dump()
        found |= {name: None if found[name] is None else tuple(found[name]) for name in ("alibi_slopes", "sinks")}
        kv_dtype = None if self.kv_dtype == self.dtype else {**DTYPES, **KV_DTYPES}[self.kv_dtype]
        return AttentionSpec(**found | {"dtype": DTYPES[self.dtype], "kv_dtype": kv_dtype, "device": device})

    @property
    def key(self) -> tuple[object, ...]:
        """All values on which times depend. Scale, soft-cap, slopes and sinks are included only as whether they are used."""
        features = (self.softcap is not None, self.alibi_slopes is not None, self.sinks is not None)
        heads: tuple[object, ...] = (self.num_heads, self.num_kv_heads, self.head_dim)
        if self.v_head_dim or self.value_in_key:
            heads += (self.v_head_dim, self.value_in_key)
        kinds = {"dense": self.dense, "bidirectional": not self.causal, self.rule: self.rule is not None}
        heads += tuple(kind for kind, holds in kinds.items() if holds)
        return (*heads, self.dtype, self.kv_dtype, self.sliding_window, *features)

    @property
    def sizes(self) -> str:
        return f"{self.num_heads}-{self.num_kv_heads}-{self.head_dim}-{self.dtype}"

    def __str__(self) -> str:
        return describe(self, self.v_head_dim or self.head_dim, self.dtype, self.kv_dtype)


_Size = Annotated[int, Field(ge=0)]


class StateSpecRecord(LayerRecord):
    """Fields of a StateSpec on which times depend. Factors such as the scale are omitted."""

    kind: ClassVar[str] = "state"
    named: ClassVar[str] = "layer with a state"
    kernels: ClassVar[str] = "state backends"
    phases: ClassVar[tuple[PhaseName, ...]] = ("scan", "step")

    recurrence: str
    """Kind of recurrence: `StateSpec.kind`."""
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
        """Return the record of a layer, without its device."""
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
    """A layer, or an all-reduce, whose times depend on one number: the cell's `batch`."""

    layer: str
    """Text that identifies the layer among layers of its kind."""

    @property
    def sizes(self) -> str:
        return slug(self.layer)

    def __str__(self) -> str:
        return self.layer


class LinearRecord(CountedRecord):
    """A linear layer with a quantized weight: its quantization format, shape and dtype."""

    kind: ClassVar[str] = "linear"
    named: ClassVar[str] = "linear layer"
    phases: ClassVar[tuple[PhaseName, ...]] = ("rows",)


class ExpertsRecord(CountedRecord):
    """A layer of experts: its configuration, dtype and quantization formats."""

    kind: ClassVar[str] = "experts"
    named: ClassVar[str] = "layer of experts"
    phases: ClassVar[tuple[PhaseName, ...]] = ("tokens",)

    def __str__(self) -> str:
        config, found, rest = self.layer.partition("), hidden size ")
        sizes = dict(re.findall(r"(\w+)=([^,()]+)", config))
        if not found or not {"num_experts", "top_k", "intermediate_size"} <= sizes.keys():
            return self.layer
        hidden, dtype, formats = [*rest.split(" ", 2), ""][:3]
        first, _, second = formats.partition(" / ")
        shared = f", shared {size}" if (size := sizes.get("shared_intermediate_size", "0")) != "0" else ""
        shard = re.search(r"held=range\((\d+), (\d+)\)", config)
        held = f", shard {shard[1]} to {int(shard[2]) - 1}" if shard else ""
        experts = f"experts {sizes['num_experts']} top {sizes['top_k']}, {hidden} x {sizes['intermediate_size']}{shared}{held}"
        return ", ".join(
            filter(None, (experts, dtype, first if first == second else f"{first or 'plain'} / {second or 'plain'}"))
        )


class RanksRecord(CountedRecord):
    """An all-reduce, identified by its number of ranks."""

    kind: ClassVar[str] = "all_reduce"
    named: ClassVar[str] = "sum over ranks"
    phases: ClassVar[tuple[PhaseName, ...]] = ("bytes",)


RECORDS: Final[dict[str, type[LayerRecord]]] = {
    record.kind: record for record in (SpecRecord, StateSpecRecord, LinearRecord, ExpertsRecord, RanksRecord)
}
"""Kind of operation -> record class of its layers."""


CRASHED, HUNG, FAILED = "crashed the measuring process", "hung the measuring process", "self-test"
"""First words of a kernel's reason if it crashed the measuring process, hung it, or failed its self-test."""


def slug(text: str) -> str:
    """Return a text as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48]


class KernelRecord(BaseModel):
    """A kernel that was considered for a measurement, such as an attention backend."""

    model_config = _STRICT

    name: str
    owner: str
    """"built-in", or the distribution that provides the kernel."""
    version: str = ""
    """Version of the distribution that provides the kernel."""
    available: bool
    reason: str = ""
    """Reason why the kernel was not measured or failed its self-test. "" if it was measured."""
    digest: str = ""
    """Hash of the plugin's files, which reveals whether a failed plugin has been changed since. "" for built-ins and plugin
    objects, and in files before 2026-11-24."""

    @property
    def usable(self) -> bool:
        """True if `auto` may choose the kernel."""
        return self.available and not self.reason


class Cell(BaseModel):
    """Result of one kernel at one point, with one layout and block size. Only a correct answer has a time."""

    model_config = _STRICT

    phase: PhaseName
    case: str
    """Case in the grammar of headway.core.oracle.cases. For a generation, it lists input_len and input_len + output_len of each
    request; on a counted axis, it is the number of rows, tokens or bytes."""
    batch: Count
    """Number of sequences, or of rows, tokens or bytes."""
    query_len: Count = 1
    """Mean query length of the sequences; for a generation, mean input length."""
    kv_len: Count = 1
    """Mean KV length of the sequences. For a generation, it is the mean length of input plus output; for a state layer, it equals
    query_len."""
    kernel: str
    layout: str | None = None
    """Cache layout. None, with block_size also None, means that no cache is read and the time applies to all layouts (dense
    prefill)."""
    block_size: Count | None = None
    """Tokens per cache block. None with a layout means states, which are stored in slots."""
    status: Status
    """Outcome of the measurement. tie: the time equals the fastest time within noise; the fastest cell is then marked as a tie as
    well. dropped: the kernel is clearly slower, and was timed roughly or skipped."""
    reason: str = ""
    variant: str = ""
    """Name that the kernel gives to the variant that ran."""
    graph: bool = False
    """True if the kernel was timed by replaying a CUDA graph captured at the table's graph_len."""
    median_us: Microseconds | None = None
    """Median time of one layer's call; at level engine, of the complete generation."""
    p20_us: Microseconds | None = None
    p80_us: Microseconds | None = None
    drift: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Relative difference between the slowest and the fastest round. None if there was one round, or in files before
    2026-11-22."""
    plan_us: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Host time for planning a step; all layers share the plan."""
    host_us: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Host time of one layer's call. None on a CPU and in a graph."""
    between: bool = False
    """True if the point was added between grid neighbours whose fastest kernels differ."""
    source: Source = "measured"
    """Where the time comes from. measured: timed on the table's device. prior: a shipped table's time, scaled by points measured
    here. derived: computed from the times of another layer or GPU, see headway.tuning.measure.derive."""
    relative_error: Annotated[FiniteFloat, Field(ge=0)] | None = None
    tolerance: Annotated[FiniteFloat, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_older_files(cls, data: object) -> object:
        """Read the boolean `prior`, which files before 2026-11-29 have instead of `source`."""
        if isinstance(data, dict) and isinstance(prior := data.get("prior"), bool) and "source" not in data:
            data = {name: value for name, value in data.items() if name != "prior"} | ({"source": "prior"} if prior else {})
        return data

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
        """The (phase, case) that was measured."""
        return self.phase, self.case

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the cell, unique in its table."""
        return self.point, self.kernel, self.layout, self.block_size

    @property
    def layer_us(self) -> float | None:
        """Cost of a layer in a step, in microseconds: device time, or host time of launching if that is longer."""
        return None if self.median_us is None else max(self.median_us, self.host_us or 0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """Number of output tokens of a generation per second."""
        if self.median_us is None or self.phase != "generate":
            return None
        return self.batch * (self.kv_len - self.query_len) / self.median_us * 1e6


class PriorRecord(BaseModel):
    """The table whose times a table has adopted: a shipped table (prior), or a table of another layer or GPU, from whose times
    this table's times were derived. "The shipped table" means either of them below."""

    model_config = _STRICT

    device: DeviceIdentity
    """Device on which the shipped table was measured."""
    origin: Origin | None
    date: str
    differs: list[str] = []
    """Descriptions of the differences between the machine that measured the shipped table and this machine."""
    checked: list[str] = []
    """Points measured here since the shipped table was adopted, such as "decode 1q1s256"."""
    layer: str = ""
    """Layer that was measured, if the times were derived from it. "" for the times of a shipped table of the same layer."""
    limits: dict[str, Annotated[FiniteFloat, Field(gt=0)]] = {}
    """Limit -> its value on this GPU divided by its value on the GPU that measured the table: copy, gemm, clock, sms. Empty if
    the times were not derived from those of another kind of GPU."""
    sources: dict[str, list[str]] = {}
    """Kernel -> tables from which its times were derived, nearest first, by device, layer and date. Empty if not derived, and in
    files before 2026-11-30."""

    @model_validator(mode="before")
    @classmethod
    def _of_older_files(cls, data: object) -> object:
        """Drop the fields that described how a start before 2026-11-29 checked a shipped table."""
        dropped = ("disagreed", "corrected", "device_scale", "host_scale")
        return {name: value for name, value in data.items() if name not in dropped} if isinstance(data, dict) else data

    @property
    def derived(self) -> bool:
        """True if the times were derived from those of another layer or GPU."""
        return bool(self.layer)

    @property
    def made(self) -> str:
        """Layer, date, device and software of the shipped table's measurement, in words."""
        driver = f"driver {self.device.driver}, " if self.device.driver else ""
        origin = f", {self.origin}" if self.origin is not None else ""
        kind = f"table for {self.layer}" if self.derived else "shipped table"
        return f"{kind} of {self.date[:10]} ({self.device.name}, {driver}torch {self.device.torch}{origin})"

    def __str__(self) -> str:
        if not self.checked:
            return f"{self.made}, {'derived, not measured here' if self.derived else 'not checked here'}"
        return f"{self.made}, checked here at {len(self.checked)} points"


class CrossoverTable(BaseModel):
    """Table of one or several merged runs, for one device and one kind of layer (at level engine, one model)."""

    model_config = _STRICT

    schema_: Literal["headway.table/1"] = Field(default=SCHEMA, alias="schema")
    kind: str = "attention"
    """Kind of operation."""
    level: Literal["kernel", "engine"] = "kernel"
    date: str
    """Start of the last run, UTC, ISO 8601."""
    command: str
    origin: Origin | None = None
    """Version of the code that made the table. None in files before 2026-11-22."""
    busy: str = ""
    """CPU use by other processes when the run began or ended, in words. "" if negligible."""
    complete: bool
    """False if the run was interrupted or its budget ended. `--resume` continues it."""
    cut_short: bool = False
    """True if the run did not reach its end: it was interrupted or killed, or the disk was full."""
    model: str = ""
    """Name of the model, at level engine."""
    device: DeviceIdentity
    rates: DeviceRates | None = None
    """Measured rates, with which times can be derived for another kind of GPU. None if unknown, as in files before 2026-11-29."""
    spec: SerializeAsAny[LayerRecord]
    graph_len: Count | None = None
    """kv_len for which decode graphs were captured. None means that no graphs were captured."""
    noise: Annotated[FiniteFloat, Field(ge=0, lt=1)]
    """Relative spread of the times. If the difference between two kernels is smaller than this, a step stays with the kernel in
    use."""
    prior: PriorRecord | None = None
    """The table that provided the cells whose source is not `measured`. None if all cells were measured here, and in files
    before 2026-11-26."""
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
    def derived(self) -> bool:
        """True if all times were derived from those of another layer or GPU: nothing was measured or checked here."""
        return self.prior is not None and self.prior.derived and not self.prior.checked

    @property
    def attention(self) -> SpecRecord:
        """The layer of an attention table."""
        assert isinstance(self.spec, SpecRecord)
        return self.spec

    @property
    def title(self) -> str:
        """Device and layer in one line."""
        what = f"{self.model}, {self.spec}" if self.model else str(self.spec)
        return f"{self.device.name}, {what}"


def without_refusals(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of one point without refusals of kernels that have a different cell at the point.

    A refusal has no layout and no time; it applies only to the layouts of the run that wrote it.
    """
    placed = {cell.kernel for cell in cells if cell.layout is not None or cell.median_us is not None}
    return [cell for cell in cells if cell.layout is not None or cell.median_us is not None or cell.kernel not in placed]


def points(cells: Sequence[Cell]) -> dict[PointKey, list[Cell]]:
    """Return the cells grouped by point, in the order of measurement."""
    found: dict[PointKey, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.point, []).append(cell)
    return found
