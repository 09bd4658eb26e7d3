"""``lora_sampling``: how fast the CPU engine decodes with an adapter, beside without one, in the same engine."""

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch

from gateway.engines.launch import EngineSpec
from tests.bench.options import Options
from tests.bench.ours import BackendLoop
from tests.bench.report import Report, Side, alternate

SEQUENCES, FEW = 64, 8


def write_adapters(options: Options, directory: Path) -> list[Path]:
    """Write three adapters of rank 8 as the trainer stages them, with a B that is not zero."""
    loop = BackendLoop(options.model, options.dtype, options.threads)
    paths: list[Path] = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        masters = loop.backend.state(loop.sessions[0]).weights
        loop.load({name: 0.02 * torch.randn(master.shape, generator=generator) for name, master in masters.items()})
        path = directory / f"adapter-{seed}"
        path.mkdir()
        loop.backend.write_adapter(loop.sessions[0], path)
        paths.append(path)
    return paths


def measure(spec: EngineSpec, adapters: Sequence[Path], options: Options, report: Report, setting: str) -> float:
    """Return the median of LoRA over base throughput, one adapter, 64 sequences; print that and others."""
    tokens = 32 if options.quick else 64
    with httpx.Client(base_url=spec.url, headers={"Authorization": f"Bearer {spec.key}"}, timeout=600) as client:
        for path in adapters:
            body = {"lora_name": path.name, "lora_path": str(path)}
            client.post("/v1/load_lora_adapter", json=body).raise_for_status()

        def decode(models: Sequence[str], sequences: int) -> None:
            """Let the models share ``sequences`` prompts, all at once."""
            prompts = [[1 + (7919 * i + 31 * j) % 49000 for j in range(24)] for i in range(sequences)]
            with ThreadPoolExecutor(len(models)) as pool:
                asked = [
                    pool.submit(_complete, client, model, prompts[at :: len(models)], tokens)
                    for at, model in enumerate(models)
                ]
                made = sum(each.result() for each in asked)
            assert made == sequences * tokens

        one, three = [adapters[0].name], [path.name for path in adapters]
        cases = {
            "base": (["bench"], SEQUENCES),
            "one adapter": (one, SEQUENCES),
            "three adapters": (three, SEQUENCES),
            f"base, {FEW} sequences": (["bench"], FEW),
            f"one adapter, {FEW} sequences": (one, FEW),
        }
        sides = [Side(name=name, run=lambda case=case: decode(*case)) for name, case in cases.items()]
        timed = alternate(sides, options.times(5, 3))
    for name, (_, sequences) in cases.items():
        base = timed[f"base, {FEW} sequences" if sequences == FEW else "base"]
        rate = sequences * tokens / timed[name].median
        share = "" if name.startswith("base") else f"{_share(base.seconds, timed[name].seconds):.2f} of base"
        report.add("lora_sampling", f"{setting}: {name}", f"{rate:.0f} tokens/s", "", share)
    return _share(timed["base"].seconds, timed["one adapter"].seconds)


def _share(base: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(b / o for b, o in zip(base, other, strict=True))


def _complete(client: httpx.Client, model: str, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    body = {"model": model, "prompt": prompts, "max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()["usage"]["completion_tokens"]
