"""Sources of plugins that misbehave, one line each in a table: where, and what they do there."""

from __future__ import annotations

from pathlib import Path

from sandbox import TOY, install

_SLOTS = ("top", "hook", "load", "available", "supports", "plan", "prefill", "decode", "rank", "writer", "processor", "proposer")
_SOURCE = """
import ctypes, os, signal, sys, threading, time
import torch
from headway import hookimpl
from headway.contract import ALL_PHASES, NHD, AttentionBackend, BackendInfo, Capabilities, Support, CacheLayout, LayoutInfo
from headway.contract import LogitsProcessorInfo
from headway.core.contract.text_plugins import ProposerInfo

{top}

class Plain(AttentionBackend):
    name = "{name}"
    capabilities = Capabilities(phases=ALL_PHASES, layouts=(NHD,), devices=("cpu",))

    @classmethod
    def available(cls):
        {available}
        return Support()

    @classmethod
    def supports(cls, spec, layout, block_size, phase):
        {supports}
        return super().supports(spec, layout, block_size, phase)

    def plan(self, metadata):
        {plan}
        return metadata

    def prefill(self, q, k, v, cache, plan, out):
        {prefill}
        self.attend(q, cache, plan, out)

    def decode(self, q, cache, plan, out):
        {decode}
        self.attend(q, cache, plan, out)

{attend}

def load():
    {load}
    return Plain

@hookimpl
def headway_register_backends():
    {hook}
    return [BackendInfo("{name}", "hostile", load, api_version=2)]

@hookimpl
def headway_rank_backends(spec, phase, candidates):
    {rank}
    return None

def processor():
    {processor}

def proposer(options):
    {proposer}
    raise RuntimeError("no proposer")

def writer(device):
    {writer}

if {parts}:
    @hookimpl
    def headway_register_logits_processors():
        return [LogitsProcessorInfo("{name}-p", "hostile", processor)]

    @hookimpl
    def headway_register_proposers():
        return [ProposerInfo("{name}-g", "hostile", proposer)]

    @hookimpl
    def headway_register_layouts():
        axes = ("block", "dim", "head", "slot")
        return [LayoutInfo(CacheLayout("{name}-l", {{"key": axes, "value": axes}}), writer)]
"""
SEGFAULT = "ctypes.string_at(0)"
HANG = "time.sleep(600)"
SPIN = "while True: pass"

HOSTILE: dict[str, tuple[str, str, str]] = {
    "sleeps-on-import": ("top", HANG, "hangs in its import"),
    "spins-on-import": ("top", SPIN, "hangs in its import"),
    "exits-on-import": ("top", "sys.exit(3)", "exits in its import (SystemExit: 3)"),
    "os-exits-on-import": ("top", "os._exit(0)", "ends the process in its import: it exited with code 0"),
    "segfaults-on-import": ("top", SEGFAULT, "ends the process in its import: it was killed by SIGSEGV"),
    "interrupts-on-import": ("top", "raise KeyboardInterrupt", "exits in its import (KeyboardInterrupt"),
    "prints-on-import": ("top", "print('welcome')", "prints to standard output in its import: 'welcome'"),
    "writes-to-the-descriptor": ("top", "os.write(1, b'from C')", "prints to standard output in its import: 'from C'"),
    "changes-the-dtype": ("top", "torch.set_default_dtype(torch.float64)", "changes torch's default dtype"),
    "seeds-random-numbers": ("top", "torch.manual_seed(0)", "changes torch's seed from "),
    "changes-the-folder": ("top", "os.chdir('/')", "changes the working folder"),
    "changes-the-umask": ("top", "os.umask(0o777)", "changes the mask of new files' modes"),
    "patches-torch": ("top", "torch.nn.functional.linear = torch.matmul", "changes torch's operations"),
    "replaces-a-module": ("top", "sys.modules['json'] = type(sys)('json')", "changes the module json for another"),
    "empties-the-environment": ("top", "os.environ.clear()", "changes the environment: "),
    "leaves-a-process": ("top", "os.fork() or (time.sleep(60), os._exit(0))", "leaves a process running"),
    "hangs-when-dropped": (
        "top",
        "kept = type('Kept', (), {'__del__': lambda self: time.sleep(600)})()",
        "hangs in what it does when Headway ends",
    ),
    "takes-ctrl-c": ("top", "signal.signal(signal.SIGINT, signal.SIG_IGN)", "changes what Ctrl-C does"),
    "replaces-stdout": ("top", "sys.stdout = open(os.devnull, 'w')", "changes sys.stdout"),
    "kills-its-parent": ("top", "os.kill(os.getppid(), 9); time.sleep(600)", "crashed during its trial"),
    "kills-its-group": ("top", "os.killpg(0, 9)", "was killed by SIGKILL"),
    "leaves-a-thread": (
        "top",
        "threading.Thread(target=time.sleep, args=(600,), name='stays').start()",
        "leaves a thread running",
    ),
    "hangs-at-the-end": ("top", "import atexit; atexit.register(time.sleep, 600)", "hangs in what it does when Headway ends"),
    "exits-in-a-hook": ("hook", "sys.exit('no licence')", "exits in its hooks (SystemExit: no licence)"),
    "hangs-in-a-hook": ("hook", HANG, "hangs in its hooks"),
    "exits-in-a-loader": ("load", "sys.exit(1)", "exits in load() of backend"),
    "aborts-in-a-loader": ("load", "os.abort()", "was killed by SIGABRT"),
    "hangs-when-asked": ("available", HANG, "hangs in available() of backend"),
    "segfaults-when-asked": ("available", SEGFAULT, "ends the process in available() of backend"),
    "exits-in-supports": ("supports", "sys.exit(1)", "exits in the self-test of backend"),
    "exits-in-plan": ("plan", "sys.exit(1)", "exits in the self-test"),
    "prints-in-plan": ("plan", "print('planning')", "prints to standard output in the self-test"),
    "segfaults-in-prefill": ("prefill", SEGFAULT, "was killed by SIGSEGV"),
    "hangs-in-decode": ("decode", HANG, "hangs in the self-test of backend"),
    "os-exits-in-decode": ("decode", "os._exit(7)", "it exited with code 7"),
    "exits-in-decode": ("decode", "raise SystemExit", "exits in the self-test"),
    "exits-in-its-order": ("rank", "sys.exit(2)", "exits in headway_rank_backends (SystemExit: 2)"),
    "hangs-in-its-order": ("rank", HANG, "hangs in headway_rank_backends"),
    "exits-in-a-processor": ("processor", "sys.exit(2)", "exits in logits processor"),
    "hangs-in-a-proposer": ("proposer", HANG, "hangs in proposer"),
    "segfaults-in-a-writer": ("writer", SEGFAULT, "ends the process in load_writer() of layout"),
}
"""Name -> where it misbehaves, the statement, and what is said of it."""

_LARGE = "q.shape[0] > 40 and "
LATE: dict[str, tuple[str, str, str]] = {
    "segfaults-at-a-shape": ("prefill", f"{_LARGE}{SEGFAULT}", "was killed by SIGSEGV"),
    "hangs-at-a-shape": ("prefill", f"{_LARGE}{HANG}", "no answer within"),
    "os-exits-at-a-shape": ("prefill", f"{_LARGE}os._exit(3)", "exited with code 3"),
    "exits-at-a-shape": ("prefill", f"{_LARGE}sys.exit(3)", "asked the program to end"),
}
"""Plugins that pass a trial, and misbehave with more than 40 query tokens."""

HARMLESS: dict[str, tuple[str, str, str]] = {
    "raises-in-its-order": ("rank", "raise ZeroDivisionError('no measurements')", "headway_rank_backends raises"),
    "raises-in-decode": ("decode", "raise ValueError('no kernel')", "self-test: decode"),
    "warns-on-import": ("top", "print('a warning', file=sys.stderr)", ""),
    "well-behaved": ("top", "pass", ""),
}
"""Plugins that are accepted; the last item is a word of the remark about them."""


def source(name: str) -> str:
    """The module of one of them."""
    slot, statement, _ = {**HOSTILE, **HARMLESS, **LATE}[name]
    attend = TOY[TOY.index("    def attend") : TOY.index("class ToyDecode")]
    filled = dict.fromkeys(_SLOTS, "pass") | {slot: statement}
    return _SOURCE.format(**filled, name=name, attend=attend, parts=slot in ("writer", "processor", "proposer"))


def install_hostile(folder: Path, name: str) -> None:
    install(folder, name.replace("-", "_"), source(name))
