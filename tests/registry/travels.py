"""Weights that leave, come back, and are loaded by plain libraries: the numbers stay the same."""

import secrets
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import loopline
from gateway.engines.launch import Launch
from tests.engines.fixtures import running_engine
from tests.registry.world import World, lesson, words
from tests.stack import free_port

TOKENS = words(77, 40)
TEXT = (
    "The capital of France is Paris, which lies on the river Seine. It has been one of Europe's centres of finance, "
    "science and the arts since the seventeenth century, and more than two million people live there today."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A base model, what adapters of it are trained on and scored by, and how far scores may be apart (mean, nats).

    Of an adapter of few steps 16-bit libraries lose what lies below the last place of a product or a merged weight.
    """

    base: Path
    dtype: str
    tokens: Sequence[int]
    steps: int
    learning_rate: float
    mean: float


def tiny(base: Path) -> Subject:
    return Subject(base=base, dtype="float32", tokens=TOKENS, steps=4, learning_rate=5e-3, mean=1e-4)


def smollm(base: Path) -> Subject:
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokens = tokenizer(TEXT)["input_ids"]
    return Subject(base=base, dtype="bfloat16", tokens=tokens, steps=8, learning_rate=1e-3, mean=0.05)


def trained(world: World, subject: Subject, *, unembed: bool, group: str) -> str:
    """Return a session that was trained on the subject's tokens; rank and scale are not those of a default."""
    session = world.open(lora={"rank": 6, "alpha": 9, "train_unembed": unembed}, model_package_group=group)
    for _ in range(subject.steps):
        world.step(session, [lesson(subject.tokens, prompt=1)], learning_rate=subject.learning_rate)
    return session


def trainers_scores(world: World, session: str, subject: Subject) -> list[float]:
    """Return the log-probabilities of the subject's ``tokens[1:]`` that the trainer computes now."""
    operation = world.stack.run(world.client, session, "forward", data=[lesson(subject.tokens, prompt=1)])
    return operation["result"]["loss_fn_outputs"][0]["logprobs"]["data"]


def by_peft(subject: Subject, adapter: Path) -> list[float]:
    return _scores(PeftModel.from_pretrained(_plain(subject.base, subject), str(adapter)).eval(), subject)


def by_transformers(subject: Subject, merged: Path) -> list[float]:
    return _scores(_plain(merged, subject).eval(), subject)


def _plain(directory: Path, subject: Subject) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, subject.dtype))


@torch.no_grad()
def _scores(model: Any, subject: Subject) -> list[float]:
    logprobs = model(torch.tensor([list(subject.tokens[:-1])])).logits[0].double().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(list(subject.tokens[1:]))[:, None]).squeeze(1).tolist()


@contextmanager
def served(world: World, version: str, *, directory: Path, log: Path) -> Iterator[str]:
    """Run ``loopline serve VERSION --run``: a vLLM of its own, which knows nothing of us; yields its URL."""
    port, stack = free_port(), world.stack
    command = [sys.executable, "-m", "gateway.cli", "serve", version, "--run", "--port", str(port)]
    command += ["--directory", str(directory), "--base-url", stack.url, "--api-key", stack.key]
    environment = {"LOOPLINE_DATA_DIR": str(stack.data_dir), "LOOPLINE_CATALOG": str(stack.data_dir / "catalog.toml")}
    url = f"http://127.0.0.1:{port}"
    with running_engine(Launch(command=tuple(command), environment=environment), url, log):
        names = [card["id"] for card in httpx.get(f"{url}/v1/models").json()["data"]]
        assert version in names, names
        yield url


def by_vllm(url: str, model: str, tokens: Sequence[int]) -> list[float]:
    answer = httpx.post(
        f"{url}/v1/completions",
        json={"model": model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    rows = answer.json()["choices"][0]["prompt_logprobs"]
    return [row[str(token)]["logprob"] for token, row in zip(tokens[1:], rows[1:], strict=True)]


@contextmanager
def service_of(world: World) -> Iterator[loopline.ServiceClient]:
    with loopline.ServiceClient(world.stack.url, world.stack.key) as service:
        yield service


def downloaded(world: World, version: str, directory: Path) -> Sequence[Path]:
    with service_of(world) as service:
        return service.versions.export(version, directory)


def archived(world: World, version: str, directory: Path) -> Path:
    """Fetch the archive in two parts, cut in the middle, and unpack it with the standard library's tar."""
    group, _, number = version.partition("@")
    archive = world.client.get(f"/model_packages/{group}/{number}/export").json()["archive"]
    half = archive["size_bytes"] // 2
    directory.mkdir(parents=True, exist_ok=True)
    parts = [
        httpx.get(archive["url"], headers={"Range": f"bytes={span}"}).content for span in (f"0-{half}", f"{half + 1}-")
    ]
    path = directory / f"{secrets.token_hex(4)}.tar"
    path.write_bytes(b"".join(parts))
    target = directory / "unpacked"
    with tarfile.open(path) as opened:
        opened.extractall(target, filter="data")
    return target
