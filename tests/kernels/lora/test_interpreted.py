"""The kernels of adapters against the plain way in float64 under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from headway.core.contract.adapters import AdapterSlots
from headway.kernels.linear.axes import Axis
from headway.kernels.linear.linear import Linear, ProductOrigin
from headway.kernels.lora import bank as bank_module
from headway.kernels.lora.bank import AdaptedProduct, AdapterBank, AdapterInMemory
from headway.kernels.lora.fused import FusedAdditions
from headway.kernels.lora.operations import AdaptedOperations, PlainAdditions
from headway.kernels.step.fused import Fused
from headway.kernels.step.operations import Embedding, Heads, Norm
from headway.kernels.step.torch_operations import TorchOperations
from operation_inputs import ropes
from tiny_adapters import exact, made_bank

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
CPU = torch.device("cpu")
CASES = [
    ({"q": 64, "k": 32, "v": 32}, 96, 3, 4, 5, torch.float32),
    ({"q": 64, "k": 16, "v": 16}, 600, 9, 16, 70, torch.bfloat16),
    ({"o": 48}, 64, 2, 40, 1, torch.float16),
    ({"q": 32, "k": 16}, 48, 3, 200, 20, torch.float32),
    ({"gate": 80, "up": 80}, 64, 8, 16, 130, torch.bfloat16),
]
EVERYDAY = (0, 3)


@pytest.mark.parametrize(
    ("modules", "columns", "slots", "rank", "rows", "dtype"),
    [pytest.param(*case, marks=() if number in EVERYDAY else pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=str,
)
def test_rows_get_what_their_own_adapter_adds(
    modules: dict[str, int], columns: int, slots: int, rank: int, rows: int, dtype: torch.dtype
) -> None:
    bank, product = made_bank(modules, columns, slots, rank, dtype)
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=draw).to(dtype)
    y = torch.randn(rows, product.out_features, generator=draw).to(dtype)
    owners = torch.randint(-1, slots, (rows,), generator=draw, dtype=torch.int32)
    expected, before = exact(y, x, product, owners), y.clone()
    plain = PlainAdditions().add(y.double(), x.double(), in_double(product), owners)
    assert torch.allclose(plain, expected, rtol=1e-10)
    fused = FusedAdditions(CPU, bank)
    added = fused.add(y, x, product, owners)
    none = owners < 0
    assert torch.equal(added[none], before[none]), "rows without an adapter keep their bits"
    if rows > 1:
        assert none.any()
    error = (added.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[dtype], float(error)


def in_double(product: AdaptedProduct) -> AdaptedProduct:
    return AdaptedProduct(product.origin, product.out_features, product.a.double(), product.b.double(), product.parts)


@pytest.mark.parametrize("size", [48, pytest.param(80, marks=pytest.mark.slow)])
def test_gate_and_up_are_activated_with_what_adapters_add(size: int) -> None:
    bank, product = made_bank({"gate": size, "up": size}, 64, 4, 8, torch.bfloat16)
    draw = torch.Generator().manual_seed(5)
    x, both = (torch.randn(70, width, generator=draw).bfloat16() for width in (64, 2 * size))
    owners = torch.randint(-1, 4, (70,), generator=draw, dtype=torch.int32)
    gate, up = exact(both, x, product, owners).chunk(2, dim=1)
    y = FusedAdditions(CPU, bank).activated(both, x, product, owners, "silu")
    expected = silu(gate) * up
    assert (y.double() - expected).norm() / expected.norm() < 1.2e-2


@pytest.mark.parametrize(("columns", "dtype"), [(96, torch.float32), pytest.param(600, torch.bfloat16, marks=pytest.mark.slow)])
def test_the_norm_and_what_adapters_make_of_it_come_of_one_launch(columns: int, dtype: torch.dtype) -> None:
    bank, product = made_bank({"gate": 48, "up": 48}, columns, 3, 8, dtype)
    draw = torch.Generator().manual_seed(8)
    x, y = 3 * torch.randn(70, columns, generator=draw).to(dtype), torch.randn(70, 96, generator=draw).to(dtype)
    norm = Norm((1 + 0.3 * torch.randn(columns, generator=draw)).to(dtype), 1e-5)
    owners = torch.randint(-1, 3, (70,), generator=draw, dtype=torch.int32)
    fused, before = FusedAdditions(CPU, bank), y.clone()
    exactly = rms_norm(x.double(), (columns,), norm.weight.double(), norm.eps)
    made = fused.normed(x, norm, product, owners)
    assert made is not None
    normed, low = made
    assert (normed.double() - exactly).norm() / exactly.norm() < TOLERANCE[dtype]
    expected = exact(before, exactly, product, owners)
    gate, up = expected.chunk(2, dim=1)
    activated = fused.activated(y, normed, product, owners, "silu", low)
    assert torch.equal(y, before), "the product is left as it is"
    assert (activated.double() - silu(gate) * up).norm() / (silu(gate) * up).norm() < 2 * TOLERANCE[dtype]
    added = fused.add(y, normed, product, owners, low)
    assert torch.equal(added[owners < 0], before[owners < 0])
    assert (added.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("modules", "columns", "slots", "rank", "rows", "dtype"),
    [CASES[0], pytest.param(*CASES[2], marks=pytest.mark.slow), pytest.param(*CASES[3], marks=pytest.mark.slow), CASES[4]],
    ids=str,
)
def test_one_product_makes_what_adapters_shrink(
    modules: dict[str, int], columns: int, slots: int, rank: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_module, "FEWEST_ROWS", 0)
    bank, product = made_bank(modules, columns, slots, rank, dtype, joins=True)
    bank.arrange()
    draw = torch.Generator().manual_seed(rows)
    linear, joined = next(iter(bank.products)), product.joined
    linear.weight.normal_(generator=draw)
    x = torch.randn(rows, columns, generator=draw).to(dtype)
    residual = torch.randn(rows, product.out_features, generator=draw).to(dtype)
    owners = torch.randint(-1, slots, (rows,), generator=draw, dtype=torch.int32)
    both = joined(x)
    assert both.shape[1] == product.out_features + slots * product.a.shape[1]
    expected = exact(x.double() @ linear.weight.double().t(), x, product, owners)
    for additions in (PlainAdditions(), FusedAdditions(CPU, bank)):
        made, added = additions.joined(both, product, owners), additions.joined(both, product, owners, residual.clone())
        assert (made.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]
        total = expected + residual.double()
        assert (added.double() - total).norm() / total.norm() < TOLERANCE[dtype]
    if "gate" in modules:
        gate, up = expected.chunk(2, dim=1)
        activated = FusedAdditions(CPU, bank).joined_activated(both, product, owners, "silu")
        assert (activated.double() - silu(gate) * up).norm() / (silu(gate) * up).norm() < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(("qk_norm", "joins"), [pytest.param(False, False, marks=pytest.mark.slow), (True, False), (True, True)])
def test_steps_of_a_decoder_equal_the_plain_ones(qk_norm: bool, joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values, rotated; a gated MLP; and a last product: the kernels behind the fused operations."""
    monkeypatch.setattr(bank_module, "FEWEST_ROWS", 0)
    draw = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * 0.3

    weights = {"qkv": ("q k v", (64, 32, 32), 48), "mlp": ("gate up", (80, 80), 48), "o": ("o", (48,), 64)}
    matrices = {name: random(sum(rows), columns) for name, (_, rows, columns) in weights.items()}
    norms, x, mixed = [1 + random(48), 1 + random(16), 1 + random(16)], random(20, 48), random(20, 64)
    owners = torch.randint(-1, 3, (20,), generator=draw, dtype=torch.int32)
    adapter, found = None, []
    for kind, dtype in ((TorchOperations, torch.float64), (Fused, torch.float32)):
        own = {
            name: Linear(
                matrices[name].to(dtype),
                origin=ProductOrigin(dict(zip(names.split(), map(Axis.all, rows), strict=True)), Axis.all(columns), None, 1.0),
            )
            for name, (names, rows, columns) in weights.items()
        }
        bank = AdapterBank(own.values(), AdapterSlots(3, 16), dtype, joins=joins)
        assert all((product.joined is not None) == joins for product in bank.products.values())
        adapter = [bank.drawn(seed).flat.double() * 8 for seed in range(3)] if adapter is None else adapter
        for slot, flat in enumerate(adapter):
            bank.put(slot, AdapterInMemory(b"", flat.to(dtype)))
        additions = PlainAdditions() if kind is TorchOperations else FusedAdditions(CPU, bank)
        ops = AdaptedOperations(kind(*ropes(16, 1e4)), bank, additions)
        norm, q_norm, k_norm = (Norm(weight.to(dtype), 1e-5) for weight in norms)
        heads = Heads(4, 2, 16, q_norm, k_norm) if qk_norm else Heads(4, 2, 16)
        table = Embedding(torch.zeros(4, 48, dtype=dtype))
        bank.begin(owners)
        _, (rope,) = ops.embed(torch.zeros(20, dtype=torch.int64), torch.arange(20), table)
        inner = ops.norm_gated_product(x.to(dtype), norm, own["mlp"], "silu")
        heads_of = ops.norm_qkv(x.to(dtype), norm, own["qkv"], heads, rope)
        last = ops.add_product(x.to(dtype).clone(), mixed.to(dtype), own["o"])
        found.append([each.double() for each in (inner, *heads_of, last)])
    for expected, got in zip(*found, strict=True):
        assert (got - expected).norm() / expected.norm() < 3e-6


def test_a_row_has_the_same_bits_in_any_batch_and_in_any_slot() -> None:
    bank, product = made_bank({"q": 64, "k": 32}, 96, 5, 16, torch.float32)
    product.a[3], product.b[3] = product.a[1], product.b[1]
    fused, x = FusedAdditions(CPU, bank), torch.randn(80, 96)
    owners = torch.arange(80, dtype=torch.int32) % 6 - 1
    batch = fused.add(torch.zeros(80, 96), x, product, owners)
    row = int((owners == 1).nonzero()[4])
    for slot in (1, 3):
        alone = fused.add(torch.zeros(1, 96), x[row : row + 1], product, torch.tensor([slot], dtype=torch.int32))
        assert torch.equal(alone[0], batch[row])
