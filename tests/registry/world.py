"""A stack on a real engine, and the few things that are done with it again and again."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx

from tests.stack import Stack

LENGTH = 12  # tokens of an answer
MARGIN = 2.0  # nats by which every token of a trained answer beats the next likely one
ADAM = {"learning_rate": 8e-3}
MAX_STEPS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a version answered greedily, and by how much its least certain token won (nats)."""

    version: str
    tokens: tuple[int, ...]
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Where the seconds of a save went, as its caller saw them (``total_s``): until the trainer took it, until its
    files were staged, until the gate began with it (and its verdict was recorded), in the gate."""

    total_s: float
    queued_s: float
    staged_s: float
    waited_s: float
    gate_s: float


def words(seed: int, length: int) -> list[int]:
    return random.Random(seed).sample(range(1000, 40000), k=length)


def lesson(tokens: Sequence[int], *, prompt: int) -> dict[str, Any]:
    """A datum whose loss is on what follows the first ``prompt`` tokens."""
    weights = [0.0] * (prompt - 1) + [1.0] * (len(tokens) - prompt)
    return {
        "model_input": list(tokens[:-1]),
        "loss_fn_inputs": {"target_tokens": list(tokens[1:]), "weights": weights},
    }


class World:
    """One stack and a client of it, which any number of threads may use. Prompts and answers are token ids."""

    def __init__(self, stack: Stack, client: httpx.Client) -> None:
        self.stack = stack
        self.client = client

    def open(self, **body: Any) -> str:
        lora = {"rank": 8, "alpha": 16, "seed": 7, **body.pop("lora", {})}
        response = self.client.post("/sessions", json={"base_model": self.stack.base_model, "lora": lora, **body})
        assert response.status_code == 201, response.text
        return response.json()["id"]

    def step(self, session: str, data: Sequence[Mapping[str, Any]], **adam: float) -> None:
        self.stack.submit(self.client, session, "forward_backward", data=list(data))
        self.stack.run(self.client, session, "optim_step", adam_params={**ADAM, **adam})

    def save(self, session: str, **body: Any) -> str:
        return self.stack.run(self.client, session, "save_weights", **body)["result"]["version"]

    def taught(self, seed: int, prompt: Sequence[int]) -> Answer:
        """Train an adapter until it answers ``prompt`` with words of its own, each by the margin."""
        session, own = self.open(), words(seed, LENGTH)
        data = [lesson([*prompt, *own], prompt=len(prompt))]
        for _ in range(0, MAX_STEPS, 20):
            for _ in range(20):
                self.step(session, data)
            answer = self.answer(self.save(session), prompt)
            if answer.tokens == tuple(own) and answer.margin >= MARGIN:
                return answer
        raise AssertionError(f"seed {seed} did not learn its answer: {answer}")

    def answer(self, version: str, prompt: Sequence[int]) -> Answer:
        """Ask greedily, over the OpenAI route, which tells the runner-up of each token as well."""
        response = self.client.post(
            f"{self.stack.url}/v1/completions",
            json={
                "model": version,
                "prompt": list(prompt),
                "max_tokens": LENGTH,
                "temperature": 0,
                "logprobs": 2,
                "return_token_ids": True,
            },
        )
        assert response.status_code == 200, response.text
        assert response.headers["X-Loopline-Version"] == version
        choice = response.json()["choices"][0]
        margins: list[float] = []
        for own, best in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
            others = sorted(best.values(), reverse=True)
            margins.append(own - others[1] if len(others) > 1 else own - others[0])
        return Answer(version=version, tokens=tuple(choice["token_ids"]), margin=min(margins))

    def scores(self, version: str, tokens: Sequence[int]) -> list[float]:
        """Return the engine's log-probabilities of ``tokens[1:]``."""
        answer = self.client.post("/logprobs", json={"version": version, "prompt": list(tokens)})
        assert answer.status_code == 200, answer.text
        assert answer.json()["version"] == version
        return answer.json()["logprobs"][1:]

    def publication(self, session: str) -> "Publication":
        """Save, wait until it resolves (staged, through the gate, recorded), and say where the time went."""
        began = time.perf_counter()
        operation = self.stack.run(self.client, session, "save_weights")
        total_s = time.perf_counter() - began
        version = self.client.get(f"/versions/{operation['result']['version_id']}").json()
        asked, started, staged, published = (
            datetime.fromisoformat(moment).timestamp()
            for moment in (
                operation["created_at"],
                operation["started_at"],
                version["created_at"],
                version["published_at"],
            )
        )
        gate_s = version["canary"]["seconds"]
        return Publication(
            total_s=total_s,
            queued_s=started - asked,
            staged_s=staged - started,
            waited_s=published - staged - gate_s,
            gate_s=gate_s,
        )


@contextmanager
def world_of(stack: Stack) -> Iterator[World]:
    with stack.client() as client:
        yield World(stack, client)


def worst(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def mean(ours: Sequence[float], theirs: Sequence[float]) -> float:
    found = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return sum(found) / len(found)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
