"""Child process that tries structured outputs for `grammar`, with limits on CPU time, memory and stack."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from headway.core.sampling.grammar import brief_reason, grammar_text
from headway.core.sampling.structured import StructuredOutputsParams
from headway.core.system.child import die_with_parent, message_of, open_replies, reply, stack_size

_ENGINE_STACK = 2**20  # Bytes of the stack on which a compiled grammar is used, in engine threads of at least 2 MiB


def main() -> None:
    """Answer requests until the parent exits. The first request contains the tokenizer, each later request a structured
    output."""
    replies = open_replies()
    die_with_parent()
    start = message_of(sys.stdin.readline())
    tokenizer = LLTokenizer(start["tokenizer"], n_vocab=start["vocab_size"], eos_token=start["eos_token_ids"])
    _limit(resource.RLIMIT_AS, _occupied() + start["memory"])
    reply(replies, {"ready": True})
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + start["seconds"])
        reply(replies, _try(message_of(line), tokenizer, start["stack"]))


def _try(fields: dict[str, Any], tokenizer: LLTokenizer, stack: int) -> dict[str, str]:
    """Compile a structured output and compute its first mask. Return the structured output in llguidance's notation, or the
    error."""
    answer: dict[str, str] = {}
    compiled: list[LLMatcher] = []

    def compile_form() -> None:
        try:
            answer["text"] = grammar_text(StructuredOutputsParams(**fields))
            compiled.append(LLMatcher(tokenizer, answer["text"], log_level=0))
        except BaseException as error:  # an invalid grammar, too little memory, or a panic of llguidance
            answer["error"] = brief_reason(str(error) or type(error).__name__)

    def follow() -> None:
        matcher = compiled.pop()
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()
            matcher.compute_bitmask()
        if matcher.is_error():
            answer["error"] = brief_reason(matcher.get_error())

    _run(compile_form, stack)
    if compiled:
        _run(follow, _ENGINE_STACK)
    return {"error": answer["error"]} if "error" in answer else answer


def _run(function: Callable[[], None], stack: int) -> None:
    with stack_size(stack):
        thread = threading.Thread(target=function)
        thread.start()
    thread.join()


def _limit(what: int, value: int) -> None:
    """Set a soft limit of this process. The hard limit stays unchanged, so that the soft limit can be raised again."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _occupied() -> int:
    """Return the size of this process's address space in bytes."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux; the interpreter's memory is small compared with the limit
        return 0


if __name__ == "__main__":
    main()
