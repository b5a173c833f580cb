"""Pictures of docs/benchmarks.md, drawn from result files with matplotlib (the extra `plot`).

    python docs/_tools/pictures.py docs/images

The script reads bench/results/ of the working folder and writes one PNG per picture.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headway.bench.charts import COLOURS, bare, bars, heading, new_figure, png
from headway.bench.crossover.plot import to_curves, to_png
from headway.bench.crossover.report import view
from headway.bench.diff.results import DiffReport
from headway.bench.diff.results import to_png as diff_to_png
from headway.bench.generate.results import KernelPeersFile, PeersFile
from headway.bench.kernel.results import KernelReport
from headway.bench.studies.ranks_report import RanksReport
from headway.core.system.json_files import write_bytes
from headway.kernels.all_reduce.one_shot_kernels import CAPACITY
from headway.tuning.table.files import read_table

RESULTS = Path("bench/results")
SHIPPED = Path("tuning/priors")
CPU, H200 = Path("bench/results/cpu"), Path("bench/results/h200")


def generation(folder: Path = H200) -> bytes:
    """Draw output tokens per second of whole generations. Headway's values above 256 sequences are from a later run."""
    labels = ["nano", "1 x 512/512", "16 x 512/512", "64 x 512/512", "320 x 256/256", "512 x 256/256"]
    rates = {peer.name: peer.tokens_per_second for peer in PeersFile.read(folder / "peers-same-gpu.json").peers}
    nano = next(peer for peer in PeersFile.read(folder / "peers-offline.json").peers if peer.name == "nano-vllm")
    rates["nano-vllm"] = {**nano.tokens_per_second, **rates["nano-vllm"]}
    rates["Headway"] = {**rates["Headway"], **_wide(folder)}
    names = {
        "Headway": "Headway, triton (320 and 512: hopper and triton, a day later, another GPU)",
        "vLLM": "vLLM 0.24, FlashAttention-3",
        "nano-vllm": "nano-vllm, flash-attn 2",
    }
    series = {shown: [rates[name].get(label) for label in labels] for name, shown in names.items()}
    groups = ["nano-vllm's\nown bench", *(label.replace(" x ", " sent at once\n") for label in labels[1:])]
    title = "Whole generations, Qwen3-0.6B shapes, bfloat16, NVIDIA H200, 2026-11-21 and 22"
    return bars(title, groups, series, "output tokens per second", "requests, and tokens in / out of each")


def _wide(folder: Path) -> dict[str, float]:
    """Return label -> output tokens per second of the run with more than 256 sequences."""
    medians: dict[str, float] = json.loads((folder / "engine-wide.json").read_text())["median"]
    return {label: rate for label, rate in medians.items() if label != "nano"}


def shares(folder: Path = H200) -> bytes:
    """Draw kernels at shapes outside of all grids, relative to the fastest library."""
    report = KernelPeersFile.read(folder / "peers-kernels.json")
    phases = list(report.cells)
    kept = [each for each in report.contenders if each.name != "Headway triton, block 16"]
    series = {each.name: [each.decode.mean, each.prefill.mean, each.extend.mean] for each in kept}
    title = f"Attention kernels on {report.device} at shapes outside every grid, {report.date}: before hopper"
    groups = [f"{phase}\n({report.cells[phase]} cells)" for phase in phases]
    limit = (1.0, "the fastest library of each cell")
    return bars(title, groups, series, "speed relative to the fastest library\n(geometric mean)", "phase of attention", limit)


def decode(folder: Path = H200, batch: int = 8) -> bytes:
    """Draw decode at one batch size by length, 32/8 heads."""
    cells = [
        cell for cell in KernelReport.read(folder / "decode.json").cells if cell.geometry == "32/8/128" and cell.phase == "decode"
    ]
    cases = [case for case in dict.fromkeys(cell.case for cell in cells) if case.startswith(f"{batch}q1s")]
    names = {
        "triton nhd 256": "Headway triton",
        "flash_attn (bare) 256": "flash-attn 2",
        "flashinfer.fa2 (bare) 16": "flashinfer fa2",
    }
    at = {(cell.label, cell.case): cell.gbps for cell in cells}
    shown = {
        name: [at.get((label, case)) for case in cases] for label, name in names.items() if any((label, c) in at for c in cases)
    }
    groups = [case.removeprefix(f"{batch}q1s") for case in cases]
    title = f"Decode of {batch} sequences, 32 query and 8 kv heads of 128, bfloat16, NVIDIA H200"
    return bars(title, groups, shown, "GB/s of keys and values, each read once", "cached tokens of each sequence (k: 1,024)")


def ratios(batch: int = 1, query_len: int = 512) -> bytes:
    """Draw times of extend by length, relative to the fastest backend; the winner changes where two curves cross."""
    table = read_table(SHIPPED / "nvidia-h100-80gb-hbm3-attention-32-8-128-bfloat16-a911acb1.json")
    times: dict[int, dict[str, float]] = {}
    for cell in table.cells:
        where = cell.phase, cell.layout, cell.block_size, cell.batch, cell.query_len
        if where == ("extend", "nhd", 256, batch, query_len) and cell.layer_us and cell.status != "dropped":
            times.setdefault(cell.kv_len, {})[cell.kernel] = cell.layer_us
    lengths, names = sorted(times), ["hopper", "flash_attn_3", "triton"]
    figure = new_figure(7.6, 4.0)
    heading(
        figure,
        f"The fastest backend changes with the length: {query_len} new tokens after a cached context",
        f"{table.title}, {table.date[:10]}",
    )
    axis = figure.subplots()
    for name, marker, colour in zip(names, "so^", (COLOURS[1], COLOURS[2], COLOURS[0]), strict=True):
        shares = [times[length][name] / min(times[length].values()) for length in lengths]
        axis.plot(lengths, shares, marker=marker, color=colour, linewidth=1.8, label=name)
    axis.axhline(1, color="#444444", linewidth=1, linestyle="--")
    axis.set(
        xscale="log", ylabel="time of one layer,\nas a multiple of the fastest", xlabel="tokens of the sequence, cached and new"
    )
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter("{x:.1f} x")
    bare(axis)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return png(figure)


def speedups(report: RanksReport) -> bytes:
    """Draw output tokens per second of several GPUs relative to one, measured and planned."""
    rows = [row for row in report.rows if row.one]
    planned = [row.planned / row.planned_one if row.planned and row.planned_one else None for row in rows]
    series: dict[str, list[float | None]] = {"measured": [row.speedup for row in rows]}
    if any(planned):
        series["headway plan, before"] = planned
    groups = [row.work.replace(", ", "\n") for row in rows]
    title = f"{report.rows[0].ranks} x {report.device} beside one, bfloat16, {report.date[:10]}"
    return bars(title, groups, series, "output tokens per second,\nas a multiple of one GPU's", "model, requests x tokens in/out")


def sums(report: RanksReport) -> bytes:
    """Draw times of all-reduce by bytes, for sizes that the one-shot kernels support, without the residual add."""
    small = [size for size in report.sum_bytes if size <= CAPACITY]
    series = {name: us[: len(small)] for name, us in report.sums.items() if not name.endswith("+ add")}
    groups = [f"{size // 1024:,} KiB" for size in small]
    title = f"A sum over {report.rows[0].ranks} x {report.device} in a CUDA graph, bfloat16"
    return bars(title, groups, series, "microseconds", "bytes of the tensor on each GPU")


def main() -> None:
    """Draw every picture into the folder named on the command line."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    for name, content in (("generation-h200", generation()), ("kernels-h200", shares()), ("decode-h200", decode())):
        write_bytes(content, folder / f"{name}.png")
    for heads in ("16-8-128", "32-8-128"):
        table = read_table(H200 / f"crossover-{heads}.json")
        write_bytes(to_png(view(table)), folder / f"crossover-h200-{heads}.png")
    write_bytes(ratios(), folder / "extend-h100-32-8-128.png")
    write_bytes(to_curves(view(read_table(H200 / "crossover-16-8-128.json"))), folder / "curves-h200-16-8-128.png")
    for path in sorted(RESULTS.glob("*x*/ranks.json")):
        report = RanksReport.read(path)
        for name, content in (("ranks", speedups(report)), ("sums", sums(report))):
            write_bytes(content, folder / f"{name}-{path.parent.name}.png")
    diff = DiffReport.model_validate_json((CPU / "diff-fp8.json").read_text())
    write_bytes(diff_to_png(diff), folder / "diff-fp8.png")


if __name__ == "__main__":
    main()
