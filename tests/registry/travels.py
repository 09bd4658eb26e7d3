"""Weights that leave, come back, and are loaded by plain libraries: the numbers stay the same."""

import secrets
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import loopline
from gateway.engines.launch import Device, VersionSpec, launch_version
from tests.engines.fixtures import all_cores, running_engine
from tests.registry.world import World, lesson, words
from tests.stack import free_port

TOKENS = words(77, 40)


def trained(world: World, *, unembed: bool, group: str) -> str:
    """Return a session of a few steps on ``TOKENS``; rank and scale are not those of a default."""
    session = world.open(lora={"rank": 6, "alpha": 9, "train_unembed": unembed}, model_package_group=group)
    for _ in range(4):
        world.step(session, [lesson(TOKENS, prompt=1)], learning_rate=5e-3)
    return session


def trainers_scores(world: World, session: str) -> list[float]:
    """Return the log-probabilities of ``TOKENS[1:]`` that the trainer computes now."""
    operation = world.stack.run(world.client, session, "forward", data=[lesson(TOKENS, prompt=1)])
    return operation["result"]["loss_fn_outputs"][0]["logprobs"]["data"]


def by_peft(base: Path, adapter: Path) -> list[float]:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return _scores(PeftModel.from_pretrained(model, str(adapter)).eval())


def by_transformers(merged: Path) -> list[float]:
    model: Any = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    return _scores(model.eval())


@torch.no_grad()
def _scores(model: Any) -> list[float]:
    logprobs = model(torch.tensor([TOKENS[:-1]])).logits[0].double().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(TOKENS[1:])[:, None]).squeeze(1).tolist()


@contextmanager
def plain_vllm(directory: Path, *, base: Path, rank: int, adapter: bool, log: Path) -> Iterator[str]:
    """Serve what was exported as ``loopline serve`` does, by a vLLM that knows nothing of us; yields its URL."""
    port = free_port()
    spec = VersionSpec(
        model_path=base if adapter else directory,
        served_name="exported",
        host="127.0.0.1",
        port=port,
        dtype="float32",
        device=Device.CPU,
        adapter=directory if adapter else None,
        base_name="base",
        rank=rank,
        context_length=512,
        threads=all_cores(),
    )
    with running_engine(launch_version(spec), f"http://127.0.0.1:{port}", log):
        yield f"http://127.0.0.1:{port}"


def by_vllm(url: str, model: str = "exported", tokens: Sequence[int] = TOKENS) -> list[float]:
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
