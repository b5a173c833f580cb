"""A third-party kernel for MoE layers: gathers the weights of each (token, expert) pair and computes with torch.einsum."""

import torch
from torch.nn.functional import silu

from headway import hookimpl
from headway.contract import ExpertsCapabilities, ExpertsKernel, ExpertsKernelInfo, GraphLevel


class Gathered(ExpertsKernel):
    """Fast for few tokens only: with more tokens, the weights of the same expert are gathered many times."""

    name = "gathered"
    capabilities = ExpertsCapabilities(
        formats=frozenset({"plain"}),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        devices=("cpu", "cuda"),
        max_tokens=16,
    )
    graph_level = GraphLevel.ANY  # never waits for the GPU

    def apply(self, x, experts, scores, weights, out):
        """Once per step. x: [tokens, hidden], normed; experts, scores: [tokens, slots]; adds to out: [tokens, hidden]."""
        chosen = experts.long()
        gate, up = torch.einsum("tsnk,tk->tsn", weights.gate_up[chosen], x).chunk(2, dim=2)
        parts = torch.einsum("tshn,tsn->tsh", weights.down[chosen], silu(gate) * up)
        out += torch.einsum("tsh,ts->th", parts, scores.to(x.dtype))


@hookimpl
def headway_register_kernels():
    return [ExpertsKernelInfo("gathered", "MoE by gathered weights, for few tokens", lambda: Gathered, api_version=3)]
