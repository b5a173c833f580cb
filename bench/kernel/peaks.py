"""What a device could do at most: the rates of its data sheet, which a kernel's are shares of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DevicePeak(BaseModel):
    """The most that a device reads and computes in a second. A rate that nobody knows is None."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gbps: float | None = Field(default=None, gt=0)
    """Bytes that its memory moves, 1e9 a second."""
    tflops: float | None = Field(default=None, gt=0)
    """Dense operations in the element type of the run, 1e12 a second, sums in float32."""
    source: str = ""
    """Whose word it is: the data sheet's, the user's, or both."""


# Name as the driver tells it, its longest match counts -> GB/s, TFLOP/s of 16-bit products without sparsity, TFLOP/s of float32
# without tensor cores. From NVIDIA's data sheets; where these give a figure with sparsity, half of it stands here.
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
    """Look up a device's peaks by the name that its driver tells.

    dtype: the element type of the run. bandwidth, flops: GB/s and TFLOP/s that the user gives, which count before a data sheet.
    """
    names = [name for name in _SHEETS if device_name == name or device_name.startswith((f"{name} ", f"{name}-"))]
    gbps, half, single = _SHEETS[max(names, key=len)] if names else (None, None, None)
    tflops = single if dtype == "float32" else half
    said = ["given by the user"] if bandwidth is not None or flops is not None else []
    sheet = ["data sheet"] if names and (bandwidth is None or flops is None) else []
    return DevicePeak(gbps=bandwidth or gbps, tflops=flops or tflops, source=", ".join(said + sheet))
