"""`python -m headway.testing.kit.child TARGET DEVICE THREADS MODEL PLUGIN...`: child process that runs cells of a subject.

Each response is one line of JSON. The subject's output goes to stderr; a crash ends only this process.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence
from typing import Any

import torch

from headway.core.contract.errors import HeadwayError
from headway.core.system.child import message_of, open_replies, reply
from headway.testing.kit.kit import Kit, list_cells, make_kit, run_cell
from headway.testing.kit.runner import OUT_OF_BOUNDS
from headway.testing.kit.subject import brought_by


def main(target: str, device: str, threads: int, model: str, rule: str, plugins: Sequence[str]) -> None:
    """Respond to requests until the input ends. model, rule: as for `make_kit`."""
    replies = open_replies()
    faulthandler.enable()
    torch.set_num_threads(threads)
    kit: Kit | None = None
    for line in sys.stdin:
        request = message_of(line)
        try:
            if "brought" in request:
                reply(replies, {"targets": brought_by(plugins)})
                continue
            if kit is None:
                kit = make_kit(target, device, plugins, model, rule)
            reply(replies, _answer(kit, device, request))
        except HeadwayError as error:
            reply(replies, {"error": str(error)})
        except Exception as error:
            reply(replies, {"error": f"{type(error).__name__}: {' '.join(str(error).split())}", "raised": True})


def _lost_gpu(device: str) -> str:
    """Return the error that has made the GPU unusable for this process, such as an illegal memory access; "" if the GPU is
    usable."""
    if device != "cuda":
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _answer(kit: Kit, device: str, request: dict[str, Any]) -> dict[str, Any]:
    if "load" in request:
        return {"loaded": kit.name}
    if "cell" in request:
        result = run_cell(kit, request["cell"], guesses=request.get("guesses", True))
        lost = _lost_gpu(device)
        if device == "cuda" and not lost:
            torch.cuda.empty_cache()  # other processes run cells on the same GPU
        if lost and result.status != "failed":
            result = result.model_copy(update={"status": "failed", "reason": lost})
        if lost:
            result = result.model_copy(update={"guess": OUT_OF_BOUNDS})
        return {"result": result.model_dump(), "lost_gpu": bool(lost)}
    return list_cells(kit, request.get("quick", False), request.get("layout", ""), request.get("only_cell", ""))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6:])
