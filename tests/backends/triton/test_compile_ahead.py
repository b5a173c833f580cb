"""Threads that compile kernels ahead build what launches them, too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.runtime import driver

from headway.core.contract.compiled import AHEAD
from headway.kernels.runtime.compile_ahead import BuildLaunchers, compile_with_triton
from headway.kernels.runtime.triton_launch import INTERPRETED, Launcher


def test_a_kernel_and_its_launcher_are_built_together(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    kernel = SimpleNamespace(src="source", metadata="metadata")
    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=lambda *parts: built.append(parts)), raising=False)
    with ThreadPoolExecutor(2) as pool:
        assert BuildLaunchers(pool).submit(lambda: kernel).result() is kernel
    assert built == [("source", "metadata")]


def test_a_launcher_that_cannot_be_built_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*parts: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(driver, "_active", SimpleNamespace(launcher_cls=fail), raising=False)
    with ThreadPoolExecutor(2) as pool:
        assert BuildLaunchers(pool).submit(lambda: SimpleNamespace(src=1, metadata=2)).result().src == 1


def test_a_kernel_that_does_not_compile_fails_as_it_would_alone() -> None:
    def fail() -> None:
        raise ValueError("does not compile")

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="does not compile"):
        BuildLaunchers(pool).submit(fail).result()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
def test_inside_launches_start_nothing_and_each_key_is_compiled_once() -> None:
    compiled: list[dict[str, Any]] = []

    class Kernel:
        arg_names = ("x", "PDL")

        def warmup(self, *arguments: Any, grid: Any, **options: Any) -> None:
            compiled.append({"arguments": arguments, **options})

        def __getitem__(self, grid: Any) -> Any:
            raise AssertionError("launched")

    launch = Launcher(Kernel())
    with compile_with_triton():
        assert AHEAD.get() is not None
        for key in ("a", "a", "b"):
            launch(key, (1, 1, 1), (5,), {"PDL": True}, num_warps=4)
        assert launch.bind("b", (1, 1, 1), (5,), (5,), (), {"PDL": True}, num_warps=4) is None
    assert AHEAD.get() is None
    options = {"num_warps": 4, "launch_pdl": True, "enable_fp_fusion": True}
    assert compiled == [{"arguments": (5,), "PDL": True, **options}] * 2
    with pytest.raises(AssertionError, match="launched"):
        launch("a", (1, 1, 1), (5,), {"PDL": True}, num_warps=4)
