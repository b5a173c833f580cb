"""Hub kernels and passports: a folder with flash-attention's functions serves a model, and what a start refuses or reports."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import py_compile
import re
import struct
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import backend_cases
from backend_cases import CASES, SPECS, VERIFY, spec
from fake_libraries import attend, rows_of
from headway import LLM, SamplingParams, create_registry
from headway.backends.flash_interface import flash_backend
from headway.cli.measure.check import check as command
from headway.core.contract.errors import ConfigError, HeadwayError, PluginError
from headway.core.contract.layout import NHD
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION
from headway.core.oracle.cases import reference, relative_error, run_backend
from headway.core.system.json_files import write_json
from headway.registry.plugin_sources import HubKernel, PluginFile, PluginSource
from headway.testing.kit.checking import Wanted, check, passport_of
from headway.tuning.isolated.passport import Passport, known_times
from headway.tuning.table.files import table_path
from headway.tuning.table.schema import KernelRecord
from sandbox import TOY, run_headway
from tables import a_cell, a_device, a_table

INIT = '"""FlashAttention 2\'s functions, in torch."""\nfrom .attend import flash_attn_varlen_func, flash_attn_with_kvcache\n'
ATTEND = """
import torch


def one(q, k, v, scale, causal, window, softcap, slopes):
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1).float() for x in (k, v))
    scores = q.transpose(0, 1).float() @ k.transpose(1, 2) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(m - n, m)[:, None] - torch.arange(m)[None]
    scores = scores if slopes is None else scores - slopes[:, None, None] * distance.abs()
    hidden = (distance < 0) & causal
    hidden |= (distance > window[0]) & (window[0] >= 0)
    hidden |= (-distance > window[1]) & (window[1] >= 0)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1).to(q.dtype)


def rows(cache, blocks, length):
    return cache[blocks[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length]


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, block_table=None,
):
    out = torch.empty_like(q)
    for row, (a, b) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:])):
        c, d = cu_seqlens_k.tolist()[row : row + 2]
        if b > a and d > c:
            keys = (k[c:d], v[c:d]) if block_table is None else (rows(x, block_table[row], d - c) for x in (k, v))
            out[a:b] = one(q[a:b], *keys, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
):
    out = torch.zeros_like(q)
    for row, length in enumerate(cache_seqlens.tolist()):
        if length:
            keys = (rows(x, block_table[row], length) for x in (k_cache, v_cache))
            out[row] = one(q[row], *keys, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return out
"""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"kv_cache_memory": "1MiB", "num_threads": 1, "autotune_budget": 0}


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with flash-attention's functions, and an empty cache of verdicts and tables."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "torch_flash"
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT)
    (folder / "attend.py").write_text(ATTEND)
    return folder


def passport(plugin: PluginSource, **changes: object) -> dict[str, Any]:
    """A passport as `headway check` writes it, with the changes of a test, at the place where a start looks for it."""
    cell = {"name": "answer:decode:nhd:own:b16:d64:g4:float32:none:-", "verdict": "passed", "error": 1e-7, "tolerance": 2e-6}
    name = "hub:" if isinstance(plugin, HubKernel) else "toy"
    found: dict[str, Any] = {
        "schema": "headway.passport/1",
        "digest": plugin.content_digest(),
        "library": plugin.owner,
        "origin": {"version": "0.5.0"},
        "date": "2026-11-29T09:00:00+00:00",
        "device": json.loads(a_device().model_dump_json()),
        "kernels": [{"name": name, "kind": "attention", "quick": True, "cells": [cell]}],
    }
    for path, value in changes.items():
        place: Any = found
        *before, last = path.split("__")
        for part in before:
            place = place[int(part) if part.isdecimal() else part]
        place[last] = value
    assert plugin.passport is not None
    plugin.passport.write_text(json.dumps(found))
    return found


# The adapter


def flash_2() -> ModuleType:
    module = ModuleType("flash_2")
    exec(ATTEND, vars(module))
    return module


def flash_3() -> ModuleType:
    """FlashAttention 3: only the function for a cache reads blocks, of packed queries too; it returns the log-sum-exp as well."""
    module = ModuleType("flash_3")

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, num_splits=1, s_aux=None,
    ):  # fmt: skip
        starts = cu_seqlens_q.tolist()
        assert starts == cu_seqlens_k.tolist()
        parts = [
            attend(q[a:b], k[a:b], v[a:b], softmax_scale, causal, *window_size, softcap, sinks=s_aux) for a, b in pairwise(starts)
        ]
        return torch.cat(parts), None

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=0, s_aux=None,
    ):  # fmt: skip
        starts = cu_seqlens_q.tolist() if cu_seqlens_q is not None else range(0, len(q) * q.shape[1] + 1, q.shape[1])
        packed = q.reshape(-1, *q.shape[-2:])
        parts = []
        for row, (a, b) in enumerate(pairwise(starts)):
            length = int(cache_seqlens[row])
            keys, values = (rows_of(cache, page_table[row], length) for cache in (k_cache, v_cache))
            parts.append(attend(packed[a:b], keys, values, softmax_scale, causal, *window_size, softcap, sinks=s_aux))
        return torch.cat(parts).view(q.shape)

    vars(module).update(flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache)
    return module


def flash_4() -> ModuleType:
    """FlashAttention 4: one function, which takes lengths of keys and a page table."""
    module = ModuleType("flash_4")

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None,
        causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    ):  # fmt: skip
        starts, parts = cu_seqlens_q.tolist(), []
        window = [-1 if each is None else each for each in window_size]
        assert (cu_seqlens_k is None) == (page_table is not None)
        for row, (a, b) in enumerate(pairwise(starts)):
            keys = (k[a:b], v[a:b])
            if page_table is not None:
                keys = tuple(rows_of(cache, page_table[row], int(seqused_k[row])) for cache in (k, v))
            parts.append(attend(q[a:b], *keys, softmax_scale, causal, *window, softcap, sinks=learnable_sink))
        return torch.cat(parts), None

    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("make", [flash_2, flash_3, flash_4])
@pytest.mark.parametrize("layer", SPECS)
def test_each_generation_of_functions_gives_the_right_answers(make: Callable[[], ModuleType], layer: str) -> None:
    backend, wanted = flash_backend("hub:a/b", make(), ("cpu",)), SPECS[layer]
    lacking = wanted.features - backend.capabilities.features
    assert backend.capabilities.features >= {"sliding_window", "softcap"}
    for name in CASES:
        case = backend_cases.case_of(name, wanted, verify=VERIFY.get(name, 1), poison=3e4)
        for phase in Phase:
            assert bool(backend.supports(wanted, NHD, 16, phase)) is not bool(lacking)
        if not lacking:
            found = run_backend(backend(wanted, NHD, 16), case)
            assert relative_error(found, reference(case), case) <= 2e-6, name


def test_what_a_module_lacks_is_a_reason() -> None:
    module = flash_3()
    del module.flash_attn_with_kvcache
    backend = flash_backend("hub:a/b", module, ("cpu",))
    assert backend.supports(spec(), NHD, 16, Phase.PREFILL)
    reasons = str(backend.supports(spec(), NHD, 16, Phase.DECODE))
    assert "flash_attn_varlen_func of hub:a/b: needs a parameter block_table or page_table" in reasons
    assert "prefill=hub:a/b" in reasons
    with pytest.raises(PluginError, match="needs a function flash_attn_varlen_func with flash-attention's parameters, got none"):
        flash_backend("hub:a/b", ModuleType("empty"), ("cpu",))
    module.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, softmax_scale: q  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="got one without causal, cu_seqlens_k"):
        flash_backend("hub:a/b", module, ("cpu",))


def test_a_module_for_gpus_has_the_limits_of_its_generation() -> None:
    claims = [flash_backend("hub:a/b", make(), ("cuda",)).capabilities for make in (flash_2, flash_3, flash_4)]
    assert [each.block_multiple for each in claims] == [256, 1, 128]
    assert all(each.devices == ("cuda",) and torch.float32 not in each.dtypes for each in claims)


# A folder that serves a model


def tokens(model: Path, **options: object) -> list[int]:
    llm = LLM(str(model), **OPTIONS, **options)
    (found,) = llm.generate("the quick brown fox", GREEDY, use_tqdm=False)
    assert found.outputs[0].error is None
    return list(found.outputs[0].token_ids)


def test_a_folder_with_a_passport_serves_a_model_and_one_changed_byte_is_refused(
    kernel: Path, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWAY_TRUST_PLUGINS")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    name = f"hub:{kernel}"
    with pytest.raises(PluginError, match=r"has no passport .*passport.json \(headway check NAME --passport FILE writes one"):
        tokens(tiny_model_folder, attn_backend=name, require_passport=True)
    before = passport(HubKernel.of(name))["digest"][:16]
    expected = tokens(tiny_model_folder, attn_backend="sdpa")
    assert tokens(tiny_model_folder, attn_backend=name, require_passport=True) == expected

    ran = tmp_path / "ran"
    changed = ATTEND.replace("import torch", f"import torch; open({str(ran)!r}, 'w')", 1)
    (kernel / "attend.py").write_text(changed)
    now = HubKernel.of(name).content_digest()[:16]
    with pytest.raises(PluginError, match=f"is for code with the digest {before}, and the code here has {now}") as raised:
        tokens(tiny_model_folder, attn_backend=name, require_passport=True)
    assert "\n" not in str(raised.value)
    assert not ran.exists()  # no trial runs code that is refused
    (kernel / "attend.py").write_text(f"{ATTEND[:-1]} ")
    with pytest.raises(PluginError, match="is for code with the digest"):
        tokens(tiny_model_folder, attn_backend=name, require_passport=True)


@pytest.mark.slow
def test_the_command_writes_a_passport_with_which_a_folder_serves_a_model(
    kernel: Path, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWAY_TRUST_PLUGINS")
    place, name = kernel / "passport.json", f"hub:{kernel}"
    done = run_headway("check", name, "--quick", "--jobs", "1", "--passport", str(place), cwd=tmp_path)
    assert done.code == 0, done
    made = Passport.read(place)
    assert (made.failed, made.kernels[0].name, made.kernels[0].quick) == ([], "hub:", True)
    assert {cell.name.partition(":")[0] for cell in made.kernels[0].cells} >= {"process", "claims", "answer", "engine"}
    llm = LLM(str(tiny_model_folder), attn_backend=f"prefill=sdpa,decode={name}", require_passport=True, **OPTIONS)
    assert f"decode={name}" in str(llm.engine.selection)


def test_a_kernel_of_a_plugin_gets_a_passport_and_no_other(kernel: Path, tmp_path: Path) -> None:
    report = check(Wanted(target=f"hub:{kernel}", quick=True, only="claims,repeat"))
    made, place = passport_of([report])
    assert place == kernel / "passport.json"
    assert made.digest == report.digest == HubKernel.of(f"hub:{kernel}").content_digest()
    assert len(made.kernels[0].cells) == len(report.cells) > 2
    two, _ = passport_of([report, report.model_copy(update={"subject": "another"})])
    assert [each.name for each in two.kernels] == ["hub:", "another"]
    with pytest.raises(ConfigError, match="--passport: needs a kernel whose cells have all been run, got 3 cells"):
        passport_of([report, report.model_copy(update={"not_run": 3})])
    for target, options, words in (
        ("sdpa", {}, "a kernel of a plugin, whose files it describes, got sdpa, which is built-in"),
        ("broken:drops-sinks", {}, "all cells of one kernel of a plugin"),
        (f"hub:{kernel}", {"only": "answer"}, "all cells of one kernel of a plugin"),
    ):
        with pytest.raises(ConfigError, match=words):
            command(target, passport=tmp_path / "passport.json", **options)


FAULTS = {
    "abort": ("import os; os.abort()", "ends the process in its import: it was killed by SIGABRT"),
    "hang": ("import time; time.sleep(600)", "hangs in its import: no answer within 2 s"),
    "exit": ("import os; os._exit(3)", "ends the process in its import"),
}


@pytest.mark.parametrize("how", ["abort", "hang", pytest.param("exit", marks=pytest.mark.slow)])
def test_a_kernel_that_fails_its_trial_is_left_out_and_the_start_goes_on(
    kernel: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    monkeypatch.delenv("HEADWAY_TRUST_PLUGINS")
    monkeypatch.setenv("HEADWAY_PLUGIN_TIMEOUT", "2")
    (kernel / "__init__.py").write_text(FAULTS[how][0])
    with caplog.at_level(logging.WARNING, logger="headway"):
        found = tokens(tiny_model_folder, attn_backend=f"hub:{kernel}")
    assert found == tokens(tiny_model_folder, attn_backend="sdpa")
    (skipped,) = [each.message for each in caplog.records if "plugin skipped" in each.message]
    assert FAULTS[how][1] in skipped
    assert f"attention backend hub:{kernel} is left out, and auto chooses instead" in caplog.messages


# Passports that do not apply

IMPOSSIBLE: dict[str, tuple[dict[str, object], str]] = {
    "unknown kind": ({"kernels__0__kind": "convolution"}, "kernels.0.kind: Input should be"),
    "negative error": ({"kernels__0__cells__0__error": -1.0}, "error: Input should be greater than or equal to 0"),
    "NaN": ({"kernels__0__cells__0__error": math.nan}, "kernels.0.cells.0.error: Input should be a finite number"),
    "passed above its tolerance": ({"kernels__0__cells__0__error": 0.5}, "passed with an error of 0.5, above its tolerance"),
    "passed without a tolerance": ({"kernels__0__cells__0__tolerance": None}, "above its tolerance 0"),
    "unknown verdict": ({"kernels__0__cells__0__verdict": "perfect"}, "kernels.0.cells.0.verdict"),
    "no cells": ({"kernels__0__cells": []}, "kernels.0.cells: List should have at least 1 item"),
    "a number as text": ({"kernels__0__cells__0__error": "0"}, "kernels.0.cells.0.error: Input should be a valid number"),
    "unknown level": ({"kernels__0__determinism": {"always": True}}, "kernels.0.determinism.always"),
    "short digest": ({"digest": "abc"}, "digest: String should match pattern"),
    "unknown field": ({"trusted": True}, "trusted: Extra inputs are not permitted"),
    "other code": ({"digest": "0" * 64}, "is for code with the digest 0000000000000000, and the code here has"),
    "other GPU": (
        {"device__name": "NVIDIA H200", "device__type": "cuda", "device__compute_capability": "9.0", "device__threads": None},
        "is for NVIDIA H200 (cuda), and this is",
    ),
    "failed cells": ({"kernels__0__cells__0__verdict": "failed"}, "reports 1 failed cells, first answer:decode"),
    "no passed cell": ({"kernels__0__cells__0__verdict": "skipped"}, "has no passed cell for hub:"),
    "a cell twice": (
        {"kernels__0__cells": [{"name": "answer:decode", "verdict": "passed", "error": 0.0, "tolerance": 1e-6}] * 2},
        "has the same cell twice for hub:",
    ),
}
BY_ALL = [name for name in IMPOSSIBLE if name not in ("failed cells", "no passed cell", "a cell twice")]
"""Reported without require_passport too."""


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_passport_that_does_not_apply_is_one_line(kernel: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    changes, words = IMPOSSIBLE[what]
    passport(HubKernel.of(f"hub:{kernel}"), **changes)
    with pytest.raises(PluginError) as raised:
        create_registry([f"hub:{kernel}"], require_passport=True)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    with caplog.at_level(logging.WARNING, logger="headway"):
        registry = create_registry([f"hub:{kernel}"])
    assert f"hub:{kernel}" in registry.backends
    assert any(words in each for each in caplog.messages) is (what in BY_ALL)


def test_a_passport_of_a_file_covers_what_it_imports_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\nfrom factor import FACTOR\n")
    (tmp_path / "factor.py").write_text("import more.parts\nFACTOR = 1.0\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "__init__.py").write_text("")
    (tmp_path / "other.py").write_text("")
    plugin = PluginFile.of(str(tmp_path / "mine.py"))
    before = plugin.content_digest()
    (tmp_path / "other.py").write_text("changed = True")
    assert plugin.content_digest() == before
    for name, text in (("factor.py", "import more.parts\nFACTOR = 0.0\n"), ("more/parts.py", "")):
        (tmp_path / name).write_text(text)
        assert plugin.content_digest() != before
        before = plugin.content_digest()


def test_compiled_files_are_not_loaded(kernel: Path, tmp_path: Path) -> None:
    """A passport does not cover them."""
    source, ran = kernel / "attend.py", tmp_path / "ran"
    forged = tmp_path / "forged.py"
    forged.write_text(f"open({str(ran)!r}, 'w').close()\n" + ATTEND)
    compiled = Path(importlib.util.cache_from_source(str(source)))
    compiled.parent.mkdir()
    py_compile.compile(str(forged), str(compiled))
    facts = source.stat()
    head = importlib.util.MAGIC_NUMBER + struct.pack("<III", 0, int(facts.st_mtime), facts.st_size)
    compiled.write_bytes(head + compiled.read_bytes()[16:])
    HubKernel.of(f"hub:{kernel}").load()
    assert not ran.exists()


def test_a_file_that_is_not_json_is_one_line(kernel: Path) -> None:
    (kernel / "passport.json").write_bytes(b"\xff{")
    with pytest.raises(PluginError, match="its passport cannot be read: result file: needs a file that headway check NAME"):
        create_registry([f"hub:{kernel}"], require_passport=True)


def test_other_versions_are_reported(kernel: Path, caplog: pytest.LogCaptureFixture) -> None:
    passport(HubKernel.of(f"hub:{kernel}"), device__torch="2.0.0")
    with caplog.at_level(logging.WARNING, logger="headway"):
        create_registry([f"hub:{kernel}"], require_passport=True)
    assert any(f"its passport was made with torch 2.0.0 (here {torch.__version__})" in each for each in caplog.messages)


@pytest.mark.parametrize("wrong_here", [True, False])
def test_a_difference_from_the_trial_is_reported(
    kernel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong_here: bool
) -> None:
    monkeypatch.delenv("HEADWAY_TRUST_PLUGINS")
    if wrong_here:
        (kernel / "attend.py").write_text(ATTEND.replace("* scale", "* scale * 1.5"))
    failed = {} if wrong_here else {"kernels__0__cells__0__verdict": "failed"}
    passport(HubKernel.of(f"hub:{kernel}"), **failed)
    with caplog.at_level(logging.WARNING, logger="headway"):
        create_registry([f"hub:{kernel}"])
    (said,) = [each for each in caplog.messages if "its passport reports that" in each]
    claimed, found = ("0 of 1", "reports: backend hub:") if wrong_here else ("1 of 1", "found nothing wrong")
    assert f"its passport reports that {claimed} cells failed, and the trial here {found}" in said.replace("attention ", "")


# Files, objects, and kernels of the same plugin


def test_a_file_has_its_passport_beside_it_and_each_kernel_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "toy_plugin.py"
    path.write_text(TOY.replace("block_multiple=64", "dtypes=(torch.float32,)"))
    plugin = PluginFile.of(str(path))
    assert plugin.passport == tmp_path / "toy_plugin.passport.json"
    passport(plugin)
    registry = create_registry([str(path)], require_passport=True)
    assert "toy" in registry.backends
    assert "toy.decode" not in registry.backends
    (failure,) = registry.failures
    assert "kernel toy.decode: needs a passport, and the plugin's does not contain it" in str(failure)
    assert "toy.decode" in create_registry([str(path)]).backends
    path.write_text(f"{path.read_text()} ")
    with pytest.raises(PluginError, match="is for code with the digest"):
        create_registry([str(path)], require_passport=True)


def test_a_passport_changes_no_digest(kernel: Path) -> None:
    plugin = HubKernel.of(f"hub:{kernel}")
    before = plugin.digest(), plugin.content_digest()
    passport(plugin)
    assert (plugin.digest(), plugin.content_digest()) == before
    (kernel / "attend.py").rename(kernel / "other.py")
    assert plugin.content_digest() != before[1]


def test_an_object_has_no_passport(kernel: Path) -> None:
    with pytest.raises(PluginError, match="has no files, and so no passport"):
        create_registry([type("Plugin", (), {})()], require_passport=True)
    with pytest.raises(ConfigError, match="registry: needs a Registry alone"):
        LLM("no/such/model", registry=create_registry(), require_passport=True)


def test_times_are_compared_with_the_fastest_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    table = a_table(a_cell(30.0, kernel="mine"), a_cell(20.0, kernel="sdpa"))
    own = KernelRecord(name="mine", owner="mine.py", available=True, digest="0123")
    table = table.model_copy(update={"kernels": [own, table.kernels[1]]})
    path = table_path(table.device, table.spec)
    path.parent.mkdir(parents=True)
    write_json(table, path)
    (found,) = known_times("mine", "attention", "0123456", table.device)
    assert (found.layer_us, found.fastest, found.fastest_us) == (30.0, "sdpa", 20.0)
    assert known_times("mine", "attention", "9" * 16, table.device) == []  # measured with another version
    assert known_times("mine", "attention", "0123456", a_device(name="another CPU")) == []


# The library `kernels`


def test_a_name_of_the_hub_is_downloaded_by_the_library(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    library = ModuleType("kernels")

    def install_kernel(repo_id: str, *, revision=None, version=None, local_files_only=False) -> Path:
        asked.append((repo_id, revision, version, local_files_only))
        return kernel

    library.install_kernel = install_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", library)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    registry = create_registry(["hub:some-owner/flash@2"])
    assert registry.backends["hub:some-owner/flash@2"].owner == "some-owner/flash@2"
    assert registry.of(ATTENTION).backend("hub:some-owner/flash@2").name == "hub:some-owner/flash@2"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert HubKernel.of("hub:some-owner/flash").target == f"hub:{kernel}"
    HubKernel.of("hub:some-owner/flash@v1.2/x")
    assert asked == [
        ("some-owner/flash", None, 2, True),
        ("some-owner/flash", "main", None, False),
        ("some-owner/flash", "v1.2/x", None, False),
    ]
    # A folder with metadata of the hub is loaded by the library's rules, and its metadata says for which devices it is.
    (kernel / "metadata.json").write_text('{"backend": {"type": "cuda"}}')
    loaded = ModuleType("torch_flash")
    exec(ATTEND, vars(loaded))
    loaded.__file__ = str(kernel / "__init__.py")
    library.get_local_kernel = lambda folder: loaded  # type: ignore[attr-defined]
    backend: Any = HubKernel.of(f"hub:{kernel}").load()
    assert backend.capabilities.devices == ("cuda",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hub:", "an existing folder, or OWNER/NAME[@VERSION], got ''"),
        ("hub:./no_such_folder", "got './no_such_folder'"),
        ("hub:no_such_folder", "got 'no_such_folder'"),
        ("hub:/no/such/folder", "got '/no/such/folder'"),
        ("hub:some-owner/flash@1", "needs a folder with __init__.py, or what the library `kernels`"),
    ],
)
def test_a_name_that_is_not_a_kernel_is_one_line(monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        create_registry([text])
    assert "\n" not in str(raised.value)


def test_what_the_library_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("kernels")

    def install_kernel(*given: object, **options: object) -> Path:
        raise FileNotFoundError("Cannot find a build variant\n\nfor this system")

    library.install_kernel = install_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kernels", library)
    with pytest.raises(HeadwayError, match="got FileNotFoundError: Cannot find a build variant for this system"):
        create_registry(["hub:some-owner/flash@1"])
