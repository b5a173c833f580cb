"""The table file of layers with a state, schema `headway.states/1`: times of `scan` and `step`, beside those of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from headway.core.system.provenance import Origin
from headway.tuning.table.identity import DeviceIdentity
from headway.tuning.table.schema import BackendRecord, Count, Microseconds

if TYPE_CHECKING:
    from headway.core.contract.state import StateSpec

STATE_SCHEMA: Final = "headway.states/1"
Verb = Literal["scan", "step"]
_STRICT = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
_Size = Annotated[int, Field(ge=0)]


class StateSpecRecord(BaseModel):
    """The part of a StateSpec that times depend on; factors such as its scale take none."""

    model_config = _STRICT
    named: ClassVar[str] = "layer with a state"

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
    def kind(self) -> tuple[object, ...]:
        """What times depend on."""
        return tuple(self.model_dump().values())

    def __str__(self) -> str:
        conv = f"convolution of {self.conv_channels} x {self.conv_width}" if self.conv_channels else ""
        if not self.num_heads:
            return f"{conv} {self.dtype}"
        heads = f"{self.recurrence} {self.num_heads}/{self.num_key_heads} heads x {self.key_dim}/{self.value_dim} {self.dtype}"
        return f"{heads}, {self.state_dtype} states{f', {conv}' if conv else ''}"


class MeasuredState(BaseModel):
    """One backend at one point over one layout of states. Only an answer that was right has a time."""

    model_config = _STRICT

    verb: Verb
    batch: Count
    query_len: Count
    """New tokens of each sequence."""
    backend: str
    layout: str
    convolution: str = ""
    """The backend that applied the convolution, where that was another."""
    status: Literal["ok", "dropped", "incorrect", "error", "oom"]
    """dropped: a clear loser, roughly timed."""
    reason: str = ""
    graph: bool = False
    """Whether it was timed as the replay of a CUDA graph."""
    median_us: Microseconds | None = None
    """One layer's call."""
    p20_us: Microseconds | None = None
    p80_us: Microseconds | None = None
    drift: Annotated[FiniteFloat, Field(ge=0)] | None = None
    plan_us: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Host time of a step's plan, shared by the layers; None in a graph."""
    host_us: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Host time of one layer's call; None on a CPU and in a graph."""
    relative_error: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Against float64, the larger of that of the output and that of the states."""

    @model_validator(mode="after")
    def _times_belong_to_right_answers(self) -> Self:
        timed = self.median_us is not None
        if timed != (self.status in ("ok", "dropped")):
            raise ValueError(f"a cell has a median_us if and only if it is ok or dropped: {self.status}, {self.median_us}")
        if (self.status == "ok") == bool(self.reason):
            raise ValueError(f"a cell has a reason if and only if it is not ok: {self.status}, {self.reason!r}")
        return self

    @property
    def point(self) -> tuple[Verb, int, int]:
        """What was measured: (verb, sequences, new tokens of each)."""
        return self.verb, self.batch, self.query_len

    @property
    def layer_us(self) -> float | None:
        """What a layer costs a step: the slower of device and host."""
        return None if self.median_us is None else max(self.median_us, self.host_us or 0.0)


class StateTable(BaseModel):
    """One run: one device, one kind of layer with a state."""

    model_config = _STRICT

    schema_: Literal["headway.states/1"] = Field(default=STATE_SCHEMA, alias="schema")
    date: str
    """UTC, ISO 8601: the start of the (last) run."""
    command: str
    origin: Origin | None = None
    busy: str = ""
    """What other processes took of the CPU when the run began or ended; empty where that was too little to matter."""
    complete: bool
    """False: the run was interrupted, or its budget ended; the next start goes on."""
    device: DeviceIdentity
    spec: StateSpecRecord
    backends: list[BackendRecord]
    cells: list[MeasuredState]

    @model_validator(mode="after")
    def _one_cell_each(self) -> Self:
        seen, names = set(), {backend.name for backend in self.backends}
        for number, cell in enumerate(self.cells):
            key = (cell.point, cell.backend, cell.layout)
            if key in seen:
                raise ValueError(f"cells.{number} is there twice: {cell.backend} at {cell.verb} {cell.batch}x{cell.query_len}")
            if cell.backend not in names:
                raise ValueError(f"cells.{number}: {cell.backend!r} is not in backends")
            seen.add(key)
        return self
