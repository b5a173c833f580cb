"""deploy/: what its files name is there: options, paths, ports and figures."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from headway.cli.app import command_for
from headway.core.engine.data.stats import EngineSnapshot, EngineStats
from headway.server.middleware import PROBES
from headway.server.operators.metrics import Metrics
from headway.server.options import ServerOptions

STUCK = 20
"""Seconds after which a stuck engine is killed (docs/server.md)."""
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def options() -> set[str]:
    """The options of `headway serve`."""
    commands: Any = command_for(())
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
