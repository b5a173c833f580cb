"""From options to a loaded model and an engine for it: what every client of an engine begins with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headway.core.contract.latent import expanded_specs, latent_layers
from headway.core.contract.proposers import ProposerOptions
from headway.core.engine.engine import Engine
from headway.core.engine.host_rows import HostRows
from headway.core.engine.specs import cache_specs
from headway.core.sampling.grammar import GrammarCompiler
from headway.core.sampling.sampler import TORCH_SAMPLING
from headway.core.select.request import parse_backend_request
from headway.core.select.selector import check_names
from headway.heap import freeze_heap
from headway.kernel_caches import bound_kernel_caches
from headway.models.device_operations import compile_ahead, fastest_sampling
from headway.models.identity import identity_of
from headway.models.loader import LoadedModel, load_model
from headway.registry import Registry
from headway.stats_log import StatsLog
from headway.threads import set_threads
from headway.tuning.autotune import TableRequest, costs_for
from headway.tuning.device import resolve_device
from headway.tuning.experts import choose_experts
from headway.tuning.named import check_named

if TYPE_CHECKING:
    import torch

    from headway.engine_args import EngineArgs

log = logging.getLogger("headway")


class Assembly(NamedTuple):
    """A model that is ready to run."""

    registry: Registry
    device: torch.device
    num_threads: int | None
    """CPU threads; None on a GPU."""
    model: LoadedModel
    engine: Engine
    stats_log: StatsLog | None
    """What logs statistics, where they are asked for."""


def assemble(args: EngineArgs) -> Assembly:
    """Load a model and set its engine up.

    :raises HeadwayError: anything the caller can put right, in one line.
    """
    config, deterministic = args.engine_config(), args.deterministic
    registry = args.make_registry()
    for failure in registry.failures:
        log.warning("plugin left out: %s", failure)
    check_names(registry, config.attn_backend, config.kv_layout, config.attn_options)
    speculate = None if config.speculate is None else registry.proposer(config.speculate)
    device = resolve_device(args.device)
    ahead = compile_ahead(device)
    num_threads = None
    if device.type == "cpu":
        bound_kernel_caches()
        num_threads = set_threads(args.num_threads)
    model = load_model(
        args.model,
        args.dtype,
        device,
        args.load_format,
        args.skip_tokenizer_init,
        deterministic,
        args.model_impl,
        args.compiles_on(device.type),
    )
    decoder, costs = model.decoder, None
    specs = cache_specs(decoder.attention_specs, config.kv_cache_dtype, decoder.kv_scales)
    check_named(registry, parse_backend_request(config.attn_backend).values(), specs)
    if not deterministic:  # which pins one backend, whatever is fastest
        table = TableRequest(None if args.crossover_table is None else Path(args.crossover_table), args.autotune_budget)
        expanded = expanded_specs(specs, latent_layers(decoder))
        costs = costs_for(specs, registry, config.attn_backend, table, ahead, expanded)
        choose_experts(decoder.expert_kinds, table.seconds(device), ahead)
    # torch's operations are those with which deterministic mode was shown to keep a request's bits.
    sampling = TORCH_SAMPLING if deterministic else fastest_sampling(device, decoder.vocab_size, ahead)
    eos = model.eos_token_ids
    grammars = None if model.tokenizer is None else GrammarCompiler(model.tokenizer, decoder.vocab_size, eos)
    hosts = HostRows(grammars, registry.logits_processors)
    proposer = None if speculate is None else speculate.make(ProposerOptions())
    weights = "" if config.kv_offload_dir is None else identity_of(model, args.load_format)
    engine = Engine(
        *(decoder, registry, config, eos, sampling, costs, proposer),
        compile_ahead=ahead,
        hosts=hosts,
        kv_scales=decoder.kv_scales,
        weights=weights,
    )
    freeze_heap()
    stats_log = None if args.log_stats_interval is None else StatsLog(engine, args.log_stats_interval)
    return Assembly(registry, device, num_threads, model, engine, stats_log)
