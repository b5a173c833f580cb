"""The flight recorder: replay of a file names the layer, sequence and head of each planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from headway.core.contract.backend import AttentionBackend
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import LayerCache
from headway.core.contract.metadata import AttentionMetadata
from headway.core.contract.model import Attention
from headway.core.contract.spec import AttentionSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.attention import HostBlockTables
from headway.core.engine.execution.states import LayersWithState
from headway.core.engine.loop import EngineLoop
from headway.core.engine.record import Difference, Record
from headway.core.sampling.params import SamplingParams
from headway.testing.broken.attention import PlainBackend
from stateful_model import MODELS
from tiny_engine import TextModel, generate, made_engine, registering


class Layers(TextModel):
    """Random attention layers, each with a scale of its own, by which a backend knows its layer."""

    max_position_embeddings = 256

    def __init__(self, random: Random, **fields: Any) -> None:
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        kv_heads, group, dim, count = (
            random.choice([1, 2, 3]),
            random.choice([1, 2, 4]),
            random.choice([8, 16, 24]),
            random.randint(2, 4),
        )
        heads = kv_heads * group
        sinks = fields.pop("sinks", False)
        self.attention_specs = [
            AttentionSpec(heads, kv_heads, dim, scale=0.4 + 0.01 * layer, sinks=(2.0,) * heads if sinks else None, **fields)
            for layer in range(count)
        ]
        self.width = 48
        self.embed = torch.randn(self.vocab_size, self.width, generator=generator)
        self.places = torch.randn(self.max_position_embeddings, self.width, generator=generator)
        self.qkv = torch.randn(count, self.width, (heads + 2 * kv_heads) * dim, generator=generator) * 0.2
        self.out = torch.randn(count, heads * dim, self.width, generator=generator) * 0.2

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.embed[input_ids] + self.places[positions]
        for layer, spec in enumerate(self.attention_specs):
            heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
            q, k, v = (x @ self.qkv[layer]).to(spec.dtype).view(len(x), -1, spec.head_dim).split(heads, dim=1)
            x = x + attention(layer, q, k, v).float().flatten(1) @ self.out[layer]
            x = x / x.norm(dim=-1, keepdim=True) * 7
        return x


RECORDING = EngineConfig(attn_backend="sdpa", block_size=8, kv_cache_memory=2**22, max_num_seqs=4, record_steps=24)


def run(model: Any, folder: Path, backends: dict[str, type[AttentionBackend]], random: Random, **options: Any) -> EngineLoop:
    own = {"attn_backend": next(iter(backends), "sdpa"), "max_num_batched_tokens": 64, "record_folder": str(folder), **options}
    engine = made_engine(model, registering(**backends), replace(RECORDING, **own))
    prompts = [[number, *(random.randrange(50) for _ in range(random.randint(20, 45)))] for number in range(4)]
    generate(engine, prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    return engine


def broken(
    random: Random, model: Layers, change: Callable[[Tensor, Tensor, int], Tensor]
) -> tuple[type[PlainBackend], int, int, int]:
    """A backend that changes the output of one head of one sequence in one layer; its layer, query head and sequence."""
    layer, seq = random.randrange(len(model.attention_specs)), random.randrange(4)
    head = random.randrange(model.attention_specs[0].num_heads)

    marks: list[Tensor] = []

    class Broken(PlainBackend):
        name = "broken"

        def sequence(
            self, q: Tensor, keys: Tensor, values: Tensor, context: int, number: int, metadata: AttentionMetadata
        ) -> Tensor:
            out = super().sequence(q, keys, values, context, number, metadata)
            if self.spec.scale != model.attention_specs[layer].scale:
                return out
            if not context and len(marks) <= seq:
                marks.append(keys[0].clone())  # the first key of a sequence tells it from others
            elif context and len(marks) > seq and torch.equal(keys[0], marks[seq]):
                out[:, head] = change(out, values, head)[:, head]
            return out

    return Broken, layer, head, seq


CHANGES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "scale": lambda out, values, head: out * 1.05,
    "overflow": lambda out, values, head: out * torch.inf,
    "nan": lambda out, values, head: out * torch.nan,
    "sign": lambda out, values, head: -out,
    "next head": lambda out, values, head: out.roll(1, 1) if out.shape[1] > 1 else -out,
    "mask": lambda out, values, head: out + 0.03 * values[:1].repeat_interleave(out.shape[1] // values.shape[1], 1),
    "zero": lambda out, values, head: out * 0,
    "rounded to eight bits": lambda out, values, head: (out * 8).round() / 8,
}


def found(engine: EngineLoop, folder: Path) -> tuple[Record, Difference | None]:
    """The first difference, from the file of a fault or from one that is requested."""
    record = Record.read(min(folder.glob("*.headway"), default=None) or engine.record("a test"))
    return record, record.judge()[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tensors", [False, True], ids=["run again", "tensors"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_head_that_a_kernel_computes_wrongly(name: str, tensors: bool, seed: int, tmp_path: Path) -> None:
    random = Random(f"{name} {seed}")
    model = Layers(random)
    backend, layer, head, seq = broken(random, model, CHANGES[name])
    engine = run(model, tmp_path, {"broken": backend}, random, record_tensors=tensors)
    record, first = found(engine, tmp_path)
    assert first is not None
    assert (first.place, first.head, first.what) == (layer, head, "output")
    assert record.meta.sequences[first.sequence].request_id == str(seq)


MISTAKES = {
    "window": (
        "a window off by one",
        {"sliding_window": 9},
        "mask",
        lambda self, scores, context: _hidden(self, scores, context, 1),
    ),
    "causal": ("the next token is seen", {}, "mask", lambda self, scores, context: _hidden(self, scores, context + 1, 0)),
    "softcap": ("no soft-cap", {"softcap": 2.0}, "cap", lambda self, scores: scores),
    "sinks": ("no sinks", {"sinks": True}, "weights", lambda self, scores: scores.softmax(-1)),
    "map": ("a map of heads", {}, "kv_heads", lambda self, device: _by_modulo(self, device)),
    "blocks": (
        "sorted blocks",
        {},
        "rows",
        lambda self, cache, blocks, n: PlainBackend.rows(self, cache, _reversed(self, blocks, n), n),
    ),
}
"""Kind of fault -> fields of the layers, method of the backend, and its wrong form, in one random layer."""


def _hidden(self: PlainBackend, scores: Tensor, context: int, more: int) -> Tensor:
    ago = self.ago(scores, context)
    hidden = ago < 0
    if self.spec.sliding_window is not None:
        hidden |= ago >= self.spec.sliding_window + more
    return scores.masked_fill(hidden, -torch.inf)


def _by_modulo(self: PlainBackend, device: torch.device) -> Tensor:
    return torch.arange(self.spec.num_heads - 1, -1, -1, device=device) // self.spec.group_size


def _reversed(self: PlainBackend, blocks: Tensor, kv_len: int) -> Tensor:
    used = -(-kv_len // self.block_size)
    return torch.cat([blocks[: used - 1].flip(0), blocks[used - 1 :]])


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_one_layers_kernel(name: str, tmp_path: Path) -> None:
    _, spec, method, wrong = MISTAKES[name]
    random = Random(name)
    model = Layers(random, **spec)
    while model.attention_specs[0].num_kv_heads == 1:
        model = Layers(random, **spec)
    layer = random.randrange(len(model.attention_specs))

    def planted(self: PlainBackend, *given: Any) -> Any:
        there = self.spec.scale == model.attention_specs[layer].scale
        return wrong(self, *given) if there else getattr(PlainBackend, method)(self, *given)

    backend = type("Wrong", (PlainBackend,), {"name": "wrong", method: planted})
    record, first = found(run(model, tmp_path, {"wrong": backend}, random), tmp_path)
    assert first is not None
    assert (first.place, first.what) == (layer, "output")
    assert {each.place for each in record.meta.checked if each.error > each.allowed and each.phase != "cache"} == {layer}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_prompt_that_is_older_than_the_ring(dtype: torch.dtype, tmp_path: Path) -> None:
    random = Random(12)
    model = Layers(random, dtype=dtype)
    layer, head = random.randrange(len(model.attention_specs)), random.randrange(model.attention_specs[0].num_heads)

    class Wrong(PlainBackend):
        name = "wrong"

        def prefill(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Any = None) -> None:
            super().prefill(q, k, v, cache, plan, out)
            if self.spec.scale == model.attention_specs[layer].scale:
                out[-1, head] = -out[-1, head]

    engine = run(model, tmp_path, {"wrong": Wrong}, random, max_num_batched_tokens=256, record_steps=2)
    _, first = found(engine, tmp_path)
    assert first is not None
    assert (first.place, first.head, first.what) == (layer, head, "output")


def test_an_old_prompt_after_a_prefix_hit_does_not_run_again_as_one_step(tmp_path: Path) -> None:
    """Its cached rows have the rounding errors of other steps."""
    random = Random(13)
    engine = run(Layers(random), tmp_path, {}, random, max_num_batched_tokens=256, record_steps=2)
    prompt = [random.randrange(50) for _ in range(30)]
    for expected in (True, False):
        generate(engine, [prompt], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        record, first = found(engine, tmp_path)
        assert first is None
        assert any(step.context_lens == [0] and step.query_lens == [30] for step in record.meta.steps) is expected
        for path in tmp_path.glob("*.headway"):
            path.unlink()


def test_a_wrong_block_in_the_executors_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a step on, the table of one sequence names another block."""
    random = Random(5)
    update, row = HostBlockTables.update, random.randrange(4)

    def wrong(self: HostBlockTables, step: Any) -> None:
        update(self, step)
        if self.num_updates == 4:
            self.tables[0][row, 1] = self.tables[0][row, 0]

    monkeypatch.setattr(HostBlockTables, "update", wrong)
    record, first = found(run(Layers(random), tmp_path, {}, random, max_num_batched_tokens=256), tmp_path)
    assert first is not None
    assert (first.place, first.what, first.sequence) == (0, "output", row)
    assert record.meta.sequences[row].wrong_block is not None
    assert record.meta.sequences[row].wrong_block[:2] == (0, 1)


def test_a_stale_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new block of one sequence does not reach the table, so that its tokens go to a block of another sequence."""
    random = Random(6)
    update, row = HostBlockTables.update, random.randrange(4)

    def stale(self: HostBlockTables, step: Any) -> None:
        kept = tuple(each for each in step.new_pages if each.row != row or each.start == 0)
        update(self, replace(step, new_pages=kept))

    monkeypatch.setattr(HostBlockTables, "update", stale)
    model = Layers(random)
    engine = run(model, tmp_path, {}, random, max_num_batched_tokens=256, kv_cache_memory=2**22)
    record, first = found(engine, tmp_path)
    assert first is not None
    assert (first.place, first.sequence) == (0, row)
    assert record.meta.sequences[row].wrong_block is not None


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_cached_rows_that_something_overwrites(
    part: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(f"{part} {dtype}")
    model = Layers(random, dtype=dtype)
    spec = model.attention_specs[0]
    layer, head, token = random.randrange(len(model.attention_specs)), random.randrange(spec.num_kv_heads), random.randrange(20)
    engine = run(model, tmp_path, {}, random, max_num_batched_tokens=256)
    row = random.randrange(4)
    block = int(engine.executor.runner.tables.tables[0][row, token // 8])
    logical = getattr(engine.executor.caches[layer], f"logical_{part}")
    logical[block, token % 8, head] = logical[block, token % 8, head].roll(1, 0) + 1.0
    _, first = found(engine, tmp_path)
    assert first is not None
    assert (first.place, first.sequence, first.kv_head, first.position, first.what) == (layer, row, head, token, f"cached {part}")


def test_a_wrong_scale_of_a_quantized_cache(tmp_path: Path) -> None:
    random = Random(8)
    model = Layers(random, kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=0.25)
    layer = random.randrange(len(model.attention_specs))
    config = {"max_num_batched_tokens": 256}
    object.__setattr__(model.attention_specs[layer], "v_scale", 0.25)
    engine = run(model, tmp_path, {}, random, **config)
    assert found(engine, tmp_path)[1] is None
    cache: LayerCache = engine.executor.caches[layer]
    object.__setattr__(cache, "v_scale", 0.5)
    prompts = [[random.randrange(50) for _ in range(30)] for _ in range(3)]
    generate(engine, prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    _, first = found(engine, tmp_path / "none")
    assert first is not None
    assert (first.place, first.what) == (layer, "cached value")


def test_a_writer_that_misses_a_slot(tmp_path: Path) -> None:
    """Every write of one layer puts its last token, of the last sequence that decodes, into the next slot."""
    random = Random(9)
    model = Layers(random)
    layer = random.randrange(len(model.attention_specs))
    engine = made_engine(model, registering(), replace(RECORDING, record_folder=str(tmp_path)))
    writers: list[Any] = engine.executor.attention.writers
    right = writers[layer]

    def wrong(k: Tensor, v: Tensor, cache: LayerCache, slots: Tensor) -> None:
        moved = slots.clone()
        moved[-1] += 1
        right(k, v, cache, moved)

    writers[layer] = wrong
    prompts = [[random.randrange(50) for _ in range(10 + number)] for number in range(3)]
    generate(engine, prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    _, first = found(engine, tmp_path)
    assert first is not None
    assert (first.place, first.sequence, first.position, first.what) == (layer, 2, 11, "cached key")


def test_pages_that_two_sequences_get(tmp_path: Path) -> None:
    """The scheduler's own mistake: one page in the tables of two sequences."""
    random = Random(10)
    model = Layers(random)
    engine = made_engine(model, registering(), replace(RECORDING, record_folder=str(tmp_path)))
    for number in range(2):
        prompt = [random.randrange(50) for _ in range(20)]
        engine.add_request(
            str(number), engine.limits.checked(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        )
    launch = engine.executor.launch

    def twice(step: Any) -> Any:
        if step.started:
            first = step.new_pages[0].pages[1]
            pages = step.new_pages[1].pages
            pages[1] = first
        return launch(step)

    engine.executor.launch = twice  # type: ignore[method-assign]
    for _ in range(4):
        engine.step()
    _, first = found(engine, tmp_path)
    assert first is not None
    assert (first.place, first.sequence, first.what) == (0, 0, "cached key")
    assert 8 <= first.position < 16


STATES = ["gated delta", "mamba2 and a window", "kda", "mamba1"]


@pytest.mark.parametrize("name", STATES)
def test_a_wrong_state_slot(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step, a sequence reads and writes the slot of another."""
    random = Random(name)
    slots_of, calls, at = LayersWithState.slots_of, [0], random.randrange(3, 7)
    victim = random.randrange(3)

    def wrong(self: LayersWithState, rows: Any, indices: Any) -> Any:
        right = slots_of(self, rows, indices)
        calls[0] += len(rows) == 4 and not isinstance(indices, numpy.int32)
        if calls[0] == at and len(rows) == 4 and not isinstance(indices, numpy.int32):
            right, listed = right.copy(), rows.tolist()
            right[listed.index(victim)] = right[listed.index(victim + 1)]
        return right

    monkeypatch.setattr(LayersWithState, "slots_of", wrong)
    model = MODELS[name]
    record, first = found(run(model, tmp_path, {}, random, max_num_batched_tokens=256, enable_prefix_caching=False), tmp_path)
    assert first is not None
    assert record.meta.layers[first.place].kind == "state"
    assert first.sequence in (victim, victim + 1)  # both states are wrong
    assert first.what.endswith("state")


def test_a_state_that_a_kernel_decays_wrongly_in_one_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.backends.states.torch_states import TorchStates

    step = TorchStates.step

    def wrong(self: Any, x: Tensor, gates: Any, parameters: Any, cache: Any, plan: Any, out: Tensor) -> None:
        step(self, x, gates, parameters, cache, plan, out)
        if parameters is model.state_layers[1].parameters:
            out.view(len(out), 4, -1)[:, 2] *= 1.1

    monkeypatch.setattr(TorchStates, "step", wrong)
    model = MODELS["kda"]
    record, first = found(run(model, tmp_path, {}, Random(3), max_num_batched_tokens=256, state_backend="torch"), tmp_path)
    assert first is not None
    assert (record.meta.layers[first.place].kind, record.meta.layers[first.place].layer, first.head) == ("state", 1, 2)


def test_nothing_differs_in_windows_latents_and_drafts(tmp_path: Path) -> None:
    for number in range(6):
        random, folder = Random(number), tmp_path / str(number)
        model = Layers(random, sliding_window=random.choice([None, 5, 17]), softcap=random.choice([None, 3.0]))
        model.attention_specs[0] = replace(model.attention_specs[0], sliding_window=None)
        speculate = random.choice([None, "ngram"])
        record, first = found(run(model, folder, {}, random, speculate=speculate, record_tensors=number % 2 == 1), folder)
        assert first is None, (number, first)
        assert record.meta.calls
        assert not record.meta.notes


def test_a_file_within_its_bytes_still_names_the_head(tmp_path: Path) -> None:
    """Only the differing sequence, kv head and rows are left; the other layers have their results from before."""
    for seed in range(3):
        random, folder = Random(seed), tmp_path / str(seed)
        model = Layers(random)
        backend, layer, head, seq = broken(random, model, CHANGES["sign"])
        engine = run(model, folder, {"broken": backend}, random, record_bytes=24_000)
        record, first = found(engine, folder)
        size = next(folder.glob("*.headway")).stat().st_size
        assert size < 36_000, size
        assert first is not None
        assert (first.place, first.head, first.sequence, first.what) == (layer, head, seq, "output")
        assert {each.place for each in record.meta.checked} == set(range(len(model.attention_specs)))


def test_the_ring_is_bounded_and_files_hold_no_text_unless_asked(tmp_path: Path) -> None:
    for text in (False, True):
        folder = tmp_path / str(text)
        engine = run(Layers(Random(1)), folder, {}, Random(1), record_steps=3, record_text=text)
        record, first = found(engine, folder)
        assert first is None
        assert [step.backends for step in record.meta.steps] == [[""]] * 4 + [["sdpa"]] * 3  # the prompts, and the ring
        assert [bool(each.token_ids) for each in record.meta.sequences] == [text] * 4
        assert next(folder.glob("*.headway")).stat().st_mode & 0o777 == 0o600
    for _ in range(40):
        engine.record()
    assert len(list(folder.glob("*.headway"))) == 32


def test_running_requests_are_not_changed_by_a_record(tmp_path: Path) -> None:
    for name, model in {"attention": Layers(Random(2), sliding_window=11), **MODELS}.items():
        prompts = [[number, *(Random(number).randrange(50) for _ in range(22))] for number in range(3)]
        tokens = []
        for records in (False, True):
            config = replace(RECORDING, max_num_batched_tokens=32, record_steps=4, record_folder=str(tmp_path))
            engine, written = made_engine(model, registering(), config), dict[str, list[int]]()
            for number, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
                engine.add_request(str(number), engine.limits.checked(prompt, params))
            while engine.has_unfinished:
                for delta in engine.step():
                    written.setdefault(delta.request_id, []).extend(delta.new_token_ids)
                if records:
                    assert Record.read(engine.record()).judge()[1] is None, name
            tokens.append(written)
        assert tokens[0] == tokens[1], name


def test_a_step_that_raises_leaves_a_file(tmp_path: Path) -> None:
    class Raises(PlainBackend):
        name = "raises"

        def decode(self, q: Tensor, cache: LayerCache, plan: Any, out: Tensor, lse: Tensor | None = None) -> None:
            if len(q) == 4:
                raise ValueError("planted")
            super().decode(q, cache, plan, out)

    run(Layers(Random(3)), tmp_path, {"raises": Raises}, Random(3), max_num_batched_tokens=256)
    (path,) = tmp_path.glob("*.headway")
    record = Record.read(path)
    assert record.meta.reason == "a step failed: BackendError"
    assert "planted" in record.meta.notes[0]
    assert record.meta.steps[-1].query_lens == [1, 1, 1, 1]


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_file_is_one_line(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    path = run(Layers(Random(4)), tmp_path, {}, Random(4)).record()
    content = bytearray(path.read_bytes())
    if seed % 2:
        content = content[: random.randrange(len(content))]
    else:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        Record.read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"record_steps": -1}, "record_steps"),
        ({"record_tensors": True}, "record_steps of at least 1"),
        ({"record_steps": 4, "tensor_parallel_size": 2}, "tensor_parallel_size=1"),
        ({"record_steps": 4, "record_bytes": 0}, "record_bytes"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options)


def test_no_record_without_a_ring(caplog: pytest.LogCaptureFixture) -> None:
    engine = made_engine(Layers(Random(0)), registering(), EngineConfig(attn_backend="sdpa", kv_cache_memory=2**20))
    with pytest.raises(ConfigError, match="record_steps=16"):
        engine.record()
    engine.record_fault("NaN")
    assert not caplog.messages
    engine.record_fault("SIGUSR2", seconds=0.0)
    assert caplog.messages == ["recorder: SIGUSR2, but no steps are kept; record_steps=16 (--record-steps 16) keeps some"]
