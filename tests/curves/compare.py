"""Both loops through a task, and how far apart their curves are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from tests.curves import tasks
from tests.curves.loops import Loop, OurLoop, PlainLoop, Setup
from tests.curves.tasks import Rollout

MAX_TOKENS = 12


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One number per step of each loop."""

    plain: list[float]
    ours: list[float]

    @property
    def farthest(self) -> float:
        return max(abs(a - b) for a, b in zip(self.plain, self.ours, strict=True))


@dataclass(frozen=True, kw_only=True)
class Addition:
    """The policy task: ``steps`` of ``problems`` with ``samples`` answers each, each worth ``reward(a, b, answer)``."""

    steps: int
    problems: int = 8
    samples: int = 8
    reward: Callable[[int, int, str], float] = tasks.reward


def sft(setup: Setup, tokenizer: Any, *, examples: int, batch: int, note: Callable[[str], None]) -> Curves:
    """Train both loops on the same batches; the curves are mean losses per token, before each step."""
    batches = tasks.in_batches(tasks.chat_examples(tokenizer)[:examples], batch, setup.seed)
    plain, ours = PlainLoop(setup), OurLoop(setup)
    curves = Curves(plain=[], ours=[])
    for step, part in enumerate(batches, start=1):
        curves.plain.append(plain.sft_step(part))
        curves.ours.append(ours.sft_step(part))
        note(f"sft  seed {setup.seed}  step {step:3}  plain {curves.plain[-1]:.6f}  ours {curves.ours[-1]:.6f}")
    return curves


def grpo(setup: Setup, tokenizer: Any, task: Addition, note: Callable[[str], None]) -> Curves:
    """Let both loops learn addition from their own samples; the curves are mean rewards.

    Problems and the sampler's random numbers are the same at each step of both loops.
    """
    curves = Curves(plain=[], ours=[])
    for loop, rewards in ((PlainLoop(setup), curves.plain), (OurLoop(setup), curves.ours)):
        for step in range(1, task.steps + 1):
            rollouts, reward = _roll_out(loop, tokenizer, task, seed=1000 * setup.seed + step)
            rewards.append(reward)
            loop.policy_step(rollouts)
            note(f"grpo seed {setup.seed}  step {step:3}  {type(loop).__name__:9}  reward {reward:.3f}")
    return curves


def _roll_out(loop: Loop, tokenizer: Any, task: Addition, seed: int) -> tuple[list[Rollout], float]:
    """Draw answers to new problems; return them with their advantages, and the mean reward."""
    drawn = torch.randint(1, 10, (task.problems, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    prompts = [tasks.chat_prompt(tokenizer, tasks.addition(a, b)) for a, b in drawn]
    answers, logprobs = _sample(loop.sampler(), torch.tensor(prompts), task.samples, tokenizer.eos_token_id, seed)
    rollouts: list[Rollout] = []
    rewards: list[float] = []
    for index, (a, b) in enumerate(drawn):
        mine = slice(index * task.samples, (index + 1) * task.samples)
        got = [task.reward(a, b, tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers[mine]]
        rewards += got
        for answer, sampled, won in zip(answers[mine], logprobs[mine], got, strict=True):
            prompt = torch.tensor(prompts[index])
            rollouts.append(Rollout(prompt=prompt, answer=answer, sampled=sampled, advantage=won - fmean(got)))
    return rollouts, fmean(rewards)


@torch.no_grad()
def _sample(model: Any, prompts: Tensor, samples: int, end: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Draw ``samples`` answers per prompt (all of one length) at temperature 1, the end token included."""
    generator = torch.Generator().manual_seed(seed)
    done = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    cache, logits = done.past_key_values, done.logits[:, -1].repeat_interleave(samples, 0)
    cache.batch_repeat_interleave(samples)
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    for _ in range(MAX_TOKENS):
        scores = logits.float().log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        tokens.append(chosen)
        logprobs.append(scores.gather(1, chosen))
        logits = model(input_ids=chosen, past_key_values=cache, use_cache=True).logits[:, -1]
    lengths = [_length(row, end) for row in torch.cat(tokens, dim=1)]
    return (
        [row[:n] for row, n in zip(torch.cat(tokens, dim=1), lengths, strict=True)],
        [row[:n] for row, n in zip(torch.cat(logprobs, dim=1), lengths, strict=True)],
    )


def _length(row: Tensor, end: int) -> int:
    """Return how many tokens belong to the answer."""
    ends: Sequence[int] = (row == end).nonzero().flatten().tolist()
    return ends[0] + 1 if ends else len(row)
