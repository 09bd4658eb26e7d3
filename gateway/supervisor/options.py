"""What a person can ask of `loopline up`."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MAX_MODEL_LEN = 2048


class EngineKind(enum.StrEnum):
    """Which engine (and with it which trainer) runs."""

    VLLM = "vllm"  # the real one
    SCRIPTED = "scripted"  # no weights, ready in a second: for trying out clients and for tests


class DeviceChoice(enum.StrEnum):
    """Where engines and trainers compute."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


class DTypeChoice(enum.StrEnum):
    """The number format of the base model's weights. Adapters are trained in float32 whatever this is."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """All of it.

    ``dtype`` None is bfloat16 where the hardware multiplies it, else float32;
    ``max_model_len`` caps the context (prompt plus answer, in tokens); ``gpu_memory`` is the share of its GPU that the
    engines take together (None: most of it, or little over half when the trainer is on the same one);
    ``engine_gpus`` and ``trainer_gpus`` are lists for CUDA_VISIBLE_DEVICES; ``kv_gib`` is each CPU engine's key-value
    cache; ``tool_parser`` is vLLM's name of how the models write calls of tools.
    """

    data_dir: Path
    models: Sequence[str] = (DEFAULT_MODEL,)
    host: str = "127.0.0.1"
    port: int = 8000
    engine: EngineKind = EngineKind.VLLM
    device: DeviceChoice = DeviceChoice.AUTO
    dtype: DTypeChoice | None = None
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    max_lora_rank: int = 32
    max_loras: int = 4
    kv_gib: int = 2
    gpu_memory: float | None = None
    engine_gpus: str | None = None
    trainer_gpus: str | None = None
    tool_parser: str | None = None
