"""The benchmark's workloads: token sequences with next-token targets, and the two losses."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Loss = Literal["cross_entropy", "importance_sampling"]


@dataclass(frozen=True, kw_only=True)
class Datum:
    """``weights`` are loss weights or advantages; ``sampled`` the sampler's log-probabilities. All [N]."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    sampled: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    loss: Loss
    datums: tuple[Datum, ...]

    @property
    def tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.datums)


def loss_sum(loss: Loss, datums: Sequence[Datum], logprobs: Sequence[Tensor]) -> Tensor:
    """Return the plain sum over positions and datums."""
    total = torch.zeros(())
    for datum, lp in zip(datums, logprobs, strict=True):
        if loss == "cross_entropy":
            total = total - (datum.weights * lp).sum()
        else:
            total = total - (torch.exp(lp - datum.sampled) * datum.weights).sum()
    return total


def sft(vocab: int, *, count: int = 16, length: int = 128, seed: int = 0) -> Batch:
    """``count`` unrelated datums of ``length`` positions, loss on all of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocab, (count, length + 1), generator=generator)
    return Batch(loss="cross_entropy", datums=tuple(_datum(row, torch.ones(length)) for row in rows))


def grpo(vocab: int, *, groups: int, samples: int, prompt: int, response: int, seed: int = 0) -> Batch:
    """Groups that share a prompt; loss on the responses, advantages that sum to zero in a group."""
    generator = torch.Generator().manual_seed(seed)
    datums: list[Datum] = []
    for _ in range(groups):
        start = torch.randint(0, vocab, (prompt,), generator=generator)
        advantages = torch.randn(samples, generator=generator)
        advantages -= advantages.mean()
        for advantage in advantages:
            row = torch.cat((start, torch.randint(0, vocab, (response,), generator=generator)))
            weights = torch.zeros(len(row) - 1)
            weights[prompt - 1 :] = advantage
            datums.append(_datum(row, weights))
    return Batch(loss="importance_sampling", datums=tuple(datums))


def real_grpo(tokenizer: Any, seed: int) -> Batch:
    """The arithmetic task: eight prompts, eight answers each, right ones rewarded; sampler log-probabilities near 0.

    Answers are drawn, not sampled from the model: right, wrong by a little, or wordy, as early training has them.
    """
    generator = torch.Generator().manual_seed(seed)
    datums: list[Datum] = []
    for _ in range(8):
        a, b = (int(n) for n in torch.randint(1, 10, (2,), generator=generator))
        prompt = _chat(tokenizer, f"What is {a} + {b}? Reply with the number only.")
        offsets = torch.randint(-2, 3, (8,), generator=generator).tolist()
        styles = torch.randint(0, 3, (8,), generator=generator).tolist()
        forms = ("{n}", "The answer is {n}.", "{a} + {b} = {n}")
        answers = [forms[s].format(n=a + b + o, a=a, b=b) for s, o in zip(styles, offsets, strict=True)]
        rewards = torch.tensor([1.0 if o == 0 else 0.0 for o in offsets])
        for answer, advantage in zip(answers, rewards - rewards.mean(), strict=True):
            row = torch.tensor(prompt + tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"])
            weights = torch.zeros(len(row) - 1)
            weights[len(prompt) - 1 :] = advantage
            datums.append(_datum(row, weights))
    return Batch(loss="importance_sampling", datums=tuple(datums))


def real_sft(tokenizer: Any, seed: int) -> Batch:
    """Short chats from ``chats.json``, loss on the assistant's tokens."""
    chats = json.loads((Path(__file__).parent / "chats.json").read_text())
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(seed))[:16]
    datums: list[Datum] = []
    for index in order.tolist():
        question, answer = chats[index]
        prompt = _chat(tokenizer, question)
        row = torch.tensor(prompt + tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"])
        weights = torch.zeros(len(row) - 1)
        weights[len(prompt) - 1 :] = 1.0
        datums.append(_datum(row, weights))
    return Batch(loss="cross_entropy", datums=tuple(datums))


def with_sampled(batch: Batch, logprobs: Sequence[Tensor]) -> Batch:
    """Return the batch with these sampler log-probabilities."""
    changed = tuple(
        Datum(tokens=d.tokens, targets=d.targets, weights=d.weights, sampled=lp)
        for d, lp in zip(batch.datums, logprobs, strict=True)
    )
    return Batch(loss=batch.loss, datums=changed)


def _datum(row: Tensor, weights: Tensor) -> Datum:
    return Datum(tokens=row[:-1], targets=row[1:], weights=weights, sampled=torch.full_like(weights, -11.0))


def _chat(tokenizer: Any, question: str) -> list[int]:
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]
