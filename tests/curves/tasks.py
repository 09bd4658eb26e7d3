"""What is learned: 200 short chats, and single-digit addition with a reward."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CAPITALS = (
    "Austria Vienna, Belgium Brussels, Brazil Brasilia, Bulgaria Sofia, Canada Ottawa, Chile Santiago, Croatia Zagreb, "
    "Cuba Havana, Denmark Copenhagen, Egypt Cairo, Estonia Tallinn, Finland Helsinki, Germany Berlin, Ghana Accra, "
    "Greece Athens, Hungary Budapest, Iceland Reykjavik, Ireland Dublin, Italy Rome, Japan Tokyo, Kenya Nairobi, "
    "Latvia Riga, Norway Oslo, Peru Lima, Poland Warsaw, Portugal Lisbon, Romania Bucharest, Senegal Dakar, "
    "Serbia Belgrade, Slovakia Bratislava, Spain Madrid, Sweden Stockholm, Thailand Bangkok, Turkey Ankara"
)
_OPPOSITES = (
    "hot cold, big small, early late, full empty, hard soft, heavy light, high low, long short, loud quiet, new old, "
    "open closed, rich poor, strong weak, sweet sour, tall short, thick thin, true false, wet dry, wide narrow, "
    "young old, bright dark, cheap expensive, clean dirty, deep shallow, easy difficult, fast slow, first last, "
    "happy sad, near far, right wrong, rough smooth, safe dangerous"
)
CHATS = 200


@dataclass(frozen=True, kw_only=True)
class Example:
    """``tokens`` [N + 1]; the loss is on the predictions of everything after the first ``silent + 1`` tokens."""

    tokens: Tensor
    silent: int


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled answer. ``sampled`` are the sampler's log-probabilities of the answer's tokens."""

    prompt: Tensor
    answer: Tensor
    sampled: Tensor
    advantage: float


def chats() -> list[tuple[str, str]]:
    """Return 200 questions with answers, always the same."""
    written: list[tuple[str, str]] = [
        (question, answer)
        for question, answer in json.loads((Path(__file__).parents[1] / "bench" / "chats.json").read_text())
    ]
    written += [
        (f"What is the capital of {country}?", f"The capital of {country} is {city}.")
        for country, city in _pairs(_CAPITALS)
    ]
    written += [
        (f"What is the opposite of {word}?", f"The opposite of {word} is {other}.")
        for word, other in _pairs(_OPPOSITES)
    ]
    products = [(a, b) for a in range(2, 13) for b in range(2, 13)]
    written += [(f"How much is {a} times {b}?", f"{a} times {b} is {a * b}.") for a, b in products]
    return written[:CHATS]


def chat_examples(tokenizer: Any) -> list[Example]:
    """Return the 200 chats as tokens, the loss on the assistant's."""
    examples: list[Example] = []
    for question, answer in chats():
        prompt = chat_prompt(tokenizer, question)
        tokens = prompt + tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
        examples.append(Example(tokens=torch.tensor(tokens), silent=len(prompt) - 1))
    return examples


def chat_prompt(tokenizer: Any, question: str) -> list[int]:
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def addition(a: int, b: int) -> str:
    return f"What is {a} + {b}? Reply with the number only."


def reward(a: int, b: int, answer: str) -> float:
    """Return 1 when the last number of the answer is the sum."""
    return float(re.findall(r"\d+", answer)[-1:] == [str(a + b)])


def in_batches(examples: Sequence[Example], size: int, seed: int) -> list[list[Example]]:
    """Shuffle once and cut into batches."""
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    return [[examples[index] for index in order[start : start + size]] for start in range(0, len(order), size)]


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(left, right) for left, right in (pair.split() for pair in text.split(", "))]
