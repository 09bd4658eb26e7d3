"""Teach a small model to add, by reinforcement learning (GRPO) against a live session.

    python clients/cookbook/grpo_arithmetic.py --base-url http://127.0.0.1:8000 --api-key tml-...

Each step: draw 8 answers to 8 questions, reward the right ones, push up what did better than its group's mean.
Exit status 1 when accuracy on held-out questions does not rise by 0.30.
Suffixes name dimensions: P problems, G answers per problem, T tokens.
"""

import argparse
import os
import random
import re
import sys
import time
from datetime import UTC, datetime
from statistics import fmean

import openai
from matplotlib.figure import Figure
from rich.console import Console

import loopline

PROBLEMS_PER_STEP, ANSWERS_PER_PROBLEM, MAX_TOKENS = 8, 8, 12
HELD_OUT_SUMS, ANSWERS_PER_HELD_OUT = 12, 6  # 12 sums, each in both orders: 24 questions, 144 answers
ADAM = loopline.AdamParams(learning_rate=3e-4, beta1=0.9, beta2=0.95)
MUST_RISE = 0.30

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--base-url", default=os.environ.get("LOOPLINE_BASE_URL", "http://127.0.0.1:8000"))
parser.add_argument("--api-key", default=os.environ.get("LOOPLINE_API_KEY"))
parser.add_argument("--base-model", default="smollm2-135m-instruct")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--seed", type=int, default=1, help="of the split, the order of problems, the adapter, the samples")
parser.add_argument("--plot", default="reward_curve.png", help="where the reward curve goes")


def question(a: int, b: int) -> str:
    return f"What is {a} + {b}? Reply with the number only."


def main() -> int:
    args = parser.parse_args()
    console, rng, began = Console(highlight=False, soft_wrap=True), random.Random(args.seed), datetime.now(UTC)

    held_out = rng.sample([(a, b) for a in range(1, 10) for b in range(a + 1, 10)], HELD_OUT_SUMS)
    test = held_out + [(b, a) for a, b in held_out]
    train = [(a, b) for a in range(1, 10) for b in range(1, 10) if (a, b) not in test]

    service = loopline.ServiceClient(args.base_url, args.api_key)
    training = service.create_lora_training_client(args.base_model, rank=8, alpha=16, seed=args.seed)
    with service, training:
        tokenizer = training.get_tokenizer()

        def prompt(a: int, b: int) -> list[int]:
            chat = [{"role": "user", "content": question(a, b)}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            return tokenizer.encode(text, add_special_tokens=False)

        def reward(a: int, b: int, answer_T: list[int]) -> float:
            numbers = re.findall(r"\d+", tokenizer.decode(answer_T, skip_special_tokens=True))
            return float(numbers[-1:] == [str(a + b)])  # the last number of the answer counts

        def ask(sampler: loopline.SamplingClient, problems_P: list[tuple[int, int]], answers: int):
            params = [loopline.SamplingParams(max_tokens=MAX_TOKENS, seed=rng.getrandbits(40)) for _ in problems_P]
            futures_P = [sampler.sample(prompt(*p), answers, s) for p, s in zip(problems_P, params, strict=True)]
            responses_P = [future.result() for future in futures_P]
            answered_P = zip(problems_P, responses_P, strict=True)
            rewards_P_G = [[reward(*p, sequence.tokens) for sequence in r.sequences] for p, r in answered_P]
            return responses_P, rewards_P_G

        def accuracy(sampler: loopline.SamplingClient) -> float:
            _, rewards_P_G = ask(sampler, test, ANSWERS_PER_HELD_OUT)
            return fmean(fmean(rewards_G) for rewards_G in rewards_P_G)

        console.print(f"Session {training.session_id} on {args.base_model}: {len(train)} questions to train on.")
        sampler = service.create_sampling_client(base_model=args.base_model)  # what a fresh adapter computes, too
        before = accuracy(sampler)
        console.print(f"Held out: {len(test)} questions, {before:.0%} right before training.")
        longest = max(len(prompt(*problem)) for problem in train)
        drawn = {"prompts": PROBLEMS_PER_STEP, "samples": ANSWERS_PER_PROBLEM, "sample_tokens": MAX_TOKENS}
        trained = {"batch_size": PROBLEMS_PER_STEP * ANSWERS_PER_PROBLEM, "datum_tokens": longest + MAX_TOKENS - 1}
        estimate = training.estimate(steps=args.steps, prompt_tokens=longest, **drawn, **trained)
        console.print(f"{args.steps} steps will cost at most ${estimate.cost_nanos / 1e9:.5f}.\n")
        console.print("[bold]step   reward                      KL   tokens      cost  seconds[/]")
        curve, spent = list[float](), 0
        for step in range(1, args.steps + 1):
            started = time.monotonic()
            problems_P = rng.sample(train, PROBLEMS_PER_STEP)
            responses_P, rewards_P_G = ask(sampler, problems_P, ANSWERS_PER_PROBLEM)
            batch = []
            for problem, response, rewards_G in zip(problems_P, responses_P, rewards_P_G, strict=True):
                prompt_T = prompt(*problem)
                for sequence, got in zip(response.sequences, rewards_G, strict=True):
                    advantage = (got - fmean(rewards_G)) / (PROBLEMS_PER_STEP * ANSWERS_PER_PROBLEM)
                    tokens_T, silent = prompt_T + sequence.tokens, len(prompt_T) - 1
                    inputs = {
                        "target_tokens": tokens_T[1:],
                        "logprobs": [0.0] * silent + sequence.logprobs,
                        "advantages": [0.0] * silent + [advantage] * len(sequence.tokens),
                    }
                    batch.append(loopline.Datum(tokens_T[:-1], inputs))

            backward = training.forward_backward(batch, "importance_sampling")
            training.optim_step(ADAM)
            sampler = training.save_weights_and_get_sampling_client()
            calls = [*responses_P, backward.result()]
            kl = backward.result().metrics["kl_sample_train_v2:mean"]  # half the mean squared logprob difference
            tokens = sum(sum(call.usage.values()) for call in calls)
            cost = sum(call.cost_nanos for call in calls)
            spent += cost
            curve.append(fmean(fmean(rewards_G) for rewards_G in rewards_P_G))
            bar, seconds = "█" * round(16 * curve[-1]), time.monotonic() - started
            row = f"{kl:9.1e}  {tokens:7,}  ${cost / 1e9:.5f}  {seconds:7.1f}"
            console.print(f"{step:4}   {curve[-1]:.2f} [green]{bar:16}[/] {row}")
        console.print(f"\nThe steps cost ${spent / 1e9:.5f}.")
        after = accuracy(sampler)
        rise = after - before
        console.print(f"Held out: {before:.0%} right before, [bold]{after:.0%}[/] after ({rise:+.2f}).")

        a, b = test[0]
        chat = openai.OpenAI(base_url=f"{args.base_url}/v1", api_key=args.api_key).chat.completions
        messages = [{"role": "user", "content": question(a, b)}]
        reply = chat.create(model=training.session_id, messages=messages, max_tokens=MAX_TOKENS, temperature=0)
        console.print(f"openai client: {question(a, b)!r} -> {reply.choices[0].message.content!r}\n")

        bill = service.get_usage(since=began)
        for line in bill.data:
            whom = "session" if line.session_id else "base model"
            console.print(f"{whom:>10} {line.meter:>14} {line.quantity:9,} tokens  ${line.cost_nanos / 1e9:.5f}")
        console.print(f"{'total':>25} {'':16}  ${bill.total_cost_nanos / 1e9:.5f}")

    axes = Figure(figsize=(7, 4)).subplots()
    axes.plot(range(1, len(curve) + 1), curve, marker="o", label="mean reward of the step")
    axes.axhline(before, color="gray", linestyle=":", label=f"held out before: {before:.0%}")
    axes.axhline(after, color="green", linestyle="--", label=f"held out after: {after:.0%}")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title=f"GRPO on addition, {args.base_model}")
    axes.legend()
    axes.figure.savefig(args.plot, dpi=120, bbox_inches="tight")
    console.print(f"Reward curve: {args.plot}")
    return 0 if rise >= MUST_RISE else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the session was stopped on the way out
        sys.exit(130)
