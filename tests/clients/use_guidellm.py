# pip: guidellm
"""guidellm: a load of chats; every request must be complete."""

import json
import os
import subprocess
import sys
from pathlib import Path

target = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
backend = f"kind=openai_http,target={target},model=smollm2,api_key={os.environ['OPENAI_API_KEY']}"
command = [Path(sys.executable).with_name("guidellm"), "run", "--backend", backend, "--profile", "kind=concurrent,streams=2"]
command += ["--constraint", "kind=max_requests,count=4", "--data", '{"prompt_tokens": 16, "output_tokens": 8}']
command += ["--tokenizer", "kind=hf_auto,model=gpt2"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
(told,) = json.loads(Path("benchmarks.json").read_text())["benchmarks"]
assert told["metrics"]["request_totals"]["successful"] == 4, told["metrics"]["request_totals"]
