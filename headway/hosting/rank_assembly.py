"""Startup of an engine's other ranks: their devices, their processes, and the executor of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from headway.core.contract.errors import ConfigError, UnsupportedError
from headway.core.contract.kernel import CompileAhead
from headway.core.contract.ranks import ONE_RANK, Ranks
from headway.core.contract.spec import AttentionSpec
from headway.core.contract.state import StateSpec
from headway.core.engine.data.config import EngineConfig
from headway.core.engine.execution.local_executor import DeviceParts, LocalExecutor
from headway.core.engine.execution.memory import run_trial
from headway.core.engine.ranks.rank_messages import RankStart
from headway.core.engine.ranks.rank_processes import RankProcesses
from headway.core.engine.scheduling.deterministic import prepare_deterministic
from headway.core.sampling.sampler import TORCH_SAMPLING, SamplingOps
from headway.core.select.costs import CostTable
from headway.core.select.request import LayerSpecs
from headway.kernels.experts.bound import AUTO, ExpertsOptions
from headway.kernels.runtime.compile_ahead import compile_ahead
from headway.kernels.sampling import fastest_sampling
from headway.machine.process import bound_kernel_caches, set_threads
from headway.models.config import DecoderConfig
from headway.models.layers.decoder import Decoder
from headway.models.loader import LoadedModel, LoadOptions, load_model
from headway.registry import Registry
from headway.tuning.autotune import TableRequest
from headway.tuning.measure.all_reduce import choose_all_reduce
from headway.tuning.measure.device import resolve_device
from headway.tuning.measure.experts import choose_experts
from headway.tuning.measure.linear import choose_linear_kernels

if TYPE_CHECKING:
    from headway.engine_args import EngineArgs
    from headway.models.transformers_adapter.model import TransformersModel

_MODULE: Final = "headway.hosting.rank_child"
_MODEL_STEP: Final = 1024
"""Number of tokens in a trial step, large enough to use the same kernels as the largest step."""


class EngineChoices(NamedTuple):
    """Choices that rank 0 made for all ranks by measuring, as lists in the order of the model's layers."""

    costs: Sequence[CostTable] | None
    """Times of attention: one table for each item of `LayerSpecs.counts`."""
    state_costs: Sequence[CostTable] | None
    """Times of state layers: one table for each distinct item of `LayerSpecs.states`."""

    @classmethod
    def of(
        cls, costs: Mapping[AttentionSpec, CostTable] | None, state_costs: Mapping[StateSpec, CostTable] | None
    ) -> EngineChoices:
        """Make the choices from rank 0's tables, which are in the order of the model's layers."""
        return cls(None if costs is None else [*costs.values()], None if state_costs is None else [*state_costs.values()])


def rank_devices(args: EngineArgs) -> list[torch.device]:
    """Return the device of each rank, before anything is started.

    :raises ConfigError: if there are more ranks than devices, the devices are of different kinds, a launcher such as torchrun is
    used, or an option does not allow several ranks.
    """
    size, option = args.tensor_parallel_size, "tensor_parallel_size"
    if sys.platform == "win32":
        raise ConfigError(option, "1 on Windows, which hands no sockets to other processes", size)
    others = os.environ.get("WORLD_SIZE", "1")
    if others != "1":
        need = "processes that Headway starts itself, one for each rank"
        hint = "start it without torchrun; a rank needs no start of its own"
        raise ConfigError(f"{option}={size}", need, f"a process that torchrun has started (WORLD_SIZE={others})", hint)
    if args.registry is not None:
        need = "plugins or backends by name or file, which each rank can load"
        raise ConfigError(f"{option}={size}", need, "a registry of this process", "leave registry out")
    if ":" in args.device:
        hint = "device='cuda'; CUDA_VISIBLE_DEVICES says which GPUs there are"
        raise ConfigError("device", f"a kind of device where {option} is {size}", args.device, hint)
    device = resolve_device(args.device)
    if device.type == "cpu":
        _check_count(size, os.cpu_count() or size, "the machine's cores")
        return [device] * size
    _check_count(size, torch.cuda.device_count(), "the GPUs that torch sees")
    names = [torch.cuda.get_device_name(number) for number in range(size)]
    if len(set(names)) > 1:
        hint = "CUDA_VISIBLE_DEVICES says which GPUs there are"
        raise ConfigError(f"{option}={size}", "GPUs of one kind", ", ".join(names), hint)
    return [torch.device("cuda", number) for number in range(size)]


def _check_count(size: int, count: int, what: str) -> None:
    if size > count:
        nearest = 2 ** (count.bit_length() - 1)
        raise ConfigError("tensor_parallel_size", f"at most {count}, {what}", size, f"tensor_parallel_size={nearest}")


def start_ranks(args: EngineArgs, devices: Sequence[torch.device]) -> RankProcesses:
    """Start the processes of the other ranks. On a CPU, the threads are divided among all ranks, and this process's thread count
    is set too."""
    size, num_threads = len(devices), None
    if devices[0].type == "cpu":
        bound_kernel_caches()
        num_threads = set_threads(args.num_threads, size)
    return RankProcesses(size, _MODULE, [str(device) for device in devices], num_threads)


def make_rank(start: RankStart, args: EngineArgs) -> LocalExecutor:
    """Make the executor of a rank other than rank 0, with rank 0's choices. Raises the same errors as `assemble`."""
    registry, device = args.make_registry(), torch.device(start.device)
    config = args.engine_config().for_device(device)
    ahead = compile_ahead(device)
    budget = 0.0 if config.deterministic else TableRequest(budget=args.autotune_budget, tune=args.tune).seconds(device)
    choose_all_reduce(start.ranks, registry.all_reduce, budget)
    loaded = load_part(args, registry, device, start.ranks)
    decoder = loaded.decoder
    layers = layers_of(loaded, args, registry, start.ranks)
    if config.deterministic:
        config = prepare_deterministic(registry, layers, config)
    choices: EngineChoices = start.choices()
    choose_experts(decoder.expert_kinds, 0, ahead, registry)  # rank 0 has measured, and stored the times
    choose_linear_kernels(decoder.linear_choices, 0, ahead, registry=registry)  # with rank 0's stored times
    states = dict.fromkeys(layers.states)
    parts = DeviceParts(
        model=decoder,
        layers=layers,
        source=registry,
        config=config,
        sampling=sampling_of(decoder, layers, config, ahead),
        costs=None if choices.costs is None else dict(zip(layers.counts, choices.costs, strict=True)),
        state_costs=None if choices.state_costs is None else dict(zip(states, choices.state_costs, strict=True)),
        compile_ahead=ahead,
        max_decode_len=1 if config.speculate is None else config.num_speculative_tokens + 1,
        ranks=start.ranks,
    )
    return LocalExecutor(parts)


def layers_of(loaded: LoadedModel, args: EngineArgs, registry: Registry, ranks: Ranks = ONE_RANK) -> LayerSpecs:
    """Return the specs of a model's layers, with the options' cache dtypes and attention rules.

    :raises HeadwayError: if a dtype or a rule cannot be used.
    """
    decoder = loaded.decoder
    layers = LayerSpecs.of(decoder, args.kv_cache_dtype, decoder.kv_scales)
    config = getattr(decoder, "config", None)
    caching = [layer.caches for layer in config.layers] if isinstance(config, DecoderConfig) else [True] * len(layers.cached)
    rules = {
        key: registry.attention_rule(given, False, "config.json, headway_attention_rules")
        for key, given in loaded.attention_rules.items()
    }
    files = not args.require_passport  # a passport does not cover a rule's file
    rules |= {key: registry.attention_rule(given, files) for key, given in args.attention_rules.items()}
    if rules and ranks.size > 1 and getattr(config, "differential", False):
        need = "1 for attention rules with differential attention, because a rank's heads do not follow one another"
        raise ConfigError("tensor_parallel_size", need, ranks.size)
    longest = args.max_model_len or decoder.max_position_embeddings
    return layers.with_rules(rules, [number for number, caches in enumerate(caching) if caches], longest, ranks)


def sampling_of(
    decoder: Decoder | TransformersModel, layers: LayerSpecs, config: EngineConfig, ahead: CompileAhead | None
) -> SamplingOps:
    """Compile a model's kernels and its sampling kernels, except attention kernels. Return the sampling operations.

    These kernels are needed for every choice of attention backend, so all of them are compiled in one `ahead` context. The model
    runs on all ranks at the same time.
    """
    most = min(_MODEL_STEP, config.for_device(layers.device).step_tokens)

    @contextmanager
    def with_model() -> Iterator[None]:
        assert ahead is not None
        with ahead():
            for num_tokens in sorted({most, *(4**n for n in range(6) if 4**n < most)}):
                run_trial(decoder, layers, num_tokens, 1)
            yield

    compiling = None if ahead is None else with_model
    # Deterministic mode was verified with torch's operations only.
    if not config.deterministic:
        return fastest_sampling(layers.device, decoder.vocab_size, compiling)
    with compiling() if compiling is not None else nullcontext():
        return TORCH_SAMPLING


def named_experts(args: EngineArgs, registry: Registry, device: torch.device) -> ExpertsOptions:
    """Return the kernels allowed for MoE layers on a device, and the kernel named by an option.

    :raises UnsupportedError: if the named kernel cannot run on the device.
    """
    named = args.experts_kernel
    if named != AUTO and not (able := registry.experts.able(named, device.type)):
        raise UnsupportedError(f"experts kernel {named}", able.reasons)
    return ExpertsOptions(registry.experts.classes, named)


def load_part(args: EngineArgs, registry: Registry, device: torch.device, ranks: Ranks) -> LoadedModel:
    """Load a rank's shard of a model; only rank 0 has the tokenizer.

    :raises UnsupportedError: if a kernel named in the options cannot run on the device.
    """
    options = LoadOptions(
        invariance=args.invariance,
        torch_compile=args.compiles_on(device.type),
        quantization=args.quantization,
        tokenizer=args.tokenizer,
        origin=args.origin,
        slots=args.adapter_slots,
        max_model_len=args.max_model_len,
        experts=named_experts(args, registry, device),
        kernels=registry.linear_kernels(device, args.linear_kernel, args.deterministic),
    )
    return load_model(
        args.model,
        dtype=args.dtype,
        device=device,
        load_format=args.load_format,
        skip_tokenizer_init=args.skip_tokenizer_init or ranks.rank > 0,
        model_impl=args.model_impl,
        ranks=ranks,
        options=options,
    )
