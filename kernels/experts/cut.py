"""How the experts of a layer are divided among ranks."""

from __future__ import annotations

from dataclasses import replace

from headway.kernels.experts.config import ExpertsConfig
from headway.kernels.linear.axes import Axis, Division


class ExpertsCut:
    """The experts of one rank: some columns of each expert, or some experts whole.

    By columns where the ranks divide an expert's inner size, so that every rank reads equally many bytes whichever experts the
    tokens choose; else by expert, where they divide the number of experts. Shared experts, which every token passes, are cut by
    columns in both. The router is every rank's: all of them choose alike.
    """

    def __init__(self, config: ExpertsConfig, division: Division | None = None) -> None:
        """config: the whole layer's, of which `needs` has nothing to say. division: None: there is one rank."""
        division = division or Division(0, 1)
        self.first = division.rank == 0
        by_columns = config.intermediate_size % division.size == 0
        self.experts = Axis.all(config.num_experts) if by_columns else division.even(config.num_experts)
        """Routed experts."""
        self.inner = division.even(config.intermediate_size) if by_columns else Axis.all(config.intermediate_size)
        """Columns of a routed expert's last product."""
        self.shared = division.even(config.shared_intermediate_size)
        """Columns of the shared experts' last products together."""
        self.own = replace(
            config,
            intermediate_size=self.inner.size,
            shared_intermediate_size=self.shared.size,
            held=None if by_columns else self.experts.held[0],
        )
        """The rank's layer."""


def needs(config: ExpertsConfig, size: int, by_expert: bool) -> list[str]:
    """Say what the number of ranks would have to be where it does not suit a layer of experts."""
    inner, experts, shared = config.intermediate_size, config.num_experts, config.shared_intermediate_size
    found = []
    if inner % size and (experts % size or not by_expert):
        also = f" or of their number {experts}" if by_expert else " (on a GPU they are not divided by expert)"
        found.append(f"a divisor of the experts' inner size {inner}{also}")
    if shared % size:
        found.append(f"a divisor of the shared experts' inner size {shared}")
    return found
