"""Result file of `headway bench kernel`, schema `headway.kernel/1`, and peak rates of devices."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway.core.system.json_files import ResultFile
from headway.core.system.provenance import Origin
from headway.tuning.measure.contender import Status
from headway.tuning.measure.workloads import PhaseName
from headway.tuning.table.schema import DeviceInfo


class DevicePeak(BaseModel):
    """Peak rates of a device. None means unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gbps: float | None = Field(default=None, gt=0)
    """Memory bandwidth in GB/s."""
    tflops: float | None = Field(default=None, gt=0)
    """Dense TFLOP/s in the element type of the run, with float32 accumulation."""
    source: str = ""
    """Source of the rates: data sheet, user, or both."""


# Name reported by the driver (the longest match counts) -> GB/s, TFLOP/s of 16-bit GEMMs without sparsity, TFLOP/s of float32
# without tensor cores. From NVIDIA's data sheets; numbers with sparsity are halved.
_SHEETS: dict[str, tuple[float, float, float]] = {
    "NVIDIA A100": (1555, 312, 19.5),  # A100 Tensor Core GPU data sheet, 40 GB
    "NVIDIA A100-SXM4-80GB": (2039, 312, 19.5),  # the same, 80 GB SXM
    "NVIDIA A100 80GB PCIe": (1935, 312, 19.5),  # the same, 80 GB PCIe
    "NVIDIA H100 80GB HBM3": (3350, 989.4, 67),  # H100 Tensor Core GPU data sheet, SXM
    "NVIDIA H100 PCIe": (2039, 756, 51),  # H100 PCIe product brief
    "NVIDIA H100 NVL": (3900, 835, 60),  # H100 Tensor Core GPU data sheet, NVL
    "NVIDIA H200": (4800, 989.4, 67),  # H200 Tensor Core GPU data sheet, SXM
    "NVIDIA H200 NVL": (4800, 835, 60),  # the same, NVL
    "NVIDIA L4": (300, 121, 30.3),  # L4 Tensor Core GPU data sheet
    "NVIDIA L40S": (864, 362.05, 91.6),  # L40S data sheet
    "NVIDIA GeForce RTX 4090": (1008, 165.2, 82.6),  # Ada GPU architecture white paper, 16-bit with float32 sums
    "NVIDIA B200": (8000, 2250, 80),  # Blackwell architecture technical brief, HGX B200 at 1,000 W
}


def peak_of(
    device_name: str,
    dtype: str,
    bandwidth: float | None = None,
    flops: float | None = None,
) -> DevicePeak:
    """Return a device's peaks by the name that its driver reports. dtype: element type of the run. bandwidth, flops: the user's
    GB/s and TFLOP/s, which take precedence over data sheets."""
    names = [name for name in _SHEETS if device_name == name or device_name.startswith((f"{name} ", f"{name}-"))]
    gbps, half, single = _SHEETS[max(names, key=len)] if names else (None, None, None)
    tflops = single if dtype == "float32" else half
    sources = ["given by the user"] if bandwidth is not None or flops is not None else []
    sheet = ["data sheet"] if names and (bandwidth is None or flops is None) else []
    return DevicePeak(gbps=bandwidth or gbps, tflops=flops or tflops, source=", ".join(sources + sheet))


Owner = Literal["backend", "peer", "writer"]


class KernelCell(BaseModel):
    """Result of one contender for one case, layout and block size. Only correct results have a time."""

    model_config = ConfigDict(extra="forbid")

    backend: str
    """Name of the backend, peer, or cache writer."""
    owner: Owner
    """"peer" is a library called without Headway."""
    phase: PhaseName
    case: str
    """The case as requested, in the grammar of headway.core.oracle.cases."""
    geometry: str
    """Geometry of the layer as num_heads/num_kv_heads/head_dim."""
    layout: str
    block_size: int | None
    """Block size of the cache. None if no cache is read (a peer's dense prefill)."""
    dtype: str
    """Element type of q, k, v and out."""
    kv_dtype: str
    """Element type of the cache."""
    status: Status
    reason: str = ""
    """Reason for a missing time; else empty."""
    kernel: str = ""
    """Name of the kernel that ran, from the backend."""
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    plan_us: float | None = None
    """Host microseconds of `plan`, once per step and spec. None for peers and writers."""
    host_us: float | None = None
    """Host microseconds until a step's call returns, including `plan`. None on a CPU, on which host time is the whole time."""
    gbps: float | None = None
    """Rate in GB/s. Decode: bytes of K and V, read once. Write: bytes read plus written."""
    tflops: float | None = None
    """Rate of prefill in TFLOP/s, counting 4 * head_dim * num_heads operations for each key that a query sees."""
    fraction: float | None = None
    """Rate divided by the device's measured copy rate (decode, write) or matrix rate (prefill)."""
    peak_fraction: float | None = None
    """Rate divided by the device's peak. None if the peak is unknown, and in files from before 2026-11-24."""
    relative_error: float | None = None
    """||out - reference|| / ||reference||, the larger of the errors before and after timing. None without a finite result."""
    tolerance: float | None = None

    @model_validator(mode="after")
    def _only_right_answers_have_a_time(self) -> Self:
        if (self.status == "ok") != (self.median_us is not None):
            raise ValueError(f"a cell has a median_us if and only if its status is ok: {self.status}, {self.median_us}")
        if (self.status == "ok") == bool(self.reason):
            raise ValueError(f"a cell has a reason if and only if its status is not ok: {self.status}, {self.reason!r}")
        return self

    @property
    def spread(self) -> float | None:
        """Half the range from p20 to p80 divided by the median. None without a time."""
        if self.median_us is None or self.p20_us is None or self.p80_us is None:
            return None
        return (self.p80_us - self.p20_us) / (2 * self.median_us)

    @property
    def label(self) -> str:
        """Contender, layout and block size: a column of the table."""
        if self.owner == "peer":
            return f"{self.backend} (bare)" if self.block_size is None else f"{self.backend} (bare) {self.block_size}"
        return f"{self.backend} {self.layout} {self.block_size}"


class ContenderRecord(BaseModel):
    """A backend or peer that was requested, and whether it is available."""

    model_config = ConfigDict(extra="forbid")

    name: str
    owner: Owner
    version: str = ""
    available: bool
    reason: str = ""


class SlowerCell(BaseModel):
    """A cell in which a backend is slower than allowed or has failed."""

    model_config = ConfigDict(extra="forbid")

    backend: str
    phase: str
    case: str
    geometry: str
    layout: str
    block_size: int | None
    median_us: float | None
    """Median time in microseconds. None if the result was wrong or the backend raised an error."""
    than_us: float
    """Median time of the backend to compare with, in microseconds."""
    factor: float | None
    """median_us / than_us."""
    reason: str = ""
    """Reason if median_us is None; else empty."""

    def __str__(self) -> str:
        where = f"{self.phase} {self.geometry} {self.case}, {self.layout} {self.block_size}"
        if self.factor is None or self.median_us is None:
            return f"{self.backend} in {where}: no time ({self.reason}), where the other takes {self.than_us:.1f} us"
        return f"{self.backend} in {where}: {self.median_us:.1f} us, {self.factor:.2f} times as long as {self.than_us:.1f} us"


class SpeedComparison(BaseModel):
    """Comparison of backends with one of them."""

    model_config = ConfigDict(extra="forbid")

    than: str
    """Backend to compare with."""
    most: float
    """Maximum allowed ratio of times."""
    compared: int
    """Number of compared cells, including cells in which only the backend to compare with has a time."""
    slower: list[SlowerCell]

    @property
    def fault(self) -> str:
        """Reason why the comparison failed, in one line; else empty."""
        if not self.compared:
            return f"nothing could be compared with {self.than}: no cell has times of both it and another backend"
        if not self.slower:
            return ""
        return f"{len(self.slower)} of {self.compared} cells take more than {self.most:g} times as long as {self.than}, or failed"


class KernelReport(ResultFile):
    """Result of one run of `headway bench kernel`."""

    schema_: Literal["headway.kernel/1"] = Field(default="headway.kernel/1", alias="schema")
    command: str
    origin: Origin | None = None
    """The code that wrote the file. None in files from before 2026-11-22."""
    busy: str = ""
    """CPU load of other processes at the start or end of the run; empty if negligible."""
    date: str
    """Start of the run: UTC, ISO 8601."""
    warmup_ms: float
    rep_ms: float
    seed: int
    device: DeviceInfo
    peak: DevicePeak | None = None
    """Peaks from the data sheet or the user. None in files from before 2026-11-24."""
    comparison: SpeedComparison | None = None
    """Result of `--fail-if-slower`. None if not requested."""
    rule: str = ""
    """Name and digest of the layers' attention rule; "" means none."""
    contenders: list[ContenderRecord]
    cells: list[KernelCell]
