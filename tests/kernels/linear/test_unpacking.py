"""The assembly that unpacks codes, instruction by instruction on a CPU, for every byte in every place."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headway.core.contract.weights import FP4_VALUES

pytest.importorskip("triton")
try:
    from headway.kernels.linear import unpack_kernels
except RuntimeError as error:  # pragma: no cover - an old GPU driver
    pytest.skip(str(error), allow_module_level=True)

DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}


def halves(word: Tensor, dtype: torch.dtype) -> Tensor:
    """Words [n] as the two numbers in each [n, 2]."""
    return word.to(torch.uint32).view(torch.int16).view(dtype).view(-1, 2)


def permuted(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """PTX's prmt without its sign mode."""
    pool = [(word >> 8 * place) & 255 for word in (a, b) for place in range(4)]
    chosen = [(int(selector[0]) >> 4 * place) & 15 for place in range(4)]
    assert max(chosen) < 8
    return sum((pool[number] << 8 * place for place, number in enumerate(chosen)), torch.zeros_like(a))


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Both halves multiplied, rounded to the nearest."""
    exact = halves(a, dtype).double() * halves(b, dtype).double()
    return exact.to(dtype).contiguous().view(torch.int16).view(torch.uint32).view(-1).to(torch.int64)


def execute(assembly: str, words: Tensor) -> list[Tensor]:
    """Run the instructions on words, int64 [n]; returns $0, $1, ..."""
    outputs = max(int(number) for number in re.findall(r"\$(\d)", assembly))
    registers = {f"${outputs}": words}

    def value(name: str) -> Tensor:
        return registers[name] if name in registers else torch.full_like(words, int(name, 0))

    simple: dict[str, Callable[..., Tensor]] = {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "shr.b32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: (a << b) & 0xFFFFFFFF,
        "prmt.b32": permuted,
        "mul.f16x2": lambda a, b: product(a, b, torch.float16),
    }
    for line in filter(None, (each.strip() for each in assembly.strip("{} \n").split(";"))):
        operation, rest = line.split(maxsplit=1)
        to, *given = (each.strip() for each in rest.split(","))
        if operation == ".reg":
            continue
        if operation == "lop3.b32":
            assert given.pop() == "0xea", "a & b | c"
            a, b, c = map(value, given)
            registers[to] = a & b | c
        elif operation == "fma.rn.bf16x2":
            a, b, c = map(value, given)
            assert (c == 0x80008000).all(), "a product is added to -0, which leaves it"
            registers[to] = product(a, b, torch.bfloat16)
        else:
            registers[to] = simple[operation](*map(value, given))
    return [registers[f"${number}"] for number in range(outputs)]


def every_byte() -> Tensor:
    """Words whose four bytes run through all values, each beside others."""
    byte = torch.arange(256)
    return byte | (byte * 7 + 3) % 256 << 8 | (byte * 31 + 11) % 256 << 16 | (255 - byte) << 24


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_of_eight_bits(dtype: str) -> None:
    words = every_byte()
    found = torch.cat(
        [halves(word, DTYPES[dtype]) for word in execute(getattr(unpack_kernels, f"FLOAT8_TO_{dtype}").value, words)], 1
    )
    expected = words.to(torch.uint32).view(torch.float8_e4m3fn).view(-1, 4).float()
    number = expected.isfinite()
    assert torch.equal(found.float()[number], expected[number])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["INT4", "FLOAT4"])
def test_codes_of_four_bits(form: str, dtype: str) -> None:
    words = every_byte()
    found = [halves(word, DTYPES[dtype]).float() for word in execute(getattr(unpack_kernels, f"{form}_TO_{dtype}").value, words)]
    byte = words.to(torch.uint32).view(torch.uint8).view(-1, 4).int()
    values = torch.tensor(FP4_VALUES) if form == "FLOAT4" else torch.arange(16.0) + (128 if dtype == "BF16" else 1024)
    assert torch.equal(torch.cat(found[:2], 1), values[byte & 15])
    assert torch.equal(torch.cat(found[2:], 1), values[byte >> 4])
