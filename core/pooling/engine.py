"""Engine for pooling models: packs texts into batches, runs the model once per batch, and pools the hidden states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

import numpy
import torch
from torch import Tensor

from headway.core.contract.backend import Backends, Plan, StepLimits, fits, powers
from headway.core.contract.errors import HeadwayError
from headway.core.contract.kernel import upload
from headway.core.contract.layout import CacheGeometry
from headway.core.contract.metadata import AttentionMetadata, Phase
from headway.core.contract.model import Attention, AttentionFunctions
from headway.core.contract.spec import AttentionSpec
from headway.core.select.costs import Shape
from headway.core.select.request import LayerSpecs
from headway.core.select.selector import Selector
from headway.core.system.logs import blame

log = logging.getLogger("headway")


class DenseAttention:
    """Attention of dense layers. `begin` plans a batch, then each layer calls this object. Layers with equal specs share a plan,
    and no cache is read."""

    def __init__(self, layers: LayerSpecs, selector: Selector) -> None:
        assert all(spec.dense for spec in layers.cached)
        self.layers = layers
        self._selector = selector
        self._kinds = layers.distinct
        self._kind_of = [self._kinds.index(spec) for spec in layers.cached]
        self._block_size = selector.selection.block_size
        geometries = [CacheGeometry.of(spec, 1, self._block_size) for spec in self._kinds]
        layouts = [selector.layout_of(spec) for spec in self._kinds]
        self._unread = [layout.allocate(geometry) for layout, geometry in zip(layouts, geometries, strict=True)]
        self._backends: Backends = {}
        self._plans: list[Plan] = []

    @property
    def serving(self) -> str:
        """Name of the backend for the current batch."""
        return next(iter(self._backends.values())).name

    @property
    def firsts(self) -> list[int]:
        """Index of the first layer of each kind."""
        return [self._kind_of.index(kind) for kind in range(len(self._kinds))]

    def begin(self, lens: Sequence[int]) -> None:
        """Plan a batch of concatenated texts. lens: number of tokens of each text. :raises BackendError: if the backend cannot
        plan the batch."""
        shape = Shape.of(Phase.PREFILL, lens, lens)
        self.begin_with(self._selector.backends_of(shape), lens)

    def begin_with(self, backends: Backends, lens: Sequence[int]) -> None:
        """Plan a batch with the given backends. Raises the same errors as `begin`."""
        tables = numpy.zeros((len(lens), -(-max(lens) // self._block_size)), dtype=numpy.int32)
        device = self.layers.device
        metadata = AttentionMetadata.build(lens, [0] * len(lens), tables, self._block_size, device, num_blocks=1)
        self._backends = backends
        self._plans = []
        for spec in self._kinds:
            backend = backends[spec]
            try:
                self._plans.append(backend.plan(metadata))
            except (Exception, SystemExit) as error:
                raise blame(
                    error, f"backend {backend.name}", Phase.PREFILL, f"plan of {len(lens)} texts, {sum(lens)} tokens"
                ) from error

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention output; see `core.contract.model.Attention`. :raises BackendError: if the backend raises."""
        kind = self._kind_of[layer]
        spec: AttentionSpec = self._kinds[kind]
        backend = self._backends[spec]
        out = q.new_empty((*q.shape[:2], spec.v_head_dim))
        try:
            backend.prefill(q, k, v, self._unread[kind], self._plans[kind], out)
        except (Exception, SystemExit) as error:
            raise blame(error, f"backend {backend.name}", Phase.PREFILL, f"layer {layer}, q {list(q.shape)}") from error
        return out


class EncodedText(NamedTuple):
    """A text, or a pair of texts, as tokens."""

    token_ids: Sequence[int]
    token_types: Sequence[int] | None = None
    """Segment id of each token, for models trained with segment embeddings. None means all zeros."""
    each_token: bool = False
    """True to return one row per token instead of one per text."""


class PooledNetwork(Protocol):
    """Interface through which the engine calls a model."""

    @property
    def attention_specs(self) -> Sequence[AttentionSpec]:
        """One spec per layer, all of them dense."""

    @property
    def size(self) -> int:
        """Number of elements of the result per text or token: size of an embedding, or number of labels."""

    def __call__(self, input_ids: Tensor, positions: Tensor, attention: Attention, token_types: Tensor | None = None) -> Tensor:
        """Return hidden states [num_tokens, hidden_size]. input_ids, positions, token_types: int64 [num_tokens]."""

    def pool(self, hidden: Tensor, starts: Tensor, each_token: bool) -> Tensor:
        """Return float32 [texts, size], or [num_tokens, size] if `each_token` is True. hidden: [num_tokens, hidden_size]; starts:
        int64 [texts + 1]."""


@dataclass
class PoolingStats:
    """Counters of an engine's work since its start."""

    num_texts: int = 0
    num_tokens: int = 0
    num_batches: int = 0
    batches_by_backend: dict[str, int] = field(default_factory=dict)


class PoolingEngine:
    """Runs one model over whole texts. Not thread-safe: the caller needs a lock.

    A batch contains texts of similar lengths, longest first, concatenated without padding. Texts with `each_token` are batched
    separately. The selector chooses the backends, as for a decoder's prompts.
    """

    def __init__(self, network: PooledNetwork, layers: LayerSpecs, selector: Selector, limits: StepLimits) -> None:
        """limits: maximum number of tokens and texts per batch, and maximum number of tokens of a text, which may exceed the
        tokens per batch."""
        self.network = network
        self.selector = selector
        self.limits = limits
        self.attention = DenseAttention(layers, selector)
        self.device = layers.device
        self.stats = PoolingStats()

    @torch.inference_mode()
    def run(self, texts: Sequence[EncodedText], finished: Callable[[int], None] = lambda count: None) -> list[Tensor]:
        """Return the result of each text, on the CPU: float32 [size], or [tokens, size] with `each_token`.

        texts: texts of 1 to `limits.max_model_len` tokens. Results are in the same order.
        finished: function called after each batch with the batch's number of texts.
        :raises BackendError: if a backend raises an error.
        """
        found: dict[int, Tensor] = {}
        in_flight: list[tuple[list[int], Tensor]] = []  # a batch is read after the next one was launched
        for batch in self._batches(texts):
            in_flight.append((batch, self._pooled([texts[index] for index in batch])))
            if len(in_flight) > 1:
                finished(_read(found, *in_flight.pop(0), texts))
        for batch, pooled in in_flight:
            finished(_read(found, batch, pooled, texts))
        return [found[index] for index in range(len(texts))]

    def _batches(self, texts: Sequence[EncodedText]) -> Iterator[list[int]]:
        for each_token in (False, True):
            numbers = [number for number, text in enumerate(texts) if text.each_token is each_token]
            lens = [len(texts[number].token_ids) for number in numbers]
            for batch in pack(lens, self.limits.max_num_tokens, self.limits.max_num_seqs):
                yield [numbers[index] for index in batch]

    def _pooled(self, texts: Sequence[EncodedText]) -> Tensor:
        lens = [len(text.token_ids) for text in texts]
        self.attention.begin(lens)
        stats = self.stats
        stats.num_texts += len(lens)
        stats.num_tokens += sum(lens)
        stats.num_batches += 1
        name = self.attention.serving
        stats.batches_by_backend[name] = stats.batches_by_backend.get(name, 0) + 1
        return self._forward(lens, texts)

    def _forward(self, lens: Sequence[int], texts: Sequence[EncodedText]) -> Tensor:
        counts = torch.tensor(lens)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(counts)
        token_ids = torch.tensor(list(chain.from_iterable(text.token_ids for text in texts)))
        types = None
        if any(text.token_types is not None for text in texts):
            types = torch.tensor(
                list(chain.from_iterable(text.token_types or [0] * n for text, n in zip(texts, lens, strict=True)))
            )
            types = upload(types, self.device)
        attention = AttentionFunctions(self.attention)
        hidden = self.network(upload(token_ids, self.device), upload(positions, self.device), attention, types)
        return self.network.pool(hidden, upload(starts, self.device), texts[0].each_token)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every kind of batch once, so that no text waits for a compiler. Logs a warning if a backend raises an error."""
        for backends in self.selector.instances.values():
            for lens in self._steps(backends):
                try:
                    self.attention.begin_with(backends, lens)
                    for layer in self.attention.firsts:
                        self.attention(layer, *self._blank(layer, sum(lens)))
                except HeadwayError as error:
                    log.warning("warm-up: %s", error)
                    break
        for count in powers(self.limits.max_num_tokens):
            texts = [EncodedText([0] * length) for length in self._batch_lens(count)]
            self.attention.begin([len(text.token_ids) for text in texts])
            self._forward([len(text.token_ids) for text in texts], texts)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.selector.forget()

    def _batch_lens(self, tokens: int) -> list[int]:
        """Return the lengths of a few texts that have `tokens` tokens in total, or fewer if these texts would exceed a batch."""
        longest = self.limits.max_model_len
        lens = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
        return lens[: self.limits.max_num_seqs]

    def _steps(self, backends: Backends) -> Iterator[list[int]]:
        seen = set()
        for backend in backends.values():
            for step in backend.warmup_steps(Phase.PREFILL, self.limits):
                lens = tuple(each.query_len for each in step)
                if fits(step, self.limits) and lens not in seen:
                    seen.add(lens)
                    yield list(lens)

    def _blank(self, layer: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.attention.layers.cached[layer]
        heads = spec.num_heads + spec.num_kv_heads
        qk = torch.zeros((tokens, heads, spec.head_dim), dtype=spec.dtype, device=self.device)
        v = torch.zeros((tokens, spec.num_kv_heads, spec.v_head_dim), dtype=spec.dtype, device=self.device)
        return qk[:, : spec.num_heads], qk[:, spec.num_heads :], v


def _read(found: dict[int, Tensor], batch: list[int], pooled: Tensor, texts: Sequence[EncodedText]) -> int:
    """Wait for a batch, and put its results into `found`. Returns the number of texts."""
    rows = pooled.cpu()
    lens = [len(texts[index].token_ids) for index in batch]
    found.update(zip(batch, torch.split(rows, lens) if texts[batch[0]].each_token else rows.unbind(), strict=True))
    return len(batch)


def pack(lens: Sequence[int], max_tokens: int, max_texts: int) -> Iterator[list[int]]:
    """Yield batches of text indexes, longest text first. lens: number of tokens of each text. A text longer than `max_tokens`
    gets a separate batch."""
    batch: list[int] = []
    tokens = 0
    for index in sorted(range(len(lens)), key=lambda index: -lens[index]):
        if batch and (tokens + lens[index] > max_tokens or len(batch) == max_texts):
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += lens[index]
    if batch:
        yield batch
