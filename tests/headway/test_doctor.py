"""The doctor's advice for machines of other kinds, whose descriptions are handed in."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.cli.look import doctor as cli_doctor
from headway.cli.look.doctor import command_lines, diagnose, screen
from headway.core.contract.backend import BackendInfo
from headway.core.contract.support import Support
from headway.machine.doctor import (
    PACKAGES,
    Advice,
    Gpu,
    Machine,
    advise,
    advise_vllm_library,
    build_jobs,
    examine,
    library,
    parse_gpus,
    wheel_tag,
)
from headway.registry import create_registry, hookimpl

app = make_app()

H200 = Machine(
    system="Linux",
    arch="x86_64",
    python="3.12.3",
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    cuda_works=True,
    cores=16,
    threads=16,
    memory_gib=128.0,
    model_cache="/home/ada/.cache/headway",
    driver="580.65.06",
    gpus=(Gpu("NVIDIA H200", (9, 0), 139.8),),
    nvcc="13.0",
    ninja="/usr/bin/ninja",
    compiler="/usr/bin/c++",
)
LAPTOP = dataclasses.replace(H200, torch="2.13.0+cpu", torch_cuda=None, cuda_works=False, driver=None, gpus=(), nvcc=None)
MISSING = Support.no("import", "a backend that loads and answers", "No module named 'flash_attn'", "pip install 'flash-attn'")
NO_GPU = Support.no("device", "a CUDA GPU", "none")


def advice(extra: str, support: Support = MISSING, machine: Machine = H200, devices: tuple[str, ...] | None = None) -> Advice:
    return advise(extra, support, devices, machine)


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ("headway[flash-attn]", "flash-attn"),
        ("flash_attn>=2.7", "flash-attn"),
        ("flash-attn-4", "flash-attn-4"),
        ("libkernel >= 2", "libkernel"),
        ("", ""),
    ],
)
def test_an_extra_names_its_library(extra: str, name: str) -> None:
    assert library(extra) == name


def test_requirements_are_those_of_the_extras() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in PACKAGES.keys() & extras.keys():
        assert extras[name] == [PACKAGES[name].requirement]


@pytest.mark.parametrize("extra", [*PACKAGES, ""])
def test_without_a_gpu_nothing_is_suggested(extra: str) -> None:
    assert advice(extra, NO_GPU, LAPTOP, ("cuda",)) == Advice("needs an NVIDIA GPU; nothing to install")


NO_CUDA = {"torch": "2.13.0+cpu", "torch_cuda": None, "cuda_works": False}
OLD_DRIVER = {"cuda_works": False, "driver": "550.54"}
OF_TORCH = Support.no("varlen_attn", "block_table", "ImportError", "torch 2.13 has it")
LOADED = Support.no("signature", "block_table", "none", "see its notes")


@pytest.mark.parametrize(
    ("extra", "change", "words", "first"),
    [
        (
            "triton",
            NO_CUDA,
            "first a CUDA build of torch: this one, 2.13.0+cpu",
            "torch --index-url https://download.pytorch.org/whl/cu130",
        ),
        ("triton", {**NO_CUDA, "driver": "550.54"}, "first a CUDA build of torch", "/cu126"),
        ("triton", OLD_DRIVER, "550.54 is too old for CUDA 13.0", "/cu126"),
        ("triton", {**OLD_DRIVER, "driver": "470.1"}, "first update the NVIDIA driver to 525 or newer: this one is 470.1", ""),
        ("triton", {"cuda_works": False}, "cannot use the GPU", ""),
        ("flash-attn", {"gpus": (Gpu("Tesla T4", (7, 5), 15.0),)}, "needs compute capability 8.0, the GPU has 7.5; nothing", ""),
        ("triton", {"system": "Windows"}, "triton is not released for Windows, only for Linux; nothing to install", ""),
        ("triton", {"installer": ""}, "", "python -m ensurepip && headway doctor"),
        ("flash-attn-4", {}, "", "python -m pip install --pre 'flash-attn-4>=4.0.0b36'"),
        ("xformers", {}, "nvidia-cuda-runtime-cu12", "xformers"),
        ("flash-attn", {"nvcc": None}, "a build needs nvcc, not found here", "linux_x86_64.whl"),
        ("flash-attn", {"nvcc": None, "compiler": None}, "a build needs nvcc and a C++ compiler, not found here", ".whl"),
        ("flash-attn", {"nvcc": "12.8"}, "a build needs nvcc 13.x like torch's CUDA, here is 12.8", "linux_x86_64.whl"),
    ],
)
def test_what_a_machine_lacks_is_said_with_the_command_that_helps(
    extra: str, change: dict[str, object], words: str, first: str
) -> None:
    found = advice(extra, machine=dataclasses.replace(H200, **change))
    assert words in found.text + found.note
    assert first in found.commands[0] if first else not found.commands


def test_what_needs_no_installation() -> None:
    """A backend for CPUs, one of torch itself, and a library that loads and is refused."""
    assert advice("libkernel>=2", MISSING, LAPTOP).commands == ("python -m pip install 'libkernel>=2'",)
    assert advice("", Support.no("torch", "2.13", "2.11", "update torch"), LAPTOP) == Advice(
        "nothing to install", (), "update torch"
    )
    own = Advice("comes with torch, this is 2.11.0+cu130; nothing to install", (), "torch 2.13 has it")
    assert advice("torch>=2.13", OF_TORCH, H200, ("cuda",)) == own
    here = dataclasses.replace(H200, installed={"flash-attn-4": "4.0"})
    assert advice("flash-attn-4", LOADED, here) == Advice(
        "flash-attn-4 4.0 is installed; nothing to install", (), "see its notes"
    )


def test_flash_attn_wheel_first_then_the_build() -> None:
    found = advice("headway[flash-attn]")
    assert "github.com/Dao-AILab/flash-attention/releases" in found.text
    assert "cu13torch2.11cxx11abiTRUE-cp312-cp312-linux_x86_64.whl" in found.text
    wheel, build = found.commands
    assert wheel == f"python -m pip install ./flash_attn-*+{wheel_tag(H200)}"
    assert build == "MAX_JOBS=14 python -m pip install --no-build-isolation 'flash-attn>=2.7'"
    assert "5 minutes to 2 hours" in found.note


def test_flash_attn_3_is_taken_out_of_the_wheel_for_this_torch() -> None:
    missing = Support.no("FlashAttention 3", "a library that holds it", "none", "install it")
    found = advice("flash-attn-3", missing)
    assert found.commands[0] == "python -m pip download --no-deps --dest fa3 vllm==0.24.0"
    assert "HEADWAY_FA3_LIBRARY" in found.commands[-1]
    other = advice("flash-attn-3", missing, dataclasses.replace(H200, torch="2.5.1+cu124"))
    assert not other.commands
    assert "torch 2.5 and CUDA 13.0 is known" in other.text
    older = advice("flash-attn-3", missing, dataclasses.replace(H200, torch="2.11.0+cu126", torch_cuda="12.6"))
    assert not older.commands
    newer = dataclasses.replace(H200, gpus=(Gpu("NVIDIA B200", (10, 0), 180.0),))
    assert "9.x alone, the GPU has 10.0" in advice("flash-attn-3", missing, newer).text


def test_where_a_library_was_found_is_shown() -> None:
    findings = diagnose(create_registry(load_entry_points=False), LAPTOP)
    row = next(row for row in findings["backends"] if row["name"] == "flash_attn_3")
    row |= {"available": True, "origin": "vllm, /opt/vllm/_vllm_fa3_C.abi3.so"}
    assert "(from vllm, /opt/vllm/_vllm_fa3_C.abi3.so)" in "\n".join(line.plain for line in screen(findings, LAPTOP, 200))


def test_without_ninja_it_is_installed_before_the_build() -> None:
    found = advice("flash-attn", machine=dataclasses.replace(H200, ninja=None))
    assert found.commands[1] == "python -m pip install ninja"


def test_a_library_that_does_not_load_is_installed_again() -> None:
    broken = dataclasses.replace(H200, installed={"flash-attn": "2.8.3", "xformers": "0.0.35"})
    undefined = Support.no("kernel", "flash_attn_2_cuda", "ImportError: undefined symbol")
    found = advice("flash-attn", undefined, broken)
    assert found.text.startswith("flash-attn 2.8.3 is installed but does not load")
    assert all("--force-reinstall --no-deps" in command for command in found.commands)
    assert "--force-reinstall" in advice("xformers", MISSING, broken).commands[0]


@pytest.mark.parametrize(("cores", "memory", "jobs"), [(16, 128.0, 14), (2, 128.0, 2), (64, 8.0, 1)])
def test_build_jobs_fit_cores_and_memory(cores: int, memory: float, jobs: int) -> None:
    assert build_jobs(dataclasses.replace(H200, cores=cores, memory_gib=memory), 9) == jobs


def test_gpus_are_parsed_from_nvidia_smi() -> None:
    rows = "580.65.06, NVIDIA H200, 9.0, 143771\n580.65.06, NVIDIA H200, 9.0, 143771\nnot a row\n1, MIG, [N/A], [N/A]\n"
    driver, gpus = parse_gpus(rows)
    assert driver == "580.65.06"
    assert gpus == (Gpu("NVIDIA H200", (9, 0), 140.4),) * 2
    assert parse_gpus("") == (None, ())


class Libraries:
    """A plugin with one backend for each library; no library is installed."""

    @hookimpl
    def headway_register_backends(self) -> list[BackendInfo]:
        def load() -> type:
            raise ModuleNotFoundError("No module named 'kernels' " + "and so on " * 40)

        return [BackendInfo(f"of_{name.replace('-', '_')}", "for a test", load, name, api_version=2) for name in PACKAGES]


def test_vllms_library_is_taken_out_of_a_wheel() -> None:
    missing = Support.no("vLLM's library", "a compiled library that holds it", "none", "install vllm")
    assert advise_vllm_library(missing, H200).commands == (
        "python -m pip download --no-deps --dest vllm vllm==0.24.0",
        "python -m zipfile -e vllm/vllm-0.24.0-*.whl vllm",
        "export HEADWAY_VLLM_LIBRARY=$PWD/vllm/vllm/_C_stable_libtorch.abi3.so && headway doctor",
    )
    assert "vllm==0.33.0" in advise_vllm_library(missing, dataclasses.replace(H200, torch="2.12.1+cu130")).commands[0]
    assert not advise_vllm_library(missing, LAPTOP).commands
    old = advise_vllm_library(missing, dataclasses.replace(H200, torch_cuda="12.6"))
    assert (old.commands, old.note) == ((), "install vllm")


@pytest.mark.parametrize("machine", [H200, LAPTOP], ids=["h200", "laptop"])
def test_the_report_fits_80_columns(machine: Machine) -> None:
    registry = create_registry([Libraries()], load_entry_points=False)
    lines = [line.plain for line in screen(diagnose(registry, machine), machine, 80)]
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    text = "\n".join(lines)
    assert len(lines) <= 15 + 7 * (len(registry.backends) + 1), "the library of products is told like a backend"
    for name in registry.backends:
        assert name in text
    assert ("pip install" in text) == bool(machine.gpus)
    assert ("whole with --json" in text) == bool(machine.gpus)
    assert lines.count("ready here") == 2, "attention, and layers with a state"
    assert ("needs an NVIDIA GPU" in lines) == (not machine.gpus)


def test_nothing_is_probed_twice() -> None:
    calls = []

    class Probed:
        @hookimpl
        def headway_register_backends(self) -> list[BackendInfo]:
            def load() -> type:
                calls.append(1)
                raise ImportError("gone")

            return [BackendInfo("probed", "for a test", load, "triton", api_version=2)]

    registry = create_registry([Probed()], load_entry_points=False)
    registry.availability("probed")
    diagnose(registry, LAPTOP)
    assert len(calls) == 1


def test_commands_break_at_spaces_only() -> None:
    lines = command_lines("python -m pip install " + "--option " * 12 + "'flash-attn>=2.7'", 60)
    assert max(map(len, lines)) <= 60
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert not lines[-1].endswith("\\")


def test_doctor_runs_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert "attention backends" in shown.output
    states_shown = shown.output.partition("backends of layers with a state\n")[2]
    assert re.search(r"ready here\n(  .*\n)*?  torch +the baseline: batched products of torch", states_shown)
    answer = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert answer.keys() == {"headway", "machine", "backends", "state_backends", "libraries", "failures"}
    rows = {row["name"]: row for row in answer["backends"]}
    assert rows["sdpa"]["available"]
    states = {row["name"]: row for row in answer["state_backends"]}
    assert states["torch"]["available"]
    for row in (*rows.values(), *states.values(), *answer["libraries"]):
        assert row["available"] != bool(row["advice"]["text"])
        assert row["available"] != bool(row["reasons"])


def test_plugin_failures_are_shown() -> None:
    findings = diagnose(create_registry(load_entry_points=False), LAPTOP)
    findings["failures"] = [{"plugin": "toy", "owner": "toy 1.0", "error": "toy (from toy 1.0): ImportError: gone"}]
    text = "\n".join(line.plain for line in screen(findings, LAPTOP, 80))
    assert "plugins that failed" in text
    assert "ImportError: gone" in text


def test_this_machine_is_described() -> None:
    machine = examine(("headway", "no-such-distribution"))
    assert machine.cores >= 1
    assert machine.installed.keys() == {"headway"}
    assert dict(cli_doctor.facts(machine))["GPUs"] == "none" or machine.gpus
