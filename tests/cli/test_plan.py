"""`headway plan`: its table, its files, and one line for each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.core.contract.errors import HeadwayError
from headway.plan.results import PlanReport

app = make_app()

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["--input-len", "200", "--output-len", "24"]
TABLE = str(ROOT / "bench" / "results" / "h200" / "crossover-16-8-128.json")


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_fits_80_columns_and_the_file_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["qwen3-0.6b", "--num-gpus", "2", *SHORT, "--time-per-token", "5", "--crossover-table", TABLE, "--json", str(path)]
    out = run(*words)
    lines = out.splitlines()
    assert max(len(line.rstrip()) for line in lines if not line.startswith("  headway serve")) <= 80
    report = PlanReport.read(path)
    best = report.plans[0]
    assert f"  {best.command}" in lines
    assert f"{best.tokens_per_second_per_gpu:,.0f}" in out
    assert "why the other layouts rank lower" in lines
    assert "attention: measured, by crossover tables" in out
    assert report.max_per_token_ms == 5
    assert {row.tensor_parallel_size for row in report.full_load} == {1, 2}


def test_sizes_that_do_not_divide_are_among_the_reasons() -> None:
    out = run("qwen3-30b-a3b", "--num-gpus", "3", *SHORT, "--tensor-parallel-sizes", "2,3", "--kv-cache-dtypes", "auto")
    assert re.search(r"^ +2 +1 +auto", out, re.MULTILINE)
    assert "tensor-parallel size 3: sizes: needs a divisor of the 32 attention heads" in " ".join(out.split())
    assert "(nearest that work: 2 and 4)" in " ".join(out.split())


@pytest.mark.slow
def test_a_rate_takes_as_few_gpus_as_will_do(tmp_path: Path) -> None:
    arrivals = tmp_path / "arrivals.jsonl"
    requests = ({"arrival": at / 20, "input_len": 100 + at, "output_len": 16} for at in range(60))
    arrivals.write_text("\n".join(map(json.dumps, requests)))
    out = run("qwen3-0.6b", "--num-gpus", "512", "--arrivals", str(arrivals), "--first-token", "200", "--kv-cache-dtypes", "auto")
    assert "on 512 x h200" in out
    assert "; 20 requests/s" in out
    assert re.search(r"^ +1 +1 +auto", out, re.MULTILINE)
    assert "takes 2 GPUs, not 1" in out


def test_the_picture_has_axes_with_units(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    path = tmp_path / "plan.png"
    run("qwen3-0.6b", *SHORT, "--kv-cache-dtypes", "auto", "--time-per-token", "2", "--picture", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


WRONG = {
    "--gpu: needs one of h100, h200, a100, l40s, b200, got 'h300' (did you mean h200?)": ["--gpu", "h300"],
    "--num-gpus: needs at least 1, got 0": ["--num-gpus", "0"],
    "--rate: needs a number above 0, got -1.0": ["--rate", "-1"],
    "--prefix-len: needs less than --input-len 1024, got 1024": ["--prefix-len", "1024"],
    "--routing: needs round-robin or prefix-aware, got 'random'": ["--routing", "random"],
    "--kv-cache-dtype: needs auto, fp8_e4m3, int8_per_token_head, got 'fp4'": ["--kv-cache-dtypes", "fp4"],
    "--weights: needs model, fp8, int4, mxfp4, got 'nf4'": ["--weights", "nf4"],
    "--picture: needs a file name that ends in .png, got p.jpg": ["--picture", "p.jpg"],
    "40960 tokens together, the model's limit, got 41216": ["--input-len", "40960"],
    "one layout that can start, got sizes: needs a divisor of the 16 attention heads": [
        "--tensor-parallel-sizes",
        "3",
        "--num-gpus",
        "3",
    ],
}


@pytest.mark.parametrize("said", WRONG)
def test_a_mistake_is_one_line(said: str) -> None:
    with pytest.raises(HeadwayError) as error:
        CliRunner().invoke(app, ["plan", "qwen3-0.6b", *WRONG[said]], catch_exceptions=False)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_of_another_gpu_is_refused() -> None:
    with pytest.raises(HeadwayError, match="--crossover-table: needs a table of kernels of NVIDIA H100 80GB HBM3, got .*H200"):
        CliRunner().invoke(app, ["plan", "qwen3-0.6b", "--gpu", "h100", "--crossover-table", TABLE], catch_exceptions=False)
