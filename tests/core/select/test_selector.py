"""The selector over a fake registry: what a request means, what is chosen, what is refused and why."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from backend_cases import LAYOUTS, spec
from headway.core.contract.backend import AttentionBackend
from headway.core.contract.capabilities import ALL_PHASES, Capabilities
from headway.core.contract.errors import ConfigError, UnknownBackendError, UnsupportedError
from headway.core.contract.kernel import GraphLevel
from headway.core.contract.layout import HND, LATENT, NHD, VLLM_5D, CacheLayout, LayoutInfo
from headway.core.contract.metadata import Phase
from headway.core.contract.operation import ATTENTION, OperationKind
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.support import Support
from headway.core.select.choice import MeasuredChoice
from headway.core.select.costs import CostTable, Sample, Shape
from headway.core.select.kernels import Placement
from headway.core.select.request import PRESETS, BackendRequest, LayerSpecs, Workload, kinds_of
from headway.core.select.selector import Selector
from headway.tuning.measure.points import grid
from tiny_bench import with_backend

PREFILLS = frozenset({Phase.PREFILL, Phase.EXTEND})
DECODES = frozenset({Phase.DECODE})


def backend(name: str, phases: frozenset[Phase] = ALL_PHASES, **claims: object) -> type[AttentionBackend]:
    capabilities = Capabilities(phases=phases, devices=("cpu",), **claims)
    options = {"splits": "how many"}
    body = {"name": name, "capabilities": capabilities, "options": options, "plan": lambda self, metadata: None}
    return type(name, (AttentionBackend,), body)


class Source:
    """A registry of the given backends, ranked as they are given; the unavailable ones say so."""

    def __init__(self, *backends: type[AttentionBackend], unavailable: Sequence[str] = ()) -> None:
        self.entries = {backend.name: backend for backend in backends}
        self.layouts = {layout.name: LayoutInfo(layout, lambda device: None) for layout in LAYOUTS}
        self.unavailable = unavailable

    def meant_for(self, device_type: str) -> list[str]:
        return list(self.entries)

    def of(self, kind: OperationKind) -> Source:
        assert kind is ATTENTION
        return self

    def layout(self, name: str) -> LayoutInfo:
        if name not in self.layouts:
            raise ConfigError("kv_layout", "another", name)
        return self.layouts[name]

    def backend(self, name: str) -> type[AttentionBackend]:
        if name not in self.entries:
            raise UnknownBackendError(name, dict.fromkeys(self.entries, "available"))
        return self.entries[name]

    def supports(self, name: str, spec: AttentionSpec, layout: CacheLayout, block_size: int, phase: Phase) -> Support:
        if name in self.unavailable:
            return Support.no("device", "a GPU", "none")
        return self.backend(name).supports(spec, layout, block_size, phase)

    def rank(self, spec: AttentionSpec, phase: Phase, candidates: Sequence[str]) -> list[str]:
        return list(candidates)


def select(source: Source, request: str = "auto", *specs: AttentionSpec, **options: object) -> Selector:
    return Selector(source, LayerSpecs(specs or (spec(),)), BackendRequest.parse(request), **options)


def names(selector: Selector) -> tuple[str, ...]:
    return tuple(selector.selection.names[phase] for phase in Phase)


def follow(source: Source, error: UnsupportedError, *specs: AttentionSpec) -> Selector:
    """Do what the error's last line says, with the same selector."""
    found = re.search(r"nearest fix: --attn-backend (\S+) --kv-layout (\S+) --block-size (\d+)$", str(error))
    assert found, str(error)
    return select(source, found[1], *specs, kv_layout=found[2], block_size=int(found[3]))


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        ("auto", "auto", "auto"),
        ("sdpa.math", "sdpa.math", "sdpa.math"),
        (" sdpa ", "sdpa", "sdpa"),
        ("prefill=a,decode=b", "a", "b"),
        ("decode=b,prefill=a", "a", "b"),
        ("prefill = a , decode = b", "a", "b"),
        ("prefill=a", "a", "auto"),
        ("decode=b", "auto", "b"),
        ("prefill=auto,decode=b", "auto", "b"),
    ],
)
def test_parse_backend_request(text: str, prefill: str, decode: str) -> None:
    request = BackendRequest.parse(text)
    assert request == BackendRequest(prefill, decode)
    assert [request.name_for(phase) for phase in Phase] == [prefill, prefill, decode]
    assert str(request) == text.strip(), "the user's words"
    assert BackendRequest.parse(request) is request
    assert BackendRequest.parse(BackendRequest(prefill, decode).text) == request


@pytest.mark.parametrize(
    "text",
    ["", "  ", "=", ",", "a,b", "a,", "prefill=", "prefill=a,", "prefil=a", "prefill=a,b", "extend=a"],
)
def test_any_other_text_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("auto, NAME, or prefill=NAME,decode=NAME")) as caught:
        BackendRequest.parse(text)
    assert repr(text.strip()) in str(caught.value)


def test_auto_takes_the_first_in_rank_that_serves_each_phase() -> None:
    source = Source(backend("dead"), backend("d", DECODES), backend("all"), backend("late"), unavailable=["dead"])
    selector = select(source)
    assert names(selector) == ("all", "all", "d")
    assert "rank order" in str(selector.selection)


def test_auto_needs_every_layer_of_a_kind_to_be_served() -> None:
    source = Source(backend("plain", head_dims=(32,)), backend("windows", features=frozenset({"sliding_window"})))
    assert names(select(source, "auto", spec())) == ("plain",) * 3
    assert names(select(source, "auto", spec(), spec(head_dim=64))) == ("windows",) * 3
    assert names(select(source, "auto", spec(), spec(sliding_window=4))) == ("plain+windows",) * 3


def test_a_pair_gives_each_phase_its_backend() -> None:
    source = Source(backend("a"), backend("b"), backend("c"))
    assert names(select(source, "prefill=b,decode=c")) == ("b", "b", "c")
    assert names(select(source, "decode=b")) == ("a", "a", "b")


def test_an_instance_is_made_for_each_distinct_layer_with_its_options() -> None:
    layers = (spec(), spec(head_dim=64), spec())
    source = Source(backend("a"), backend("b"))
    selector = select(source, "prefill=a,decode=b", *layers, options={"b": {"splits": "4"}}, block_size=64, kv_layout="hnd")
    instances = selector.backends_for(Phase.DECODE)
    assert set(instances) == set(layers)
    assert {(type(made).name, made.layout, made.block_size) for made in instances.values()} == {("b", HND, 64)}
    assert selector.backends_for(Phase.EXTEND) is selector.backends_for(Phase.PREFILL)


@pytest.mark.parametrize("text", ["nope", "prefill=nope", "prefill=a,decode=nope"])
def test_an_unknown_name_is_refused(text: str) -> None:
    with pytest.raises(UnknownBackendError, match="'nope'"):
        select(Source(backend("a")), text)


def test_an_option_of_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UnknownBackendError, match="'nope'"):
        select(Source(backend("a")), options={"nope": {"splits": "4"}})


@pytest.mark.parametrize("name", ["a", "b"], ids=["of the chosen backend", "of another backend"])
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--attn-opt.*{name}\.splits.*{name}\.split\b"):
        select(Source(backend("a"), backend("b")), "a", options={name: {"split": "4"}})


@pytest.mark.parametrize("text", ["dead", "prefill=dead,decode=fine", "prefill=fine,decode=dead"])
def test_an_explicit_name_never_falls_back(text: str) -> None:
    source = Source(backend("fine"), backend("dead"), unavailable=["dead"])
    with pytest.raises(UnsupportedError, match="attention backend .*dead.*cannot be used here") as caught:
        select(source, text)
    assert "device: needs a GPU, got none" in str(caught.value)
    assert names(follow(source, caught.value)) == tuple(
        BackendRequest.parse(text.replace("dead", "fine")).name_for(phase) for phase in Phase
    )


def test_the_layout_is_one_that_every_phase_can_read() -> None:
    source = Source(backend("p", PREFILLS, layouts=(NHD, HND)), backend("d", DECODES, layouts=(VLLM_5D, HND)))
    assert select(source).selection.layout == HND
    assert select(source, "prefill=p,decode=d").selection.layout == HND


def test_auto_leaves_a_backend_out_whose_layout_the_other_phase_cannot_read() -> None:
    source = Source(backend("p", PREFILLS, layouts=(NHD,)), backend("d", DECODES, layouts=(HND,)), backend("any", DECODES))
    selector = select(source)
    assert (selector.selection.layout, names(selector)) == (NHD, ("p", "p", "any"))
    with pytest.raises(UnsupportedError, match="kv_layout"):
        select(source, "prefill=p,decode=d")


@pytest.mark.parametrize(("multiple", "chosen"), [(1, 16), (16, 16), (32, 64), (128, 128), (256, 256)])
def test_the_block_size_is_the_smallest_default_that_every_phase_can_use(multiple: int, chosen: int) -> None:
    source = Source(backend("p", PREFILLS), backend("d", DECODES, block_multiple=multiple))
    assert select(source).selection.block_size == chosen


def test_a_block_size_and_a_layout_that_are_asked_for_are_kept() -> None:
    selection = select(Source(backend("a")), kv_layout="vllm_5d", block_size=24).selection
    assert (selection.layout, selection.block_size) == (VLLM_5D, 24)


def test_a_head_dim_that_a_layout_cannot_split_rules_the_layout_out() -> None:
    source, odd = Source(backend("a")), spec(head_dim=6)
    with pytest.raises(UnsupportedError, match="head_dim: needs a multiple of 4 for layout vllm_5d, got 6") as caught:
        select(source, "a", odd, kv_layout="vllm_5d")
    assert follow(source, caught.value, odd).selection.layout == NHD


def test_a_refusal_carries_every_reason() -> None:
    picky = backend("picky", dtypes=(torch.float16,), head_dims=(64,), layouts=(HND,), block_multiple=64, max_group_size=1)
    with pytest.raises(UnsupportedError) as caught:
        select(Source(picky, backend("fine")), "picky", spec(softcap=2.0), kv_layout="nhd", block_size=16)
    whats = {reason.what for reason in caught.value.reasons}
    assert whats == {"dtype", "head_dim", "kv_layout", "block_size", "query heads a kv head", "softcap"}
    for reason in caught.value.reasons:
        assert reason.need
        assert reason.got
        assert str(reason) in str(caught.value)


def test_a_refused_auto_says_which_backend_lacks_what() -> None:
    source = Source(backend("p", PREFILLS), backend("dead"), unavailable=["dead"])
    with pytest.raises(UnsupportedError) as caught:
        select(source)
    text = str(caught.value)
    assert "p, phase: needs prefill or extend, got decode" in text
    assert "dead, device: needs a GPU, got none" in text
    assert "nearest fix" not in text


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (backend("part", DECODES), ("fine", "fine", "part")),
        (backend("part", PREFILLS), ("part", "part", "fine")),
        (backend("part", frozenset({Phase.PREFILL, Phase.DECODE})), ("fine", "fine", "part")),
    ],
    ids=["decode only", "prefill only", "no extend"],
)
def test_a_backend_for_some_phases_is_refused_and_the_fix_keeps_it(asked: type[AttentionBackend], kept: tuple[str, ...]) -> None:
    source = Source(backend("fine"), asked)
    with pytest.raises(UnsupportedError, match="phase: needs") as caught:
        select(source, "part")
    assert names(follow(source, caught.value)) == kept


@pytest.mark.parametrize(
    ("options", "word"),
    [({"kv_layout": "nhd"}, "kv_layout: needs hnd, got nhd"), ({"block_size": 16}, "a multiple of 64, got 16")],
)
def test_the_fix_for_a_layout_or_block_size_keeps_the_backend(options: dict[str, object], word: str) -> None:
    source = Source(backend("fine"), backend("picky", layouts=(HND,), block_multiple=64))
    with pytest.raises(UnsupportedError, match=re.escape(word)) as caught:
        select(source, "picky", **options)
    assert names(follow(source, caught.value)) == ("picky",) * 3


@pytest.mark.parametrize(("latent_model", "reads"), [(False, LATENT), (True, NHD)])
@pytest.mark.parametrize("layout", ["auto", "nhd", "latent"])
def test_no_hint_names_a_layout_that_cannot_hold_the_layer(latent_model: bool, reads: CacheLayout, layout: str) -> None:
    layer = AttentionSpec(4, 1, 48, 0.2, v_head_dim=32, value_in_key=True) if latent_model else AttentionSpec(4, 2, 32, 0.2)
    claims = Capabilities(ALL_PHASES, (reads,), devices=("cpu",), v_head_dims=None, value_in_key=not latent_model)
    registry = with_backend("mine", capabilities=claims)
    with pytest.raises(UnsupportedError) as refused:
        Selector(registry, LayerSpecs([layer]), BackendRequest.parse("mine"), kv_layout=layout)
    assert "--kv-layout" not in " ".join(map(str, refused.value.reasons))
    fix = str(refused.value).splitlines()[-1]
    assert re.fullmatch(r"  nearest fix: --attn-backend auto --kv-layout (nhd|latent) --block-size 16", fix)
    if not latent_model:
        assert "needs latent attention, whose values lie in the keys: the backend reads latent alone" in str(refused.value)


def test_no_fix_is_printed_where_none_would_work() -> None:
    with pytest.raises(UnsupportedError) as caught:
        select(Source(backend("dead"), unavailable=["dead"]), "dead")
    assert "nearest fix" not in str(caught.value)


Law = Callable[[str, Shape, str, int], float | None]
PLACES = [("nhd", 16), ("nhd", 256), ("hnd", 16), ("hnd", 256)]


def table(us: Law, *backends: str, excluded: Mapping[str, str] | None = None) -> CostTable:
    """A cost table over two layouts and block sizes: us(backend, shape, layout, block size)."""
    shapes = [Shape(Phase.DECODE, batch, 1, kv_len) for batch in (1, 256) for kv_len in (64, 16384)]
    shapes += [Shape(Phase.PREFILL, batch, n, n) for batch in (1, 16) for n in (16, 4096)]
    shapes += [Shape(Phase.EXTEND, 1, n, 2 * n) for n in (16, 4096)]
    samples = [Sample(s, name, *place, us(name, s, *place)) for s in shapes for name in backends for place in PLACES]
    return CostTable(samples, 0.02, "the table", excluded)


def measured(source: Source, costs: CostTable, request: str = "auto", **options: object) -> Selector:
    asked = BackendRequest.parse(request)
    return Selector(source, LayerSpecs((spec(), spec())), asked, costs={spec(): costs}, **options)


def test_with_a_table_the_cheapest_layout_and_block_size_are_chosen() -> None:
    source = Source(backend("a"), backend("b"))
    costs = table(lambda name, shape, layout, size: 1.0 if (name, layout, size) == ("b", "hnd", 256) else 2.0, "a", "b")
    selector = measured(source, costs)
    assert (selector.selection.layout, selector.selection.block_size) == (HND, 256)
    assert names(selector) == ("b", "b", "b")
    assert "the table" in str(selector.selection)


def test_a_graph_takes_what_is_fastest_on_the_device_out_of_what_can_be_captured() -> None:
    """By its launches b is the fastest at 16 tokens; on the device c, which no graph may hold, and after it a."""
    made = [backend("a"), backend("b"), backend("c")]
    for each in made[:2]:
        each.graph_level = GraphLevel.UNIFORM
    laws = {"a": (10.0, 0.1, 300.0), "b": (20.0, 1.0, 100.0), "c": (5.0, 0.5, 200.0)}
    """On the device, there for each token, and the launches on the host, in microseconds."""
    shapes = [Shape(Phase.PREFILL, batch, n, n) for batch in (1, 16) for n in (16, 4096)]
    shapes += [Shape(Phase.EXTEND, 1, n, 2 * n) for n in (16, 4096)] + [Shape(Phase.DECODE, 1, 1, n) for n in (64, 16384)]
    samples = [
        Sample(shape, name, *PLACES[0], device + token * shape.query_len, 0.0, host)
        for shape in shapes
        for name, (device, token, host) in laws.items()
    ]
    selector = measured(Source(*made), CostTable(samples, 0.02, "the table"), kv_layout="nhd", block_size=16)
    prompt = Shape(Phase.PREFILL, 1, 16, 16)
    asked = [prompt, replace(prompt, captured=True)]
    assert [next(iter(selector.backends_of(shape).values())).name for shape in asked] == ["b", "a"]
    uncaptured = measured(Source(made[2]), CostTable(samples, 0.02, "the table"), kv_layout="nhd", block_size=16)
    assert next(iter(uncaptured.backends_of(asked[1]).values())).name == "c"


def test_a_layout_that_costs_the_same_is_the_first_in_order() -> None:
    selector = measured(Source(backend("a"), backend("b")), table(lambda name, shape, layout, size: 1.0, "a", "b"))
    assert (selector.selection.layout, selector.selection.block_size) == (NHD, 16)


def test_the_first_layout_and_block_size_are_kept_unless_another_is_better_beyond_doubt() -> None:
    times = {("nhd", 16): 1.02, ("nhd", 256): 1.01, ("hnd", 16): 1.0, ("hnd", 256): 1.0}
    selector = measured(Source(backend("a")), table(lambda name, shape, *place: times[place], "a"))
    assert (selector.selection.layout, selector.selection.block_size) == (NHD, 16)
    times["nhd", 16] = times["nhd", 256] = 1.06
    selector = measured(Source(backend("a")), table(lambda name, shape, *place: times[place], "a"))
    assert (selector.selection.layout, selector.selection.block_size) == (HND, 16)


def test_the_choice_says_when_times_are_too_noisy_to_leave_the_first_block_size() -> None:
    """9 % are a reason among steady times, and none among times that differ by 10 % from one call to the next."""

    def selected(noise: float) -> str:
        shapes = [Shape(Phase.PREFILL, 1, 64, 64), Shape(Phase.EXTEND, 1, 64, 128), Shape(Phase.DECODE, 1, 1, 128)]
        samples = [Sample(s, "a", "nhd", size, 1.0 if size == 256 else 1.09) for s in shapes for size in (16, 256)]
        return str(measured(Source(backend("a")), CostTable(samples, noise, "the table"), kv_layout="nhd").selection)

    assert "block_size=256" in selected(0.02)
    assert "too noisy" not in selected(0.02)
    assert "block_size=16" in selected(0.1)
    assert "times too noisy (10%) to prefer kv_layout=nhd, block_size=256" in selected(0.1)
    shapes = [Shape(Phase.PREFILL, 1, 64, 64), Shape(Phase.EXTEND, 1, 64, 128), Shape(Phase.DECODE, 1, 1, 128)]
    samples = [Sample(s, "a", "nhd", size, 1.0 if size == 256 else 1.09) for s in shapes for size in (16, 256)]
    costs = dict.fromkeys((spec(), WINDOW), CostTable(samples, 0.1, "the table"))
    both = Selector(Source(backend("a", features=WINDOWS)), LayerSpecs([spec(), WINDOW]), costs=costs, kv_layout="nhd")
    assert "times too noisy (10%) to prefer kv_layout=nhd, block_size=256" in str(both.selection)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("noise", "gain", "chosen"), [(0.02, 1.0, 16), (0.05, 1.01, 16), (0.02, 1.1, 256), (0.05, 1.2, 256)])
def test_noise_does_not_decide_the_block_size(noise: float, gain: float, chosen: int) -> None:
    shapes = [point.shape for point in grid("cpu")]
    places = [Placement(NHD, 16), Placement(NHD, 256)]

    def choice(seed: int) -> int:
        draw = random.Random(seed)

        def us(shape: Shape, name: str, size: int) -> float:
            right = shape.batch * shape.kv_len * {"a": 1.0, "b": 1.2}[name] * (gain if size == 16 else 1.0)
            return right * math.exp(draw.gauss(0.0, noise))

        samples = [Sample(s, name, "nhd", size, us(s, name, size)) for s in shapes for name in "ab" for _, size in places]
        choice = MeasuredChoice([(CostTable(samples, noise), 32)], PRESETS["chat"], PRESETS["chat"].steps())
        found = choice.select(places, lambda *_: ["a", "b"])
        return found[0].block_size

    flips = sum(choice(seed) != chosen for seed in range(200))
    assert flips <= 2


def test_small_blocks_must_be_as_good_beyond_the_workload_too() -> None:
    def times(name: str, shape: Shape, layout: str, size: int) -> float:
        return 2.0 if shape.phase is Phase.PREFILL and size == 16 else 1.0

    selection = measured(Source(backend("a")), table(times, "a"), workload=Workload(16, 1024, 256, cached_len=512)).selection
    assert (selection.layout, selection.block_size) == (NHD, 256), "the workload itself has no prefill"


def test_the_workload_decides_between_layouts() -> None:
    def us(name: str, shape: Shape, layout: str, size: int) -> float:
        favoured = layout == ("nhd" if shape.phase is Phase.DECODE else "hnd")
        return float(shape.kv_len) * shape.batch * (1 if favoured else 3)

    source = Source(backend("a"))
    assert measured(source, table(us, "a"), workload=Workload(1, 64, 4096)).selection.layout == NHD
    assert measured(source, table(us, "a"), workload=Workload(1, 8192, 1)).selection.layout == HND


def test_each_step_gets_its_fastest_backend_and_each_phase_its_own() -> None:
    def us(name: str, shape: Shape, layout: str, size: int) -> float:
        return {"short": 1.0 * shape.kv_len, "long": 1000.0 + 0.1 * shape.kv_len}[name]

    selector = measured(Source(backend("short"), backend("long")), table(us, "short", "long"))
    chosen = [next(iter(selector.backends_for(Phase.DECODE, 1, 1, kv_len).values())).name for kv_len in (64, 16000, 64)]
    assert chosen == ["short", "long", "short"]
    assert next(iter(selector.backends_for(Phase.PREFILL, 1, 16, 16).values())).name == "short"
    assert set(selector.decode_candidates(1)) == {"short", "long"}
    assert {next(iter(made.values())).name for made in selector.instances.values()} == {"short", "long"}
    assert next(iter(selector.backends_for(Phase.DECODE).values())).name == selector.selection.names[Phase.DECODE]
    assert "|" in str(selector.selection)


def test_a_named_backend_is_not_switched_and_the_free_phase_is() -> None:
    costs = table(lambda name, shape, layout, size: {"a": 1.0, "b": 2.0}[name], "a", "b")
    selector = measured(Source(backend("a"), backend("b")), costs, "prefill=b")
    assert names(selector) == ("b", "b", "a")
    assert selector.decode_candidates(8) == ["a"]
    named = measured(Source(backend("a"), backend("b")), costs, "b")
    assert names(named) == ("b", "b", "b")
    assert "asked for" in str(named.selection)


def test_a_backend_that_failed_its_self_test_is_left_out_even_where_nothing_was_measured() -> None:
    source = Source(backend("bad"), backend("good"))
    costs = table(lambda name, shape, layout, size: {"bad": 1.0, "good": 2.0}[name], "bad", "good", excluded={"bad": "wrong"})
    assert names(measured(source, costs)) == ("good",) * 3
    assert names(measured(source, costs, block_size=64)) == ("good",) * 3
    assert names(measured(source, costs, "bad")) == ("bad",) * 3  # asked for by name: the user's word counts


def test_a_layout_without_times_falls_back_to_the_rank_order_and_says_so() -> None:
    costs = table(lambda name, shape, layout, size: 1.0 if name == "b" else 2.0, "a", "b")
    selector = measured(Source(backend("a"), backend("b")), costs, kv_layout="vllm_5d")
    assert names(selector) == ("a",) * 3
    assert "the table has no times for this layout and block size, rank order" in str(selector.selection)
    assert selector.decode_candidates(4) == ["a"]


def test_a_backend_that_cannot_serve_the_layer_is_not_chosen_whatever_the_table_says() -> None:
    source = Source(backend("picky", head_dims=(64,)), backend("fine"))
    costs = table(lambda name, shape, layout, size: {"picky": 1.0, "fine": 2.0}[name], "picky", "fine")
    assert names(measured(source, costs)) == ("fine",) * 3


ENCODER = spec(dense=True, causal=False)
PROMPTS = frozenset({Phase.PREFILL})


def both_ways(name: str) -> type[AttentionBackend]:
    return backend(name, dense_prefill=True, non_causal=True)


def test_layers_without_a_cache_ask_for_prompts_alone() -> None:
    """By backends that claim nothing else, too; and the workload's prompts have no cached part."""
    prompts_alone = backend("prompts_alone", PROMPTS, dense_prefill=True, non_causal=True)
    assert select(Source(backend("causal"), prompts_alone), "auto", ENCODER).selection.names == {Phase.PREFILL: "prompts_alone"}
    source = Source(both_ways("a"), both_ways("b"), backend("causal", dense_prefill=True))
    times = table(lambda name, shape, *_: 1.0 if (name == "b") is (shape.query_len > 100) else 2.0, "a", "b")
    costs = CostTable(
        [
            Sample(shape, name, None, None, times.at(shape, name, "nhd", 16)[0])
            for shape in times.shapes[Phase.PREFILL]
            for name in "ab"
        ],
        0.02,
        phases=PROMPTS,
    )
    for workload in PRESETS.values():
        chosen = Selector(source, LayerSpecs([ENCODER] * 3), costs={ENCODER: costs}, workload=workload)
        assert set(chosen.selection.names) == {Phase.PREFILL}
        assert [next(iter(chosen.backends_for(Phase.PREFILL, 1, n, n).values())).name for n in (16, 4096)] == ["a", "b"]


def test_a_backend_that_is_causal_alone_is_refused_for_an_encoder_with_what_would_serve() -> None:
    source = Source(backend("causal", dense_prefill=True), both_ways("other"))
    with pytest.raises(UnsupportedError, match="causal: needs a backend that declares non_causal") as refused:
        select(source, "causal", ENCODER)
    assert follow(source, refused.value, ENCODER).selection.names == {Phase.PREFILL: "other"}


WINDOW = spec(sliding_window=4)
WINDOWS = frozenset({"sliding_window"})


def parts(selector: Selector) -> dict[str, tuple[str, str, int, str]]:
    """Prefill's backend, layout, block size and decode's backend of each kind."""
    chosen = {kind: each.selection for kind, each in selector.groups.items()}
    return {
        kind: (each.names[Phase.PREFILL], each.layout.name, each.block_size, each.names[Phase.DECODE])
        for kind, each in chosen.items()
    }


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        ("window=a", "auto", "auto"),
        ("full=a,wide:decode=b", "a", "b"),
        ("wide=a,full=b", "a", "a"),
        ("full:prefill=a,wide:decode=b,decode=c", "a", "b"),
        ("full=a,full:decode=b,prefill=c", "a", "b"),
        ("full:decode=auto,decode=c,prefill=d", "d", "auto"),
    ],
)
def test_the_most_specific_kind_that_is_named_decides_for_each_phase(text: str, prefill: str, decode: str) -> None:
    request = BackendRequest.parse(text)
    kinds = kinds_of(spec(head_dim=512))
    assert kinds == ("wide", "full")
    assert request.for_layer(kinds) == BackendRequest(prefill, decode)
    mapping = {key: name for key, _, name in (part.partition("=") for part in text.split(","))}
    assert BackendRequest.parse(mapping) == request == BackendRequest.parse(replace(request, text="").text)


def test_kinds_have_backends_of_their_own_in_one_layout_and_block_size() -> None:
    source = Source(backend("a", layouts=(NHD, HND)), backend("w", layouts=(HND,), block_multiple=64, features=WINDOWS))
    selector = select(source, "auto", spec(), WINDOW)
    assert parts(selector) == {"full": ("a", "hnd", 64, "a"), "window": ("w", "hnd", 64, "w")}
    made = selector.backends_for(Phase.DECODE)
    assert {each: backend.name for each, backend in made.items()} == {spec(): "a", WINDOW: "w"}
    assert str(selector.selection).startswith("full: prefill=a, extend=a, decode=a; kv_layout=hnd, block_size=64")
    assert [row.kind for row in selector.plan()] == ["full"] * 3 + ["window"] * 3


def test_kinds_without_a_common_layout_have_their_own_and_need_a_common_block_size() -> None:
    source = Source(backend("n", layouts=(NHD,)), backend("h", layouts=(HND,), block_multiple=64, features=WINDOWS))
    assert {each[1] for each in parts(select(source, "auto", spec(), WINDOW)).values()} == {"hnd"}
    assert parts(select(source, "full=n", spec(), WINDOW)) == {"full": ("n", "nhd", 64, "n"), "window": ("h", "hnd", 64, "h")}
    with pytest.raises(UnsupportedError, match="^window layers: .*block_size=16") as refused:
        select(source, "window=h", spec(), WINDOW, block_size=16)
    assert parts(follow(source, refused.value, spec(), WINDOW))["window"][2] == 64


def test_kinds_choose_a_layout_by_their_common_cost() -> None:
    """Windows gain more in hnd than full layers lose there."""
    both = [backend(name, features=WINDOWS) for name in ("a", "b")]

    def us(best: str, gain: float, name: str, layout: str) -> float:
        return (1.0 if name == best else 3.0) * (gain if layout == "hnd" else 1.0)

    costs = {
        spec(): table(lambda name, shape, layout, size: us("a", 1.2, name, layout), "a", "b"),
        WINDOW: table(lambda name, shape, layout, size: us("b", 0.3, name, layout), "a", "b"),
    }
    chosen = Selector(Source(*both), LayerSpecs([spec(), WINDOW]), costs=costs)
    assert parts(chosen) == {"full": ("a", "hnd", 16, "a"), "window": ("b", "hnd", 16, "b")}
    many = Selector(Source(*both), LayerSpecs([*[spec()] * 9, WINDOW]), costs=costs)
    assert parts(many) == {"full": ("a", "nhd", 16, "a"), "window": ("b", "nhd", 16, "b")}
    assert many.decode_us(1, 1, 64) == pytest.approx(10.0, rel=1e-3)


def test_only_the_largest_kind_changes_its_backend_between_graphs() -> None:
    def us(name: str, shape: Shape, layout: str, size: int) -> float:
        return {"short": 1.0 * shape.kv_len, "long": 1000.0 + 0.1 * shape.kv_len}[name]

    source = Source(*(backend(name, features=WINDOWS) for name in ("short", "long")))
    costs = dict.fromkeys((spec(), WINDOW), table(us, "short", "long"))
    selector = Selector(source, LayerSpecs([spec(), spec(), WINDOW]), costs=costs)
    candidates = selector.decode_candidates(1)
    assert len(candidates) == 2
    found = {
        tuple(each.name for each in selector.backends_for(Phase.DECODE, 1, 1, kv_len).values()) for kv_len in range(64, 16384, 64)
    }
    assert found == {tuple(each.name for each in selector.instances[name].values()) for name in candidates}
