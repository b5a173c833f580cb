"""Latent attention in the engine on a GPU: logits against transformers, graphs against eager, kernels of a decode step.

Run in the repository root:  python mla-engine.py [check] [gather] [profile]   (default: all; writes $OUT/mla-engine.json)
"""
from __future__ import annotations

import json, os, random, sys, tempfile, time
from pathlib import Path

import torch, transformers
from transformers import DeepseekV2Config, DeepseekV3Config

from headway.core.engine.config import EngineConfig
from headway.core.engine.engine import Engine
from headway.core.engine import latent
from headway.core.sampling.params import SamplingParams
from headway.models.device_operations import compile_ahead, fastest_sampling
from headway.models.loader import load_model
from headway.registry import create_registry

WHAT = set(sys.argv[1:]) or {"check", "gather", "profile"}
DEV = torch.device("cuda")
results: dict = {"device": torch.cuda.get_device_name(), "check": [], "faults": []}
registry = create_registry()
SMALL = dict(vocab_size=997, hidden_size=512, intermediate_size=768, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=4096,
             kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=256, first_k_dense_replace=2, num_experts_per_tok=3,
             n_shared_experts=2, n_routed_experts=8, initializer_range=0.05, bos_token_id=1, eos_token_id=2, pad_token_id=0)
CONFIGS = {
    "lite": DeepseekV2Config(**SMALL, q_lora_rank=None, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 0.707, "mscale_all_dim": 0.707}),
    "v3": DeepseekV3Config(**SMALL, q_lora_rank=256, n_group=2, topk_group=1),
    "lite dense": DeepseekV2Config(**{**SMALL, "first_k_dense_replace": 4}, q_lora_rank=None),
    "v3 dense": DeepseekV3Config(**{**SMALL, "first_k_dense_replace": 4}, q_lora_rank=256, n_group=2, topk_group=1),
}
LENS, NEW = (700, 33, 1500), 16


def logits_of(engine: Engine, prompts, n):
    rows = {str(i): [] for i in range(len(prompts))}
    def keep(sampled, logits):
        of = {seq.row: seq.request_id for seq in engine.scheduler.running}
        for row, found in zip(sampled.tolist(), logits):
            rows[of[row]].append(found.float().clone())
    engine.executor.observe(keep)
    tokens = {name: [] for name in rows}
    for name, prompt in zip(rows, prompts):
        engine.add_request(name, list(prompt), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
    while engine.has_unfinished:
        for delta in engine.step():
            tokens[delta.request_id] += delta.new_token_ids
            if delta.error: raise RuntimeError(delta.error)
    engine.executor.observe(None)
    return [(tokens[name], torch.stack(rows[name])) for name in rows]


def check() -> None:
    for name, config in CONFIGS.items():
        # In bfloat16 a near tie of two experts may fall the other way than in the float32 reference: those cases are dense.
        dense = "dense" in name
        torch.manual_seed(0)
        reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with tempfile.TemporaryDirectory() as folder:
            reference.save_pretrained(folder)
            reference = reference.to(DEV)
            draw = random.Random(0)
            prompts = [[draw.randrange(3, 990) for _ in range(length)] for length in LENS]
            for dtype, backends, limit in ((("bfloat16", ("triton", "auto", "prefill=auto,decode=hopper_latent", "flash_attn_3"), None),) if dense else (("float32", ("sdpa.math", "triton"), 2e-3), ("bfloat16", ("triton", "auto"), None))):
                decoder = load_model(folder, dtype, DEV, skip_tokenizer_init=True).decoder
                for backend in backends:
                    for eager in (True, False):
                        label = f"{name} {dtype} {backend} {'eager' if eager else 'graphs'}"
                        try:
                            engine = Engine(decoder, registry, EngineConfig(attn_backend=backend, kv_cache_memory=2**28, max_num_batched_tokens=512, max_num_seqs=8, max_model_len=2048, enforce_eager=eager),
                                            sampling=fastest_sampling(DEV), compile_ahead=compile_ahead(DEV))
                        except Exception as error:
                            print(label, type(error).__name__, str(error).splitlines()[0][:160], flush=True)
                            if backend in ("triton", "sdpa.math", "auto"): results["faults"].append(f"{label}: {error}"[:300])
                            continue
                        try:
                            worst, apart = 0.0, []
                            for prompt, (tokens, logits) in zip(prompts, logits_of(engine, prompts, NEW)):
                                with torch.inference_mode():
                                    expected = reference(torch.tensor([[*prompt, *tokens]], device=DEV)).logits[0, len(prompt) - 1 : -1].float()
                                apart.append((logits - expected).abs().amax(-1) / expected.std())
                            again = logits_of(engine, prompts, NEW)  # prefix hits
                            for prompt, (tokens, logits) in zip(prompts, again):
                                with torch.inference_mode():
                                    expected = reference(torch.tensor([[*prompt, *tokens]], device=DEV)).logits[0, len(prompt) - 1 : -1].float()
                                apart.append((logits - expected).abs().amax(-1) / expected.std())
                            every = torch.cat(apart)
                            worst, median, flips = float(every.max()), float(every.median()), int((every > 0.25).sum())
                            # With experts, a few tokens may be routed otherwise in bfloat16; without, none is far off.
                            ok = worst < limit if limit else median < 0.15 and (flips == 0 if dense else flips < len(every) / 4)
                            stats = engine.stats
                            line = {"case": label, "worst": worst, "median": median, "far": flips, "of": len(every), "selection": str(engine.selection), "graph_steps": stats.num_graph_steps, "pieces": dict(stats.steps_in_pieces), "late": dict(stats.compilations) if hasattr(stats, "compilations") else None}
                            results["check"].append(line)
                            print("ok   " if ok else "WRONG", label, f"worst {worst:.2e} median {median:.2e} far {flips} of {len(every)}", engine.selection, "graphs", stats.num_graph_steps, "pieces", dict(stats.steps_in_pieces), "late", line["late"], flush=True)
                            if not ok: results["faults"].append(f"{label}: {worst:.2e}")
                        except Exception as error:
                            results["faults"].append(f"{label}: {type(error).__name__}: {str(error)[:300]}")
                            print("FAILED", results["faults"][-1], flush=True)
                        del engine
                        torch.cuda.empty_cache()
                del decoder
            del reference
            torch.cuda.empty_cache()


def gather() -> None:
    """An extend by absorbed triton, absorbed FA3, and gathered contexts through hopper, triton and FA3: us a layer."""
    from dataclasses import replace
    from headway.core.contract.layout import LATENT, NHD, CacheGeometry
    from headway.core.contract.metadata import AttentionMetadata, Phase
    from headway.core.contract.spec import AttentionSpec
    from headway.models.config import LatentConfig
    from headway.models.fused.latent import FusedLatentLayer, LatentKernels
    import triton
    sizes = LatentConfig(512, 128, 64, 128)
    for heads in (16, 128):
        spec = AttentionSpec(heads, 1, 576, 192**-0.5, torch.bfloat16, DEV, v_head_dim=512, value_in_key=True)
        dense = replace(spec, num_kv_heads=heads, head_dim=192, v_head_dim=128, value_in_key=False, dense=True)
        layer = FusedLatentLayer(dense, sizes, torch.randn(heads * 256, 512, device=DEV, dtype=torch.bfloat16) * 0.04, LatentKernels(DEV))
        for batch, new, length in ((1, 32, 4096), (1, 64, 4096), (1, 128, 4096), (1, 256, 4096), (1, 512, 4096), (1, 2048, 4096), (4, 64, 2048), (4, 256, 2048), (1, 512, 32768), (1, 2048, 16384)):
            if heads == 128 and length > 8192: continue
            blocks = -(-length // 64)
            cache = LATENT.allocate(CacheGeometry.of(spec, batch * blocks + 4, 64))
            cache.key.normal_()
            tables = [[b * blocks + i for i in range(blocks)] for b in range(batch)]
            view = AttentionMetadata.build([new] * batch, [length - new] * batch, tables, 64, DEV, num_blocks=batch * blocks + 4)
            q = torch.randn(batch * new, heads, 192, device=DEV, dtype=torch.bfloat16)
            lat = torch.randn(batch * new, 1, 576, device=DEV, dtype=torch.bfloat16)
            out = torch.empty(batch * new, heads, 128, device=DEV, dtype=torch.bfloat16)
            times, answers = {}, {}
            def time_of(name, backend, plan):
                run = lambda: latent.attend(layer, Phase.EXTEND, backend, plan, (q, lat, out), cache, view.slot_mapping, False)
                run(); answers[name] = out.clone()
                times[name] = round(triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median") * 1000, 1)
            for name in ("triton", "flash_attn_3", *(["hopper_latent"] if "hopper" in WHAT or os.environ.get("HOPPER") else [])):
                if registry.supports(name, spec, LATENT, 64, Phase.EXTEND):
                    made = registry.backend(name)(spec, LATENT, 64)
                    time_of(f"absorbed {name}", made, made.plan(view))
            cached = replace(dense, dense=False)
            for name in ("hopper", "triton", "flash_attn_3"):
                if registry.supports(name, cached, NHD, 64, Phase.EXTEND):
                    made = registry.backend(name)(cached, NHD, 64)
                    time_of(f"gathered {name}", made, latent.plan_gathered(view, made))
            first = next(iter(answers.values()))
            apart = max(float((a.float() - first.float()).norm() / first.float().norm()) for a in answers.values())
            rule = latent.gathers(view, spec, dense)
            print(f"{heads} heads {batch} x {new} of {length}: {times} apart {apart:.1e} rule {'gathers' if rule else 'absorbs'}", flush=True)
            results.setdefault("gather", []).append({"heads": heads, "batch": batch, "new": new, "length": length, "us": times, "apart": apart, "rule": rule})
            if apart > 2e-2: results["faults"].append(f"gather {heads} {batch} {new} {length}: apart {apart}")
    for heads, rows in ((16, 1), (16, 16), (16, 64), (16, 128), (16, 256), (16, 512), (128, 64)):
        dense = AttentionSpec(heads, heads, 192, 1.0, torch.bfloat16, DEV, v_head_dim=128, dense=True)
        layer = FusedLatentLayer(dense, sizes, torch.randn(heads * 256, 512, device=DEV, dtype=torch.bfloat16), LatentKernels(DEV))
        q = torch.randn(rows, heads, 192, device=DEV, dtype=torch.bfloat16)
        attended, out = torch.randn(rows, heads, 512, device=DEV, dtype=torch.bfloat16), torch.empty(rows, heads, 128, device=DEV, dtype=torch.bfloat16)
        from headway.models.latent import PlainLatentLayer
        line = {}
        for name, kind in (("ours", FusedLatentLayer), ("torch", PlainLatentLayer)):
            line[name] = [round(triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median") * 1000, 1) for run in (lambda: kind.absorb(layer, q), lambda: kind.project(layer, attended, out))]
        print(f"absorb and project, {heads} heads {rows} rows: {line}", flush=True)
        results.setdefault("products", []).append({"heads": heads, "rows": rows, "us": line})


def profile() -> None:
    """A decode step of 8 dense DeepSeek-V2-Lite layers: kernels and their times."""
    config = DeepseekV2Config(**{**SMALL, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 8, "first_k_dense_replace": 8, "vocab_size": 102400}, q_lora_rank=None)
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = ["DeepseekV2ForCausalLM"]
        config.save_pretrained(folder)
        decoder = load_model(folder, "bfloat16", DEV, "dummy", skip_tokenizer_init=True).decoder
    for backend in ("auto", "triton"):
        engine = Engine(decoder, registry, EngineConfig(attn_backend=backend, max_num_seqs=64, max_model_len=2048, gpu_memory_utilization=0.5), sampling=fastest_sampling(DEV), compile_ahead=compile_ahead(DEV))
        for batch in (1, 16, 64):
            for number in range(batch):
                engine.add_request(f"{batch}-{number}", [3 + (i * 7 + number) % 900 for i in range(512)], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
            for _ in range(20): engine.step()
            torch.cuda.synchronize(); started = time.perf_counter()
            for _ in range(20): engine.step()
            torch.cuda.synchronize(); step = (time.perf_counter() - started) / 20 * 1e6
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
                for _ in range(4): engine.step()
                torch.cuda.synchronize()
            rows = sorted(((e.key[:70], e.count / 4, e.self_device_time_total / 4) for e in prof.key_averages() if e.self_device_time_total), key=lambda r: -r[2])[:16]
            print(f"--- {backend} {engine.selection} batch {batch}: {step:.0f} us a step (8 layers), graphs {engine.stats.num_graph_steps} of {engine.stats.num_steps}", flush=True)
            for key, count, us in rows: print(f"   {us:8.1f} us {count:5.1f} x {key}")
            results.setdefault("profile", []).append({"backend": backend, "batch": batch, "step_us": step, "rows": rows})
            while engine.has_unfinished: engine.step()
        del engine
        torch.cuda.empty_cache()


for name in ("check", "gather", "profile"):
    if name in WHAT:
        try: globals()[name]()
        except Exception:
            import traceback; traceback.print_exc(); results["faults"].append(name)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "mla-engine.json").write_text(json.dumps(results, default=str))
print("faults:", results["faults"])
