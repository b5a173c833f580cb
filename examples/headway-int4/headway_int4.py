"""A third-party kernel for linear layers with int4 weights and 16- or 32-bit activations (W4A16), in torch."""

import torch

from headway import hookimpl
from headway.contract import GraphLevel, LinearCapabilities, LinearKernel, LinearKernelInfo


class Int4(LinearKernel):
    """x W^T with grouped int4 weights, with or without zero points."""

    name = "int4"
    capabilities = LinearCapabilities(
        formats=frozenset({"int4"}),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        devices=("cpu", "cuda"),
    )
    graph_level = GraphLevel.ANY  # never waits for the GPU

    def prepare(self, weight):
        """Once per layer: return int8 [N, groups, group], zero points subtracted, and scales [N, groups, 1]."""
        halves = weight.packed.view(len(weight.packed), -1, weight.group_size // 2)
        codes = torch.stack([halves & 15, halves >> 4], dim=2).flatten(2).to(torch.int8)
        codes = codes - (8 if weight.zeros is None else weight.zeros.to(torch.int8)[:, :, None])
        return codes, weight.scales.to(self.spec.dtype)[:, :, None]

    def apply(self, x, weight, out):
        """Once per step. x: [rows, K]; out: [rows, N]."""
        codes, scales = weight
        torch.mm(x, (codes * scales).flatten(1).t(), out=out)


@hookimpl
def headway_register_kernels():
    return [LinearKernelInfo("int4", "W4A16 in torch: dequantizes the weight in each call", lambda: Int4, api_version=3)]
