"""`python -m headway.tuning.measuring`: measures one table in a process of its own, and says what it is about to call."""

from __future__ import annotations

import base64
import faulthandler
import json
import pickle
import sys
from dataclasses import replace

import torch

from headway.core.contract.errors import HeadwayError
from headway.core.system.child import answers, die_with_parent, say
from headway.models.device_operations import compile_ahead
from headway.registry import create_registry
from headway.tuning.run import CrossoverOptions, run_kernel_level


def main() -> None:
    """Answer one request, which the process that started this one has pickled."""
    die_with_parent()
    told = answers()
    faulthandler.enable(2)
    request = json.loads(sys.stdin.readline())
    torch.set_num_threads(int(request["threads"]))
    options: CrossoverOptions = pickle.loads(base64.b64decode(request["options"]))
    options = replace(options, compile_ahead=compile_ahead(options.spec.device))
    try:
        registry = create_registry(request["plugins"], try_files=False)
        run_kernel_level(options, registry, tell=lambda at, point: say(told, {"at": at, "point": point}))
    except (HeadwayError, OSError) as error:
        say(told, {"error": str(error)})
    else:
        say(told, {"done": True})


if __name__ == "__main__":
    main()
