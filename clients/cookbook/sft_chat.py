"""Fine-tune a small chat model on conversations, and ask it the same question before and after.

    python clients/cookbook/sft_chat.py --base-url http://127.0.0.1:8000 --api-key tml-...

Data: one JSON object a line, {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}.
Only the assistant's tokens are learned: every other position has weight 0.
"""

import argparse
import json
import os
import random
import sys
from pathlib import Path

import openai

import loopline

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--base-url", default=os.environ.get("LOOPLINE_BASE_URL", "http://127.0.0.1:8000"))
parser.add_argument("--api-key", default=os.environ.get("LOOPLINE_API_KEY"))
parser.add_argument("--base-model", default="smollm2-135m-instruct")
parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data" / "lighthouse.jsonl")
parser.add_argument("--question", default="Who are you?")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=1)


def main() -> int:
    args = parser.parse_args()
    if not args.data.is_file():
        parser.error(f"there is no file {args.data}")
    conversations = [json.loads(line)["messages"] for line in args.data.read_text().splitlines() if line.strip()]
    if not conversations:
        parser.error(f"{args.data} holds no conversation")
    rng = random.Random(args.seed)

    service = loopline.ServiceClient(args.base_url, args.api_key)
    training = service.create_lora_training_client(args.base_model, rank=8, alpha=16, seed=args.seed)
    with service, training:
        tokenizer = training.get_tokenizer()
        chat = openai.OpenAI(base_url=f"{args.base_url}/v1", api_key=args.api_key)

        def encode(messages: list[dict[str, str]], *, to_answer: bool) -> list[int]:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=to_answer)
            return tokenizer.encode(text, add_special_tokens=False)

        def to_datum(messages: list[dict[str, str]]) -> loopline.Datum:
            tokens_T, weights_T = encode(messages, to_answer=False), []
            for turn, message in enumerate(messages):  # what ends with an answer is learned from where it begins
                end = len(encode(messages[: turn + 1], to_answer=False))
                if message["role"] == "assistant":
                    begin = len(encode(messages[:turn], to_answer=True))
                    weights_T += [0.0] * (begin - len(weights_T)) + [1.0] * (end - begin)
            weights_T += [0.0] * (len(tokens_T) - len(weights_T))
            return loopline.Datum(tokens_T[:-1], {"target_tokens": tokens_T[1:], "weights": weights_T[1:]})

        def answer(model: str) -> str:
            messages = [{"role": "user", "content": args.question}]
            reply = chat.chat.completions.create(model=model, messages=messages, max_tokens=48, temperature=0)
            return reply.choices[0].message.content or ""

        data = [to_datum(messages) for messages in conversations]
        before = answer(args.base_model)
        print(f"{args.question!r} before: {before!r}\n\nstep  loss per answer token")

        losses: list[float] = []
        for step in range(1, args.steps + 1):
            batch = rng.sample(data, min(args.batch_size, len(data)))
            learned = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in batch)
            backward = training.forward_backward(batch, "cross_entropy")
            training.optim_step(loopline.AdamParams(learning_rate=args.learning_rate)).result()
            losses.append(backward.result().metrics["loss:sum"] / learned)
            print(f"{step:4}  {losses[-1]:.3f}")

        training.save_weights_for_sampler().result()
        after = answer(training.session_id)
        print(f"\n{args.question!r} after: {after!r}")
        bill = service.get_usage(session_id=training.session_id)
        print(f"cost: ${bill.total_cost_nanos / 1e9:.5f}")

    if losses[-1] >= losses[0] or after == before:
        print("Nothing was learned: the loss did not fall, or the answer is the same.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
