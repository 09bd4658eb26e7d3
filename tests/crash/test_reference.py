"""Float32 rounding must not move a run away from the reference."""

import pytest
import torch
from torch import Tensor

from tests.crash.oracles.reference import ReferenceModel, ReferenceTrainer
from tests.crash.plan import ADAM_EPS, Style, draw_plan
from tests.tiny_model import cached_tiny_model

FLOAT32_ROUNDING = 2.0**-24  # relative


def first_gradient(model: ReferenceModel, seed: int, style: Style) -> dict[str, Tensor]:
    """Return the gradient that the first step of a session would use."""
    session = draw_plan(seed, operations=40, sessions=1, vocab_size=512, style=style).sessions[0]
    trainer = ReferenceTrainer(model, session)
    for step in session.steps:
        if step.verb == "optim_step" and step.failure is None:
            break
        trainer.apply(step)
    assert trainer.window is not None
    return trainer.window


@pytest.mark.parametrize("style", Style)
def test_what_rounding_does_to_a_gradient_is_far_below_adams_eps(style: Style) -> None:
    model, rounded = (ReferenceModel(cached_tiny_model(vocab_size=512)) for _ in range(2))
    noise = torch.Generator().manual_seed(0)
    for name, value in rounded.base.items():
        error = torch.rand(value.shape, generator=noise, dtype=torch.float64) * 2 - 1
        rounded.base[name] = value * (1 + FLOAT32_ROUNDING * error)

    for seed in range(1, 4):
        exact, inexact = first_gradient(model, seed, style), first_gradient(rounded, seed, style)
        assert max(float((exact[name] - inexact[name]).abs().max()) for name in exact) < ADAM_EPS / 30
