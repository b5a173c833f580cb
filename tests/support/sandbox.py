"""Throw-away models and plugins, and the command line in a child process."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """Result of a command: exit code and output."""

    code: int
    out: str
    err: str


def run_headway(*arguments: str, plugins: Path | None = None, cwd: Path, columns: int = 80) -> Result:
    """`python -m headway` in a new process, offline, with the distributions under `plugins` installed."""
    return run_python("-m", "headway", *arguments, plugins=plugins, cwd=cwd, columns=columns)


def run_python(*arguments: str, plugins: Path | None = None, cwd: Path, columns: int = 80) -> Result:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": str(columns), "PYTHONUTF8": "1"}
    environment["PYTHONPATH"] = "" if plugins is None else str(plugins)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=120,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2, nothing on stdout, and one message that holds the words."""
    assert result.code == 2, result
    assert result.out == ""
    assert "Traceback" not in result.err
    assert result.err.startswith("headway: error: ")
    assert result.err.count("headway: error: ") == 1
    for word in words:
        assert word in result.err


def install(folder: Path, name: str, source: str, version: str = "1.0", entry_points: str | None = None) -> None:
    """Write a distribution: a module called `name`, and metadata that names it in the entry-point group "headway"."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / f"{name}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[headway]\n{name} = {name}\n" if entry_points is None else entry_points)


CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A chat template."""


def save_tiny_model(folder: Path, positions: int = 256, chat: bool = False, special: Sequence[str] = ()) -> Path:
    """A Llama of two layers with random weights as transformers saves it: 300 tokens of ASCII text. chat: with a template.
    special: further special tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>", *special], show_progress=False)
    syllables = " ".join(first + vowel + last for first in string.ascii_lowercase for vowel in "aeiou" for last in "nrst")
    tokenizer.train_from_iterator([string.printable, "the quick brown fox jumps over the lazy dog", syllables], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    ids = {"vocab_size": len(wrapped), "bos_token_id": None, "eos_token_id": wrapped.eos_token_id}
    # Weights so large that logits are far from uniform: greedy choices are no near-ties.
    config = LlamaConfig(**sizes, **ids, max_position_embeddings=positions, initializer_range=0.5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    if chat:
        wrapped.chat_template = CHAT
    wrapped.save_pretrained(folder)
    return folder


TOY = '''
"""A third-party plugin: a backend for every phase, and one that only decodes."""

import torch

from headway import hookimpl
from headway.contract import ALL_PHASES, HND, NHD, AttentionBackend, BackendInfo, Capabilities, Phase


class Toy(AttentionBackend):
    name = "toy"
    capabilities = Capabilities(phases=ALL_PHASES, layouts=(HND, NHD), dtypes=(torch.float32,), devices=("cpu",))

    def plan(self, metadata):
        return metadata

    def prefill(self, q, k, v, cache, plan, out):
        self.attend(q, cache, plan, out)

    def decode(self, q, cache, plan, out):
        self.attend(q, cache, plan, out)

    def attend(self, q, cache, plan, out):
        start = 0
        for row, (queries, length) in enumerate(zip(plan.query_lens, plan.kv_lens)):
            keys = torch.arange(length)
            slots = plan.block_table[row].long()[keys // plan.block_size] * plan.block_size + keys % plan.block_size
            k, v = (t.repeat_interleave(self.spec.group_size, 1) for t in cache.gather(slots))
            scores = torch.einsum("qhd,khd->hqk", q[start : start + queries], k) * self.spec.scale
            hidden = keys > torch.arange(length - queries, length)[:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[start : start + queries] = torch.einsum("hqk,khd->qhd", weights, v)
            start += queries


class ToyDecode(Toy):
    name = "toy.decode"
    capabilities = Capabilities(phases=frozenset({Phase.DECODE}), layouts=(HND,), devices=("cpu",), block_multiple=64)


@hookimpl
def headway_register_backends():
    return [
        BackendInfo("toy", "plain attention", lambda: Toy, api_version=2),
        BackendInfo("toy.decode", "plain attention, one query token", lambda: ToyDecode, api_version=2),
    ]
'''
"""Source of a plugin that works: `toy` serves every phase on nhd and hnd, `toy.decode` decodes on hnd in blocks of 64 n."""

REFUSING = '''
"""Backends that refuse: one its machine, one its model, one that does not load, one that raises in the middle of a step."""

import torch

from headway import hookimpl
from headway.contract import ALL_PHASES, AttentionBackend, BackendInfo, Capabilities, Support


class Base(AttentionBackend):
    capabilities = Capabilities(phases=ALL_PHASES, devices=("cpu",))

    def plan(self, metadata):
        return metadata

    def prefill(self, q, k, v, cache, plan, out):
        out.zero_()

    def decode(self, q, cache, plan, out):
        out.zero_()


class OtherMachine(Base):
    name = "other_machine"

    @classmethod
    def available(cls):
        return Support.no("GPU", "compute capability 9.0", "no GPU", "run it on a Hopper GPU")


class OtherModel(Base):
    name = "other_model"
    capabilities = Capabilities(phases=ALL_PHASES, devices=("cpu",), dtypes=(torch.float16,), head_dims=(64, 128))


class Failing(Base):
    name = "failing"

    def prefill(self, q, k, v, cache, plan, out):
        raise RuntimeError("the kernel fell over")


def missing():
    raise ImportError("No module named 'libkernel'")


@hookimpl
def headway_register_backends():
    return [
        BackendInfo("other_machine", "refuses this machine", lambda: OtherMachine, api_version=2),
        BackendInfo("other_model", "refuses the tiny model", lambda: OtherModel, api_version=2),
        BackendInfo("failing", "raises in prefill", lambda: Failing, api_version=2),
        BackendInfo("missing_library", "does not load", missing, extra="libkernel>=2", api_version=2),
    ]
'''
"""Source of a plugin whose backends cannot be used with the tiny model on a CPU."""

_HOOK = "from headway import hookimpl\nfrom headway.contract import BackendInfo\n\n@hookimpl\ndef headway_register_"
BROKEN = {
    "raises_on_import": 'raise RuntimeError("no such driver")\n',
    "syntax_error": "def headway_register_backends(:\n",
    "missing_dependency": "import a_library_nobody_has\n",
    "wrong_signature": f"{_HOOK}backends(surprise):\n    return []\n",
    "unknown_hook": f"{_HOOK}engines():\n    return []\n",
    "wrong_api": f'{_HOOK}backends():\n    return [BackendInfo("from_the_future", "", lambda: None, api_version=99)]\n',
    "taken_name": f'{_HOOK}backends():\n    return [BackendInfo("sdpa", "", lambda: None, api_version=2)]\n',
    "raising_hook": f'{_HOOK}backends():\n    raise KeyError("no table of kernels")\n',
    "wrong_answer": f'{_HOOK}backends():\n    return ["flash"]\n',
    "exit": "import sys\nsys.exit(3)\n",
}
"""Sources of plugins that break one rule each."""

BROKEN_SAYS = {
    "raises_on_import": ("RuntimeError", "no such driver"),
    "syntax_error": ("SyntaxError",),
    "missing_dependency": ("ModuleNotFoundError", "a_library_nobody_has"),
    "wrong_signature": ("headway_register_backends", "surprise"),
    "unknown_hook": ("unknown hook", "headway_register_engines"),
    "wrong_api": ("from_the_future", "api_version 99", "Headway has 3"),
    "taken_name": ("'sdpa'", "taken_name 1.0", "built-in"),
    "raising_hook": ("KeyError", "no table of kernels"),
    "wrong_answer": ("str",),
    "exit": ("SystemExit",),
}
"""Words that the record of each must hold."""
