"""The training loop on real parts: gateway, trainer and vLLM; fp32 on the tiny model, bf16 on SmolLM2."""

import math
import random
import statistics
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.stack import Stack

pytestmark = pytest.mark.engine

LORA = {"rank": 8, "alpha": 16, "seed": 7}
ADAM = {"learning_rate": 2e-3}


SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "In spring the river rises quickly, so the farmers move their sheep to higher ground.",
    "She opened the old book and read the first page aloud to her younger brother.",
)


def new_session(client: httpx.Client, stack: Stack, **lora: Any) -> str:
    response = client.post("/sessions", json={"base_model": stack.base_model, "lora": {**LORA, **lora}})
    assert response.status_code == 201, response.text
    return response.json()["id"]


def next_token_datum(tokens: list[int]) -> dict[str, Any]:
    return {
        "model_input": tokens[:-1],
        "loss_fn_inputs": {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    }


def random_tokens(seed: int, length: int = 24) -> list[int]:
    return random.Random(seed).choices(range(1000, 40000), k=length)


def train_steps(stack: Stack, client: httpx.Client, session: str, seed: int, steps: int) -> list[str]:
    """Pipeline ``steps`` training steps on data made from ``seed``; return the operation ids."""
    ids: list[str] = []
    for step in range(steps):
        batch = [next_token_datum(random_tokens(1000 * seed + 10 * step + row)) for row in range(3)]
        ids.append(stack.submit(client, session, "forward_backward", data=batch)["id"])
        ids.append(stack.submit(client, session, "optim_step", adam_params=ADAM)["id"])
    return ids


def saved_tensors(stack: Stack, client: httpx.Client, session: str) -> dict[str, Any]:
    """Save the session's adapter and read its file."""
    result = stack.run(client, session, "save_weights")["result"]
    group, number = result["group"], result["number"]
    version = client.get(f"/model_packages/{group}/{number}").json()
    assert version["state"] == "published"
    found = list((stack.data_dir / "artifacts").glob(f"{version['id']}*/adapter_model.safetensors"))
    assert len(found) == 1
    return load_file(str(found[0]))


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(bool((left[name] == right[name]).all()) for name in left)


def test_two_interleaved_sessions_end_with_the_weights_they_have_alone(tiny_stack: Stack) -> None:
    with tiny_stack.client() as client:
        alone: list[dict[str, Any]] = []
        for seed in (1, 2):
            session = new_session(client, tiny_stack)
            for operation in train_steps(tiny_stack, client, session, seed, 4):
                tiny_stack.finish(client, operation)
            alone.append(saved_tensors(tiny_stack, client, session))
        sessions = [new_session(client, tiny_stack) for _ in range(2)]
        submitted: list[str] = []
        for step in range(4):
            for seed, session in zip((1, 2), sessions, strict=True):
                batch = [next_token_datum(random_tokens(1000 * seed + 10 * step + row)) for row in range(3)]
                submitted.append(tiny_stack.submit(client, session, "forward_backward", data=batch)["id"])
                submitted.append(tiny_stack.submit(client, session, "optim_step", adam_params=ADAM)["id"])
        for operation in submitted:
            tiny_stack.finish(client, operation)
        together = [saved_tensors(tiny_stack, client, session) for session in sessions]
    assert equal(together[0], alone[0])
    assert equal(together[1], alone[1])
    assert not equal(together[0], together[1])


def test_a_trained_string_grows_more_likely_through_completions_after_each_save(tiny_stack: Stack) -> None:
    nonsense = random_tokens(99, 20)
    chat = openai.OpenAI(base_url=f"{tiny_stack.url}/v1", api_key=tiny_stack.key, max_retries=0)
    scores: list[float] = []
    versions: list[str] = []
    with tiny_stack.client() as client:
        session = new_session(client, tiny_stack)
        for _ in range(4):
            for _ in range(3):
                tiny_stack.run(client, session, "forward_backward", data=[next_token_datum(nonsense)])
                tiny_stack.run(client, session, "optim_step", adam_params=ADAM)
            versions.append(tiny_stack.run(client, session, "save_weights")["result"]["version"])
            raw = chat.completions.with_raw_response.create(
                model=session, prompt=nonsense, max_tokens=1, extra_body={"prompt_logprobs": 0}
            )
            assert raw.headers["x-loopline-version"] == versions[-1]
            rows = raw.http_response.json()["choices"][0]["prompt_logprobs"]
            scores.append(sum(row[str(token)]["logprob"] for token, row in zip(nonsense[1:], rows[1:], strict=True)))
    chat.close()
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)
    assert scores[-1] - scores[0] > 1.0
    assert len(set(versions)) == 4


def trainer_and_sampler_differences(stack: Stack, lessons: list[list[int]], prompt: list[int]) -> list[float]:
    """Train on ``lessons``, sample 20 sequences at T=1, and score them with the trainer: |difference| per token."""
    with stack.client() as client:
        session = new_session(client, stack)
        for _ in range(3):
            stack.run(client, session, "forward_backward", data=[next_token_datum(lesson) for lesson in lessons])
            stack.run(client, session, "optim_step", adam_params=ADAM)
        stack.run(client, session, "save_weights")
        answer = client.post(
            f"/sessions/{session}/sample",
            json={"prompt": prompt, "num_samples": 20, "max_tokens": 24, "temperature": 1.0, "ignore_eos": True},
        )
        assert answer.status_code == 200, answer.text
        sequences = answer.json()["sequences"]
        assert len(sequences) == 20
        batch = [next_token_datum(prompt + sequence["tokens"]) for sequence in sequences]
        outputs = stack.run(client, session, "forward", data=batch)["result"]["loss_fn_outputs"]
    differences: list[float] = []
    for sequence, output in zip(sequences, outputs, strict=True):
        trained = output["logprobs"]["data"][len(prompt) - 1 :]
        differences += [abs(a - b) for a, b in zip(trained, sequence["logprobs"], strict=True)]
    assert all(math.isfinite(value) for value in differences)
    return differences


def test_trainer_and_sampler_logprobs_agree_in_fp32(tiny_stack: Stack) -> None:
    lessons = [random_tokens(row) for row in range(3)]
    differences = trainer_and_sampler_differences(tiny_stack, lessons, random_tokens(5, 12))
    assert len(differences) == 20 * 24
    assert statistics.mean(differences) < 1e-4


def test_trainer_and_sampler_logprobs_agree_in_bf16(smollm_stack: Stack) -> None:
    with smollm_stack.client() as client:
        text = client.get(f"/base_models/{smollm_stack.base_model}/tokenizer/tokenizer.json").content
    tokenizer = Tokenizer.from_str(text.decode())
    lessons = [tokenizer.encode(sentence).ids for sentence in SENTENCES]
    prompt = tokenizer.encode("Once upon a time, in a small village by the sea,").ids
    differences = trainer_and_sampler_differences(smollm_stack, lessons, prompt)
    assert len(differences) == 20 * 24
    assert statistics.mean(differences) < 0.05


def test_openai_chats_with_the_live_session_streaming_and_not(smollm_stack: Stack) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France? One word."}]
    with smollm_stack.client() as client:
        session = new_session(client, smollm_stack)
        text = "Hello there, this is one training step."
        tokens = [ord(letter) + 100 for letter in text]
        smollm_stack.run(client, session, "forward_backward", data=[next_token_datum(tokens)])
        smollm_stack.run(client, session, "optim_step", adam_params={"learning_rate": 1e-5})
        version = smollm_stack.run(client, session, "save_weights")["result"]["version"]
    with openai.OpenAI(base_url=f"{smollm_stack.url}/v1", api_key=smollm_stack.key, max_retries=0) as chat:
        whole = chat.chat.completions.create(model=session, messages=messages, max_tokens=16, temperature=0)
        stream = chat.chat.completions.create(
            model=version,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    pieces = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in (whole.choices[0].message.content or "")
    assert pieces == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.system_fingerprint == chunks[0].system_fingerprint


def test_usage_sums_what_the_operations_say(tiny_stack: Stack) -> None:
    with tiny_stack.client() as client:
        session = new_session(client, tiny_stack)
        operations = [
            tiny_stack.run(client, session, "forward_backward", data=[next_token_datum(random_tokens(row))] * 2)
            for row in range(3)
        ]
        usage = client.get("/usage", params={"session_id": session}).json()
    assert [operation["usage"] for operation in operations] == [{"train": 46}] * 3
    assert [(row["meter"], row["quantity"]) for row in usage["data"]] == [("train", 138)]
    assert usage["total_cost_nanos"] == sum(operation["cost_nanos"] for operation in operations) > 0


def test_a_version_is_never_served_from_the_base(tiny_stack: Stack, tmp_path: Path) -> None:
    with tiny_stack.client() as client:
        session = new_session(client, tiny_stack)
        unpublished = client.post(f"/sessions/{session}/sample", json={"prompt": [1, 2], "max_tokens": 1})
        unknown = client.post("/sample", json={"version": f"{session}@1", "prompt": [1, 2], "max_tokens": 1})
    assert (unpublished.status_code, unpublished.json()["error"]["code"]) == (409, "no_published_version")
    assert unknown.status_code == 404
