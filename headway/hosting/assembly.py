"""Startup of an engine: from options to a loaded model, an optional draft model, and their engines."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from headway.compat.vllm_views import VllmConfig
from headway.core.contract.errors import ConfigError, HeadwayError, made_by
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.operation import STATE
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.contract.text_plugins import Proposer, ProposerOptions
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import ExecutorLostError
from headway.core.engine.data.request_limits import CheckedRequest
from headway.core.engine.execution.host_rows import HostRows
from headway.core.engine.loop import EngineLoop, EngineParts, make_engine
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.engine.ranks.torch_ranks import CollectiveError, TorchRanks
from headway.core.sampling.batch_processors import ProcessorBatch
from headway.core.sampling.grammar import GrammarCompiler
from headway.core.sampling.params import SamplingParams
from headway.core.sampling.sampler import SamplingOps
from headway.core.select.costs import CostTable
from headway.core.select.kernels import check_names
from headway.core.select.request import LayerSpecs, draft_cache_dtype
from headway.core.system.part_clock import PartClock
from headway.hosting.rank_assembly import EngineChoices, layers_of, load_part, make_rank, rank_devices, sampling_of, start_ranks
from headway.hosting.stats_report import StatsLog
from headway.kernels.experts.bound import AUTO, ExpertsKind
from headway.kernels.linear.choice import LinearChoice
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.kernels.runtime.compile_process import compile_process
from headway.machine.process import bound_kernel_caches, freeze_heap, set_threads
from headway.models.loader import LoadedModel
from headway.registry import Registry
from headway.requests.validation import RequestRules, processor_class
from headway.tuning.autotune import RegisteredLayer, TableRequest, costs_for
from headway.tuning.idle import IdleTuner
from headway.tuning.measure.all_reduce import choose_all_reduce
from headway.tuning.measure.device import identify_device, resolve_device
from headway.tuning.measure.experts import choose_experts
from headway.tuning.measure.linear import choose_linear_kernels
from headway.tuning.measure.self_test import check_named
from headway.tuning.measure.timing import SharedBudget, on_device

if TYPE_CHECKING:
    from headway.engine_args import EngineArgs

    Costs = Mapping[AttentionSpec, CostTable] | None
    StateCosts = Mapping[StateSpec, CostTable] | None

log = logging.getLogger("headway")

_SHARE = 0.1
"""Fraction of a GPU's free memory for the draft model's KV cache."""


class DraftModel:
    """A `Proposer` that runs a draft model's engine for all sequences of a step at once."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine

    def begin(self, num_prompt_tokens: int) -> DraftedSequence:
        """Return the proposer of one sequence."""
        return DraftedSequence(self)

    def propose_batch(self, sequences: Sequence[Sequence[int]], most: Sequence[int]) -> list[list[int]]:
        """Return draft tokens for each sequence. most: maximum number of draft tokens for each sequence. A sequence that is too
        long for the draft model gets no draft tokens."""
        engine, found = self._engine, [list[int]() for _ in sequences]
        longest = engine.limits.max_model_len
        for number, (token_ids, count) in enumerate(zip(sequences, most, strict=True)):
            count = min(count, longest - len(token_ids) - 1)
            if count > 0:
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                engine.add_request(str(number), CheckedRequest(token_ids, params))
        try:
            while engine.has_unfinished:
                for delta in engine.step():
                    found[int(delta.request_id)] += delta.new_token_ids
        except BaseException:  # an interrupt
            engine.abort_all()
            raise
        return found


class DraftedSequence:
    """A `SequenceProposer` for one sequence, which uses a shared `DraftModel`."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Return at most `most` draft tokens that continue a sequence."""
        return self._model.propose_batch([token_ids], [most])[0]

    def finish(self, token_ids: Sequence[int]) -> None:
        """Do nothing: the draft model's prefix cache evicts the sequence when it needs space."""


def draft_args(args: EngineArgs, device: torch.device) -> EngineArgs:
    """Return the options of the draft model's engine, derived from the target engine's. device: device of both engines."""
    assert args.speculative_model is not None
    memory = args.kv_cache_memory
    if memory is None and device.type == "cuda":
        memory = int(torch.cuda.mem_get_info(device)[0] * _SHARE)
    return dataclasses.replace(
        args,
        model=args.speculative_model,
        speculative_model=None,
        record_steps=0,
        record_tensors=False,
        attention_rules={},
        tokenizer=None,
        skip_tokenizer_init=True,
        hf_overrides=None,
        quantization=None,
        experts_kernel=AUTO,
        linear_kernel=AUTO,
        kv_cache_memory=memory,
        attn_backend=args.backend_request.for_draft(),
        kv_cache_dtype=draft_cache_dtype(args.kv_cache_dtype),
        kv_offload_size=None,
        kv_offload_dir=None,
        max_model_len=None,
        enable_prefix_caching=True,
        enable_prompt_embeds=False,
        enable_lora=False,
        logits_processors=(),
        log_stats_interval=None,
        scheduling_policy="fcfs",
    )


class Assembly(NamedTuple):
    """A loaded model with an engine that is ready for requests."""

    registry: Registry
    device: torch.device
    num_threads: int | None
    """Number of CPU threads. None on a GPU."""
    model: LoadedModel
    engine: EngineLoop
    stats_log: StatsLog | None
    """Periodic logger of statistics. None if log_stats_interval is None."""
    start: PartClock
    """Durations of the parts of the engine's startup."""
    rules: RequestRules = RequestRules()
    """Rules for requests, as set by the options."""
    settings: VllmConfig | None = None
    """Options under vLLM's names, for programs that read them."""
    worker_extension: str = ""
    """Value of the option worker_extension_cls."""
    draft: Assembly | None = None
    """Draft model and its engine. None without a draft model."""
    tuner: IdleTuner | None = None
    """Measures kernels while the engine is idle. None if the options do not ask for it."""


def checked_registry(args: EngineArgs) -> Registry:
    """Make the registry for the options, and check every name in the options before any slow work begins.

    :raises HeadwayError: if a backend, layout or proposer is unknown, a plugin is unusable, or there are more ranks than devices.
    """
    if args.tensor_parallel_size > 1:
        rank_devices(args)
    registry = args.make_registry()
    config = args.engine_config()  # a hub kernel may have been left out
    for failure in registry.failures:
        log.warning("plugin skipped: %s", failure)
    check_names(registry, config.backend_request, config.kv_layout, config.attn_options, config.state_request)
    if config.speculate is not None:
        registry.proposer(config.speculate)
    if args.experts_kernel != AUTO:
        registry.experts.backend(args.experts_kernel)
    return registry


def assemble(args: EngineArgs, registry: Registry | None = None) -> Assembly:
    """Load a model and make its engine, with all its ranks. registry: result of `checked_registry`; None means that it is called
    here.

    :raises HeadwayError: if an option is invalid or a rank fails to start; the error message is one line.
    """
    clock, age = PartClock(), time.time() - psutil.Process().create_time()
    assembly = _assemble_ranks(args, registry, clock)
    clock.end()
    log.info("ready in %s; before that, the process took %.1f s, mostly for imports", clock, age)
    return assembly


def _assemble_ranks(args: EngineArgs, registry: Registry | None, clock: PartClock) -> Assembly:
    """Assemble the engine in this process, and start the processes of other ranks if there are any."""
    if args.tensor_parallel_size == 1:
        device = resolve_device(args.device)
        with compile_process(device.type):
            return _assemble(_Start(args, registry or checked_registry(args), device, clock))
    devices = rank_devices(args)
    registry = registry or checked_registry(args)
    processes = start_ranks(args, devices)
    try:
        with compile_process(devices[0].type):
            return _assemble(_Start(args, registry, devices[0], clock, processes.join(partial(make_rank, args=args)), processes))
    except ExecutorLostError:
        raise
    except (RuntimeError, CollectiveError) as error:  # raised by a rendezvous if other ranks have ended
        processes.fail(error)
    finally:
        if not processes.are_ready:
            processes.end()


@dataclass(frozen=True)
class _Start:
    """Values that all parts of an engine's startup share."""

    args: EngineArgs
    registry: Registry
    device: torch.device
    clock: PartClock
    ranks: Ranks = ONE_RANK
    processes: RankProcesses | None = None
    """Processes of the other ranks. None if there is only one rank."""

    @cached_property
    def config(self) -> EngineConfig:
        """Engine configuration, taken from the options."""
        return self.args.engine_config()

    compiling: list[Future[SamplingOps]] = field(default_factory=list)
    """Compilations in other threads, which `compiled` waits for."""

    @cached_property
    def compile(self) -> CompileAhead | None:
        """Context in which the device's kernels are compiled in parallel. None if nothing is compiled."""
        return compile_ahead(self.device)

    @cached_property
    def ahead(self) -> CompileAhead | None:
        """`compile`, timed, and followed by `compiled`: whatever is measured next does not share the cores with compilers."""
        compile = self.compile

        @contextmanager
        def all_compiled() -> Iterator[object]:
            with nullcontext() if compile is None else compile() as found:
                yield found
            wait(self.compiling)

        return None if compile is None else self.clock.within("compiling", all_compiled)

    def compiled(self) -> SamplingOps | None:
        """Wait until the threads in `compiling` have ended. Return the result, or None if no thread was started."""
        with self.clock.part("compiling"):
            return next((each.result() for each in self.compiling), None)

    @cached_property
    def table(self) -> TableRequest:
        """Request for the crossover tables of `auto`, with the measuring budget."""
        paths = [Path(path) for path in self.args.crossover_table or ()]
        return TableRequest(paths, self.args.autotune_budget, self.args.tune)

    @cached_property
    def budget(self) -> SharedBudget:
        """Time budget that all measurements share."""
        return SharedBudget(0.0 if self.args.deterministic else self.table.seconds(self.device))


class _Loaded(NamedTuple):
    """A loaded model with its layers, before any measurement."""

    model: LoadedModel
    layers: LayerSpecs


def _assemble(start: _Start) -> Assembly:
    """Load rank 0's shard and make the engine."""
    rules, args = _rules(start.args), start.args
    num_threads = None
    if start.device.type == "cpu":
        bound_kernel_caches()
        num_threads = set_threads(args.num_threads, start.ranks.size)
    if isinstance(start.ranks, TorchRanks):  # choose the all-reduce
        start.budget.expect(1)
        with start.clock.part("measuring all-reduce"), start.budget.part() as seconds:
            choose_all_reduce(start.ranks, start.registry.all_reduce, seconds)
    loaded = _load(start)
    draft = _assemble_draft(start)
    choices = _measure(start, loaded)
    settings = VllmConfig.of(args, loaded.model)
    with start.clock.part("memory and graphs"):
        proposer = _proposer(start.registry, start.config.speculate, draft, loaded.model)
        engine = _engine(start, loaded, choices, proposer, _processors(rules.processors, settings, start.device))
    freeze_heap()
    _settle(settings, args, engine)
    return Assembly(
        registry=start.registry,
        device=start.device,
        num_threads=num_threads,
        model=loaded.model,
        engine=engine,
        stats_log=None if args.log_stats_interval is None else StatsLog(engine, args.log_stats_interval),
        start=start.clock,
        rules=rules,
        settings=settings,
        worker_extension=args.worker_extension_cls,
        draft=draft,
        tuner=_tuner(start, loaded.layers, engine),
    )


def _tuner(start: _Start, layers: LayerSpecs, engine: EngineLoop) -> IdleTuner | None:
    """Return the tuner for the idle time of an engine, or None if nothing is to be measured then."""
    table, config, registry = start.table, start.config, start.registry
    if table.when(start.device.type) != "idle":
        return None
    if table.paths or config.deterministic or not layers.auto_phases(config.backend_request):
        if table.tune is not None:
            log.warning(
                "tune=idle: nothing to measure, because a table or every backend is named, or the engine is deterministic"
            )
        return None
    device, able = identify_device(start.device), registry.able(start.device)
    found = {
        spec: RegisteredLayer.of(registry, spec, device, able, layers.phases_of(spec), tune="idle") for spec in layers.counts
    }
    return IdleTuner(engine, found, start.args.tune_share, take=start.ranks.size == 1)


def _load(start: _Start) -> _Loaded:
    """Load the model, while another thread tests the backends that `auto` may choose from.

    The model's kernels and the sampling kernels are then compiled in a thread, by running the model, while attention kernels are
    tested. Two cases prevent this. Measurements may choose the kernels of linear layers or experts, whose weights are packed only
    after the choice. Other ranks, if any, join the model's all-reduces only after they have received the choices.
    """
    with _trying_backends(start):
        ahead = start.compile  # begins to load the compiler
        with start.clock.part("weights"):
            model = load_part(start.args, start.registry, start.device, start.ranks)
        decoder = model.decoder
        layers = layers_of(model, start.args, start.registry, start.ranks)

        def compile_model() -> SamplingOps:
            with on_device(start.device):
                return sampling_of(decoder, layers, start.config, ahead)

        if start.ranks.size == 1 and not decoder.linear_choices and not decoder.expert_kinds:
            pool = ThreadPoolExecutor(1, "compile-model")
            start.compiling.append(pool.submit(compile_model))
            pool.shutdown(wait=ahead is None)
        return _Loaded(model, layers)


@contextmanager
def _trying_backends(start: _Start) -> Iterator[None]:
    """Test in a thread, for the duration of the context, the backends that `auto` may choose from.

    The tests take seconds: some GPU backends test a library in a child process, and the CPU backend compiles C code.
    """
    if not start.config.backend_request.auto_phases:
        yield
        return
    trying = Thread(target=start.registry.able, args=(start.device,), name="trying-backends", daemon=True)
    trying.start()
    yield
    with start.clock.part("trying backends"):
        trying.join()


def _assemble_draft(start: _Start) -> Assembly | None:
    """Load the draft model named in the options and make its engine. Return None if no draft model is named."""
    if start.args.speculative_model is None:
        return None
    start.compiled()  # the draft's cache takes a share of the memory that is free
    try:
        args = draft_args(start.args, start.device)
        return _assemble(_Start(args, checked_registry(args), start.device, start.clock))
    except HeadwayError as error:
        error.args = f"draft model: {error}", *error.args[1:]
        raise


def _measure(start: _Start, loaded: _Loaded) -> tuple[Costs, StateCosts]:
    """Measure attention and recurrent layers. Return their times, which are also sent to the other ranks.

    The kernels of linear and MoE layers are chosen by measurement as well; all measurements share one time budget. Deterministic
    mode pins one kernel regardless of speed, and only checks that third-party kernels run.
    """
    registry, config, table, budget, clock = start.registry, start.config, start.table, start.budget, start.clock
    decoder, layers, ahead = loaded.model.decoder, loaded.layers, start.ahead
    check_named(registry, config.backend_request.names, layers.cached)
    costs: Costs = None
    state_costs: StateCosts = None
    states, experts, products = dict.fromkeys(layers.states), decoder.expert_kinds, decoder.linear_choices
    if not config.deterministic:
        attention = len(layers.counts) if layers.auto_phases(config.backend_request) else 0
        budget.expect(attention + len(states) + len(experts) + bool(products))
        with clock.part("measuring attention"):
            costs = costs_for(layers, registry, config.backend_request, table, ahead, budget)
        with clock.part("measuring states"):
            state_costs = costs_for(layers, registry, config.state_request, table, ahead, budget, STATE)
    choose_weight_kernels(registry, products, experts, budget, clock, ahead)
    if start.processes is not None:
        start.processes.choose(EngineChoices.of(costs, state_costs))
    return costs, state_costs


def choose_weight_kernels(
    registry: Registry,
    products: Sequence[LinearChoice],
    experts: Sequence[ExpertsKind],
    budget: SharedBudget,
    clock: PartClock,
    ahead: CompileAhead | None,
) -> None:
    """Choose the kernel of each kind of linear and MoE layer by measured times, within the rest of a time budget."""
    with clock.part("measuring experts"):
        for kind in experts:
            with budget.part() as seconds:
                choose_experts([kind], seconds, ahead, registry)
    with clock.part("measuring linear layers"), budget.part() as seconds:
        choose_linear_kernels(products, seconds, ahead, registry=registry)


def _engine(
    start: _Start,
    loaded: _Loaded,
    choices: tuple[Costs, StateCosts],
    proposer: Proposer | None,
    processors: ProcessorBatch | None,
) -> EngineLoop:
    """Make the engine. choices: result of `_measure`. proposer: source of draft tokens; None means no draft tokens."""
    model, config = loaded.model, start.config
    decoder, eos = model.decoder, model.eos_token_ids
    grammars = None if model.tokenizer is None else GrammarCompiler(model.tokenizer, decoder.vocab_size, eos)
    parts = EngineParts(
        model=decoder,
        source=start.registry,
        layers=loaded.layers,
        config=config,
        eos_token_ids=eos,
        sampling=start.compiled() or sampling_of(decoder, loaded.layers, config, start.ahead),
        costs=choices[0],
        state_costs=choices[1],
        proposer=proposer,
        compile_ahead=start.ahead,
        hosts=HostRows(grammars, start.registry.logits_processors, processors),
        weights="" if config.kv_offload_dir is None else _identity_of(model, start.args.load_format, loaded.layers),
        name=model.name,
        ranks=start.ranks,
        processes=start.processes,
    )
    return make_engine(parts)


def _proposer(registry: Registry, name: str | None, draft: Assembly | None, model: LoadedModel) -> Proposer | None:
    """Return the proposer of draft tokens: the draft model or the proposer with this name. None if neither is given.

    :raises ConfigError: if the draft model's vocabulary differs from the model's.
    """
    if draft is not None:
        size, own = model.decoder.vocab_size, draft.model.decoder.vocab_size
        if own != size:
            need = f"a model with the vocabulary of {model.name}, {size} tokens"
            raise ConfigError("speculative_model", need, f"{draft.model.name} with {own}")
        return DraftModel(draft.engine)
    if name is None:
        return None
    info = registry.proposer(name)
    return made_by(f"proposer {name}", lambda: info.make(ProposerOptions()), "begin")


def _rules(args: EngineArgs) -> RequestRules:
    """Return the rules for requests that the options define.

    :raises ConfigError: if a logits processor cannot be found, or logits processors are combined with speculation.
    """
    rules = RequestRules(args.generation_config, tuple(map(processor_class, args.logits_processors)))
    if rules.processors and (args.speculate or args.speculative_model) is not None:
        need, hint = "steps of one token a sequence", "leave one of them out"
        got = f"speculate={args.speculate}" if args.speculate else f"speculative_model={args.speculative_model}"
        raise ConfigError("logits_processors", need, got, hint)
    return rules


def _settle(settings: VllmConfig, args: EngineArgs, engine: EngineLoop) -> None:
    """Add to the vLLM settings the values that are known only once the engine has its cache."""
    pool, longest = engine.capacity.pool, engine.limits.max_model_len
    settings.model_config.max_model_len = settings.scheduler_config.max_model_len = longest
    settings.cache_config = SimpleNamespace(
        block_size=pool.page_format.block_size,
        num_gpu_blocks=pool.num_pages,
        cache_dtype=args.kv_cache_dtype,
        gpu_memory_utilization=args.gpu_memory_utilization,
        enable_prefix_caching=args.enable_prefix_caching,
    )


def _processors(classes: Sequence[type[Any]], settings: VllmConfig, device: torch.device) -> ProcessorBatch | None:
    """Return the engine's logits processors, or None if there are none. :raises PluginError: if a constructor raises."""
    made = [
        made_by(
            f"logits_processors: {each.__name__}",
            lambda each=each: each(settings, device, device.type == "cuda"),  # type: ignore[misc]
            "apply",
            "update_state",
        )
        for each in classes
    ]
    return ProcessorBatch(made) if made else None


_WEIGHTS = (".safetensors", ".gguf", ".json")


def _identity_of(model: LoadedModel, load_format: str, layers: LayerSpecs) -> str:
    """Return a digest that identifies the weights and how they are computed, for blocks offloaded to disk.

    The digest covers config.json, the weight files' names, sizes and times, the implementation, the kind of device, the dtype,
    and the layers' attention rules.
    """
    decoder = model.decoder
    digest = hashlib.blake2b(digest_size=16)
    parts: list[object] = [load_format, model.implementation, decoder.dtype, decoder.device.type]
    parts += ["long factors"] if model.long_factors else []
    parts += [(place, spec.rule.digest) for place, spec in enumerate(layers.cached) if spec.rule is not None]
    files = [model.folder] if model.folder.is_file() else sorted(model.folder.iterdir())
    for path in files:
        if path.suffix in _WEIGHTS and path.is_file():
            stat = path.stat()
            parts.append((path.name, stat.st_size, stat.st_mtime_ns))
            if path.name == "config.json":
                parts.append(path.read_bytes())
    digest.update(repr(parts).encode())
    return digest.hexdigest()
