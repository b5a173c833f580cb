"""The transformers adapter on a GPU: right first, then its speed beside the native decoder's. Run in the repository's root.

    python ada-speed.py [--check-only | --speed-only] [--long]

Part 1 saves tiny random models (float32 and bfloat16) and compares the engine's logits, graphs on, with transformers' eager run.
Part 2 times Qwen3-0.6B shapes with dummy weights: native, adapter compiled, adapter uncompiled; 64 x 512/512 and 1 x 512/512.
Writes $OUT/ada-speed.json.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from headway import LLM, SamplingParams

OUT = Path(os.environ.get("OUT", "."))
DEVICE = "cuda"
VOCABULARY = 512
NEW = 24
LENS = (13, 40, 97, 150, 33)
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.08, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
LATENT = dict(
    num_key_value_heads=8, kv_lora_rank=128, q_lora_rank=96, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, n_group=2, topk_group=1, first_k_dense_replace=1,
)
ALTERNATING = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=32, head_dim=64)
MODELS = {
    "Qwen3ForCausalLM": dict(head_dim=64),
    "LlamaForCausalLM": dict(head_dim=64),
    "Gemma2ForCausalLM": dict(query_pre_attn_scalar=40, **ALTERNATING),
    "Gemma3ForCausalLM": dict(query_pre_attn_scalar=40, **ALTERNATING),
    "GPT2LMHeadModel": dict(num_attention_heads=4),
    "OPTForCausalLM": dict(num_attention_heads=4, ffn_dim=512, word_embed_proj_dim=256, init_std=0.08),
    "GPTNeoXForCausalLM": dict(num_attention_heads=4),
    "Phi3ForCausalLM": dict(num_attention_heads=4),
    "MixtralForCausalLM": dict(num_local_experts=8, head_dim=64),
    "Qwen3MoeForCausalLM": dict(head_dim=64, **EXPERTS),
    "GptOssForCausalLM": dict(num_local_experts=8, num_experts_per_tok=2, **ALTERNATING),
    "DeepseekV3ForCausalLM": LATENT,
}
TOLERANCE = {"float32": 0.02, "bfloat16": 0.2}
"""Of the largest logit: the products of the kernels are of TF32 kind at most; bfloat16 rounds between any two operations."""


def free() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def save(name: str, folder: str) -> object:
    torch.manual_seed(0)
    config = getattr(transformers, name).config_class(**{**SIZES, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key or "ln_" in key or "sinks" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def check(name: str, dtype: str, compiled: bool) -> dict:
    free()
    with tempfile.TemporaryDirectory() as folder:
        reference = save(name, folder)
        seen: dict[int, list] = defaultdict(list)
        began = time.perf_counter()
        llm = LLM(
            folder, dtype=dtype, device=DEVICE, model_impl="transformers", torch_compile=compiled, skip_tokenizer_init=True,
            max_num_seqs=8, max_num_batched_tokens=96, kv_cache_memory="256MiB", autotune_budget=0.0,
        )
        started = time.perf_counter() - began
    # In float32 on the GPU: what both are compared with.
    reference = reference.to(DEVICE, torch.float32)
    prompts = [torch.randint(1, VOCABULARY, (length,)).tolist() for length in LENS]

    def look(rows, logits):
        for row, own in zip(rows.tolist(), logits.float().clone()):
            seen[row].append(own)

    llm.engine.executor.observe(look)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    worst = 0.0
    for _ in range(2):  # the second time the prompts are in the prefix cache
        seen.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = {tuple(torch.stack(own).argmax(-1).tolist()[:NEW]): torch.stack(own)[:NEW] for own in seen.values()}
        for prompt, output in zip(prompts, outputs):
            written = output.outputs[0].token_ids
            assert output.outputs[0].error is None, output.outputs[0].error
            with torch.inference_mode():
                ids = torch.tensor([prompt + list(written[:-1])], device=DEVICE)
                expected = reference(ids, use_cache=False).logits[0][len(prompt) - 1 :].float()
            ours = found.get(tuple(written))
            if ours is None:
                return dict(model=name, dtype=dtype, compiled=compiled, ok=False, why="the logits of a completion were not found")
            worst = max(worst, float((ours - expected).abs().max() / expected.abs().max()))
    stats = llm.engine.stats
    row = dict(
        model=name, dtype=dtype, compiled=compiled, ok=worst < TOLERANCE[dtype], error=worst, start_seconds=round(started, 1),
        steps=stats.num_steps, graph_steps=stats.num_graph_steps, in_pieces=dict(stats.steps_in_pieces),
        without_graph=dict(stats.steps_without_graph), late=dict(stats.compilations),
        backends=sorted(set(llm.engine.selection.names.values())),
    )
    del llm
    return row


def speed(label: str, batch: int, **options: object) -> dict:
    free()
    began = time.perf_counter()
    llm = LLM(
        "qwen3-0.6b", load_format="dummy", device=DEVICE, skip_tokenizer_init=True, max_num_seqs=batch, max_model_len=1152,
        kv_cache_memory="12GiB", **options,
    )
    started = time.perf_counter() - began
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True)
    seconds = []
    for _ in range(4):
        prompts = torch.randint(10, 150000, (batch, 512), generator=generator).tolist()
        torch.cuda.synchronize()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        assert all(len(output.outputs[0].token_ids) == 512 for output in outputs)
    stats = llm.engine.stats
    row = dict(
        label=label, batch=batch, tokens_per_second=batch * 512 / statistics.median(seconds[1:]), start_seconds=round(started, 1),
        implementation=llm.model.implementation, steps=stats.num_steps, graph_steps=stats.num_graph_steps,
        late=dict(stats.compilations), selection=str(llm.engine.selection),
    )
    del llm
    return row


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    report: dict = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, transformers=transformers.__version__)
    checks, speeds = [], []
    if "--speed-only" not in sys.argv:
        cases = [(name, "bfloat16", True) for name in MODELS]
        cases += [("Qwen3ForCausalLM", "float32", compiled) for compiled in (True, False)]
        cases += [(name, "bfloat16", False) for name in ("Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel")]
        for case in cases:
            try:
                row = check(*case)
            except Exception as error:  # the next model may work
                row = dict(model=case[0], dtype=case[1], compiled=case[2], ok=False, why=f"{type(error).__name__}: {error}"[:1500])
            checks.append(row)
            print("check", json.dumps(row)[:700], flush=True)
    if "--check-only" not in sys.argv:
        for batch in (64, 1):
            for label, options in (
                ("native", {"model_impl": "headway"}),
                ("adapter, compiled", {"model_impl": "transformers", "torch_compile": True}),
                ("adapter, uncompiled", {"model_impl": "transformers", "torch_compile": False}),
            ):
                try:
                    row = speed(label, batch, **options)
                except Exception as error:
                    row = dict(label=label, batch=batch, why=f"{type(error).__name__}: {error}"[:1500])
                speeds.append(row)
                print("speed", json.dumps(row)[:600], flush=True)
        for batch in (64, 1):
            of = {row["label"]: row.get("tokens_per_second") for row in speeds if row["batch"] == batch}
            for label, rate in of.items():
                if rate and of.get("native"):
                    print(f"{batch:3d} x 512/512  {label:22s} {rate:10.0f} tok/s  {rate / of['native']:.2f} of native")
    report.update(checks=checks, speeds=speeds)
    (OUT / "ada-speed.json").write_text(json.dumps(report, indent=1))
    print("checks passed:", sum(bool(row["ok"]) for row in checks), "of", len(checks))


if __name__ == "__main__":
    main()
