# pip: aiperf
"""NVIDIA's AIPerf: a profile of streamed chats of synthetic prompts, two at a time, and its report."""

import json
import os
import subprocess
import sys
from pathlib import Path

command = [
    *(Path(sys.executable).with_name("aiperf"), "profile", "--model", "smollm2", "--endpoint-type", "chat", "--streaming"),
    *("--url", os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), "--api-key", os.environ["OPENAI_API_KEY"]),
    *("--tokenizer", os.environ["TOKENIZER"], "--ui", "none", "--artifact-dir", "artifacts"),
    *("--concurrency", "2", "--request-count", "4", "--random-seed", "1"),
    *("--synthetic-input-tokens-mean", "24", "--output-tokens-mean", "6", "--extra-inputs", "ignore_eos:true"),
]
online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # offline it reads no tokenizer's folder
subprocess.run(command, check=True, timeout=300, env=online)
(path,) = Path("artifacts").rglob("profile_export_aiperf.json")
report = json.loads(path.read_text())
assert report["request_count"]["avg"] == 4, report["request_count"]
assert report["time_to_first_token"]["avg"] > 0
assert report["output_sequence_length"]["avg"] >= 5, report["output_sequence_length"]
