"""The step benchmark away from a GPU: the bytes its floor is made of, and what a user may get wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import typer
from typer.testing import CliRunner

from headway.bench.studies import decode_step as step
from headway.models.checkpoints.weights import DummyWeights
from headway.models.layers.decoder import Decoder


def test_the_floor_counts_weights_once_and_k_and_v_of_every_token() -> None:
    shapes = step.shapes("qwen3-0.6b")
    config = dataclasses.replace(shapes, layers=shapes.layers[:2], vocab_size=1000)
    model = Decoder(config, DummyWeights(torch.float32, torch.device("cpu")))
    layer = (2048 + 2 * 1024) * 1024 + 1024 * 2048 + 3 * 3072 * 1024
    kv = 2 * 2 * 1024  # layers, K and V
    packed = sum(linear.weight.numel() for linear in model.layers[0].linears)
    assert packed == layer
    assert step.step_bytes(model, 0, 0) == 4 * (2 * layer + 1000 * 1024)
    assert step.step_bytes(model, 3, 9) - step.step_bytes(model, 0, 9) == 4 * 3 * 10 * kv


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "none"], "llama-3-8b or qwen3-0.6b or qwen3-30b-a3b"),
        (["--batch-size", "1,x"], "positive numbers"),
        (["--batch-size", "0"], "positive"),
    ],
)
def test_mistakes_are_told_in_one_message(arguments: list[str], said: str) -> None:
    app = typer.Typer()
    app.command()(step.main)
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert said in done.output
