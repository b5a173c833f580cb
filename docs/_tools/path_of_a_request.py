"""List the files of a walk through the code: of a request, of a choice, of a plugin, of a state slot, of a weight.

    python docs/_tools/path_of_a_request.py              # prints the list of docs/design.md
    python docs/_tools/path_of_a_request.py --write      # puts it there
    python docs/_tools/path_of_a_request.py --walk gpu   # or auto, plugin, slot, weight

request: functions called between `LLM.generate` and its return, in any thread, on a CPU: one prompt, greedy, a named backend. A
file *hands on* if one of its functions calls into another file; the others answer a question and are done.
gpu: the same request where a GPU would replay captured steps, with a recorder whose replays do nothing; and, with launches that
compile in place of running, the functions within what was captured: the decoder and the `triton` backend. It takes minutes.
auto: functions called while a start chooses attention backends by the table that an earlier start has kept.
plugin: files on the stack of a call into a plugin's backend, from the registration of its class to its first prompt.
slot: files of which a function that ran names the slot of a sequence's state.
weight: functions called while a quantised weight is read from a tiny int4 checkpoint and multiplied, on a CPU; and, with launches
that compile in place of running, while a layer over such a weight is bound and multiplied on a GPU. Both are done a second time:
kernels are asked only once whether they read a kind of weight.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import headway
from headway import LLM, SamplingParams
from headway.backends.sdpa import SDPA
from headway.models.checkpoints.locate import locate
from headway.models.checkpoints.tokenizer import read_tokenizer

ROOT = Path(headway.__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- path of a request: begin -->\n", "<!-- path of a request: end -->\n"


class Calls:
    """Profile function (`sys.setprofile`) that records which files call which others, in the order of first calls."""

    def __init__(self) -> None:
        self.callees: dict[str, set[str]] = {}
        """File relative to the repository -> files that its functions call."""
        self.first: dict[str, str] = {}
        """File -> its function that was called first."""
        self._known: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record the file of a call. The arguments are those of `sys.setprofile`."""
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
        """Return a frame's file relative to the repository, or "" if it is not in the package."""
        name = frame.f_code.co_filename
        if name not in self._known:
            path = Path(name)
            ours = path.is_absolute() and path.resolve().is_relative_to(ROOT)
            short = path.resolve().relative_to(ROOT) if ours else Path()
            self._known[name] = "" if not ours or short.parts[0] in (".venv", "docs", "tests") else str(short)
        return self._known[name]


class Within(Calls):
    """Records only direct and indirect calls from some functions."""

    def __init__(self, roots: Collection[str]) -> None:
        super().__init__()
        self._roots = roots
        self._depth = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call inside of the functions."""
        if self._file(frame) and frame.f_code.co_qualname in self._roots:
            self._depth += {"call": 1, "return": -1}.get(event, 0)
        if self._depth > 0:
            super().__call__(frame, event, argument)


class Naming(Calls):
    """Records only functions whose code names one of some attributes."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call of such a function."""
        code = frame.f_code
        if self._names.intersection(code.co_names + code.co_varnames):
            super().__call__(frame, event, argument)


CHOICE = ("costs_for", "Selector.__init__")
"""Functions that find measured times, and that choose by them."""
SLOT = ("state_index", "state_slots", "StateSlots", "num_state_slots", "out_slots", "restored_from", "held_state")


@contextmanager
def profiled(calls: Calls) -> Iterator[None]:
    """Record every call of this process's threads."""
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def trace_auto(model: str) -> Calls:
    """Return the calls of a choice with a table that an earlier start has saved."""
    LLM(model, device="cpu")
    calls = Within(CHOICE)
    with profiled(calls):
        LLM(model, device="cpu")
    return calls


def trace_plugin(model: str) -> Calls:
    """Return the files on the stack whenever a class of the caller is called, up to its first prompt."""
    calls = Calls()

    class Own(SDPA):
        """A plugin's backend that records its callers."""

        name = "own"

        def __init__(self, *arguments: Any, **options: Any) -> None:
            note()
            super().__init__(*arguments, **options)

        @classmethod
        def available(cls) -> Any:
            note()
            return super().available()

        @classmethod
        def supports(cls, *arguments: Any, **options: Any) -> Any:
            note()
            return super().supports(*arguments, **options)

        def prefill(self, *arguments: Any, **options: Any) -> None:
            note()
            super().prefill(*arguments, **options)

    def note() -> None:
        frame = sys._getframe(1)
        while frame is not None:
            calls(frame, "call", None)
            frame = frame.f_back  # type: ignore[assignment]

    llm = LLM(model, device="cpu", attn_backend="own", backends=[Own])
    llm.generate("The capital of France is", SamplingParams(max_tokens=1), use_tqdm=False)
    return calls


def trace_slot() -> Calls:
    """Return the functions that name a state's slot while a small hybrid model answers a request."""
    sys.path[:0] = map(str, (ROOT / "tests" / "support").glob("*/"))
    calls = Naming(SLOT)
    from headway.core.engine.loop import EngineParts, make_engine
    from headway.core.sampling.params import SamplingParams as Params
    from headway.registry import create_registry
    from stateful_model import Stateful

    with profiled(calls):
        engine = make_engine(EngineParts(model=Stateful("mamba2", None), source=create_registry(policy="none")))
        engine.add_request("0", engine.limits.checked([1, 2, 3], Params(temperature=0, max_tokens=4)))
        while engine.has_unfinished:
            engine.step()
    return calls


GRAPH = (
    "Decoder.__call__",
    "Decoder.compute_logits",
    "TritonAttention.plan",
    "TritonAttention.prefill",
    "TritonAttention.decode",
)
"""Functions that a captured step calls."""


def trace_gpu(model: str) -> Calls:
    """Return the calls of a request in captured steps, and those within a step, on a simulated GPU."""
    sys.path[:0] = map(str, (ROOT / "tests" / "support").glob("*/"))
    from headway.core.contract.kernel import GraphLevel
    from headway.testing.broken.attention import PlainBackend

    class Captured(PlainBackend):
        """A backend whose steps can be captured."""

        graph_level = GraphLevel.UNIFORM

    llm = LLM(model, device="cpu", attn_backend="plain", backends=[Captured])
    llm.engine.executor.capture(Idle())  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate("A first request fills the caches of this process.", params, use_tqdm=False)
    calls = Calls()
    with profiled(calls):
        llm.generate("The capital of France is", params, use_tqdm=False)
    from absent_gpu import absent_gpu
    from headway.models.layers.decoder import Decoder
    from launched_kernels import ATTENTION, BF16, EmptyWeights, attend, run_decoder, shipped

    within = Within(GRAPH)
    within.callees, within.first = calls.callees, calls.first

    def run_step() -> None:
        run_decoder(model_of_step, (1,))
        attend(*ATTENTION["head 128"])

    with absent_gpu((9, 0), whole=False):
        model_of_step = Decoder(shipped("qwen3-0.6b"), EmptyWeights(BF16))
        run_step()  # compiles, and binds layers to kernels
        with profiled(within):
            run_step()
    return calls


class Idle:
    """A graph recorder whose replays do nothing."""

    def record(self, run: Any) -> Any:
        """Return a replay."""
        return lambda: None

    def begin(self) -> None:
        """Begin a segment of a step."""

    def end(self) -> Any:
        """Return the replay of a segment."""
        return lambda: None


WEIGHT = ("LayerTensors.linear", "Linear.__call__", "Fused.product")
"""Functions that read a layer's weight, and that multiply by it."""


def trace_weight() -> Calls:
    """Return the calls from a checkpoint's file to the kernel of an int4 linear layer."""
    sys.path[:0] = map(str, (ROOT / "tests" / "support").glob("*/"))
    import tempfile

    import torch

    from absent_gpu import absent_gpu
    from headway.kernels.linear.linear import Linear
    from headway.models.layers.decoder import Decoder
    from headway.models.loader import LoadOptions, load_model
    from headway.registry import create_registry
    from quantized_models import FORMATS, save_both
    from quantized_weights import int4

    calls, cpu, gpu = Within(WEIGHT), torch.device("cpu"), torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as place:
        folder, _ = save_both(Path(place), FORMATS["compressed int4"])
        options = LoadOptions(kernels=create_registry(policy="none").linear_kernels(cpu))
        load_model(str(folder), "bfloat16", skip_tokenizer_init=True, options=options)  # imports
        with profiled(calls):
            decoder = load_model(str(folder), "bfloat16", skip_tokenizer_init=True, options=options).decoder
            assert isinstance(decoder, Decoder)
            linear, _ = decoder.products[0]
            linear(torch.zeros(1, linear.in_features, dtype=torch.bfloat16))
    print(f"The first {len(calls.first)} on a CPU, the others on a GPU besides:")
    weight = int4(torch.randn(256, 512), 128)
    with absent_gpu((8, 9), whole=False):
        from headway.core.oracle.weight_cases import on_device
        from headway.kernels.step.fused import Fused

        operations = Fused(torch.empty(1, 64, device=gpu), torch.empty(1, 64, device=gpu))
        layer, x = Linear(on_device(weight, gpu), dtype=torch.bfloat16), torch.empty(40, 512, dtype=torch.bfloat16, device=gpu)
        operations.product(x, layer)  # compiles
        layer.unbind()
        with profiled(calls):
            operations.product(x, layer)
    return calls


def trace_request(model: str, attn_backend: str, max_tokens: int = 4) -> Calls:
    """Return the calls of one greedy request on a CPU, with the tokenizer already cached."""
    read_tokenizer(locate(model))
    llm = LLM(model, attn_backend=attn_backend, device="cpu")
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    llm.generate("A first request fills the caches of this process.", params, use_tqdm=False)
    calls = Calls()
    with profiled(calls):
        llm.generate("The capital of France is", params, use_tqdm=False)
    return calls


def section(calls: Calls) -> str:
    """Return the lists in the form of the page."""
    on = [file for file, others in calls.callees.items() if others]
    done = [file for file, others in calls.callees.items() if not others]
    rows = [f"{number}. `{file}` (`{calls.first[file]}`)" for number, file in enumerate(on, start=1)]
    answers = ", ".join(f"`{file}`" for file in done)
    return "\n".join(["", *rows, "", f"{len(done)} are called for information: {answers}.", ""])


def main() -> None:
    """Print the lists, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--attn-backend", default="sdpa")
    parser.add_argument("--walk", choices=("request", "gpu", "auto", "plugin", "slot", "weight"), default="request")
    parser.add_argument("--write", action="store_true", help="put the lists into docs/design.md")
    asked = parser.parse_args()
    if asked.walk != "request":
        walks = {"gpu": trace_gpu, "auto": trace_auto, "plugin": trace_plugin}
        alone = {"slot": trace_slot, "weight": trace_weight}
        calls = walks[asked.walk](asked.model) if asked.walk in walks else alone[asked.walk]()
        print(*(f"{number}. {file} ({first})" for number, (file, first) in enumerate(calls.first.items(), start=1)), sep="\n")
        return
    text = section(trace_request(asked.model, asked.attn_backend))
    if not asked.write:
        print(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
