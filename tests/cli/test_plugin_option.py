"""--plugin and `LLM(backends=...)`: a backend without a package, in every command that asks which backends there are."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from headway import LLM, SamplingParams, create_registry
from headway.cli.app import make_app
from headway.cli.measure.bench_crossover import crossover
from headway.cli.options import requests_of
from headway.contract import Phase
from headway.core.contract.errors import ConfigError, PluginError
from headway.core.select.request import BackendRequest
from headway.registry.plugin_sources import PluginFile
from sandbox import TOY, assert_refused, run_headway

app = make_app()

COMMANDS = (
    *("backends", "backends explain", "bench crossover", "bench kernel", "bench throughput", "check", "diff", "doctor"),
    *("generate", "table check", "table regret", "warm"),
)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy_plugin.py"
    path.write_text(TOY.replace("block_multiple=64", "dtypes=(torch.float32,)"))
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_with_a_registry_has_the_option(command: str) -> None:
    found: Any = get_command(app)
    for word in command.split():
        found = found.commands[word]
    assert "--plugin" in {option for each in found.params for option in each.opts}


def test_a_class_from_a_notebook_generates(toy: Path, tiny_model_folder: Path) -> None:
    spec = importlib.util.spec_from_file_location("toy_of_a_notebook", toy)
    notebook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(notebook)
    options = {"kv_cache_memory": "1MiB", "num_threads": 1, "autotune_budget": 0}
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    own = LLM(str(tiny_model_folder), attn_backend="toy", backends=[notebook.Toy], **options)
    assert "toy" in str(own.engine.selection)
    (found,) = own.generate("the fox", greedy, use_tqdm=False)
    plain = LLM(str(tiny_model_folder), attn_backend="sdpa", plugins=[str(toy)], **options)
    assert "toy.decode" in plain.registry.backends
    (expected,) = plain.generate("the fox", greedy, use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert found.outputs[0].error is None


def test_a_registry_and_plugins_beside_it_are_refused(tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="registry: needs a Registry alone"):
        LLM(str(tiny_model_folder), registry=create_registry(), plugins=["toy.py"])
    with pytest.raises(ConfigError, match="plugins: needs a list"):
        LLM(str(tiny_model_folder), plugins="toy.py")


@pytest.mark.parametrize("given", [5, "sdpa", int, [5], ["sdpa"], [int], [object()], {"sdpa": 1}])
def test_backends_that_are_no_list_of_backend_classes_are_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="backends: needs a list of subclasses of AttentionBackend or .* ExpertsKernel, got"):
        LLM("no/such/model", backends=given)


def test_names_and_pairs_are_read_from_one_text() -> None:
    assert requests_of(None) is None
    assert requests_of("a, b") == ["a", "b"]
    assert requests_of("a,prefill=auto,decode=b,c") == ["a", "prefill=auto,decode=b", "c"]
    assert requests_of("prefill=a,decode=b,prefill=b,decode=a") == ["prefill=a,decode=b", "prefill=b,decode=a"]
    assert requests_of("decode=a,decode=b,prefill=c") == ["decode=a", "decode=b,prefill=c"]


def test_a_pair_is_refused_where_each_phase_is_timed_by_itself() -> None:
    with pytest.raises(ConfigError, match="--backends: needs names at level kernel.*got prefill=auto,decode=b .*--level engine"):
        crossover(backends="sdpa,prefill=auto,decode=b", device="cpu")


def test_a_file_without_a_hook_is_told_its_class(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(
        "from headway.contract import AttentionBackend\n\n\nclass Bare(AttentionBackend):\n    pass\n"
    )
    with pytest.raises(PluginError, match=r"name a class of it: .*bare\.py:Bare"):
        PluginFile.of(str(tmp_path / "bare.py")).load()


def test_a_backend_of_a_part_is_asked_for_beside_auto() -> None:
    assert str(BackendRequest.for_backend("whole", Phase)) == "whole"
    assert str(BackendRequest.for_backend("half", {Phase.DECODE})) == "prefill=auto,decode=half"
    assert str(BackendRequest.for_backend("half", {Phase.DECODE, Phase.EXTEND})) == "prefill=auto,decode=half"
    assert str(BackendRequest.for_backend("half", {Phase.PREFILL, Phase.EXTEND})) == "prefill=half,decode=auto"


@pytest.mark.slow
def test_a_decode_only_plugin_is_a_guest_in_every_command(toy: Path, tiny_model_folder: Path) -> None:
    model, here = ["--model", str(tiny_model_folder)], toy.parent
    pair, plugin = "prefill=auto,decode=toy.decode", ["--plugin", toy.name]
    refused = run_headway("generate", *model, *plugin, "--attn-backend", "toy.decode", "the fox", cwd=here)
    assert_refused(refused, "name another backend for prefill", f"nearest fix: --attn-backend {pair}")
    for command in (
        ["generate", *model, *plugin, "--attn-backend", pair, "--no-autotune", "--max-tokens", "3", "the fox"],
        ["diff", pair, *model, *plugin, "--prompt", "the fox", "--max-tokens", "2"],
        ["backends", "explain", *plugin, "--attn-backend", pair],
        ["bench", "kernel", *plugin, "--backends", "toy.decode", "--cases", "1q1s16", "--geometry", "4/2/64"],
        ["check", "toy.decode", *plugin, "--only", "turns", "--quick"],
    ):
        done = run_headway(*command, cwd=here, columns=200)
        assert done.code == 0, done
        assert "toy.decode" in done.out + done.err, done
    output = here / "engine.json"
    sizes = ["--batch-sizes", "1", "--input-lens", "8", "--output", str(output)]
    names = ["--backends", f"toy.decode,{pair},sdpa"]
    done = run_headway("bench", "crossover", "--level", "engine", *model, *plugin, *names, *sizes, cwd=here)
    assert done.code == 0, done
    found = {cell["kernel"]: cell["status"] for cell in json.loads(output.read_text())["cells"]}
    assert found.pop("toy.decode") == "unsupported"
    assert set(found) == {pair, "sdpa"}
    assert set(found.values()) <= {"ok", "tie"}
