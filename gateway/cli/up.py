"""`loopline up`: the command's options."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from gateway.auth.master import MasterKeyError
from gateway.cli.common import DataDir, fail, settings_of
from gateway.core.errors import Unavailable
from gateway.store import UnfitDatabase
from gateway.supervisor.models import ModelProblem
from gateway.supervisor.options import (
    DEFAULT_MAX_MODEL_LEN,
    DEFAULT_MODEL,
    DeviceChoice,
    DTypeChoice,
    EngineKind,
    UpOptions,
)
from gateway.supervisor.ports import PortTaken
from gateway.supervisor.records import AlreadyRunning
from gateway.supervisor.up import up as run_up


def up(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A base model: a catalogue name, a directory or a Hugging Face id; NAME=... names it. "
            f"May be given several times (default: {DEFAULT_MODEL})."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="The one port (default: 8000).")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    data_dir: DataDir = None,
    engine: Annotated[
        EngineKind, typer.Option(help="vllm, or scripted: no weights, for trying out clients.")
    ] = EngineKind.VLLM,
    device: Annotated[DeviceChoice, typer.Option(help="Where engines and trainers compute.")] = DeviceChoice.AUTO,
    dtype: Annotated[
        DTypeChoice | None,
        typer.Option(help="Number format of the base weights (default: bfloat16 where hardware has it, else float32)."),
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=8, help="Cap of prompt plus answer, in tokens.")] = (
        DEFAULT_MAX_MODEL_LEN
    ),
    max_lora_rank: Annotated[int, typer.Option(min=1, max=256, help="Largest LoRA rank of a session.")] = 32,
    max_loras: Annotated[int, typer.Option(min=2, help="Adapters that one engine serves in one batch.")] = 4,
    kv_gib: Annotated[int, typer.Option(min=1, help="CPU: size of an engine's key-value cache, in GiB.")] = 2,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0.05, max=1.0, help="GPU: share of its memory that the engines take.")
    ] = None,
    engine_gpus: Annotated[str | None, typer.Option(help="GPU: which ones the engines see, e.g. 0 or 0,1.")] = None,
    trainer_gpus: Annotated[str | None, typer.Option(help="GPU: which ones the trainers see.")] = None,
    tool_parser: Annotated[
        str | None, typer.Option(help="How the models write calls of tools: vLLM's name of a parser, e.g. hermes.")
    ] = None,
) -> None:
    """Run gateway, trainer and engine on this machine until Ctrl-C."""
    settings = settings_of(data_dir)
    options = UpOptions(
        data_dir=settings.data_dir,
        models=tuple(model or [DEFAULT_MODEL]),
        host=host or settings.host,
        port=port or settings.port,
        engine=engine,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_lora_rank=max_lora_rank,
        max_loras=max_loras,
        kv_gib=kv_gib,
        gpu_memory=gpu_memory,
        engine_gpus=engine_gpus,
        trainer_gpus=trainer_gpus,
        tool_parser=tool_parser,
    )
    try:
        status = asyncio.run(run_up(options, console=Console()))
    except (AlreadyRunning, PortTaken, ModelProblem, MasterKeyError, UnfitDatabase, Unavailable, ValueError) as error:
        fail(str(error))
    raise typer.Exit(status)
