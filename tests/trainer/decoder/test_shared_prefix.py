"""Shared-prefix training equals the unshared computation, in transformers and in the decoder itself."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.trainer.decoder.reference import (
    ALL,
    Plain,
    adapt,
    base,
    distance,
    random_tokens,
    shifted,
    weights_like,
)
from trainer.decoder import DecoderSettings, LoraDecoder, PlanSettings
from trainer.decoder.rows import Kind

SHARED = DecoderSettings(plan=PlanSettings(max_tokens=4096, min_saved_tokens=1))
UNSHARED = DecoderSettings(plan=PlanSettings(max_tokens=4096, share=False))


def group(prefix: Tensor, seed: int, *lengths: int) -> list[Tensor]:
    return [torch.cat((prefix, own)) for own in random_tokens(seed, *lengths)]


PROMPT, OTHER, TURN = random_tokens(1, 21, 15, 9)
CASES: dict[str, list[Tensor]] = {
    "equal responses": group(PROMPT, 2, 6, 6, 6, 6),
    "unequal responses": group(PROMPT, 3, 1, 2, 13, 40, 5),
    "two groups": group(PROMPT, 4, 7, 3) + group(OTHER, 5, 4, 8, 1),
    "nested tree": group(PROMPT, 6, 5, 2) + group(torch.cat((PROMPT, TURN)), 7, 4, 11, 6) + group(PROMPT[:10], 8, 6, 9),
    "a datum that ends inside another": [PROMPT, torch.cat((PROMPT, TURN)), PROMPT[:7]],
    "a datum twice": [PROMPT, *group(PROMPT, 9, 5), PROMPT],
    "single datum": group(PROMPT, 10, 12),
    "first token differs": [torch.cat((torch.tensor([i]), PROMPT)) for i in range(3)],
    "prefix longer than an attention chunk": group(random_tokens(11, 300)[0], 12, 5, 270),
}


def run(
    plain: Plain, settings: DecoderSettings, sequences: Sequence[Tensor], weights: Sequence[Tensor], temperature: float
) -> tuple[list[Tensor], dict[str, Tensor], int]:
    decoder = LoraDecoder(plain.model.get_base_model(), compute_dtype=torch.float32, settings=settings)
    lora = plain.lora()
    found = decoder.logprobs(sequences, shifted(sequences), lora, plain.scale, temperature=temperature)
    sum((lp * w).sum() for lp, w in zip(found, weights, strict=True)).backward()  # pyright: ignore
    rows = sum(len(batch.tokens) for batch in decoder.plan(sequences))
    return [lp.detach() for lp in found], {name: tensor.grad for name, tensor in lora.items()}, rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("model_type", "attention"), [("llama", "fused"), ("llama", "matmul"), ("qwen3", "auto")])
def test_equals_the_unshared_computation(case: str, model_type: str, attention: Kind) -> None:
    plain = adapt(base(model_type), ALL)
    sequences = CASES[case]
    weights = weights_like(shifted(sequences))
    expected, expected_grad = plain.gradients(sequences, shifted(sequences), weights)
    shared, shared_grad, rows = run(plain, replace(SHARED, attention=attention), sequences, weights, 1.0)
    unshared, unshared_grad, all_rows = run(plain, UNSHARED, sequences, weights, 1.0)
    assert all_rows == sum(len(s) for s in sequences)
    assert (rows == all_rows) == (case in {"single datum", "first token differs"})
    for a, b, c in zip(shared, unshared, expected, strict=True):
        assert float((a - b).abs().max()) < 1e-5
        assert float((a - c).abs().max()) < 1e-5
    assert distance(shared_grad, unshared_grad) < 1e-5
    assert distance(shared_grad, expected_grad) < 1e-5


@pytest.mark.parametrize("loss_from", [0, 20, 21, 23])
def test_equals_the_unshared_computation_wherever_the_loss_begins(loss_from: int) -> None:
    """20 is the last position of the prefix: it predicts the first token of every response."""
    plain = adapt(base("llama"), ALL)
    sequences = group(PROMPT, 13, 4, 9, 6)
    weights = [w * (torch.arange(len(w)) >= loss_from) for w in weights_like(sequences)]
    shared, shared_grad, _ = run(plain, SHARED, sequences, weights, 0.8)
    unshared, unshared_grad, _ = run(plain, UNSHARED, sequences, weights, 0.8)
    assert all(float((a - b).abs().max()) < 1e-5 for a, b in zip(shared, unshared, strict=True))
    assert distance(shared_grad, unshared_grad) < 1e-5


def test_siblings_do_not_see_each_other() -> None:
    plain = adapt(base("llama"), ALL)
    sequences = group(PROMPT, 14, 6, 6, 6)
    changed = [sequences[0], *group(PROMPT, 15, 6, 6)]
    weights = [weights_like(sequences)[0], torch.zeros(27), torch.zeros(27)]
    before, before_grad, _ = run(plain, SHARED, sequences, weights, 1.0)
    after, after_grad, _ = run(plain, SHARED, changed, weights, 1.0)
    assert torch.equal(before[0], after[0])
    assert distance(before_grad, after_grad) < 1e-6


def test_opposite_advantages_on_equal_datums_cancel() -> None:
    plain = adapt(base("llama"), ALL)
    weight = weights_like([PROMPT])[0]
    weight[-1] = 0.0  # the only position whose targets differ
    _, gradient, rows = run(plain, SHARED, [PROMPT, PROMPT], [weight, -weight], 1.0)
    assert rows == len(PROMPT)
    assert all(float(tensor.abs().max()) == 0.0 for tensor in gradient.values())


def test_splitting_an_operation_gives_equal_gradients() -> None:
    plain = adapt(base("llama"), ALL)
    sequences = CASES["nested tree"]
    weights = weights_like(sequences)
    _, whole, _ = run(plain, SHARED, sequences, weights, 1.0)
    narrow = DecoderSettings(plan=PlanSettings(max_tokens=45, min_saved_tokens=1))
    _, parts, _ = run(plain, narrow, sequences, weights, 1.0)
    assert distance(parts, whole) < 1e-5


def test_two_runs_of_a_shared_operation_give_equal_bits() -> None:
    plain = adapt(base("qwen2"), ALL)
    sequences = CASES["nested tree"]
    weights = weights_like(sequences)
    first, first_grad, _ = run(plain, SHARED, sequences, weights, 1.0)
    second, second_grad, _ = run(plain, SHARED, sequences, weights, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(first_grad[name], second_grad[name]) for name in first_grad)
