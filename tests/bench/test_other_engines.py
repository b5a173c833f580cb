"""Other engines in a child process: one that is here is measured on the same requests, one that is not is refused."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from headway.bench.generate.results import PeersFile
from headway.bench.generate.workloads import RandomTokens
from headway.bench.studies.command import run_study
from headway.bench.studies.engines import PeerOptions, engines, run_peer
from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.system.json_files import write_json
from sandbox import save_tiny_model


@pytest.fixture(scope="module")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


CPU = torch.device("cpu")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_a_peer_that_is_not_installed_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedError, match="vllm: needs the module vllm, got none installed here .pip install vllm"):
        run_peer(PeerOptions("vllm"), [RandomTokens(1, 4, 2)], CPU)
    monkeypatch.setattr(sys, "argv", ["engines", "vllm", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        run_study(engines)
    assert ended.value.code == 2
    assert "pip install vllm" in capsys.readouterr().err.replace("\n", " ")


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="vllm or nano-vllm or transformers or llama.cpp, got 'tgi'"):
        run_peer(PeerOptions("tgi"), [RandomTokens(1, 4, 2)], CPU)


@pytest.mark.slow
def test_transformers_is_measured_on_the_requests_of_the_benchmark(tiny_model_folder: Path, tmp_path: Path) -> None:
    options = PeerOptions("transformers", str(tiny_model_folder), "auto", "float32", repeat=2, warmup=0, command="c")
    found = run_peer(options, [RandomTokens(2, 4, 3), RandomTokens(1, 5, 2)], CPU)
    write_json(found, tmp_path / "p.json")
    (peer,) = PeersFile.read(tmp_path / "p.json").peers
    assert peer.name == "transformers"
    assert list(peer.tokens_per_second) == ["2 x 4/3", "1 x 5/2"]
    for label, rate in peer.tokens_per_second.items():
        assert len(peer.passes[label]) == 2
        assert min(peer.passes[label]) <= rate <= max(peer.passes[label])
    assert found.measured_by == ""
    assert found.origin is not None
