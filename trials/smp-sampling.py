"""smp: sampling on a GPU. Run in the repository root: python /path/smp-sampling.py [--model NAME] [--small]

0. pip install llguidance jsonschema first (structured outputs are left out without).
1. correctness: tests/headway/test_sampling_gpu.py, tests/models/fused/test_draw.py, tests/headway/test_engine_gpu.py (graphs, sampled tokens).
2. decode of qwen3-0.6b shapes (dummy weights) at batch 1, 64, 256, for each kind of request: tokens/s, host ms per step, steps in graphs,
   what was chosen after the model. "plain" is the base; the column "rate" is against it. One row of the batch asking (one) and all (all).
3. structured outputs with smollm2's tokenizer, if it can be loaded: rate against plain, how long launches waited.
JSON in $OUT/smp-sampling.json.
"""
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

out = Path(os.environ.get("OUT", "."))
result = {}
small = "--small" in sys.argv
model = sys.argv[sys.argv.index("--model") + 1] if "--model" in sys.argv else "qwen3-0.6b"


def tests():
    files = ["tests/headway/test_sampling_gpu.py", "tests/models/fused/test_draw.py", "tests/headway/test_engine_gpu.py"]
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n0", *files], capture_output=True, text=True)
    result["tests"] = {"rc": run.returncode, "tail": run.stdout[-3000:]}
    print(run.stdout[-3000:], flush=True)


def odd_after_even(output, logits):
    logits[(output[-1] if output else 0) % 2 :: 2] = -float("inf")
    return logits


WISHES = {
    "plain": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    "bias, bad words": {"temperature": 0, "logit_bias": {5: 1.0}, "bad_words_token_ids": [[4], [2, 3]]},
    "logprobs 5": {"temperature": 0, "logprobs": 5},
    "processor": {"temperature": 0, "logits_processors": [odd_after_even]},
    "min_tokens": {"temperature": 0, "min_tokens": 10**6},
}


def measure(llm, params, batch, input_len):
    from random import Random

    random = Random(batch)
    prompts = [[random.randrange(10, 290) for _ in range(input_len)] for _ in range(batch)]
    rates, hosts, last = [], [], None
    for turn in range(3):
        before, began = llm.engine.stats.snapshot(), time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, stats = time.perf_counter() - began, llm.engine.stats - before
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        rates.append(tokens / seconds)
        hosts.append(1e3 * stats.host_seconds / stats.num_steps)
        last = stats
        assert all(output.outputs[0].error is None for output in outputs), outputs[0].outputs[0].error
    return {
        "tokens_per_second": statistics.median(rates),
        "host_ms": statistics.median(hosts),
        "graph_share": last.num_graph_steps / last.num_steps,
        "after_model": dict(last.steps_after_model),
        "waiting": dict(last.steps_waiting),
        "wait_ms": 1e3 * last.wait_seconds / last.num_steps,
        "compilations": dict(last.compilations),
    }


def rates():
    from headway import LLM, SamplingParams

    length = 16 if small else 128
    llm = LLM(model, load_format="dummy" if "/" not in model else "auto", max_model_len=4 * length, skip_tokenizer_init=True)
    result["rates"] = rows = []
    for batch in (1, 4) if small else (1, 64, 256):
        base = None
        for name, wish in WISHES.items():
            wish = {**wish, **({"min_tokens": length} if "min_tokens" in wish else {})}
            asked = SamplingParams(max_tokens=length, ignore_eos=True, **wish)
            plain = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0)
            for how in ("all", "one") if batch > 1 and name != "plain" else ("all",):
                params = asked if how == "all" else [asked] + [plain] * (batch - 1)
                found = measure(llm, params, batch, length)
                base = base or found["tokens_per_second"]
                rows.append({"batch": batch, "wish": name, "how": how, "rate": found["tokens_per_second"] / base, **found})
                print(f"{batch:4d} {name:16s} {how:4s} {found['tokens_per_second']:10.0f} tok/s {rows[-1]['rate']:.2f}  host "
                      f"{found['host_ms']:.2f} ms  wait {found['wait_ms']:.2f} ms  graphs {found['graph_share']:.0%}  "
                      f"{found['after_model']} {found['waiting']} {found['compilations']}", flush=True)


def structured():
    from headway import LLM, SamplingParams, StructuredOutputsParams

    name = model if "/" in model else "smollm2"
    llm = LLM(name)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}, "tags": {"type": "array", "minItems": 3,
              "maxItems": 6, "items": {"type": "string", "maxLength": 12}}, "year": {"type": "integer", "minimum": 1900, "maximum": 2030}},
              "required": ["name", "tags", "year"], "additionalProperties": False}
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    result["structured"] = rows = []
    for batch in (1, 4) if small else (1, 32, 128):
        for what, form_of in (("plain", None), ("json", form)):
            params = [SamplingParams(temperature=0.8, seed=n, max_tokens=160, structured_outputs=form_of) for n in range(batch)]
            found = measure(llm, params, batch, 32)
            outputs = llm.generate([f"A film, number {n}, as JSON:" for n in range(batch)], params, use_tqdm=False)
            ok = [output.outputs[0] for output in outputs]
            valid = 0
            if form_of is not None:
                for one in ok:
                    if one.finish_reason == "stop":
                        json.loads(one.text)
                        valid += 1
            rows.append({"batch": batch, "what": what, "valid": valid, **found})
            print(f"{batch:4d} {what:6s} {found['tokens_per_second']:10.0f} tok/s host {found['host_ms']:.2f} ms wait {found['wait_ms']:.2f} ms "
                  f"valid {valid} of {batch}, {found['waiting']}", flush=True)


for part in (tests, rates, structured):
    if part is tests and small:
        continue
    try:
        part()
    except Exception as error:
        import traceback

        traceback.print_exc()
        result[part.__name__ + "_error"] = repr(error)
(out / "smp-sampling.json").write_text(json.dumps(result, indent=1))
