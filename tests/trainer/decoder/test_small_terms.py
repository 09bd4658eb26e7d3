"""LoRA terms below half a unit of the last place of what they are added to."""

import torch
from torch import Tensor

from trainer.decoder.layer import project
from trainer.decoder.lora import Block, Group
from trainer.decoder.weights import Projection

ROWS, INPUTS, OUTPUTS, RANK = 64, 64, 512, 4


def share(found: Tensor, base: Tensor, term: Tensor) -> float:
    """Return how much of ``term`` is in ``found - base``: the least-squares factor."""
    return float(((found.double() - base) * term).sum() / term.square().sum())


def test_the_trainer_keeps_small_terms_and_a_16_bit_engine_s_way_of_adding_them_loses_most() -> None:
    generator = torch.Generator().manual_seed(0)
    x, W = (torch.randn(n, INPUTS, generator=generator).bfloat16() for n in (ROWS, OUTPUTS))
    B = (torch.randn(OUTPUTS, RANK, generator=generator) * 0.01).bfloat16()
    z = (torch.randn(ROWS, RANK, generator=generator) * 0.1).bfloat16()
    block = Block(B_OR=B, inner=slice(0, RANK), outer=slice(0, OUTPUTS), pairs=())
    lora = Group(A_RI=torch.zeros(RANK, INPUTS), blocks=(block,))
    projection = Projection(paths=("q_proj",), widths=(OUTPUTS,), weight=W, bias=None)
    base, term = x.double() @ W.double().t(), z.double() @ B.double().t()

    exact, served = (project(x, projection, lora, z, dtype) for dtype in (None, torch.bfloat16))

    assert 0.9 < share(exact, base, term) < 1.1
    assert share(served, base, term) < 0.3
    peft = (x @ W.t()) + (z @ B.t())
    assert float((served == peft).double().mean()) > 0.999
