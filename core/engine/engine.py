"""Puts an engine together: loop, scheduler and executor for one model, in one process or with other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from headway.core.contract.compiled import CompileAhead
from headway.core.contract.model import Model, embedding_size, state_layers
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.sampling_plugins import Proposer
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.data.request_limits import RequestLimits
from headway.core.engine.execution.host_rows import HostRows
from headway.core.engine.execution.local_executor import DeviceParts, EngineSource, LocalExecutor
from headway.core.engine.loop import EngineLoop
from headway.core.engine.offload.page_copier import PageCopier
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.engine.ranks.ranked_executor import RankedExecutor
from headway.core.engine.scheduling.deterministic import IndependentScheduler, prepare_deterministic
from headway.core.engine.scheduling.drafting import Drafting
from headway.core.engine.scheduling.scheduler import Scheduler
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.core.select.costs import CostTable
from headway.core.select.layer_specs import LayerSpecs
from headway.core.speculation.proposers import StepTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What an engine is made from. Fields that `DeviceParts` has too mean the same."""

    model: Model
    source: EngineSource
    layers: LayerSpecs | None = None
    """None: as config.kv_cache_dtype says, with scales of 1."""
    config: EngineConfig | None = None
    eos_token_ids: frozenset[int] = frozenset()
    sampling: SamplingOps = TORCH_SAMPLING
    costs: Mapping[AttentionSpec, CostTable] | None = None
    state_costs: Mapping[StateSpec, CostTable] | None = None
    proposer: Proposer | None = None
    """Guesses tokens, which change no output, only the speed."""
    measured: bool = True
    """Whether drafts are verified only if they pay by the times of steps; else whatever they cost."""
    compile_ahead: CompileAhead | None = None
    hosts: HostRows | None = None
    weights: str = ""
    """Identity of the weights, for blocks that are kept on disk."""
    ranks: Ranks = ONE_RANK
    processes: RankProcesses | None = None
    """The other ranks' processes, of which this process is rank 0."""


def make_engine(parts: EngineParts) -> EngineLoop:
    """Make the loop of one model in this process, with its executor, ready for requests.

    :raises HeadwayError: options that cannot work together, with what would.
    """
    model = parts.model
    proposer = parts.proposer
    config = parts.config or EngineConfig()
    layers = parts.layers or LayerSpecs.of(model, config.kv_cache_dtype)
    config = config.for_device(layers.device)
    if config.deterministic:
        config = prepare_deterministic(parts.source, layers, state_layers(model), config)
    device = DeviceParts(
        model=model,
        source=parts.source,
        layers=layers,
        config=config,
        sampling=parts.sampling,
        costs=parts.costs,
        state_costs=parts.state_costs,
        compile_ahead=parts.compile_ahead,
        max_decode_len=1 if proposer is None else config.num_speculative_tokens + 1,
        hosts=parts.hosts,
        ranks=parts.ranks,
    )
    if parts.processes is None:
        copier = partial(PageCopier, config=config, weights=parts.weights) if config.offload_bytes[0] else None
        executor = LocalExecutor(device, copier)
    else:
        executor = RankedExecutor(device, parts.processes)
    drafting = None
    if proposer is not None:
        times = StepTimes(executor.selector.decode_us) if parts.measured else None
        drafting = Drafting(proposer, model.vocab_size, config.num_speculative_tokens, times)
    limits = RequestLimits.of(
        config, executor.capacity.max_model_len, model.max_position_embeddings, model.vocab_size, embedding_size(model)
    )
    scheduler = IndependentScheduler if config.deterministic else Scheduler
    engine = EngineLoop(executor, config, limits, parts.eos_token_ids, scheduler, drafting)
    executor.capture()
    return engine
