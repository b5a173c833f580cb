"""The machine that a figure was taken on, as result files hold it. Nothing here imports torch: to read a file takes none."""

from __future__ import annotations

from typing import Final, Self

from pydantic import BaseModel, ConfigDict, model_validator

from headway.core.system.text import shown

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
    """Compiler -> version of those that made the GPU's code, ptxas and nvrtc; empty on a CPU. None in files of before this
    field, whose compilers are unknown."""
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
