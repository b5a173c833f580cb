"""`headway new-backend`: a package that passes at once."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headway.cli.look.plugins import distribution_of, write_package
from headway.contract import API_VERSION
from headway.core.contract.errors import ConfigError
from headway.core.contract.operation import EXPERTS, LINEAR, STATE, OperationKind
from headway.core.oracle.cells import CheckCell
from headway.registry import create_registry
from headway.registry.plugin_sources import load_file
from headway.testing.kit.kit import Kit
from headway.testing.kit.subject import load_subject
from sandbox import assert_refused, run_headway, run_python

REGISTRY = create_registry(load_entry_points=False)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "headway-walnut-tree"
    files = write_package("walnut_tree", folder, REGISTRY)
    names = {str(path) for path in files}
    assert names == {
        *(".github/workflows/test.yml", ".gitignore", "README.md", "headway_walnut_tree.py", "pyproject.toml"),
        "tests/test_walnut_tree.py",
    }
    return folder


@pytest.fixture(scope="module")
def module(package: Path) -> ModuleType:
    return load_file(package / "headway_walnut_tree.py")


def test_its_metadata_names_the_module_and_the_contract(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())
    assert project["project"]["name"] == distribution_of("walnut_tree") == "headway-walnut-tree"
    assert project["project"]["entry-points"]["headway"] == {"walnut_tree": "headway_walnut_tree"}
    assert project["tool"]["setuptools"]["py-modules"] == ["headway_walnut_tree"]
    registry = create_registry([str(package / "headway_walnut_tree.py")], load_entry_points=False)
    assert registry.backends["walnut_tree"].info.api_version == API_VERSION
    assert registry.backend("walnut_tree").__name__ == "WalnutTree"


def test_its_own_test_passes(module: ModuleType, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headway_walnut_tree", module)
    own = load_file(package / "tests" / "test_walnut_tree.py")
    for query_len, kv_len in own.test_the_kernel_computes_attention.pytestmark[0].args[1]:
        own.test_the_kernel_computes_attention(query_len, kv_len)


@pytest.mark.parametrize("check", ["answer", "steps"])
def test_it_keeps_the_contract(package: Path, check: str) -> None:
    kit = Kit(load_subject(f"{package}/headway_walnut_tree.py:WalnutTree", torch.device("cpu")))
    plain = CheckCell("answer", "decode", layout="nhd", block_size=8, head_dim=32, group=2)
    result = kit.run(plain if check == "answer" else plain.plain("steps"))
    assert result.status == "passed", result


@pytest.mark.parametrize("name", ["1abc", "with-dash", "a b", "class", "Walnut", "wälnut", "", "auto", "reference"])
def test_a_name_that_is_no_identifier_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="NAME: needs a Python identifier in lower case"):
        write_package(name, tmp_path / "new", REGISTRY)
    assert not (tmp_path / "new").exists()


def test_a_name_that_is_taken_and_a_folder_that_is_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a name that no backend has, got 'sdpa' of built-in"):
        write_package("sdpa", tmp_path / "new", REGISTRY)
    with pytest.raises(ConfigError, match="needs a folder that does not exist yet"):
        write_package("walnut", tmp_path, REGISTRY)
    with pytest.raises(ConfigError, match="a folder that can be written"):
        write_package("walnut", Path("/proc/no/folder"), REGISTRY)
    monkeypatch.setitem(sys.modules, "copier", None)
    with pytest.raises(ConfigError, match=r'pip install "headway\[kit\]"'):
        write_package("walnut", tmp_path / "new", REGISTRY)


@pytest.mark.parametrize("kind", [LINEAR, EXPERTS], ids=lambda kind: kind.name)
def test_a_kernels_package_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: OperationKind) -> None:
    folder = tmp_path / "headway-oak"
    files = {str(path) for path in write_package("oak", folder, REGISTRY, kind)}
    assert files > {"headway_oak.py", "pyproject.toml", "tests/test_oak.py"}
    module = load_file(folder / "headway_oak.py")
    monkeypatch.setitem(sys.modules, "headway_oak", module)
    own = load_file(folder / "tests" / "test_oak.py")
    if kind is LINEAR:
        for zeros in (False, True):
            own.test_it_multiplies(16, zeros)
    else:
        own.test_it_adds_what_the_experts_give(5)
    registry = create_registry([str(folder / "headway_oak.py")], load_entry_points=False)
    assert registry.of(kind).entries["oak"].info.api_version == API_VERSION


def test_a_package_is_refused_for_a_taken_name_and_for_a_kind_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="NAME: needs a name that no linear kernel has, got 'marlin' of built-in"):
        write_package("marlin", tmp_path / "other", REGISTRY, LINEAR)
    with pytest.raises(
        ConfigError, match="--kind: needs one that there is a template for: attention, linear, experts, got state"
    ):
        write_package("oak", tmp_path / "other", REGISTRY, STATE)


def test_an_unknown_kind_is_one_line(tmp_path: Path) -> None:
    assert_refused(run_headway("new-kernel", "oak", "--kind", "convolution", cwd=tmp_path), "--kind", "one of attention, state")


@pytest.mark.slow
def test_the_command_says_what_comes_next_and_all_of_it_works(tmp_path: Path) -> None:
    made = run_headway("new-backend", "oak", cwd=tmp_path)
    assert made.code == 0, made
    folder = tmp_path / "headway-oak"
    for line in ("cd headway-oak", "headway check headway_oak.py:Oak --quick", "headway generate --plugin headway_oak.py"):
        assert line in made.out
    assert_refused(run_headway("new-backend", "oak", cwd=tmp_path), "--into", "does not exist yet")
    checked = run_headway("check", "headway_oak.py:Oak", "--quick", cwd=folder)
    assert checked.code == 0, checked
    assert "oak" in run_headway("backends", "--plugin", "headway_oak.py", cwd=folder).out


@pytest.mark.slow
@pytest.mark.soak
def test_installed_into_an_environment_of_its_own_it_is_found_and_its_tests_pass(package: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    # Headway and what it needs are those of this environment; the package alone is installed anew.
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
    target = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site), str(package)]
    installed = run_python("-m", "pip", "install", *target, cwd=tmp_path)
    assert installed.code == 0, installed
    found = subprocess.run(
        [python, "-m", "headway", "backends", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert '"kind": "headway-walnut-tree 0.1.0"' in found.stdout, found
    tests = subprocess.run(
        [python, "-m", "pytest", "-v", "-p", "no:cacheprovider"], cwd=package, capture_output=True, text=True, timeout=900
    )
    assert tests.returncode == 0, tests
    assert "answer:decode" in tests.stdout
