"""Tests of safetensors folders, complete and damaged, and of linear layers with quantized weights."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headway.core.contract.errors import ModelError
from headway.kernels.linear.axes import Axis, Division
from headway.kernels.linear.linear import Linear
from headway.kernels.step.invariant import invariant_operations
from headway.kernels.step.torch_operations import TorchOperations
from headway.models.checkpoints.formats.rounding import float8
from headway.models.checkpoints.tensor_files import plain_slices
from headway.models.checkpoints.weights import DummyWeights, QuantizeOnLoading, Weights
from operation_inputs import ropes
from quantized_weights import FORMS

INDEX = "model.safetensors.index.json"


def tensor(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)


def save(folder: Path, file: str = "model.safetensors", **tensors: torch.Tensor) -> None:
    save_file({name.replace("__", "."): value for name, value in tensors.items()}, folder / file)


def index(folder: Path, **file_of: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(folder, dtype, torch.device("cpu"))


def test_tensors_are_taken_by_name_and_merged_along_their_rows_in_the_wanted_dtype(tmp_path: Path) -> None:
    save(tmp_path, a=tensor(2, 3), b=tensor(1, 3).bfloat16(), c=tensor(4))
    weights = open_folder(tmp_path, torch.float16)
    assert [name in weights for name in "abcd"] == [True, True, True, False]
    torch.testing.assert_close(weights.take("b", (1, 3)), tensor(1, 3).half(), rtol=0, atol=0)
    merged = weights.take_merged({"b": 1, "a": 2}, 3)
    assert merged.dtype == torch.float16
    torch.testing.assert_close(merged, torch.cat([tensor(1, 3), tensor(2, 3)]).half(), rtol=0, atol=0)
    torch.testing.assert_close(weights.take_merged({"c": 4}), tensor(4).half(), rtol=0, atol=0)
    weights.finish()


def folder(path: Path, files: dict[str, str], named: dict[str, str] | None = None) -> Path:
    """Files of tensors with one-letter names, and an index if one is given."""
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
        (True, "weights: quantized to fp8 while loading: 12.6 MB instead of 25.2 MB"),
        (False, "weights: quantized to fp8 while loading, then dequantized to bfloat16: 25.2 MB as before"),
    ):
        drawn = DummyWeights(torch.bfloat16, torch.device("cpu"))
        source = QuantizeOnLoading(drawn, float8, lambda weight, keeps=keeps: keeps)  # type: ignore[misc]
        for _ in range(2):
            assert isinstance(source.take_product({"a": 1024, "b": 1024}, 3072), Tensor) is not keeps
        source.finish()
        assert caplog.messages == [told]
        caplog.clear()


def check_layers(expected_of: dict[Linear, Tensor], x: Tensor, residual: Tensor, tolerance: float) -> None:
    tolerance = 1e-6 if x.dtype == torch.float32 else tolerance
    for linear, expected in expected_of.items():
        out = torch.empty_like(residual)
        assert linear(x, out) is out
        assert torch.equal(out, linear(x))
        assert (out - expected).norm() < tolerance * expected.norm()
        whole = residual.double() + expected
        assert (linear.add_to(residual.clone(), x) - whole).norm() < tolerance * whole.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products_are_those_of_the_dequantised_weight(form: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = FORMS[form](torch.randn(80, 384, generator=generator))
    bias, x, residual = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((80,), (5, 384), (5, 80)))
    exact = x.double() @ weight.dequantized(torch.float64).t()
    check_layers({Linear(weight, dtype=dtype): exact, Linear(weight, bias): exact + bias.double()}, x, residual, 6e-3)


def test_a_layer_tells_what_it_expanded() -> None:
    drawn = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    assert Linear(FORMS["fp8 rows"](drawn)).expanded_bytes == 4 * 64 * 256
    assert Linear(FORMS["int4 of 128"](drawn), dtype=torch.bfloat16).expanded_bytes == 0
    assert Linear(FORMS["int4 of 128"](drawn[:40]), dtype=torch.bfloat16).expanded_bytes == 2 * 40 * 256  # torch wants 16 rows
    assert Linear(FORMS["int4 of 128"](drawn), dtype=torch.float32).expanded_bytes == 4 * 64 * 256  # torch's is slower there
    assert Linear(FORMS["int8"](drawn), dtype=torch.bfloat16).expanded_bytes == 2 * 64 * 256
    assert Linear(drawn).expanded_bytes == 0


@pytest.mark.parametrize("form", ["fp8 rows", "int8", "int4 of 128"])
def test_rows_keep_their_bits_in_invariant_products(form: str) -> None:
    linear = Linear(FORMS[form](torch.randn(64, 256, generator=torch.Generator().manual_seed(3))))
    operations = invariant_operations(TorchOperations(*ropes(16)), [linear], torch.device("cpu"))
    x = torch.randn(19, 256, generator=torch.Generator().manual_seed(4))
    assert torch.equal(operations.product(x, linear)[:3], operations.product(x[:3], linear))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_plain_layer_is_right_whether_its_weight_is_packed_or_not(dtype: torch.dtype) -> None:
    """Large enough to be packed, where the CPU packs the type."""
    generator = torch.Generator().manual_seed(5)
    weight, x, bias, residual = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((520, 400), (7, 400), (520,), (7, 520))
    )
    exact = x.double() @ weight.double().t()
    check_layers({Linear(weight): exact, Linear(weight, bias): exact + bias.double()}, x, residual, 4e-3)
