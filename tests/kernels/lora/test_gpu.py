"""Adapters on a GPU: the kernels against float64, and engines with graphs beside those without, and beside a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm, silu
from transformers import LlamaConfig, LlamaForCausalLM

from headway import LLM, SamplingParams
from headway.core.contract.adapters import LoRARequest
from headway.kernels.step.operations import Norm
from tiny_adapters import exact, made_bank, save_adapter

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.mark.parametrize("rows", [1, 3, 64, 65, 700])
@pytest.mark.parametrize(
    ("modules", "columns", "slots", "rank", "dtype"),
    [
        ({"q": 4096, "k": 1024, "v": 1024}, 4096, 8, 16, torch.bfloat16),
        ({"gate": 14336, "up": 14336}, 4096, 8, 16, torch.bfloat16),
        ({"down": 4096}, 14336, 3, 64, torch.float16),
        ({"q": 128, "k": 64}, 576, 20, 256, torch.float32),
    ],
    ids=str,
)
def test_rows_get_what_their_own_adapter_adds(
    modules: dict[str, int], columns: int, slots: int, rank: int, dtype: torch.dtype, rows: int
) -> None:
    from headway.kernels.lora.fused import FusedAdditions

    bank, product = made_bank(modules, columns, slots, rank, dtype, "cuda")
    draw = torch.Generator("cuda").manual_seed(rows)
    x, y = (torch.randn(rows, size, generator=draw, device="cuda").to(dtype) for size in (columns, product.out_features))
    owners = torch.randint(-1, slots, (rows,), generator=draw, device="cuda", dtype=torch.int32)
    norm = Norm((1 + 0.2 * torch.randn(columns, generator=draw, device="cuda")).to(dtype), 1e-5)
    normed_exactly = rms_norm(x.double(), (columns,), norm.weight.double(), norm.eps)
    expected, expected_normed = exact(y, x, product, owners), exact(y, normed_exactly, product, owners)
    fused, before = FusedAdditions(torch.device("cuda"), bank), y.clone()
    added = fused.add(y, x, product, owners)
    assert torch.equal(added[owners < 0], before[owners < 0])
    assert (added.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    made = fused.normed(x, norm, product, owners)
    if made is not None:
        again = fused.add(before.clone(), made[0], product, owners, made[1])
        assert (again.double() - expected_normed).norm() / expected_normed.norm() < TOLERANCE[dtype]
    if len(modules) == 2 and modules.get("gate"):
        gate, up = expected.chunk(2, dim=1)
        activated = fused.activated(before, x, product, owners, "silu")
        assert (activated.double() - silu(gate) * up).norm() / (silu(gate) * up).norm() < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [1, 64, 65, 700])
@pytest.mark.parametrize(
    ("modules", "columns"), [({"q": 4096, "k": 1024, "v": 1024}, 4096), ({"gate": 14336, "up": 14336}, 4096)], ids=str
)
def test_one_product_makes_what_adapters_shrink(modules: dict[str, int], columns: int, rows: int) -> None:
    from headway.kernels.lora.fused import FusedAdditions

    bank, product = made_bank(modules, columns, 8, 16, torch.bfloat16, "cuda", joins=True)
    draw = torch.Generator("cuda").manual_seed(rows)
    linear, joined = next(iter(bank.products)), product.joined
    linear.weight.normal_(0, 0.02, generator=draw)
    bank.arrange()
    x, residual = (torch.randn(rows, size, generator=draw, device="cuda").bfloat16() for size in (columns, product.out_features))
    owners = torch.randint(-1, 8, (rows,), generator=draw, device="cuda", dtype=torch.int32)
    expected = exact(x.double() @ linear.weight.double().t(), x, product, owners)
    fused, both = FusedAdditions(torch.device("cuda"), bank), joined(x)
    assert (fused.joined(both, product, owners).double() - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]
    total = expected + residual.double()
    added = fused.joined(both, product, owners, residual)
    assert added.data_ptr() == residual.data_ptr()
    assert (added.double() - total).norm() / total.norm() < TOLERANCE[torch.bfloat16]
    if "gate" in modules:
        gate, up = expected.chunk(2, dim=1)
        activated = fused.joined_activated(both, product, owners, "silu")
        assert (activated.double() - silu(gate) * up).norm() / (silu(gate) * up).norm() < 2 * TOLERANCE[torch.bfloat16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64, "vocab_size": 211}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2}
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(path)
    return path


def written(folder: Path, adapters: list[LoRARequest], **options: object) -> list[list[int]]:
    llm = LLM(
        str(folder), skip_tokenizer_init=True, enable_lora=True, max_loras=2, max_lora_rank=16, kv_cache_memory="64MiB",
        autotune_budget=0, max_num_seqs=16, **options,
    )  # fmt: skip
    prompts = [[(7 * place + number) % 200 + 1 for place in range(5 + 9 * number)] for number in range(8)]
    wanted = [None if number % 4 == 3 else adapters[number % 4] for number in range(8)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False, lora_request=wanted)]
    llm.engine.adapter_table.check_integrity()
    return found


@pytest.mark.parametrize(
    "options", [{}, {"speculate": "ngram"}, {"max_num_batched_tokens": 64}, {"deterministic": True}], ids=str
)
def test_an_engine_writes_what_it_writes_on_a_cpu(folder: Path, tmp_path: Path, options: dict[str, object]) -> None:
    kinds = enumerate((4, 16, 8), start=1)
    adapters = [
        LoRARequest(f"a{seed}", seed, str(save_adapter(tmp_path / f"a{seed}", folder, rank, seed=seed))) for seed, rank in kinds
    ]
    expected = written(folder, adapters, device="cpu", dtype="float32")
    assert written(folder, adapters, device="cuda", dtype="float32", **options) == expected
    assert len({tuple(tokens) for tokens in expected}) == 8


def test_graphs_write_what_single_launches_write(folder: Path, tmp_path: Path) -> None:
    adapters = [
        LoRARequest(f"a{seed}", seed, str(save_adapter(tmp_path / f"a{seed}", folder, 8, seed=seed))) for seed in (1, 2, 3)
    ]
    with_graphs, without = (
        written(folder, adapters, device="cuda", dtype="bfloat16", enforce_eager=eager) for eager in (False, True)
    )
    same = sum(one == other for one, other in zip(with_graphs, without, strict=True))
    assert same >= 6, "near-ties of bfloat16 aside"
