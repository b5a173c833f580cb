"""Times of whole generations that bench/results holds, as points to predict."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

RESULTS: Final = Path(__file__).resolve().parents[2] / "results" / "h200"
Metric = Literal["seconds", "first_token_ms", "per_token_ms"]
WEIGHT_FORMS: Final = {"bf16": "model", "fp8": "fp8", "fp8-blocks": "fp8", "w4a16": "int4", "mxfp4": "mxfp4"}
"""Forms of headway.bench.studies.weight_shapes -> the format of `headway plan`."""

DEEPSEEK_V2_LITE: Final = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "bos_token_id": 100000,
    "dtype": "bfloat16",
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 12,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
"""Sizes of deepseek-ai/DeepSeek-V2-Lite with 12 of its 27 layers, as they were measured."""


@dataclass(frozen=True)
class MeasuredPoint:
    """One figure of one workload: `batch` requests of so many tokens, all sent at once."""

    model: str
    """A name in models/shapes, or deepseek-v2-lite."""
    num_layers: int | None
    """Layers that were measured, the first ones; None: all."""
    batch: int
    input_len: int
    output_len: int
    metric: Metric
    measured: float
    file: str
    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 256
    gpu: str = "h200"
    """A kind of GPU that `headway plan` knows."""
    ranks: int = 1
    """GPUs of the engine."""
    weights: str = "model"
    """A format of `headway plan`."""

    def __str__(self) -> str:
        others = [each for each in (self.kv_cache_dtype, self.weights) if each not in ("auto", "model")]
        return " ".join([f"{self.model} {self.batch} x {self.input_len}/{self.output_len}", *others])


def measured_points() -> list[MeasuredPoint]:
    """Every point, in an order that does not depend on any figure. What was measured several times is one point: the median."""
    runs: dict[MeasuredPoint, list[MeasuredPoint]] = {}
    for each in (*_throughput(), *_engine_level(), *_experts(), *_wide(), *_generations()):
        runs.setdefault(replace(each, measured=0.0, file=""), []).append(each)
    found = [
        replace(same[0], measured=statistics.median(each.measured for each in same), file=", ".join(each.file for each in same))
        for same in runs.values()
    ]
    return sorted(found, key=lambda each: (each.model, each.metric, each.batch, each.input_len, each.kv_cache_dtype))


def weight_points() -> list[MeasuredPoint]:
    """Times per token with weights in other formats, on an H100: bench/results/h100/weights-MODEL-FORM.json."""
    found = []
    for form, weights in WEIGHT_FORMS.items():
        for path in sorted((RESULTS.parent / "h100").glob(f"weights-*-{form}.json")):
            model = path.stem.removeprefix("weights-").removesuffix(f"-{form}")
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
                shape = (model, None, cell["batch_size"], cell["input_len"], cell["output_len"])
                measured = cell["time_per_output_token_ms"]
                found.append(MeasuredPoint(*shape, "per_token_ms", measured, path.name, gpu="h100", weights=weights))
    return found


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _throughput() -> Iterator[MeasuredPoint]:
    """Mean times per token of `headway bench throughput`. Its first tokens of 2026-11-21 are of an engine whose prompts were not
    graphs yet, and are left out; that of 8,190 tokens was measured later."""
    for path in sorted(RESULTS.glob("throughput-*.json")):
        read = json.loads(path.read_text(encoding="utf-8"))
        cache = "fp8_e4m3" if "fp8_e4m3" in read["command"] else "auto"
        for cell in read["cells"]:
            if cell["input_len"] is None:
                continue
            shape = (read["model"], None, cell["batch_size"], cell["input_len"], cell["output_len"])
            if cell["output_len"] > 2:
                yield MeasuredPoint(*shape, "per_token_ms", cell["time_per_output_token_ms"], path.name, cache)
            else:
                yield MeasuredPoint(*shape, "first_token_ms", cell["time_to_first_token_ms"], path.name, cache)


def _engine_level() -> Iterator[MeasuredPoint]:
    """Whole generations through `auto`."""
    read = _read("crossover-engine.json")
    for cell in read["cells"]:
        if cell["backend"] == "auto":
            shape = (read["model"], None, cell["batch"], cell["query_len"], cell["kv_len"] - cell["query_len"])
            yield MeasuredPoint(*shape, "seconds", cell["median_us"] * 1e-6, "crossover-engine.json")


def _experts() -> Iterator[MeasuredPoint]:
    """Models with experts, the best pass of each batch size."""
    shapes: Mapping[str, Any] = _read("experts-vllm.json")["shapes"]
    for model, shape in shapes.items():
        for batch, cell in shape["batches"].items():
            seconds = int(batch) * 512 / cell["headway_tok_s"]
            yield MeasuredPoint(model, shape["layers"], int(batch), 512, 512, "seconds", seconds, "experts-vllm.json")


def _wide() -> Iterator[MeasuredPoint]:
    """More than 256 sequences, and single first tokens."""
    read = _read("engine-wide.json")
    for batch in (320, 512):
        seconds = batch * 256 / read["median"][f"{batch} x 256/256"]
        yield MeasuredPoint("qwen3-0.6b", None, batch, 256, 256, "seconds", seconds, "engine-wide.json", max_num_seqs=512)
    for length, ms in read["first_token_ms"].items():
        yield MeasuredPoint("qwen3-0.6b", None, 1, int(length), 1, "first_token_ms", ms, "engine-wide.json")


def _generations() -> Iterator[MeasuredPoint]:
    """What `measure` has measured."""
    for each in _read("plan-points.json")["points"]:
        yield MeasuredPoint(**{name: value for name, value in each.items() if name != "predicted"} | {"file": "plan-points.json"})
