"""How an engine is put together: loop, scheduler and executor for one model in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.core.contract.compiled import CompileAhead
from headway.core.contract.model import Model
from headway.core.contract.proposers import Proposer
from headway.core.contract.spec import AttentionSpec
from headway.core.engine import deterministic
from headway.core.engine.config import EngineConfig
from headway.core.engine.drafting import Drafting
from headway.core.engine.host_rows import HostRows
from headway.core.engine.limits import PromptLimits
from headway.core.engine.local import LocalExecutor
from headway.core.engine.loop import EngineLoop
from headway.core.engine.scheduler import Scheduler
from headway.core.engine.specs import cache_specs
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.core.select.costs import CostTable
from headway.core.select.selector import BackendSource
from headway.core.speculation.times import StepTimes


class Engine(EngineLoop):
    """The loop of one model in this process, with the executor that it made for it."""

    def __init__(
        self,
        model: Model,
        source: BackendSource,
        config: EngineConfig | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        sampling: SamplingOps = TORCH_SAMPLING,
        costs: Mapping[AttentionSpec, CostTable] | None = None,
        proposer: Proposer | None = None,
        measured: bool = True,
        compile_ahead: CompileAhead | None = None,
        hosts: HostRows | None = None,
        kv_scales: Sequence[tuple[float, float]] | None = None,
        weights: str = "",
    ) -> None:
        """sampling: how tokens are chosen, where something does it faster than torch.

        compile_ahead: what the device's kernels are compiled in before the engine is ready; None: nothing is compiled there.

        hosts: serves grammars and named logits processors; None: there are neither.

        kv_scales: k_scale and v_scale of each layer's cache where kv_cache_dtype is fp8; None: 1.

        weights: what tells these weights from all others, for blocks that are kept on disk.

        costs: measured times of each distinct layer, which `auto` obeys; None: the order that plugins propose.

        proposer: guesses tokens, which change no output, only the speed. measured: verify guesses where they pay by the times of
        the steps; else whatever they cost.

        :raises HeadwayError: options that cannot work together, with what would.
        """
        config = config or EngineConfig()
        specs = cache_specs(model.attention_specs, config.kv_cache_dtype, kv_scales)
        config = config.for_device(specs[0].device)
        if config.deterministic:
            config = deterministic.prepare(source, specs, config)
        max_decode_len = 1 if proposer is None else config.num_speculative_tokens + 1
        self.executor = LocalExecutor(
            model, specs, source, config, sampling, costs, compile_ahead, max_decode_len, hosts, weights
        )
        self.selection = self.executor.selection
        limits = PromptLimits.of(config, self.executor.capacity.max_model_len, model.max_position_embeddings, model.vocab_size)
        scheduler = deterministic.IndependentScheduler if config.deterministic else Scheduler
        drafting = None
        if proposer is not None:
            times = StepTimes(self.executor.attention_us) if measured else None
            drafting = Drafting(proposer, model.vocab_size, config.num_speculative_tokens, times)
        super().__init__(self.executor, config, limits, eos_token_ids, scheduler, drafting)
        self.executor.capture()
