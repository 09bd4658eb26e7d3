"""The tiled head alone, from hidden states to log-probabilities."""

import torch

from trainer.decoder.head import Head, Queries, Tiling
from trainer.decoder.lora import Group

ROWS, HIDDEN, ENTRIES = 40, 64, 1000


def test_logits_of_twenty_keep_a_bfloat16_log_probability_exact_to_a_hundredth() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ENTRIES, HIDDEN, generator=generator).bfloat16()
    hidden = (torch.randn(ROWS, HIDDEN, generator=generator) * 0.8).bfloat16()
    tokens = torch.randint(0, ENTRIES, (ROWS,), generator=generator)
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), dim=1)[torch.arange(ROWS), tokens]
    coarse = torch.log_softmax((hidden @ weight.t()).double(), dim=1)[torch.arange(ROWS), tokens]
    assert float((coarse - exact).abs().max()) > 0.05  # what a product rounded to bfloat16 does to a ratio

    queries = Queries(
        rows_Q=torch.arange(ROWS), tokens_Q=tokens, first_T=torch.arange(ROWS), bounds=tuple(range(ROWS + 1))
    )
    head = Head(weight, torch.bfloat16, Tiling(rows=16, entries=200))
    scored = head.score(hidden, queries, Group(A_RI=None, blocks=()), 1.0, None)
    assert float((scored.logprobs_Q - exact).abs().max()) < 0.01
