"""Puts an engine together: loop, scheduler and executor for one model, in one process or with other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from headway.core.contract.compiled import CompileAhead
from headway.core.contract.model import Model, embedding_size, state_layers
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.sampling_plugins import Proposer
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.executor import Executor
from headway.core.engine.data.request_limits import RequestLimits
from headway.core.engine.execution.host_rows import HostRows
from headway.core.engine.execution.local_executor import EngineSource, LocalExecutor
from headway.core.engine.loop import EngineLoop
from headway.core.engine.offload.page_copier import PageCopier
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.engine.ranks.ranked_executor import RankedExecutor
from headway.core.engine.scheduling import scheduler as deterministic
from headway.core.engine.scheduling.drafting import Drafting
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.core.select.costs import CostTable
from headway.core.select.layer_specs import LayerSpecs
from headway.core.speculation.step_times import StepTimes


def make_engine(
    *,
    model: Model,
    source: EngineSource,
    layers: LayerSpecs | None = None,
    config: EngineConfig | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    sampling: SamplingOps = TORCH_SAMPLING,
    costs: Mapping[AttentionSpec, CostTable] | None = None,
    state_costs: Mapping[StateSpec, CostTable] | None = None,
    proposer: Proposer | None = None,
    measured: bool = True,
    compile_ahead: CompileAhead | None = None,
    hosts: HostRows | None = None,
    weights: str = "",
    ranks: Ranks = ONE_RANK,
    processes: RankProcesses | None = None,
) -> EngineLoop:
    """Make the loop of one model in this process, with its executor, ready for requests.

    source: the registry of backends. layers: the specs of the model's layers; None: as config.kv_cache_dtype says, scales of 1.
    sampling: how tokens are chosen, where something does it faster than torch. costs: measured times of each distinct layer,
    which `auto` obeys, state_costs those of layers with a state; None: the order that plugins propose. proposer: guesses tokens,
    which change no output, only the speed. measured: verify guesses where they pay by the times of the steps; else whatever they
    cost. compile_ahead: what the device's kernels are compiled in before the engine is ready; None: nothing is compiled there.
    hosts: serves grammars and named logits processors; None: there are neither. weights: what tells these weights from all
    others, for blocks that are kept on disk. ranks, processes: those that hold the model's other parts, of which this process is
    rank 0; each makes a `LocalExecutor` with equal arguments at the same time.

    :raises HeadwayError: options that cannot work together, with what would.
    """
    config = config or EngineConfig()
    layers = layers or LayerSpecs.of(model, config.kv_cache_dtype)
    config = config.for_device(layers.device)
    if config.deterministic:
        config = deterministic.prepare(source, layers, state_layers(model), config)
    local = LocalExecutor(
        model=model,
        layers=layers,
        source=source,
        config=config,
        sampling=sampling,
        costs=costs,
        state_costs=state_costs,
        compile_ahead=compile_ahead,
        max_decode_len=1 if proposer is None else config.num_speculative_tokens + 1,
        hosts=hosts,
        make_mover=partial(PageCopier, config=config, weights=weights) if config.offload_bytes[0] else None,
        ranks=ranks,
    )
    executor: Executor = local if processes is None else RankedExecutor(local, processes)
    drafting = None if proposer is None else _drafting(proposer, model, config, local if measured else None)
    limits = RequestLimits.of(
        config, executor.capacity.max_model_len, model.max_position_embeddings, model.vocab_size, embedding_size(model)
    )
    scheduler = deterministic.IndependentScheduler if config.deterministic else Scheduler
    engine = EngineLoop(executor, config, limits, eos_token_ids, scheduler, drafting)
    executor.capture()
    return engine


def _drafting(proposer: Proposer, model: Model, config: EngineConfig, measured_by: LocalExecutor | None) -> Drafting:
    """measured_by: knows what a decode's attention costs; None: guesses are verified whatever they cost."""
    times = None if measured_by is None else StepTimes(measured_by.attention_us)
    return Drafting(proposer, model.vocab_size, config.num_speculative_tokens, times)
