"""What a layer of experts computes, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.contract.errors import ModelError


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: a router sends every token to `top_k` of `num_experts` gated MLPs and adds what they give.

    Shared experts, which every token passes, are cut into experts of the routed ones' size: their weights stand after the routed
    ones', so that all are computed together.
    """

    hidden_size: int
    num_experts: int
    """Those that the router chooses from."""
    top_k: int
    intermediate_size: int
    """Of one expert."""
    shared_intermediate_size: int = 0
    """Of all shared experts together; 0: there is none."""
    shared_gate: bool = False
    """Whether what the shared experts give is multiplied by the sigmoid of one more row of the router (Qwen2-MoE)."""
    scoring: str = "softmax"
    """softmax or sigmoid, of the router's logits."""
    renormalize: bool = False
    """Whether a token's weights are divided by their sum. With softmax this is the softmax over the chosen logits alone."""
    scale: float = 1.0
    """Multiplies the weights of the routed experts."""
    num_groups: int = 1
    """Groups of equally many experts, of which a token may choose from `top_k_groups` (DeepSeek-V2, node-limited routing)."""
    top_k_groups: int = 1
    group_score: int = 1
    """How many of a group's best scores are added to rank it: 1 (DeepSeek-V2) or 2 (DeepSeek-V3)."""
    correction_bias: bool = False
    """Whether a bias for each expert is added to its score for the choice, not for its weight (DeepSeek-V3)."""
    router_bias: bool = False
    """Whether the logits have a bias (gpt-oss)."""
    bias: bool = False
    """Whether the experts' products have biases (gpt-oss)."""
    activation_alpha: float = 1.0
    """The gate is gate * sigmoid(alpha * gate); 1: SiLU."""
    activation_limit: float | None = None
    """The gate is at most this, and the other half within plus and minus this and then raised by 1 (gpt-oss); None: neither."""

    def __post_init__(self) -> None:
        """:raises ModelError: numbers that contradict each other, by the names of config.json."""
        for name in ("hidden_size", "num_experts", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ModelError(f"experts: {name} needs a number above 0, got {getattr(self, name)}")
        if self.scoring not in ("softmax", "sigmoid"):
            raise ModelError(f"scoring_func: needs softmax or sigmoid, got {self.scoring}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ModelError(f"num_experts_per_tok: needs 1 to {self.num_experts}, the number of experts, got {self.top_k}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ModelError(f"n_group: needs a divisor of {self.num_experts}, the number of experts, got {self.num_groups}")
        if not 1 <= self.top_k_groups <= self.num_groups:
            raise ModelError(f"topk_group: needs 1 to {self.num_groups}, the number of groups, got {self.top_k_groups}")
        if self.top_k > self.top_k_groups * self.group_size:
            raise ModelError(
                f"num_experts_per_tok: needs at most {self.top_k_groups * self.group_size}, the experts of topk_group groups, "
                f"got {self.top_k}"
            )
        if self.num_groups > 1 and self.group_size < self.group_score:
            raise ModelError(f"n_group: needs groups of {self.group_score} experts or more, got groups of {self.group_size}")
        if self.shared_intermediate_size < 0:
            raise ModelError(f"experts: the size of the shared ones needs 0 or more, got {self.shared_intermediate_size}")
        if self.bias and self.num_shared:
            raise ModelError("experts: biases beside shared experts are not supported")

    @property
    def group_size(self) -> int:
        """Experts in a group."""
        return self.num_experts // self.num_groups

    @property
    def num_shared(self) -> int:
        """Pieces that the shared experts are cut into; the last may be padded."""
        return -(-self.shared_intermediate_size // self.intermediate_size)

    @property
    def num_all(self) -> int:
        """Experts whose weights are held: routed, then shared."""
        return self.num_experts + self.num_shared

    @property
    def num_slots(self) -> int:
        """Experts that each token passes."""
        return self.top_k + self.num_shared

    @property
    def num_logits(self) -> int:
        """Rows of the router: the experts', and the shared ones' gate."""
        return self.num_experts + (1 if self.shared_gate else 0)
