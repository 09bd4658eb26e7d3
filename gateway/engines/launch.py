"""The command and environment that start one vLLM server for runtime LoRA. Pure: starts nothing.

The server listens on loopback only, wants the boot's random key, keeps no request logs and phones nobody.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gateway.core.sampling import MAX_STOPS

# What --max-lora-rank accepts; buffers are padded to it, so the smallest that fits is chosen.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Adapters kept in host memory per slot: a version that is not in a slot is then rarely read from disk again.
CPU_LORAS_PER_SLOT = 4
# The library that keeps answers to a schema, a regex or a grammar.
GRAMMAR_BACKEND = "xgrammar"
# Carried in every answer as ``system_fingerprint``: prompt scores of this engine include a LoRA on lm_head.
EXACT_PROMPT_SCORES = "loopline-exact-prompt-scores"

# How often a compute thread without work looks again before it sleeps, about 0.1 ms. libgomp's 300,000 keep the cores
# of a small machine from the engine's own server between two steps: with two cores that takes 13 % of its throughput.
SPINS = "5000"


class Device(StrEnum):
    """Where the engine computes."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine.

    ``threads`` is a CPU list such as ``0-1`` ("auto" would leave one core of two idle), ``kv_gib`` the size of the
    key-value cache on CPU, ``gpu_memory`` the share of the device on GPU. ``max_loras`` counts adapters in one batch.
    """

    model_path: Path
    served_name: str
    port: int
    key: str
    dtype: str = "bfloat16"
    device: Device = Device.CPU
    max_loras: int = 4
    max_lora_rank: int = 32
    max_model_len: int = 2048
    max_num_seqs: int = 64
    kv_gib: int = 2
    threads: str = "0-1"
    gpu_memory: float = 0.6
    visible_devices: str | None = None
    tool_parser: str | None = None

    def __post_init__(self) -> None:
        if self.max_loras < 2:
            raise ValueError(f"max_loras must be at least 2 (one slot stays free for publications): {self.max_loras}")
        if self.max_lora_rank > _RANKS[-1]:
            raise ValueError(f"max_lora_rank must be at most {_RANKS[-1]}: {self.max_lora_rank}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to execute. ``environment`` is added to the parent's."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def launch_vllm(spec: EngineSpec) -> Launch:
    """Return how to start ``spec``. The module path is used because ``vllm serve`` insists on the GPU distribution."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(spec.model_path)),
        *("--served-model-name", spec.served_name),
        *("--host", "127.0.0.1"),
        *("--port", str(spec.port)),
        *("--dtype", spec.dtype),
        *("--max-model-len", str(spec.max_model_len)),
        *("--max-num-seqs", str(spec.max_num_seqs)),
        "--enable-lora",
        *("--max-loras", str(spec.max_loras)),
        *("--max-cpu-loras", str(CPU_LORAS_PER_SLOT * spec.max_loras)),
        *("--max-lora-rank", str(next(rank for rank in _RANKS if rank >= spec.max_lora_rank))),
        *("--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--max-logprobs", "20"),
        *("--structured-outputs-config", f'{{"backend": "{GRAMMAR_BACKEND}"}}'),  # what the gateway tries grammars with
        *("--middleware", "gateway.engines.door.Door"),  # vLLM's own key guards a part of its paths
        "--enable-prompt-tokens-details",
        "--enable-scale-out",  # for /inference/v1/abort_requests, which aborts without losing the count
        "--no-enable-log-requests",
        "--disable-uvicorn-access-log",
    ]
    if spec.tool_parser is not None:
        command += ["--enable-auto-tool-choice", "--tool-call-parser", spec.tool_parser]
    environment = {
        "VLLM_API_KEY": spec.key,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_MAX_STOP_STRINGS": str(MAX_STOPS),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    match spec.device:
        case Device.CPU:
            command += ["--enforce-eager", "--fingerprint-mode", "custom", "--fingerprint-value", EXACT_PROMPT_SCORES]
            # A seeded prompt cut over two steps kills the stock CPU engine ("CPU Generator does not use offset").
            command.append("--no-enable-chunked-prefill")
            environment |= _on_cpu(spec.kv_gib, spec.threads)
        case Device.GPU:
            command += ["--gpu-memory-utilization", str(spec.gpu_memory)]
            if spec.visible_devices is not None:
                environment["CUDA_VISIBLE_DEVICES"] = spec.visible_devices
    return Launch(command=tuple(command), environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpec:
    """A version to be served by a vLLM of its own: a merged model, or a base model and the adapter on it.

    ``context_length`` None leaves it to the model.
    """

    model_path: Path
    served_name: str
    host: str
    port: int
    dtype: str
    device: Device
    adapter: Path | None = None
    base_name: str | None = None
    rank: int = 0
    context_length: int | None = None
    threads: str = "0-1"


def launch_version(spec: VersionSpec) -> Launch:
    """Return how to serve one version, outside any Loopline. Who may reach it is the operator's to decide."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(spec.model_path)),
        *("--served-model-name", spec.served_name if spec.adapter is None else spec.base_name or "base"),
        *("--host", spec.host),
        *("--port", str(spec.port)),
        *("--dtype", spec.dtype),
        *("--generation-config", "vllm"),
    ]
    if spec.context_length is not None:
        command += ["--max-model-len", str(spec.context_length)]
    if spec.adapter is not None:
        rank = next(rank for rank in _RANKS if rank >= spec.rank)
        command += ["--enable-lora", "--max-lora-rank", str(rank)]
        command += ["--lora-modules", f"{spec.served_name}={spec.adapter}"]
    environment: dict[str, str] = {}
    if spec.device is Device.CPU:
        command += ["--enforce-eager", "--no-enable-chunked-prefill"]
        environment = _on_cpu(2, spec.threads)
    return Launch(command=tuple(command), environment=environment)


def _on_cpu(kv_gib: int, threads: str) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "GOMP_SPINCOUNT": SPINS,
    }


def launch_scripted(spec: EngineSpec, *, token_delay_ms: float = 0.0) -> Launch:
    """Return how to start the scripted engine in place of ``spec``."""
    command = (
        *(sys.executable, "-m", "gateway.engines.scripted"),
        *("--port", str(spec.port)),
        *("--served-name", spec.served_name),
        *("--max-model-len", str(spec.max_model_len)),
        *("--token-delay-ms", str(token_delay_ms)),
    )
    return Launch(command=command, environment={"LOOPLINE_SCRIPTED_KEY": spec.key})
