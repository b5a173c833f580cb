"""Start `headway serve smollm2`, run the scripts of clients against it, each with its own environment's Python, and stop it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headway.models.checkpoints.locate import locate
from headway.models.checkpoints.tokenizer import read_tokenizer

FOLDER = Path(__file__).resolve().parent
ENVIRONMENTS = FOLDER.parent.parent / ".venv-clients"
KEY = "a-key-of-the-test"


def main(names: list[str]) -> int:
    """Run the scripts of these names; returns the number of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "headway",
            "serve",
            "smollm2",
            "--port",
            "0",
            "--no-autotune",
            "--dtype",  # named, no processor rounds activations: log-likelihoods are compared with transformers'
            "float32",
            "--files-dir",
            f"{folder}/files",
        ]
        with log.open("w") as told, subprocess.Popen(command, stderr=told, env={**os.environ, "HEADWAY_API_KEY": KEY}) as server:
            try:
                url, tokenizer = wait_for_url(server, log), save_tokenizer(Path(folder) / "tokenizer")
                return sum(not run(name, url, tokenizer) for name in names)
            finally:
                server.terminate()


def wait_for_url(server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's URL, once it listens."""
    ends = time.monotonic() + 120
    while not (found := re.search(r"listening on (http://\S+)", log.read_text())):
        if server.poll() is not None or time.monotonic() > ends:
            raise SystemExit(log.read_text())
        time.sleep(0.2)
    return found[1]


def save_tokenizer(folder: Path) -> Path:
    """The model's tokenizer as files, for clients that count tokens themselves."""
    read_tokenizer(locate("smollm2")).save_pretrained(folder)
    return folder


def run(name: str, url: str, tokenizer: Path) -> bool:
    """Run a script; returns whether it went well."""
    own = ENVIRONMENTS / name / "bin" / "python"
    environment = {
        **{each: value for each, value in os.environ.items() if each != "PYTHONPATH"},
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": KEY,
        "TOKENIZER": str(tokenizer),
        "MODEL_FOLDER": str(locate("smollm2")),
        "HF_HUB_OFFLINE": "1",
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [own, FOLDER / f"use_{name}.py"], env=environment, cwd=folder, capture_output=True, text=True, timeout=600
        )
    figures = "".join(f", {line.removeprefix('figure: ')}" for line in done.stdout.splitlines() if line.startswith("figure: "))
    verdict = f"ok{figures}" if done.returncode == 0 else f"FAILED\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    print(f"{name}: {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
