"""A third-party kernel for linear layers: activations in 16 or 32 bits times weights of 4 bits (W4A16), in torch."""

import torch

from headway import hookimpl
from headway.contract import GraphLevel, LinearCapabilities, LinearKernel, LinearKernelInfo


class Int4(LinearKernel):
    """x W^T over int4 weights in groups, with or without zeros."""

    name = "int4"
    capabilities = LinearCapabilities(
        formats=frozenset({"int4"}),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        devices=("cpu", "cuda"),
    )
    graph_level = GraphLevel.ANY  # nothing here waits for the GPU

    def prepare(self, weight):
        """Once a layer: codes [N, groups, group] as int8, less their zeros, and scales [N, groups, 1]."""
        halves = weight.packed.view(len(weight.packed), -1, weight.group_size // 2)
        codes = torch.stack([halves & 15, halves >> 4], dim=2).flatten(2).to(torch.int8)
        codes = codes - (8 if weight.zeros is None else weight.zeros.to(torch.int8)[:, :, None])
        return codes, weight.scales.to(self.spec.dtype)[:, :, None]

    def apply(self, x, weight, out):
        """Each step. x: [rows, K]; out: [rows, N]."""
        codes, scales = weight
        torch.mm(x, (codes * scales).flatten(1).t(), out=out)


@hookimpl
def headway_register_kernels():
    return [LinearKernelInfo("int4", "W4A16 in torch: the weight is dequantised for each product", lambda: Int4, api_version=3)]
