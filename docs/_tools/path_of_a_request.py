"""Lists the files that one request passes through, from `LLM.generate` to its tokens.

    python docs/_tools/path_of_a_request.py              # prints the list of docs/design.md
    python docs/_tools/path_of_a_request.py --write      # puts it there

A file counts if one of its functions is called between the call of `generate` and its return, in any thread; what runs while
the model loads and the engine warms up does not. A file *hands on* if one of its functions calls into another file; the others
answer a question and are done. The plain path: a CPU, one prompt, greedy, a named backend.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import headway
from headway import LLM, SamplingParams

ROOT = Path(headway.__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- path of a request: begin -->\n", "<!-- path of a request: end -->\n"


class Calls:
    """A profile function (`sys.setprofile`) that notes which files call into which others, in the order of first calls."""

    def __init__(self) -> None:
        self.callees: dict[str, set[str]] = {}
        """File below the repository -> the files into which its functions call."""
        self.first: dict[str, str] = {}
        """File -> the function of it that was called first."""
        self._known: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note the file of a call. The arguments are those of `sys.setprofile`."""
        if event != "call" or not (file := self._file(frame)):
            return
        self.first.setdefault(file, frame.f_code.co_qualname)
        self.callees.setdefault(file, set())
        caller = frame.f_back
        while caller is not None and not self._file(caller):
            caller = caller.f_back
        if caller is not None and (above := self._file(caller)) != file:
            self.callees.setdefault(above, set()).add(file)

    def _file(self, frame: FrameType) -> str:
        """The file of a frame below the repository; empty if it is not one of the package's."""
        name = frame.f_code.co_filename
        if name not in self._known:
            path = Path(name)
            ours = path.is_absolute() and path.resolve().is_relative_to(ROOT)
            short = path.resolve().relative_to(ROOT) if ours else Path()
            self._known[name] = "" if not ours or short.parts[0] in (".venv", "docs", "tests") else str(short)
        return self._known[name]


def trace_request(model: str, attn_backend: str, max_tokens: int = 4) -> Calls:
    """The calls of one greedy request on a CPU."""
    llm = LLM(model, attn_backend=attn_backend, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm.generate("A first request fills the caches of this process.", params, use_tqdm=False)
    calls = Calls()
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        llm.generate("The capital of France is", params, use_tqdm=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def section(calls: Calls) -> str:
    """The lists, as they stand in the page."""
    on = [file for file, others in calls.callees.items() if others]
    done = [file for file, others in calls.callees.items() if not others]
    rows = [f"{number}. `{file}` (`{calls.first[file]}`)" for number, file in enumerate(on, start=1)]
    answers = ", ".join(f"`{file}`" for file in done)
    return "\n".join(["", *rows, "", f"{len(done)} answer on the way: {answers}.", ""])


def main() -> None:
    """Print the lists, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--attn-backend", default="sdpa")
    parser.add_argument("--write", action="store_true", help="put the lists into docs/design.md")
    asked = parser.parse_args()
    text = section(trace_request(asked.model, asked.attn_backend))
    if not asked.write:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
