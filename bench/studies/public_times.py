"""NVIDIA's public times of FlashAttention-3 beside a crossover table of the same kind of GPU.

pip download --no-deps aiconfigurator-core==0.12.0 && pip install pyarrow
python -m headway.bench.studies.public_times aiconfigurator_core-*.whl bench/results/h200/crossover-*.json --output FILE

The wheel's Parquet files (Apache-2.0) hold latencies of vLLM's attention, measured by NVIDIA for its planner. Their K and V may
lie in the L2 cache, ours never do, so decode is told apart by whether they fit there.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from headway.bench.studies.command import run_study
from headway.core.contract.errors import ConfigError
from headway.core.system.json_files import write_bytes
from headway.core.system.provenance import Origin, command_line
from headway.core.system.terminal import Terminal
from headway.tuning.table.files import read_table
from headway.tuning.table.schema import TIMED, CrossoverTable, SpecRecord

KERNEL = "vllm_flash_attn_fa3"
SYSTEMS = {"NVIDIA H100 80GB HBM3": "h100_sxm", "NVIDIA H200": "h200_sxm"}
"""Name of a GPU -> the folder of its data."""
_FILES = {"decode": "generation_attention_perf.parquet", "prefill": "context_attention_perf.parquet"}
_L2_BYTES = 50e6
"""The L2 cache of an H100 and of an H200."""
_FEW_TOKENS, _MANY_TOKENS = 1024, 8192
Shape = tuple[int, int]
"""Sequences, and keys of each; of a prompt as many queries."""


@dataclass(frozen=True, slots=True)
class PublicCell:
    """One point that both have measured."""

    heads: str
    phase: str
    batch: int
    kv_len: int
    group: str
    """Points that are told of together, in words."""
    public_us: float
    ours_us: Mapping[str, float]
    """Backend -> microseconds over the best of its layouts and block sizes."""


def public_times(
    files: Annotated[list[Path], typer.Argument(help="The wheel or the folder that it was unpacked to, and crossover tables.")],
    output: Annotated[Path | None, typer.Option(help="Write all points to this JSON file.")] = None,
) -> None:
    """Put NVIDIA's public times beside crossover tables of the same kind of GPU."""
    data, *tables = files
    if not tables:
        raise ConfigError("public_times", "a wheel and at least one crossover table", f"only {data}")
    cells = [cell for path in tables for cell in common_cells(data, read_table(path))]
    if not cells:
        raise ConfigError("public_times", "points that both have measured", "none", "whole tables of bfloat16 without a window")
    rows = summary(cells)
    Terminal().print(drawn(rows))
    if output is not None:
        command = command_line("python", "-m", "headway.bench.studies.public_times")
        told: dict[str, Any] = {"origin": Origin.here().model_dump(), "command": command, "kernel": KERNEL}
        told |= {"data": data.name, "tables": [str(path) for path in tables], "summary": rows}
        cells_told = [{name: getattr(cell, name) for name in PublicCell.__slots__} for cell in cells]
        write_bytes(f"{json.dumps({**told, 'cells': cells_told}, indent=1)}\n".encode(), output)


def common_cells(data: Path, table: CrossoverTable) -> Iterator[PublicCell]:
    """The points of decode and prefill that a table and the public data have in common.

    :raises ConfigError: the data has no folder of this GPU, or its version is not there once.
    """
    spec = table.spec
    system = SYSTEMS.get(table.device.name)
    if system is None:
        raise ConfigError("public_times", f"a table of {' or '.join(SYSTEMS)}", table.device.name)
    for phase, name in _FILES.items():
        ours: dict[Shape, dict[str, float]] = defaultdict(dict)
        for cell in table.cells:
            if cell.phase == phase and cell.status in TIMED and cell.median_us is not None and "_" not in cell.case:
                times = ours[cell.batch, cell.kv_len]
                times[cell.backend] = min(cell.median_us, times.get(cell.backend, math.inf))
        public = _public(data, f"{system}/attention/vllm", name, spec)
        for batch, kv_len in sorted(ours.keys() & public.keys()):
            group = _group(phase, batch, kv_len, spec)
            heads = f"{spec.num_heads}/{spec.num_kv_heads}/{spec.head_dim}"
            yield PublicCell(heads, phase, batch, kv_len, group, public[batch, kv_len], ours[batch, kv_len])


def _group(phase: str, batch: int, kv_len: int, spec: SpecRecord) -> str:
    if phase == "decode":
        held = batch * kv_len * spec.num_kv_heads * spec.head_dim * 2 * 2
        return "decode, K and V fit in the L2" if held <= _L2_BYTES else "decode, K and V do not"
    tokens = batch * kv_len
    if tokens <= _FEW_TOKENS:
        return f"prefill, to {_FEW_TOKENS:,} tokens"
    return f"prefill, to {_MANY_TOKENS:,}" if tokens <= _MANY_TOKENS else "prefill, beyond"


def _public(data: Path, folder: str, name: str, spec: SpecRecord) -> dict[Shape, float]:
    """Microseconds of one layer in bfloat16, without a window and over a cache in bfloat16."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError("public_times", "pyarrow, to read Parquet", "it is not installed", "pip install pyarrow") from error
    wanted = {
        "kernel_source": KERNEL,
        "num_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "attn_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "window_size": 0,
    }
    try:
        rows = parquet.read_table(io.BytesIO(_file(data, folder, name)), filters=[(key, "==", of) for key, of in wanted.items()])
        found = rows.to_pylist()
        return {(row["batch_size"], row["isl"] + row["step"]): row["latency"] * 1000 for row in found}
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError("public_times", f"a Parquet file {folder}/*/{name}", f"{data}: {error}") from error


def _file(data: Path, folder: str, name: str) -> bytes:
    """The one file of that name below a folder, out of a wheel or of what it was unpacked to."""
    if data.is_dir():
        at = [path for path in data.rglob(name) if f"/{folder}/" in path.as_posix()]
        contents = [path.read_bytes() for path in at[:2]]
    else:
        try:
            with zipfile.ZipFile(data) as wheel:
                inside = [each for each in wheel.namelist() if f"/{folder}/" in each and each.endswith(f"/{name}")]
                contents = [wheel.read(each) for each in inside[:2]]
        except (OSError, zipfile.BadZipFile) as error:
            raise ConfigError("public_times", "the wheel of aiconfigurator-core, or its folder", f"{data}: {error}") from error
    if len(contents) != 1:
        raise ConfigError("public_times", f"one file {folder}/*/{name}", f"{len(contents)} in {data}")
    return contents[0]


def summary(cells: Sequence[PublicCell]) -> list[dict[str, Any]]:
    """For each group the public time over each backend's, as geometric means: above 1 ours is faster."""
    groups: dict[str, list[PublicCell]] = defaultdict(list)
    for cell in cells:
        groups[cell.group].append(cell)
    rows = []
    for group, found in groups.items():
        ratios: dict[str, list[float]] = defaultdict(list)
        for cell in found:
            for backend, us in cell.ours_us.items():
                ratios[backend].append(cell.public_us / us)
        means = {name: round(math.exp(sum(map(math.log, each)) / len(each)), 3) for name, each in sorted(ratios.items())}
        rows.append({"group": group, "points": len(found), "public_over_ours": means})
    return rows


def drawn(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The summary as a table."""
    names = sorted({name for row in rows for name in row["public_over_ours"]})
    table = Table(box=box.SIMPLE, title=f"{KERNEL}: its public time over ours")
    for name, justify in (("", "left"), ("points", "right"), *((name, "right") for name in names)):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        means = row["public_over_ours"]
        table.add_row(row["group"], str(row["points"]), *(f"{means[name]:.2f}" if name in means else "" for name in names))
    return table


if __name__ == "__main__":
    run_study(public_times)
