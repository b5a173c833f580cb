"""What a backend raised, as an error that says which backend, in which phase, over which work."""

from __future__ import annotations

from headway.core.contract.errors import BackendError, HeadwayError
from headway.core.contract.metadata import Phase
from headway.core.system.logs import log_traceback


def blame(error: BaseException, backend: str, phase: Phase, work: str) -> HeadwayError:
    """Return an error of ours as it is, and any other as one that names the backend, the phase and the shapes.

    backend: in words, such as "backend triton".
    """
    if isinstance(error, HeadwayError):
        return error
    log_traceback(backend, error)
    return BackendError(f"{backend} failed in {phase.value} ({work}): {type(error).__name__}: {error}")
