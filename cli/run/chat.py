"""`headway chat`: a conversation in the terminal, or through a pipe with one message per line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from headway.cli.engine_options import takes_engine_options, takes_sampling_options
from headway.cli.options import AdapterFolder, adapter_of
from headway.core.contract.errors import BackendError, HeadwayError, PromptError
from headway.core.sampling.params import SamplingParams
from headway.core.system.terminal import Terminal, for_standard_output
from headway.engine_args import help_texts

if TYPE_CHECKING:
    from headway.core.contract.adapters import LoRARequest
    from headway.llm import LLM
    from headway.outputs import RequestOutput

_MAX_TOKENS: Final = 1024
_HELP: Final = """\
/reset   forget the conversation
/stats   engine statistics: tokens per second, prefix cache hits, backends
/help    show these lines
/exit    leave; Ctrl-D also leaves
Ctrl-C stops an answer. A line that ends with \\ continues on the next."""


@takes_engine_options(*(name for name in help_texts() if name not in ("seed", "skip_tokenizer_init")))
@takes_sampling_options("n", "logprobs", max_tokens=_MAX_TOKENS)
def chat(
    sampling: dict[str, Any],
    engine: dict[str, Any],
    lora: AdapterFolder = None,
    system: Annotated[str | None, typer.Option(help="System message at the start of the conversation.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show engine statistics while the model answers.")] = False,
) -> None:
    """Talk to a model in the terminal, using its chat template.

    By default, sampling uses the model's recommended parameters.
    """
    SamplingParams(**sampling)  # report invalid parameters before loading the model
    adapter = adapter_of(lora, engine)
    err = Terminal(stderr=True, highlight=False, soft_wrap=True)
    with err.status(f"loading {engine['model']}"):
        from headway.llm import LLM

        llm = LLM(**engine)
    if adapter is not None:
        llm.add_lora(adapter)  # report an unsupported adapter before the user types
    llm.chat_prompt("")  # report a model without a template before the user types
    params = replace(llm.get_default_sampling_params(), **sampling)
    talk = ChatSession(llm, params, err, system, stats, adapter)
    if sys.stdin.isatty():
        err.print(f"{llm.model.name}: /help lists the commands, /exit or Ctrl-D leaves", style="dim")
    for message in _messages():
        if not talk.take(message):
            break


class ChatSession:
    """A conversation: its messages, and the generation and display of answers."""

    def __init__(
        self, llm: LLM, params: SamplingParams, err: Console, system: str | None, stats: bool, adapter: LoRARequest | None = None
    ) -> None:
        """err: console for all output except answers. stats: True to show live statistics. adapter: LoRA adapter for the
        answers."""
        self._llm = llm
        self._params = params
        self._err = err
        self._shows_stats = stats
        self._adapter = adapter
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._begun = llm.stats()

    def take(self, message: str) -> bool:
        """Answer a message or run a command. Return False if the command ends the conversation."""
        command = message.strip()
        if command in ("/exit", "/quit"):
            return False
        if command == "/reset":
            self._messages = list(self._start)
        elif command == "/stats":
            self._print_stats()
        elif command == "/help":
            self._err.print(_HELP)
        elif command.startswith("/"):
            self._err.print(f"no such command: {command.split()[0]}; /help lists them")
        elif command:
            self._answer(message)
        return True

    def _answer(self, message: str) -> None:
        messages = [*self._messages, {"role": "user", "content": message}]
        begun = self._llm.stats().totals
        try:
            with _noted_interrupts(self._llm) as interrupts:
                text, output = self._stream(messages, interrupts)
        except HeadwayError as error:  # only this message failed
            hint = "; /reset forgets the conversation" if isinstance(error, PromptError) and self._messages else ""
            self._err.print(f"headway: {error}{hint}", style="red")
            return
        self._messages = [*messages, {"role": "assistant", "content": text}]
        reason = output.outputs[0].finish_reason
        if reason in ("abort", "length"):
            self._err.print("(stopped)" if reason == "abort" else "(cut off at max_tokens or the model's length)", style="dim")
        if output.outputs[0].token_ids:
            from headway.hosting.stats_report import answer_line

            self._err.print(answer_line(output, self._llm.stats().totals - begun, "/stats"), style="dim")

    def _stream(self, messages: list[dict[str, str]], interrupts: list[int]) -> tuple[str, RequestOutput]:
        """Write an answer as it grows. Return its text and its request's output. :raises HeadwayError: if the request fails."""
        from headway.cli.engine_view import LiveStats

        text, last = "", None
        try:
            with LiveStats(self._llm.stats, self._shows_stats) as live:
                prompt = self._llm.chat_prompt(messages)
                for piece, last in self._llm.stream(prompt, self._params, lora_request=self._adapter):
                    shown = piece if text else piece.lstrip()
                    text += shown
                    sys.stdout.write(for_standard_output(shown))
                    sys.stdout.flush()
                    live.refresh()
                    if interrupts:  # an interrupt may precede the request
                        self._llm.abort(last.request_id)
        finally:
            if text or last is not None:
                print(flush=True)
        assert last is not None  # a stream yields at least once
        (completion,) = last.outputs
        if completion.error is not None:
            raise BackendError(completion.error)
        return text, last

    def _print_stats(self) -> None:
        from headway.hosting.stats_report import stats_page

        for line in stats_page(self._llm.stats(), self._begun):
            self._err.print(line)
        self._err.print(f"attention  {self._llm.engine.selection}")


def _messages() -> Iterator[str]:
    """Yield messages. Typed messages are read with a prompt and line history; in a pipe, each line is a message."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with suppress(ImportError):  # Windows has no readline
        import readline  # noqa: F401  # loading it gives input() editing and history
    lines: list[str] = []
    while True:
        try:
            line = input("" if not sys.stdout.isatty() else "... " if lines else "> ")
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit ends the chat)", file=sys.stderr)
            lines = []
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield "\n".join(lines)
            lines = []


@contextmanager
def _noted_interrupts(llm: LLM) -> Iterator[list[int]]:
    """Yield a list that records each Ctrl-C. Ctrl-C ends the request after the running step, whereas an exception would interrupt
    the step."""
    interrupts: list[int] = []

    def note(number: int, _: object) -> None:
        interrupts.append(number)
        Thread(target=llm.abort, daemon=True).start()  # abort waits for the end of the step

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
