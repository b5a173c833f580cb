# pip: torch==2.13.0 guidellm
"""guidellm's benchmark: streamed chats of synthetic prompts, one after the other, and its report."""

import json
import os
import subprocess
import sys
from pathlib import Path

url, key = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
command = [
    *(Path(sys.executable).with_name("guidellm"), "run", "--disable-console"),
    *("--backend", f"kind=openai_http,target={url},api_key={key}"),
    *("--tokenizer", f"kind=hf_auto,model={os.environ['TOKENIZER']}"),
    *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=6"),
    *("--profile", "kind=synchronous"),
    *("--constraint", "kind=max_requests,count=3"),
    *("--output", "kind=json,path=report.json"),
]
subprocess.run(command, check=True, timeout=300)
(report,) = json.loads(Path("report.json").read_text())["benchmarks"]
assert len(report["requests"]["successful"]) == 3, report["requests"]
