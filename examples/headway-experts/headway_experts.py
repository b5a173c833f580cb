"""A third-party kernel for layers of experts: weights gathered for each pair of token and expert, in three products of torch."""

import torch
from torch.nn.functional import silu

from headway import hookimpl
from headway.contract import ExpertsCapabilities, ExpertsKernel, ExpertsKernelInfo, GraphLevel


class Gathered(ExpertsKernel):
    """Right for any number of tokens, and fast for a few: more of them would gather the same expert many times."""

    name = "gathered"
    capabilities = ExpertsCapabilities(
        formats=frozenset({"plain"}),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        devices=("cpu", "cuda"),
        max_tokens=16,
    )
    graph_level = GraphLevel.ANY  # nothing here waits for the GPU

    def apply(self, x, experts, scores, weights, out):
        """Each step. x: [tokens, hidden], normed; experts, scores: [tokens, slots]; out: [tokens, hidden], added to."""
        chosen = experts.long()
        gate, up = torch.einsum("tsnk,tk->tsn", weights.gate_up[chosen], x).chunk(2, dim=2)
        parts = torch.einsum("tshn,tsn->tsh", weights.down[chosen], silu(gate) * up)
        out += torch.einsum("tsh,ts->th", parts, scores.to(x.dtype))


@hookimpl
def headway_register_kernels():
    return [ExpertsKernelInfo("gathered", "weights of each pair gathered, for few tokens", lambda: Gathered, api_version=3)]
