"""`headway bench kernel` beside other libraries, called bare in the same run: `python -m headway.bench.studies.kernel_peers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from headway.bench.kernel.contenders import KernelPeer
from headway.bench.studies.command import run_study
from headway.bench.studies.kernel_peers.libraries import all_peers
from headway.cli.measure.bench_kernel import measure_kernels, with_plugins
from headway.cli.options import names_of
from headway.core.contract.errors import ConfigError
from headway.core.system.provenance import command_line

if TYPE_CHECKING:
    from headway.bench.kernel.run import KernelOptions


def peers_of(phase: str, names: Sequence[str] | None) -> list[KernelPeer]:
    """Peers of a phase by name; None: all of them, installed or not.

    :raises ConfigError: a name that no peer of the phase has.
    """
    known = {peer.name: peer for peer in all_peers() if phase in peer.phases}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"peers for {phase}", " or ".join(known), ", ".join(map(repr, unknown)))
    return [known[name] for name in names] if names is not None else list(known.values())


def measure(options: KernelOptions, plugin: Sequence[str] | None, only_peers: str | None) -> None:
    """Time attention kernels, each checked against float64 first, beside the bare libraries."""
    peers = peers_of(options.phase, names_of(only_peers))
    command = command_line("python", "-m", "headway.bench.studies.kernel_peers")
    measure_kernels(replace(options, peers=peers, command=command), plugin)


ONLY_PEERS = Annotated[str | None, typer.Option(help="Only these libraries' kernels, comma-separated. Default: all.")]
main = with_plugins(measure, only_peers=(ONLY_PEERS, None))

if __name__ == "__main__":
    run_study(main)
