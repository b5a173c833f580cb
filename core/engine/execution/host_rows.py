"""Host side of steps: launched steps, and rows whose logits processing needs tokens that the host has seen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.contract.errors import ConfigError, PluginError, made_by
from headway.core.contract.text_plugins import LogitsProcessorInfo
from headway.core.engine.data.stats import LaunchFacts
from headway.core.engine.data.step import Sampled, SampledExtras, StartedRow
from headway.core.sampling.batch_processors import ENGINE_PROCESSORS, ProcessorBatch
from headway.core.sampling.grammar import Grammar, GrammarCompiler, GrammarError, GrammarQueue
from headway.core.sampling.logprobs import Scores, TokenLogprobs
from headway.core.sampling.params import LogitsProcessor, SamplingParams


class HostResults:
    """Copies int64 tensors to the host. Pinned memory and events are reused, because making them costs more than the copy."""

    def __init__(self, num_longs: int, device: torch.device) -> None:
        """num_longs: initial size of each buffer in int64 elements. A larger tensor raises the size."""
        self._num_longs = num_longs
        self._gpu = device.type == "cuda"
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def copy(self, tensor: Tensor) -> HostCopy:
        """Start copying a tensor, after all work queued on the current stream."""
        memory, done = self._take(tensor.numel())
        view = memory[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor, non_blocking=True)
        if done is not None:
            done.record()
        return HostCopy(self, memory, done, view)

    @property
    def num_free(self) -> int:
        """Number of pinned buffers that the next copies reuse."""
        return len(self._free)

    def _take(self, length: int) -> tuple[Tensor, torch.cuda.Event | None]:
        if length > self._num_longs:
            self._num_longs = length
            self._free = []
        if self._free:
            return self._free.pop()
        memory = torch.empty(self._num_longs, dtype=torch.int64, pin_memory=self._gpu)
        return memory, torch.cuda.Event() if self._gpu else None

    def reuse(self, memory: Tensor, done: torch.cuda.Event | None) -> None:
        """Accept pinned memory for reuse by later copies. It must not be read any more. Memory of a step whose result is never
        awaited is not reused."""
        if len(memory) == self._num_longs:
            self._free.append((memory, done))


class HostCopy:
    """A tensor that is being copied to the host."""

    def __init__(self, owner: HostResults, memory: Tensor, done: torch.cuda.Event | None, view: Tensor) -> None:
        self._owner = owner
        self._done = done
        self._view = view
        self.memory = memory
        """Pinned memory that receives the tensor."""

    def wait(self) -> NDArray[numpy.int64]:
        """Wait until the device has finished the copy and all work queued before it, and return the tensor. May be called only
        once."""
        if self._done is not None:
            self._done.synchronize()
        found: NDArray[numpy.int64] = self._view.numpy().copy()
        self._owner.reuse(self.memory, self._done)
        return found


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the tokens in one part of a prompt."""

    index: int
    first: int
    """Position of the part's first token."""
    k: int
    """Number of most likely tokens to list with each token."""
    scores: Scores


@dataclass(frozen=True, slots=True)
class DeviceExtras:
    """Results of a step in addition to tokens. Tensors are in host memory, and valid once the step is done."""

    errors: Mapping[int, str]
    """Error text of a sequence, keyed by its row of logits."""
    scores: Scores | None
    scored: Sequence[tuple[int, int]]
    """For each entry of `scores`: index of the row of logits, and requested number of most likely tokens."""
    prompts: Sequence[PromptScores]
    owners: NDArray[numpy.int64]
    """int64 [rows of logits]: index of the sampling sequence to which each row belongs."""

    def on_host(self) -> SampledExtras:
        """Return the results as plain data, keyed by sequence."""
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for index, (row, k) in enumerate(self.scored):
            assert self.scores is not None
            logprobs.setdefault(int(self.owners[row]), []).append(self.scores.at(index, k))
        prompts = {
            each.index: (each.first, [each.scores.at(index, each.k) for index in range(len(each.scores.ranks))])
            for each in self.prompts
        }
        return SampledExtras({int(self.owners[row]): why for row, why in self.errors.items()}, logprobs, prompts)


@dataclass(slots=True)
class Launched(LaunchFacts):
    """A step that this process has launched, whose tokens may not have arrived yet."""

    tokens: HostCopy
    """Sampled tokens: int64 [rows], with the rows in the order of `order`, or int64 [rows, drafts + 2] as in
    `Verified.tokens`."""
    order: NDArray[numpy.int64] | None
    """For each row of `tokens`, the index of its sequence among the step's sampling sequences. None means that the rows are in
    the order of these sequences."""
    extras: DeviceExtras | None = None
    check: Callable[[], None] | None = None
    """Function that raises an error if another rank was lost. The results are then invalid, although the device reports no
    error."""
    _sampled: Sampled | None = field(default=None, init=False)

    def wait(self) -> Sampled:
        """Wait for the step's tokens and return them. May be called several times. A kernel's error is raised here at the
        latest."""
        if self._sampled is None:
            self._sampled = self._read()
        return self._sampled

    def _read(self) -> Sampled:
        tokens = self.tokens.wait()
        if self.check is not None:
            self.check()
        if tokens.ndim == 2:
            tokens, counts = tokens[:, :-1], tokens[:, -1]
        else:
            tokens, counts = tokens[:, None], numpy.ones(len(tokens), dtype=numpy.int64)
        if self.order is not None:  # rows of a graph, which have no drafts
            ordered = numpy.empty_like(tokens)
            ordered[self.order] = tokens
            tokens = ordered
        return Sampled(tokens, counts, None if self.extras is None else self.extras.on_host())


@dataclass
class HostRow:
    """Prompt, parameters and output tokens of a completion, as far as the host has read them."""

    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    grammar: Grammar | None = None
    processors: list[LogitsProcessor] = field(default_factory=list)
    """Functions (prompt_token_ids, token_ids, logits) -> logits, in call order."""
    batched: bool = False
    """True if the engine's own processors also change the row's logits."""
    error: str | None = None
    """Error that ends the completion, or None."""

    @property
    def length(self) -> int:
        """Number of prompt and output tokens."""
        return len(self.prompt) + len(self.output)

    def take(self, tokens: Sequence[int]) -> None:
        """Append new output tokens, and advance the grammar."""
        self.output += tokens
        try:
            for token in tokens:
                if self.grammar is not None and self.error is None:
                    self.grammar.accept(token)
        except GrammarError as error:
            self.error = str(error)


class HostRows:
    """Compiles grammars and loads processors for requests, tracks their completions, and changes their logits."""

    def __init__(
        self, grammars: GrammarCompiler | None, processors: Mapping[str, LogitsProcessorInfo], batch: ProcessorBatch | None = None
    ) -> None:
        """grammars: compiler of structured outputs, or None without a tokenizer. processors: registered processors by name.
        batch: the engine's own processors, or None."""
        self._grammars = grammars
        self._infos = processors
        self._batch = batch
        self._makers: dict[str, Callable[[Mapping[str, Any]], Callable[..., Any]]] = {}
        self._queue: GrammarQueue | None = None
        self._rows: dict[int, HostRow] = {}
        self._unread: list[tuple[Launched, list[tuple[int, HostRow]]]] = []
        """Launched steps whose tokens have not been read. For each tracked sequence of a step: its index among the sampling
        sequences, and its row."""

    def prepare(self, params: SamplingParams) -> Future[None] | None:
        """Start any work that a request needs before its first step. The returned future can be cancelled, and fails with a
        GrammarError if the structured output cannot be compiled.

        :raises ConfigError: if a logits processor is not registered, or this engine cannot compile structured outputs.
        """
        for each in params.logits_processors or ():
            if isinstance(each, str) and each not in (ENGINE_PROCESSORS, *self._makers):
                self._makers[each] = self._load(each)
        form = params.structured_outputs
        if form is None:
            return None
        if self._grammars is None:
            raise ConfigError("structured_outputs", "a model with a tokenizer", "none")
        self._grammars.check()
        if self._queue is None:
            self._queue = GrammarQueue(self._grammars)
        return self._queue.add(form)

    def _load(self, name: str) -> Callable[[Mapping[str, Any]], Callable[..., Any]]:
        if name not in self._infos:
            known = ", ".join(self._infos) or "none"
            raise ConfigError("logits_processors", f"a function, or a name that a plugin registered ({known})", repr(name))
        return made_by(f"logits_processors: the maker of {name!r}", self._infos[name].load, "__call__")

    def start(self, started: StartedRow, wanted: bool) -> None:
        """Set up a row for a sequence that begins. wanted: True if the sequence has a grammar or logits processors."""
        self._rows.pop(started.row, None)
        if not wanted:
            return
        params = started.params
        row = self._rows[started.row] = HostRow(list(started.token_ids[: started.num_prompt_tokens]), params)
        try:
            if params.structured_outputs is not None:
                assert self._queue is not None, "prepare() has refused it"
                row.grammar = self._queue.grammar(params.structured_outputs)
            for each in params.logits_processors or ():
                if each == ENGINE_PROCESSORS:
                    row.batched = True
                    continue
                function = self._made(each, params) if isinstance(each, str) else each
                row.processors.append(_with_prompt(function))
        except (Exception, SystemExit) as error:  # a function's signature may be a property that raises anything
            row.error = str(error) if isinstance(error, (GrammarError, PluginError)) else _named(error)
        row.take(started.token_ids[started.num_prompt_tokens :])

    def _made(self, name: str, params: SamplingParams) -> Callable[..., Any]:
        return made_by(f"logits processor {name!r}", lambda: self._makers[name](params.extra_args or {}), "__call__")

    def refuse(self, started: StartedRow, why: str) -> None:
        """Set up a row for a sequence that must end at its first token. why: reason, which becomes the sequence's error."""
        self._rows[started.row] = HostRow(list(started.token_ids), started.params, error=why)

    def launched(self, step: Launched, rows: NDArray[numpy.int32]) -> None:
        """Record a launched step. rows: rows of the step's sampling sequences, in the step's order."""
        if self._rows:
            members = [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]
            if members:
                self._unread.append((step, members))

    def catch_up(self) -> None:
        """Read the tokens of all launched steps. Waits for the device."""
        while self._unread:
            step, members = self._unread[0]
            try:
                tokens = step.wait().token_lists()
            except Exception:  # the engine ends the step's sequences; an interrupt loses nothing
                self._unread.pop(0)
                raise
            self._unread.pop(0)
            for index, row in members:
                if all(token >= 0 for token in tokens[index]):
                    row.take(tokens[index])

    def masks(
        self, rows: Sequence[int], lens: Sequence[int], drafts: Mapping[int, Sequence[int]]
    ) -> tuple[list[int], NDArray[numpy.int32] | None]:
        """Return the indices of the logits rows that a grammar masks, and the masks (see `GrammarCompiler.masks`).

        rows: the executor's row for each row of logits. lens: number of tokens before each new token. drafts: executor row ->
        drafts to verify; a row with drafts appears several times in `rows`.
        """
        which, grammars = [], []
        for number, (row, length) in enumerate(zip(rows, lens, strict=True)):
            own = self._rows[row]
            if own.grammar is None or own.error is not None:
                continue
            guessed = length - own.length
            grammar = own.grammar.ahead(drafts[row][:guessed]) if guessed else own.grammar
            if grammar is not None:  # else the previous draft will be rejected, and this token is not read
                which.append(number)
                grammars.append(grammar)
        if not which:
            return [], None
        assert self._grammars is not None
        endless = [place for place, number in enumerate(which) if self._rows[rows[number]].params.ignore_eos]
        masks = self._grammars.masks(grammars, endless)
        for number, grammar in zip(which, grammars, strict=True):
            if grammar.fault:
                self._rows[rows[number]].error = f"structured_outputs: nothing can follow ({grammar.fault})"
        return which, masks

    def process(
        self, rows: Sequence[int], lens: Sequence[int], drafts: Mapping[int, Sequence[int]], logits: Tensor
    ) -> dict[int, str]:
        """Apply processors to logits [rows, vocab_size] in place. Returns the errors of failed rows, whose logits become NaN.
        rows, lens, drafts: see `masks`."""
        failed = {}
        if self._batch is not None:
            self._process_batch(self._batch, [self._rows[row] for row in rows], logits)
        for number, (row, length) in enumerate(zip(rows, lens, strict=True)):
            own = self._rows[row]
            output = [*own.output, *drafts.get(row, ())[: length - own.length]]
            try:
                for processor in own.processors if own.error is None else ():
                    changed = processor(list(own.prompt), output, logits[number])
                    if not isinstance(changed, Tensor) or changed.shape != logits[number].shape:
                        found = f"a tensor of shape {list(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
                        raise TypeError(f"it must return logits of shape {list(logits[number].shape)}, not {found}")
                    if changed.is_complex():
                        raise TypeError(f"it must return real numbers, not {changed.dtype}")
                    logits[number] = changed
            except (Exception, SystemExit) as error:  # any error that a processor raises
                own.error = _named(error)
            if own.error is not None:
                logits[number] = torch.nan
                failed[number] = own.error
        return failed

    def _process_batch(self, batch: ProcessorBatch, rows: Sequence[HostRow], logits: Tensor) -> None:
        """Apply the engine's processors to rows of logits in place. If they raise an error, all of these rows end."""
        at = [number for number, row in enumerate(rows) if row.batched and row.error is None]
        if not at:
            return
        try:
            logits[at] = batch.apply([rows[number] for number in at], logits[at])
        except (Exception, SystemExit) as error:  # any error that a processor raises
            for number in at:
                rows[number].error = _named(error)


def _with_prompt(function: Callable[..., Any]) -> LogitsProcessor:
    try:
        count = len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a built-in function
        count = 2
    return function if count == 3 else lambda prompt, output, logits: function(output, logits)


def _named(error: BaseException) -> str:
    return f"logits processor: {type(error).__name__}: {error}"
