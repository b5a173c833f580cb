"""Random checkpoints of mixture-of-experts shapes that vLLM and Headway both load, and both engines' speed on them.

moe-vllm.py make FOLDER SHAPE [LAYERS]   writes config.json and bf16 safetensors, made on the GPU (SHAPE: qwen3-30b-a3b, deepseek-v2-lite,
                                         or a config.json of qwen3_moe, qwen2_moe, mixtral, deepseek_v2, deepseek_v3)
moe-vllm.py touched FOLDER               experts touched a layer and decode step, counted in Headway without graphs
moe-vllm.py vllm|headway FOLDER          output tok/s at 1, 16 and 64 x 512/512, greedy, ignore_eos
moe-vllm.py table FOLDER                 ratio and share of the roofline
Each of the last four writes $OUT/moe-e2e-NAME.json as results arrive. moe-vllm.sh runs all, each in a process of its own.
"""
import json, os, sys, time, types
from pathlib import Path

OUT = Path(os.environ.get("OUT", "."))
BATCHES = [int(n) for n in os.environ.get("BATCHES", "1,16,64").split(",")]
LENGTH = int(os.environ.get("LENGTH", "512"))
PASSES = int(os.environ.get("PASSES", "2"))
DEVICE = os.environ.get("DEVICE", "cuda")
READ, FLOPS = 4194e9, 722e12

SHAPES = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 12, "num_key_value_heads": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936},
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 100000,
        "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 12, "num_key_value_heads": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16", "use_cache": True,
        "v_head_dim": 128, "vocab_size": 102400},
}


def is_sparse(c, i):
    if i in c.get("mlp_only_layers", []): return False
    if "first_k_dense_replace" in c: return i >= c["first_k_dense_replace"] and i % c.get("moe_layer_freq", 1) == 0
    return (i + 1) % c.get("decoder_sparse_step", 1) == 0


def numbers(c):
    e = c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts")
    inner = c.get("moe_intermediate_size", c["intermediate_size"])
    shared = c.get("shared_expert_intermediate_size") or (c.get("n_shared_experts") or 0) * inner
    return e, c["num_experts_per_tok"], inner, shared


def layer_tensors(c, i):
    """(name, shape, what) of one layer; what: norm, in, out (writes to the residual stream), router, correction."""
    H, heads = c["hidden_size"], c["num_attention_heads"]
    at = f"model.layers.{i}."
    yield at + "input_layernorm.weight", (H,), "norm"
    yield at + "post_attention_layernorm.weight", (H,), "norm"
    if "kv_lora_rank" in c:
        nope, rope, v, lora = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        q = c.get("q_lora_rank")
        if q:
            yield at + "self_attn.q_a_proj.weight", (q, H), "in"
            yield at + "self_attn.q_a_layernorm.weight", (q,), "norm"
            yield at + "self_attn.q_b_proj.weight", (heads * (nope + rope), q), "in"
        else:
            yield at + "self_attn.q_proj.weight", (heads * (nope + rope), H), "in"
        yield at + "self_attn.kv_a_proj_with_mqa.weight", (lora + rope, H), "in"
        yield at + "self_attn.kv_a_layernorm.weight", (lora,), "norm"
        yield at + "self_attn.kv_b_proj.weight", (heads * (nope + v), lora), "in"
        yield at + "self_attn.o_proj.weight", (H, heads * v), "out"
    else:
        d, kv = c.get("head_dim") or H // heads, c["num_key_value_heads"]
        for n, rows in (("q", heads), ("k", kv), ("v", kv)):
            yield at + f"self_attn.{n}_proj.weight", (rows * d, H), "in"
            if c["model_type"] == "qwen2_moe": yield at + f"self_attn.{n}_proj.bias", (rows * d,), "bias"
        yield at + "self_attn.o_proj.weight", (H, heads * d), "out"
        if c["model_type"] == "qwen3_moe":
            yield at + "self_attn.q_norm.weight", (d,), "norm"
            yield at + "self_attn.k_norm.weight", (d,), "norm"
    def mlp(at, inner, names=("gate_proj", "up_proj", "down_proj")):
        yield f"{at}{names[0]}.weight", (inner, H), "in"
        yield f"{at}{names[1]}.weight", (inner, H), "in"
        yield f"{at}{names[2]}.weight", (H, inner), "out"
    if not is_sparse(c, i):
        yield from mlp(at + "mlp.", c["intermediate_size"])
        return
    e, _, inner, shared = numbers(c)
    mixtral = c["model_type"] == "mixtral"
    block = at + ("block_sparse_moe." if mixtral else "mlp.")
    yield block + "gate.weight", (e, H), "router"
    if c["model_type"] == "deepseek_v3": yield block + "gate.e_score_correction_bias", (e,), "correction"
    for n in range(e):
        yield from mlp(f"{block}experts.{n}.", inner, ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj"))
    if shared:
        one = c["model_type"] == "qwen2_moe"
        yield from mlp(block + ("shared_expert." if one else "shared_experts."), shared)
        if one: yield block + "shared_expert_gate.weight", (1, H), "in"


def make(folder, shape, layers=None):
    import torch
    from safetensors.torch import save_file
    c = dict(SHAPES[shape]) if shape in SHAPES else json.loads(Path(shape).read_text())
    if layers: c["num_hidden_layers"] = int(layers)
    folder = Path(folder); folder.mkdir(parents=True, exist_ok=True)
    g = torch.Generator(DEVICE).manual_seed(0)
    def draw(shape, what):
        t = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        if what == "norm": return t.fill_(1)
        if what == "correction": return torch.empty(shape, device=DEVICE).normal_(0, 0.02, generator=g)
        if what == "embed": return t.normal_(0, 1, generator=g)
        if what == "bias": return t.normal_(0, 0.1, generator=g)
        t.normal_(0, shape[-1] ** -0.5 * (0.5 if what == "out" else 1), generator=g)
        if what == "router":  # rows of unequal length: experts with longer ones are chosen more often, as in a trained model
            t *= torch.empty(shape[0], 1, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.3, generator=g).exp()
        return t
    index, total, began = {}, 0, time.time()
    def write(number, tensors):
        nonlocal total
        name = f"model-{number:05d}.safetensors"
        held = {n: draw(s, w).cpu() for n, s, w in tensors}
        save_file(held, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(held, name)); total += sum(t.nbytes for t in held.values())
    H, V = c["hidden_size"], c["vocab_size"]
    write(0, [("model.embed_tokens.weight", (V, H), "embed"), ("model.norm.weight", (H,), "norm"), ("lm_head.weight", (V, H), "in")])
    for i in range(c["num_hidden_layers"]): write(i + 1, list(layer_tensors(c, i)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(c, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": c["eos_token_id"]}))
    print(f"{folder}: {total / 1e9:.1f} GB in {time.time() - began:.0f} s", flush=True)


def prompts(c, batch, seed):
    import random
    r = random.Random(seed)
    return [[r.randrange(100, c["vocab_size"] - 2000) for _ in range(LENGTH)] for _ in range(batch)]


def record(who, folder, found):
    OUT.mkdir(exist_ok=True)
    (OUT / f"moe-e2e-{Path(folder).name}-{who}.json").write_text(json.dumps(found, indent=1))


def measure(who, folder, generate, extra):
    c = json.loads((Path(folder) / "config.json").read_text())
    found = {"engine": who, "model": Path(folder).name, "layers": c["num_hidden_layers"], **extra, "tok_s": {}, "passes": {}}
    for batch in BATCHES:
        generate(prompts(c, batch, 999), 16)
        times = []
        for n in range(PASSES + 1):  # the first one warms up
            p = prompts(c, batch, n); t0 = time.perf_counter()
            sizes = generate(p, LENGTH); took = time.perf_counter() - t0
            assert sizes == [LENGTH] * batch, sizes
            times.append(batch * LENGTH / took)
        found["passes"][batch] = times; found["tok_s"][batch] = max(times[1:] or times)
        print(f"{who} {batch} x {LENGTH}/{LENGTH}: {found['tok_s'][batch]:,.0f} tok/s  ({', '.join(f'{t:,.0f}' for t in times)})", flush=True)
        record(who, folder, found)


def vllm(folder):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try: import numba  # noqa: F401
    except Exception:
        stub = types.ModuleType("numba"); f = lambda *a, **k: a[0] if a and callable(a[0]) else (lambda g: g)
        stub.jit = stub.njit = f; stub.prange = range; sys.modules["numba"] = stub
    import torch, vllm as v
    t0 = time.time()
    llm = v.LLM(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2 * LENGTH + 64, max_num_seqs=max(64, *BATCHES), enable_prefix_caching=False, gpu_memory_utilization=0.85)
    ready = time.time() - t0
    def generate(ps, n):
        out = llm.generate([{"prompt_token_ids": p} for p in ps], v.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False), use_tqdm=False)
        return [len(o.outputs[0].token_ids) for o in out]
    measure("vllm", folder, generate, {"version": v.__version__, "ready_s": ready, "torch": torch.__version__, "device": torch.cuda.get_device_name()})


def engine(folder, **options):
    from headway import LLM
    return LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", device=DEVICE, max_model_len=2 * LENGTH + 64, max_num_seqs=max(64, *BATCHES), enable_prefix_caching=False, **options)


def headway(folder):
    import logging, torch
    from headway import SamplingParams
    logging.basicConfig(level=logging.INFO, format="%(message)s"); logging.getLogger("headway").setLevel(logging.INFO)
    t0 = time.time(); llm = engine(folder); ready = time.time() - t0
    def generate(ps, n):
        out = llm.generate([{"prompt_token_ids": p} for p in ps], SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True), use_tqdm=False)
        return [len(o.outputs[0].token_ids) for o in out]
    from importlib import metadata
    kinds = [k.describe() for k in getattr(llm.model.decoder, "expert_kinds", [])]
    measure("headway", folder, generate, {"commit": os.environ.get("HEADWAY_COMMIT", ""), "ready_s": ready, "torch": torch.__version__, "triton": metadata.version("triton"),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE, "experts": kinds, "selection": str(llm.engine.selection) if hasattr(llm.engine, "selection") else ""})
    s = llm.engine.stats
    print("steps", s.num_steps, "graphs", s.num_graph_steps, "pieces", dict(s.steps_in_pieces), "without", dict(s.steps_without_graph), "compiled later", dict(s.compilations), flush=True)


def touched(folder):
    from headway import SamplingParams
    from headway.models.experts.fused import FusedExperts
    c = json.loads((Path(folder) / "config.json").read_text())
    seen, inner = {}, FusedExperts.__call__
    def counting(self, residual, norm, weights):
        n = len(residual)
        if n in BATCHES and on:
            routed = self.method_for(n).route(residual.clone(), norm, weights)
            seen.setdefault(n, []).append(int(routed.experts[:, : self.config.top_k].unique().numel()))
        return inner(self, residual, norm, weights)
    on = False
    FusedExperts.__call__ = counting
    llm = engine(folder, enforce_eager=True)
    for batch in BATCHES:
        on = True
        llm.generate([{"prompt_token_ids": p} for p in prompts(c, batch, 1)], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True), use_tqdm=False)
        on = False
    e, k, _, _ = numbers(c)
    found = {str(n): {"mean": sum(v) / len(v), "least": min(v), "most": max(v), "uniform": e * (1 - (1 - k / e) ** n)} for n, v in seen.items()}
    for n, row in found.items(): print(f"{n} tokens touch {row['mean']:.1f} of {e} experts a layer ({row['least']} to {row['most']}; uniform {row['uniform']:.1f})", flush=True)
    record("touched", folder, found)


def floor_seconds(c, batch, experts):
    """Least time of LENGTH decode steps at the read rate, and of the prompts at the matrix rate."""
    e, k, inner, shared = numbers(c)
    H, dense, per_layer, active = c["hidden_size"], 0, 0, 0
    for i in range(c["num_hidden_layers"]):
        size = sum(2 * (s[0] * s[1]) for n, s, w in layer_tensors(c, i) if len(s) == 2 and ".experts." not in n)
        dense += size; active += size
        if is_sparse(c, i):
            per_layer += 6 * H * inner * experts; active += 6 * H * inner * k
    head = 2 * c["vocab_size"] * H
    kv = c["num_hidden_layers"] * (2 * (c["kv_lora_rank"] + c["qk_rope_head_dim"]) if "kv_lora_rank" in c else 4 * c["num_key_value_heads"] * (c.get("head_dim") or H // c["num_attention_heads"]))
    step = dense + per_layer + head + batch * kv * 1.5 * LENGTH
    return LENGTH * step / READ + batch * LENGTH * active / FLOPS


def table(folder):
    c = json.loads((Path(folder) / "config.json").read_text())
    def get(who):
        p = OUT / f"moe-e2e-{Path(folder).name}-{who}.json"
        return json.loads(p.read_text()) if p.exists() else {}
    v, h, t = get("vllm"), get("headway"), get("touched")
    e, k, _, _ = numbers(c)
    rows = {}
    print(f"{Path(folder).name}, {c['num_hidden_layers']} layers, output tok/s, {LENGTH}/{LENGTH}")
    for n in map(str, BATCHES):
        mean = t.get(n, {}).get("mean", e * (1 - (1 - k / e) ** int(n)))
        best = int(n) * LENGTH / floor_seconds(c, int(n), mean)
        a, b = v.get("tok_s", {}).get(n), h.get("tok_s", {}).get(n)
        rows[n] = {"vllm": a, "headway": b, "ratio": b / a if a and b else None, "experts touched": mean, "roofline tok/s": best, "share": b / best if b else None}
        print(f"  {n:>3}: vLLM {a or 0:,.0f}  Headway {b or 0:,.0f}  ratio {rows[n]['ratio'] or 0:.2f}  touched {mean:.1f}  roofline {best:,.0f}  share {rows[n]['share'] or 0:.0%}", flush=True)
    record("table", folder, rows)


if __name__ == "__main__":
    {"make": make, "vllm": vllm, "headway": headway, "touched": touched, "table": table}[sys.argv[1]](*sys.argv[2:])
