"""From options and prepared models to what has to run: the catalogue and the processes. Pure: starts nothing."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.core.catalog import BaseModel
from gateway.engines.launch import Device, EngineSpec, Launch, launch_scripted, launch_vllm
from gateway.supervisor.machine import Machine
from gateway.supervisor.models import ModelFacts
from gateway.supervisor.options import DeviceChoice, DTypeChoice, EngineKind, UpOptions

# Shares of a GPU's memory that the engines take together: beside a trainer on the same GPU, and alone.
_GPU_MEMORY_SHARED = 0.6
_GPU_MEMORY_ALONE = 0.9

# The trainer that goes with each engine.
_BACKENDS: Mapping[EngineKind, str] = {EngineKind.VLLM: "peft", EngineKind.SCRIPTED: "scripted"}

# What a child must not learn from its parent's environment: it has no use for it.
_SECRETS = ("LOOPLINE_MASTER_KEY", "LOOPLINE_ENGINE_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A base model on disk, and the loopback port that its engine gets."""

    name: str
    path: Path
    facts: ModelFacts
    engine_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process to run. ``probe_url`` answers 200 (to the bearer ``probe_key``, if any) once it is ready."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    probe_url: str
    probe_key: str | None
    stop_grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run: the catalogue's models and the processes in start order."""

    models: Sequence[BaseModel]
    processes: Sequence[Process]


def make_plan(
    options: UpOptions, prepared: Sequence[PreparedModel], machine: Machine, *, engine_key: str, catalog: Path
) -> Plan:
    """Decide what to run.

    Raises:
        ValueError: options that contradict each other; the message names them.
    """
    device = choose_device(options.device, machine)
    dtype = options.dtype or choose_dtype(machine, device)
    specs = [_engine_spec(options, model, machine, device, dtype, engine_key, len(prepared)) for model in prepared]
    models = [
        BaseModel(
            name=model.name,
            path=model.path,
            dtype=dtype.value,
            vocab_size=model.facts.vocab_size,
            context_length=spec.max_model_len,
            max_lora_rank=options.max_lora_rank,
            max_loras=options.max_loras,
            engines=(spec.url,),
            tool_parser=spec.tool_parser,
        )
        for model, spec in zip(prepared, specs, strict=True)
    ]
    several = len(prepared) > 1
    gateway_url = f"http://{reachable_host(options.host)}:{options.port}"
    common = {
        "LOOPLINE_DATA_DIR": str(options.data_dir.absolute()),
        "LOOPLINE_CATALOG": str(catalog.absolute()),
    }
    engines = [
        _engine(options.engine, spec, f"engine-{model.name}" if several else "engine")
        for model, spec in zip(models, specs, strict=True)
    ]
    trainers = [
        Process(
            name=f"trainer-{model.name}" if several else "trainer",
            command=(sys.executable, "-m", "trainer", "--backend", _BACKENDS[options.engine]),
            environment={**common, **_trainer_environment(options, model, machine, device)},
            probe_url=f"{gateway_url}/readyz",
            probe_key=None,
            stop_grace_s=60.0,
        )
        for model in models
    ]
    gateway = Process(
        name="gateway",
        command=(sys.executable, "-m", "gateway"),
        environment={
            **common,
            "LOOPLINE_ENGINE_KEY": engine_key,
            "LOOPLINE_HOST": options.host,
            "LOOPLINE_PORT": str(options.port),
        },
        probe_url=f"{gateway_url}/livez",
        probe_key=None,
        stop_grace_s=20.0,
    )
    return Plan(models=models, processes=[*engines, *trainers, gateway])


def choose_dtype(machine: Machine, device: Device) -> DTypeChoice:
    """Return bfloat16 where the hardware multiplies it, else float32."""
    fast = device is Device.GPU or machine.cpu_bfloat16
    return DTypeChoice.BFLOAT16 if fast else DTypeChoice.FLOAT32


def choose_device(choice: DeviceChoice, machine: Machine) -> Device:
    """Return where to compute.

    Raises:
        ValueError: a GPU was asked for and there is none that vLLM could use.
    """
    match choice:
        case DeviceChoice.CPU:
            return Device.CPU
        case DeviceChoice.AUTO:
            return Device.GPU if machine.has_gpu else Device.CPU
        case DeviceChoice.GPU:
            if not machine.has_gpu:
                raise ValueError(
                    "--device gpu: there is no NVIDIA device, or the installed vLLM is not its CUDA build "
                    "(`pip install 'loopline-server[gpu]'` brings that one)"
                )
            return Device.GPU


def reachable_host(host: str) -> str:
    """Return the host under which a server that listens on ``host`` is reached from this machine."""
    match host:
        case "0.0.0.0":
            return "127.0.0.1"
        case "::":
            return "[::1]"
        case _:
            return f"[{host}]" if ":" in host else host


def child_environment(parent: Mapping[str, str], process: Process) -> Mapping[str, str]:
    """Return the whole environment of a process: its parent's without what it need not know, and its own additions."""
    keep_master_key = process.name == "gateway"
    hidden = {name for name in _SECRETS if not (keep_master_key and name == "LOOPLINE_MASTER_KEY")}
    if process.name.startswith("engine"):
        hidden.add("LOOPLINE_DATABASE_URL")
    return {**{name: value for name, value in parent.items() if name not in hidden}, **process.environment}


def _engine_spec(
    options: UpOptions,
    model: PreparedModel,
    machine: Machine,
    device: Device,
    dtype: DTypeChoice,
    key: str,
    count: int,
) -> EngineSpec:
    shared = (options.engine_gpus or "0") == (options.trainer_gpus or "0")
    memory = options.gpu_memory or (_GPU_MEMORY_SHARED if shared else _GPU_MEMORY_ALONE)
    return EngineSpec(
        model_path=model.path,
        served_name=model.name,
        port=model.engine_port,
        key=key,
        dtype=dtype.value,
        device=device,
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        max_model_len=min(options.max_model_len, model.facts.context_length),
        kv_gib=options.kv_gib,
        threads=machine.engine_cores,
        gpu_memory=round(memory / count, 3),
        visible_devices=options.engine_gpus,
        tool_parser=options.tool_parser,
    )


def _engine(kind: EngineKind, spec: EngineSpec, name: str) -> Process:
    launch = _launch(kind, spec)
    return Process(
        name=name,
        command=launch.command,
        environment=launch.environment,
        probe_url=f"{spec.url}/health",
        probe_key=spec.key,
        stop_grace_s=15.0,
    )


def _launch(kind: EngineKind, spec: EngineSpec) -> Launch:
    match kind:
        case EngineKind.VLLM:
            return launch_vllm(spec)
        case EngineKind.SCRIPTED:
            return launch_scripted(spec)


def _trainer_environment(options: UpOptions, model: BaseModel, machine: Machine, device: Device) -> Mapping[str, str]:
    environment = {
        "LOOPLINE_BASE_MODEL": model.name,
        "LOOPLINE_THREADS": str(machine.trainer_threads),
        "LOOPLINE_DEVICE": "cuda" if device is Device.GPU else "cpu",
    }
    if options.trainer_gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = options.trainer_gpus
    return environment
