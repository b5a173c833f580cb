"""Latent (MLA) kernels on a GPU: correct first, then a sweep of triton's decode beside FA3, FlashInfer and FlashMLA.

Run in the repository root:  python mla-kernels.py [--quick] [--sweep]   (writes $OUT/mla-kernels.json)
  --sweep: triton's configurations too (a minute more). Our CUDA kernel (hopper_latent) is checked in a process of its own first: it may hang.
Peers are optional: HEADWAY_FA3_LIBRARY for FA3; flashinfer importable; FLASHMLA_LIBRARY=path/_flashmla_C.abi3.so (or vllm on the path).
"""
from __future__ import annotations

import dataclasses, importlib.util, itertools, json, math, os, sys, time, traceback
from pathlib import Path

import torch, triton
from headway.backends.triton.backend import TritonAttention
from headway.backends.triton.configs import DecodeConfig, latent_config, architecture
from headway.core.contract.layout import LATENT, CacheGeometry
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.spec import AttentionSpec
from headway.registry import create_registry
from headway.testing.cases import make_case, parse_case
from headway.testing.reference import reference_with_lse, relative_error, run_backend

DEV = torch.device("cuda")
QUICK = "--quick" in sys.argv
READ = 4192.0  # GB/s
results: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "cells": [], "errors": []}
registry = create_registry()
writer = registry.layout("latent").load_writer(DEV)


def spec(heads: int, **more) -> AttentionSpec:
    return AttentionSpec(num_heads=heads, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5, dtype=torch.bfloat16, device=DEV, value_in_key=True, **more)


def bench(run, reps=80) -> float:
    return triton.testing.do_bench(run, warmup=15, rep=reps, return_mode="median") * 1000


# ---------------------------------------------------------------- correctness
def correct() -> None:
    worst = 0.0
    cases = [("8q1s700_3q1s17_1q1s4096", 1), ("1q4s300_3q2s90", 8), ("1q1s20000", 1), ("2q64s500_1q33s33", 1), ("3q1s1", 1)]
    for heads, (text, verify), block in itertools.product((16, 20, 64, 128), cases, (16, 64)):
        case = make_case(parse_case(text, verify), spec(heads), LATENT, block, writer, decode_query_len=verify, poison=math.nan, padding_rows=1 if verify == 1 and "q1s" in text else 0)
        backend = TritonAttention(case.spec, LATENT, block)
        lse = torch.full((heads, len(case.q)), math.nan, device=DEV)
        try:
            out = run_backend(backend, case, lse)
            expected, sums = reference_with_lse(case)
            error = relative_error(out, expected, case)
            real = torch.repeat_interleave(torch.tensor(case.metadata.kv_lens) > 0, torch.tensor(case.metadata.query_lens)).to(DEV)
            lse_error = float((lse - sums)[:, real].abs().max())
            # the same through a graph, replayed at other lengths
            worst = max(worst, error)
            ok = error < 8e-3 and lse_error < 2e-2
            if not ok:
                results["errors"].append(f"{heads} heads {text} block {block}: error {error:.2e} lse {lse_error:.2e}")
                print("WRONG", results["errors"][-1], flush=True)
        except Exception as e:
            results["errors"].append(f"{heads} heads {text} block {block}: {type(e).__name__}: {str(e)[:300]}")
            print("FAILED", results["errors"][-1], flush=True)
    for dtype in (torch.float16, torch.float32):
        s = dataclasses.replace(spec(16), dtype=dtype)
        case = make_case(parse_case("2q1s300_1q1s5"), s, LATENT, 16, writer, poison=math.nan)
        try:
            error = relative_error(run_backend(TritonAttention(s, LATENT, 16), case), reference_with_lse(case)[0], case)
            print(dtype, f"{error:.2e}", flush=True)
            if error > TritonAttention.tolerance[dtype]:
                results["errors"].append(f"{dtype}: error {error:.2e}")
        except Exception as e:
            results["errors"].append(f"{dtype}: {type(e).__name__}: {str(e)[:300]}")
            print("FAILED", results["errors"][-1], flush=True)
    print(f"correct: worst relative error {worst:.2e}, {len(results['errors'])} faults", flush=True)
    results["worst_error"] = worst


def correct_hopper() -> int:
    """Our CUDA kernel alone, in a process of its own (a kernel that hangs must not take the rest along)."""
    from headway.backends.hopper.latent_backend import HopperLatent
    faults, worst = 0, 0.0
    cases = [("1q1s64", 1), ("1q1s1", 1), ("2q1s700_1q1s130", 1), ("8q1s700_3q1s17_1q1s4096", 1), ("1q4s300_3q2s90", 8), ("1q1s20000", 1), ("2q64s500_1q33s100", 1), ("1q300s1300", 1), ("3q5s77", 1), ("1q128s128", 1)]
    for heads, (text, verify), block, dtype in itertools.product((16, 20, 64, 128, 1), cases, (64, 16, 48), (torch.bfloat16, torch.float16)):
        if dtype is torch.float16 and (heads, block) != (16, 64):
            continue
        if block == 48 and heads not in (16, 128):
            continue
        s = dataclasses.replace(spec(heads), dtype=dtype)
        case = make_case(parse_case(text, verify), s, LATENT, block, writer, decode_query_len=verify, poison=math.nan, padding_rows=1 if verify == 1 and "1q1s" in text else 0)
        label = f"hopper_latent {heads} heads {text} block {block} {dtype}"
        try:
            backend = HopperLatent(s, LATENT, block)
            phases = [v.phase for v in (case.metadata.prefill, case.metadata.decode) if v is not None]
            if any(ph is Phase.PREFILL for ph in phases):
                continue
            lse = torch.full((heads, len(case.q)), math.nan, device=DEV)
            out = run_backend(backend, case, lse)
            torch.cuda.synchronize()
            expected, sums = reference_with_lse(case)
            real = torch.repeat_interleave(torch.tensor(case.metadata.kv_lens) > 0, torch.tensor(case.metadata.query_lens)).to(DEV)
            error, lse_error = relative_error(out, expected, case), float((lse - sums)[:, real].abs().max())
            worst = max(worst, error)
            if not (error < 8e-3 and lse_error < 2e-2):
                faults += 1
                print("WRONG", label, f"error {error:.2e} lse {lse_error:.2e}", flush=True)
                if faults == 1:
                    rows = (out.float() - expected.float()).abs().amax(-1)
                    print("   by token and head:", rows[:4, :20].cpu().tolist(), flush=True)
                    print("   by column block of 64, token 0 head 0:", (out[0, 0].float() - expected[0, 0].float()).abs().view(8, 64).amax(1).tolist(), flush=True)
        except Exception as e:
            faults += 1
            print("FAILED", label, type(e).__name__, str(e)[:300], flush=True)
            if "CUDA" in str(e) or "illegal" in str(e):
                return faults
    print(f"hopper_latent: worst relative error {worst:.2e}, {faults} faults", flush=True)
    return faults


# ---------------------------------------------------------------- inputs for timing
class Step:
    def __init__(self, heads: int, lens: list[int], block: int, query_len: int = 1) -> None:
        self.spec, self.block, self.lens, self.heads, self.query_len = spec(heads), block, lens, heads, query_len
        counts = [-(-n // block) for n in lens]
        self.blocks = sum(counts) + 8
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(0)).tolist()
        tables = [[order.pop() for _ in range(c)] for c in counts]
        geometry = CacheGeometry.of(self.spec, self.blocks, block)
        self.cache = LATENT.allocate(geometry)
        self.cache.key.normal_()
        self.metadata = AttentionMetadata.build([query_len] * len(lens), [n - query_len for n in lens], tables, block, DEV, decode_query_len=max(query_len, 1) if query_len <= 8 else 1, num_blocks=self.blocks)
        self.q = torch.randn(len(lens) * query_len, heads, 576, device=DEV, dtype=torch.bfloat16)
        self.out = torch.empty(len(lens) * query_len, heads, 512, device=DEV, dtype=torch.bfloat16)
        self.bytes = sum(lens) * 1152 + self.q.nbytes + self.out.nbytes
        self.flops = 2 * heads * query_len * sum(lens) * (576 + 512)

    def reference(self) -> torch.Tensor:
        from headway.testing.cases import Case
        k = torch.zeros(len(self.q), 1, 576, device=DEV, dtype=torch.bfloat16)
        case = Case(self.spec, self.metadata, self.cache, self.q, k, k[..., :512])
        return reference_with_lse(case)[0]


def error_of(step: Step, out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- peers
def fa3(step: Step):
    backend = registry.backend("flash_attn_3")
    support = registry.supports("flash_attn_3", step.spec, LATENT, step.block, Phase.DECODE)
    if not support:
        raise RuntimeError(str(support))
    made = backend(step.spec, LATENT, step.block)
    plan = made.plan(step.metadata)
    return lambda: made.decode(step.q, step.cache, plan, step.out)


def hopper_latent(step: Step):
    from headway.backends.hopper.latent_backend import HopperLatent
    made = HopperLatent(step.spec, LATENT, step.block)
    plan = made.plan(step.metadata)
    return lambda: made.decode(step.q, step.cache, plan, step.out)


def hopper_splits(step: Step, expected: torch.Tensor, splits_list: list[int]) -> None:
    from headway.backends.hopper.latent_backend import HopperLatent
    line = {}
    for splits in splits_list:
        made = HopperLatent(step.spec, LATENT, step.block)
        made._decode._num_splits = splits
        plan = made.plan(step.metadata)
        step.out.zero_()
        run = lambda: made.decode(step.q, step.cache, plan, step.out)
        run()
        error = error_of(step, step.out, expected)
        line[splits] = round(bench(run, 40), 1) if error < 8e-3 else f"wrong {error:.1e}"
    print("    hopper_latent by splits:", line, flush=True)
    results.setdefault("hopper_splits", {})[f"{step.heads}x{len(step.lens)}x{step.lens[0]}"] = line


def flashinfer_mla(step: Step, kind: str):
    import flashinfer
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(256 << 20, dtype=torch.int8, device=DEV), backend=kind)
    counts = torch.tensor([-(-n // step.block) for n in step.lens], dtype=torch.int32)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    table = step.metadata.block_table.cpu()
    indices = torch.cat([table[i, : int(c)] for i, c in enumerate(counts)]).int()
    qo = torch.arange(0, len(step.lens) + 1, dtype=torch.int32) * step.query_len
    wrapper.plan(qo.to(DEV), indptr.to(DEV), indices.to(DEV), torch.tensor(step.lens, dtype=torch.int32).to(DEV), step.heads, 512, 64, step.block, True, step.spec.scale, torch.bfloat16, torch.bfloat16)
    q_nope, q_pe = step.q[..., :512].contiguous(), step.q[..., 512:].contiguous()
    rows = step.cache.key.squeeze(2)
    ckv, kpe = rows[..., :512], rows[..., 512:]
    return lambda: wrapper.run(q_nope, q_pe, ckv, kpe, out=step.out)


def _flashmla_op():
    path = os.environ.get("FLASHMLA_LIBRARY")
    if not path:
        found = importlib.util.find_spec("vllm")
        roots = [Path(found.origin).parent] if found and found.origin else []
        roots += [Path(os.environ["VLLM_SITE"]) / "vllm"] if "VLLM_SITE" in os.environ else []
        roots += [Path(os.environ["HEADWAY_FA3_LIBRARY"]).parent.parent, Path(os.environ["HEADWAY_FA3_LIBRARY"]).parent] if "HEADWAY_FA3_LIBRARY" in os.environ else []
        path = next((str(p) for r in roots for p in r.rglob("_flashmla_C*.so")), None)
    if not path:
        raise RuntimeError("no _flashmla_C library")
    torch.ops.load_library(path)
    for name in ("dense_decode_fwd", "fwd_kvcache_mla"):
        if hasattr(torch.ops._flashmla_C, name):
            return name, getattr(torch.ops._flashmla_C, name)
    raise RuntimeError(f"{path}: no dense decode op")


def flashmla(step: Step):
    if step.block != 64:
        raise RuntimeError("block size 64 alone")
    name, op = _flashmla_op()
    q = step.q.view(len(step.lens), step.query_len, step.heads, 576)
    args = (q, step.cache.key, 512, step.metadata.seq_lens, step.metadata.block_table, step.spec.scale, True)
    if name == "dense_decode_fwd":
        state = [None, None]
        more = len(op.default._schema.arguments) - len(args) - 2
        def run():
            out, lse, state[0], state[1] = op(*args, *state, *[None] * more)
            step.result = out.view(step.out.shape)
        return run
    md, splits = torch.ops._flashmla_C.get_mla_decoding_metadata(step.metadata.seq_lens, step.query_len * step.heads, 1, None, False, None)
    def run():
        out, lse = op(*args, md, splits)
        step.result = out.view(step.out.shape)
    return run


PEERS = {"hopper_latent": hopper_latent, "fa3": fa3, "flashinfer-fa3": lambda s: flashinfer_mla(s, "fa3"), "flashinfer-fa2": lambda s: flashinfer_mla(s, "fa2"), "flashmla": flashmla}
_broken: dict[str, str] = {}


def time_peers(step: Step, expected: torch.Tensor) -> dict[str, float]:
    times = {}
    for name, make in PEERS.items():
        if name in _broken:
            continue
        try:
            step.out.zero_(); step.result = step.out
            run = make(step); run()
            error = error_of(step, step.result, expected)
            if not error < 2e-2:
                times[name] = math.nan
                print(f"  {name}: wrong, error {error:.2e}", flush=True)
                continue
            times[name] = bench(run)
        except Exception as e:
            text = f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"
            print(f"  {name}: {text}", flush=True)
            if "block size" not in text:
                _broken[name] = text
                results.setdefault("peers", {})[name] = text
    return times


# ---------------------------------------------------------------- sweep
def configs(rows: int) -> list[DecodeConfig]:
    """(BLOCK_N, warps, stages, BLOCK_M) worth a try; those that do not fit are skipped when they fail."""
    C = lambda n, w, s, m: DecodeConfig(n, num_warps=w, num_stages=s, block_m=m)
    if rows <= 16:
        every = [C(32, 4, 2, 16), C(32, 4, 3, 16), C(32, 4, 4, 16), C(32, 4, 5, 16), C(64, 4, 2, 16), C(64, 4, 3, 16), C(64, 8, 2, 16), C(64, 8, 3, 16), C(32, 8, 3, 16), C(32, 8, 4, 16), C(128, 8, 2, 16), C(32, 2, 3, 16)]
    elif rows <= 32:
        every = [C(64, 4, 2, 16), C(64, 8, 2, 32), C(64, 8, 3, 32), C(64, 4, 2, 32), C(64, 8, 3, 16)]
    else:
        every = [C(64, 8, 2, 64), C(32, 8, 2, 64), C(32, 8, 3, 64), C(32, 8, 4, 64), C(64, 8, 2, 32), C(64, 8, 3, 32), C(64, 8, 3, 16), C(64, 4, 3, 16)]
    return every[:4] if QUICK else every


def sweep(step: Step, expected: torch.Tensor, splits_list: list[int]) -> list[dict]:
    found = []
    rows = step.heads * step.query_len
    for config in configs(rows):
        best = None
        for splits in splits_list:
            try:
                backend = TritonAttention(step.spec, LATENT, step.block, {"num_splits": str(splits)})
                backend._decode._configs = lambda max_query_len, config=config: (config,)
                plan = backend.plan(step.metadata)
                step.out.zero_()
                run = lambda: backend.decode(step.q, step.cache, plan, step.out)
                run(); torch.cuda.synchronize()
                error = error_of(step, step.out, expected)
                if not error < 8e-3:
                    print(f"  WRONG {config} splits {splits}: {error:.2e}", flush=True)
                    results["errors"].append(f"sweep {config} splits {splits}: {error:.2e}")
                    continue
                us = bench(run, 40)
                key = (config.block_n, config.num_warps, config.num_stages, config.block_m)
                found.append({"config": key, "splits": splits, "us": us})
                best = min(best or (us, splits), (us, splits))
            except Exception as e:
                print(f"  {config.block_n}x{config.num_warps}w{config.num_stages}s m{config.block_m} splits {splits}: {type(e).__name__} {str(e).splitlines()[0][:120]}", flush=True)
                break
    return found


def main() -> None:
    started = time.time()
    print(results["device"], torch.__version__, triton.__version__, flush=True)
    import importlib.util, subprocess
    try:
        if importlib.util.find_spec("headway.backends.hopper.latent_backend") is None:
            _broken["hopper_latent"] = "not in this checkout (branch mla-hopper)"
            print("hopper_latent:", _broken["hopper_latent"], flush=True)
        done = "hopper_latent" not in _broken and subprocess.run([sys.executable, __file__, "--hopper-check"], timeout=240, capture_output=True, text=True)
        if done: print(done.stdout[-3000:], done.stderr[-1500:] if done.returncode else "", flush=True)
        if done and done.returncode:
            _broken["hopper_latent"] = "its check failed"
            results["errors"].append("hopper_latent: " + done.stdout[-1500:])
    except subprocess.TimeoutExpired as e:
        _broken["hopper_latent"] = "hangs"
        results["errors"].append("hopper_latent hangs: " + str(e.stdout)[-1000:])
        print("hopper_latent HANGS", str(e.stdout)[-1000:], flush=True)
    if "--sweep" in sys.argv or QUICK:
        correct()
    cells = [(16, [4096] * 64, 64), (16, [16384], 64), (16, [1024] * 16, 64), (16, [1024] * 64, 64), (16, [512], 64), (16, [1024] * 128, 64), (16, [8192] * 8, 16), (128, [4096] * 64, 64), (128, [16384], 64), (128, [2048] * 8, 64)]
    if QUICK:
        cells = cells[:2] + cells[7:9]
    for heads, lens, block in cells:
        step = Step(heads, lens, block)
        expected = step.reference()
        name = f"{heads} heads {len(lens)} x {lens[0]} b{block}"
        floor = step.bytes / READ / 1e3
        peers = time_peers(step, expected)
        n = len(lens)
        most = max(1, 132 * 6 // n)
        splits = [s for s in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if s <= min(most, max(lens) // 32)]
        if n >= 64:
            splits = [s for s in splits if s <= 8]
        found = sorted(sweep(step, expected, splits), key=lambda f: f["us"]) if "--sweep" in sys.argv else []
        ours = TritonAttention(step.spec, LATENT, block)
        plan = ours.plan(step.metadata)
        rule = bench(lambda: ours.decode(step.q, step.cache, plan, step.out))
        results["cells"].append({"cell": name, "floor_us": floor, "flops_us": step.flops / 740e6, "peers": peers, "rule_us": rule, "rule": [plan.config.block_n, plan.config.num_warps, plan.config.num_stages, plan.block_m, plan.chunks.splits], "sweep": found})
        print(f"{name}: bytes {floor:.1f} us, products {step.flops / 740e6:.1f} us; rule {rule:.1f} ({plan.config.block_n}x{plan.config.num_warps}w{plan.config.num_stages}s m{plan.block_m} splits {plan.chunks.splits}); "
              + ", ".join(f"{k} {v:.1f}" for k, v in peers.items()), flush=True)
        seen = set()
        for f in found:
            if tuple(f["config"]) not in seen:
                seen.add(tuple(f["config"]))
                print(f"    {f['us']:.1f} us {step.bytes / f['us'] / 1e3:.0f} GB/s  N{f['config'][0]} w{f['config'][1]} s{f['config'][2]} m{f['config'][3]} splits {f['splits']}", flush=True)
        if "hopper_latent" in peers:
            hopper_splits(step, expected, splits)
        del step, expected
        torch.cuda.empty_cache()
        _write()
    extends()
    print(f"{time.time() - started:.0f} s; faults: {results['errors']}")
    _write()


def extends() -> None:
    """Absorbed extend by triton and FA3; expanded prefill 192/128 by triton, hopper, FA3."""
    for heads, query, length, batch in ((16, 64, 4096, 4), (16, 512, 4096, 1), (16, 2048, 8192, 1), (128, 64, 4096, 1)):
        try:
            step = Step(heads, [length] * batch, 64, query)
            k = torch.zeros(len(step.q), 1, 576, device=DEV, dtype=torch.bfloat16)
            line = {}
            for name in ("triton", "flash_attn_3", "hopper_latent"):
                if name in _broken or not registry.supports(name, step.spec, LATENT, 64, Phase.EXTEND):
                    continue
                made = registry.backend(name)(step.spec, LATENT, 64)
                plan = made.plan(step.metadata)
                line[name] = bench(lambda: made.prefill(step.q, k, k[..., :512], step.cache, plan, step.out))
            results["cells"].append({"cell": f"extend {heads} heads {batch} x {query} of {length}", "us": line})
            print(f"extend absorbed {heads} heads {batch} x {query} of {length}:", {n: round(v, 1) for n, v in line.items()}, flush=True)
        except Exception:
            traceback.print_exc()
    expanded = AttentionSpec(num_heads=16, num_kv_heads=16, head_dim=192, v_head_dim=128, scale=192**-0.5, dtype=torch.bfloat16, device=DEV)
    from headway.core.contract.layout import NHD
    for batch, length in ((1, 512), (1, 2048), (1, 8192), (16, 512), (4, 128)):
        line = {}
        try:
            meta = AttentionMetadata.build([length] * batch, [0] * batch, [[0] * -(-length // 64)] * batch, 64, DEV)
            q = torch.randn(batch * length, 16, 192, device=DEV, dtype=torch.bfloat16)
            k, v = torch.randn_like(q), torch.randn(batch * length, 16, 128, device=DEV, dtype=torch.bfloat16)
            out = torch.empty_like(v)
            cache = NHD.allocate(CacheGeometry.of(expanded, 2, 64))
            for name in ("triton", "hopper", "flash_attn_3"):
                if not registry.supports(name, expanded, NHD, 64, Phase.PREFILL):
                    continue
                made = registry.backend(name)(expanded, NHD, 64)
                plan = made.plan(meta)
                line[name] = bench(lambda: made.prefill(q, k, v, cache, plan, out))
            results["cells"].append({"cell": f"prefill expanded {batch} x {length}", "us": line})
            print(f"prefill expanded 16 heads {batch} x {length}:", {n: round(t, 1) for n, t in line.items()}, flush=True)
        except Exception:
            traceback.print_exc()


def _write() -> None:
    out = os.environ.get("OUT")
    if out:
        (Path(out) / "mla-kernels.json").write_text(json.dumps(results, default=str))


if __name__ == "__main__":
    with torch.inference_mode():
        if "--hopper-check" in sys.argv:
            raise SystemExit(min(correct_hopper(), 100))
        main()
