"""What `sdpa` asks torch for on a GPU, as far as a CPU can tell."""

from __future__ import annotations

import pytest
import torch

from headway.backends.sdpa import SDPA, SDPAMath
from headway.core.contract.errors import ConfigError
from headway.core.contract.layout import NHD
from headway.testing.reference import reference, relative_error
from headway.tuning.work import Geometry, build_case, make_spec, make_work

GEOMETRY = Geometry(4, 2, 32)
CPU = torch.device("cpu")


def layer(device: str, **options: str) -> SDPA:
    return SDPA(make_spec(GEOMETRY, torch.float32, None, torch.device(device)), NHD, 16, options)


def takes_cudnn(backend: SDPA) -> bool:
    with backend._kernels():
        return bool(torch.backends.cuda.cudnn_sdp_enabled())


def test_cudnn_which_plans_for_every_shape_must_be_asked_for() -> None:
    assert not takes_cudnn(layer("cuda"))
    assert takes_cudnn(layer("cuda", cudnn="1"))
    with pytest.raises(ConfigError, match=r"sdpa\.cudnn: needs 0 or 1, got '2'"):
        layer("cuda", cudnn="2")
    with pytest.raises(ConfigError, match=r"sdpa\.math"):
        SDPAMath(make_spec(GEOMETRY, torch.float32, None, CPU), NHD, 16, {"cudnn": "1"})


@pytest.mark.parametrize(("phase", "case"), [("prefill", "2q20"), ("prefill", "2q8s40_1q5s5"), ("decode", "3q1s17_2q3s30")])
def test_the_way_taken_on_a_gpu_gives_the_same_answers(phase: str, case: str) -> None:
    step = build_case(make_work(phase, case, GEOMETRY, make_spec(GEOMETRY, torch.float32, None, CPU)), NHD, 16, 0)
    backend = layer("cpu")
    backend._gpu = True
    out, plan = torch.full_like(step.q, torch.nan), backend.plan(step.metadata)
    if phase == "decode":
        backend.decode(step.q, step.cache, plan, out)
    else:
        backend.prefill(step.q, step.k, step.v, step.cache, plan, out)
    assert relative_error(out, reference(step), step) < 1e-5
