"""Chunked log-probabilities against full logits, values and gradients."""

import pytest
import torch

from trainer.logprobs import Head, target_logprobs


def full(hidden, targets, weight, A=None, B=None, scale=1.0):
    logits = hidden @ weight.T
    if A is not None:
        logits = logits + scale * (hidden @ A.T) @ B.T
    return logits.log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.parametrize("adapted", [False, True])
def test_values_and_gradients_equal_the_full_computation(adapted: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 12), torch.randn(50, 12)
    A, B = (torch.randn(3, 12), torch.randn(50, 3)) if adapted else (None, None)
    targets, outer = torch.randint(50, (70,)), torch.randn(70) * (torch.rand(70) > 0.4)
    leaves = [t.requires_grad_() for t in (hidden, A, B) if t is not None]
    head = Head(weight_VH=weight, A_RH=A, B_VR=B, scale=0.5, chunk_bytes=0)
    assert head.chunk == 16

    ours = target_logprobs(hidden, targets, head)
    expected = full(hidden, targets, weight, A, B, 0.5)

    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    our_gradients = torch.autograd.grad((ours * outer).sum(), leaves)
    for mine, theirs in zip(our_gradients, torch.autograd.grad((expected * outer).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adapted", [False, True])
def test_alternatives_and_temperatures_equal_the_full_computation(adapted: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 12), torch.randn(50, 12)
    A, B = (torch.randn(3, 12), torch.randn(50, 3)) if adapted else (None, None)
    targets, outer = torch.randint(50, (40, 7)), torch.randn(40, 7) * (torch.rand(40, 7) > 0.6)
    targets[:, 3] = targets[:, 5]  # the same token twice
    temperature = 0.3 + 2 * torch.rand(40)
    leaves = [t.requires_grad_() for t in (hidden, A, B) if t is not None]
    head = Head(weight_VH=weight, A_RH=A, B_VR=B, scale=0.5, chunk_bytes=0)

    ours = target_logprobs(hidden, targets, head, temperature)
    logits = hidden @ weight.T + (0 if A is None or B is None else 0.5 * (hidden @ A.T) @ B.T)
    expected = (logits / temperature[:, None]).log_softmax(dim=1).gather(1, targets)

    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    our_gradients = torch.autograd.grad((ours * outer).sum(), leaves)
    for mine, theirs in zip(our_gradients, torch.autograd.grad((expected * outer).sum(), leaves), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=3e-5)


def test_one_alternative_and_a_temperature_of_one_change_no_bit() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(33, 12), torch.randn(50, 12), torch.randint(50, (33,))
    head = Head(weight_VH=weight)

    plain = target_logprobs(hidden, targets, head)

    assert torch.equal(plain, target_logprobs(hidden, targets[:, None], head, torch.ones(33))[:, 0])


def test_logits_of_a_bfloat16_head_are_normalised_in_float32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 16, dtype=torch.bfloat16), torch.randn(300, 16, dtype=torch.bfloat16)
    targets = torch.randint(300, (9,))

    ours = target_logprobs(hidden, targets, Head(weight_VH=weight))

    expected = (hidden @ weight.T).float().log_softmax(dim=1).gather(1, targets[:, None]).squeeze(1)
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)


def test_the_value_does_not_depend_on_whether_a_gradient_is_wanted() -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(33, 12), torch.randn(50, 12), torch.randint(50, (33,))
    head = Head(weight_VH=weight)

    with torch.no_grad():
        plain = target_logprobs(hidden, targets, head)

    assert torch.equal(plain, target_logprobs(hidden.clone().requires_grad_(), targets, head).detach())
