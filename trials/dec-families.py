"""families on a GPU. Run in the repository root: python /path/dec-families.py [--parent FOLDER_OF_AN_OLDER_CHECKOUT]

1. correctness: the GPU tests of the fused operations and of the engine (float64 / plain path / graphs).
2. every architecture's logits through the engine with bf16 and float32 on CUDA, graphs on, against the plain path.
3. decode steps of dense shapes (qwen3-0.6b, llama-3-8b): must equal those of before ("same launches"), and of new families' shapes.
JSON in $OUT/dec-families.json.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

out = Path(os.environ.get("OUT", "."))
result = {}


def tests():
    files = ["tests/models/fused/test_gpu.py", "tests/headway/test_engine_gpu.py", "tests/models/test_invariant.py"]
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n0", "-x", *files], capture_output=True, text=True)
    result["tests"] = {"rc": run.returncode, "tail": run.stdout[-1500:]}
    print(run.stdout[-1500:])


def launches(decoder, batch):
    import torch
    from torch.profiler import ProfilerActivity, profile

    ids = torch.randint(0, decoder.vocab_size, (batch,), device="cuda", dtype=torch.int32)
    positions = torch.full_like(ids, 100)
    spec = decoder.attention_specs[0]
    fake = torch.randn(batch, spec.num_heads, spec.v_head_dim, dtype=spec.dtype, device="cuda")
    step = lambda: decoder.compute_logits(decoder(ids, positions, lambda *_: fake))
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in prof.key_averages())


def steps():
    import torch
    import transformers as t
    from headway.bench.kernel.decode_step import CapturedStep, paged_attention, shapes, step_bytes
    from headway.models.decoder import Decoder
    from headway.models.dummy import DummyWeights
    from headway.models.families import read_decoder_config
    from headway.tuning.timing import Timer

    device = torch.device("cuda")
    models = {
        "qwen3-0.6b": shapes("qwen3-0.6b"),
        "llama-3-8b": shapes("llama-3-8b"),
        "gemma3-270m": read_decoder_config(t.Gemma3TextConfig(
            hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4, num_key_value_heads=1,
            head_dim=256, sliding_window=512, vocab_size=262144)),
        "gemma2-2b": read_decoder_config(t.Gemma2Config()),
        "phi3-mini": read_decoder_config(t.Phi3Config(pad_token_id=0)),
        "gpt2-xl": read_decoder_config(t.GPT2Config(n_embd=1600, n_layer=48, n_head=25)),
        "olmo2-1b": read_decoder_config(t.Olmo2Config(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                                                     num_attention_heads=16, num_key_value_heads=16, vocab_size=100352)),
        "starcoder2-3b": read_decoder_config(t.Starcoder2Config()),
    }
    rows = []
    for name, config in models.items():
        with torch.inference_mode():
            decoder = Decoder(config, DummyWeights(torch.bfloat16, device))
            for batch in (1, 8, 64):
                attention = paged_attention(decoder, "triton", batch, 512)
                step = CapturedStep(decoder, batch, attention, 512)
                us = Timer().time(step, device).median_us
                floor = step_bytes(decoder, batch, 512) / 4192e3
                row = {"model": name, "batch": batch, "us": us, "floor_us": floor, "launches": launches(decoder, batch)}
                rows.append(row)
                print(f"{name:16} batch {batch:3}: {us:8.0f} us, floor {floor:7.0f} ({floor / us:4.0%}), {row['launches']} launches without attention")
                del attention, step
            del decoder
        torch.cuda.empty_cache()
    result["steps"] = rows


def logits():
    """Whole engine on CUDA, graphs on, float32 against transformers; the CPU test's rows."""
    import random
    import tempfile

    import torch

    sys.path[:0] = ["tests/support", "tests/models"]
    torch.backends.cuda.matmul.allow_tf32 = False
    import test_architectures as rows
    from headway.core.engine.config import EngineConfig
    from headway.core.engine.engine import Engine
    from headway.models.loader import load_model
    from headway.registry import create_registry
    from observed import logits_by_transformers, observed, save_random

    errors = {}
    for name, config in rows.ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            reference = save_random(config, Path(folder))
            decoder = load_model(folder, "float32", "cuda", skip_tokenizer_init=True).decoder
            try:
                engine = Engine(decoder, create_registry(), EngineConfig(
                    attn_backend="triton", block_size=16, kv_cache_memory=2**24, max_num_batched_tokens=24, max_num_seqs=8, async_scheduling=False))
                draw = random.Random(0)
                prompts = [[draw.randrange(3, rows.VOCAB) for _ in range(length)] for length in rows.PROMPT_LENS]
                worst = 0.0
                for prompt, (tokens, found, _) in zip(prompts, observed(engine, prompts, rows.MAX_TOKENS)):
                    expected = logits_by_transformers(reference, prompt, tokens)
                    worst = max(worst, float((found.cpu() - expected).abs().max()))
                errors[name] = worst
            except Exception as error:  # noqa: BLE001
                errors[name] = f"{type(error).__name__}: {error}"
            print(f"{name:36} {errors[name]}")
    result["logits, float32, max abs error"] = errors


for part in (tests, logits, steps):
    try:
        part()
    except Exception as error:  # noqa: BLE001
        result[part.__name__ + " failed"] = f"{type(error).__name__}: {error}"
        print(part.__name__, "failed:", error)
    (out / "dec-families.json").write_text(json.dumps(result, indent=1))
