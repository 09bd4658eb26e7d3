"""Preparing base models, in a process of its own: converting one needs torch, which the supervisor never loads."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.supervisor import groups
from gateway.supervisor.models import ModelProblem
from gateway.supervisor.records import RunDir

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
# The scripted engine has no weights, only sizes; it has this many token ids.
_SCRIPTED_CONFIG = {"vocab_size": 49152, "max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArgument:
    """``[NAME=]SOURCE``: what to load, and the name under which it is served."""

    name: str
    source: str


def parse_model(argument: str) -> ModelArgument:
    """Read a model argument. Without ``NAME=`` the name is the last part of the source, so ``org/model`` is ``model``.

    Raises:
        ModelProblem: the name is not made of letters, digits, dots, dashes and underscores.
    """
    given, separator, source = argument.partition("=")
    if not separator:
        source = argument
    name = given if separator else Path(source).expanduser().name
    if not _NAME.fullmatch(name):
        raise ModelProblem(f"{name!r} cannot be the name of a base model; give it one: --model NAME={source}")
    return ModelArgument(name=name, source=source)


async def prepare(source: str, *, models_dir: Path, run_dir: RunDir, say: Callable[[str], None]) -> Path:
    """Return the directory of ``source``, which is first converted or downloaded when it has to be.

    ``say`` gets every line that the preparation writes. Cancelling ends it, and what it started.

    Raises:
        ModelProblem: it did not work; the message is the last that was said.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trainer.base_models", "prepare", source, "--models-dir", str(models_dir)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    run_dir.write_child("prepare", process.pid)
    assert process.stdout is not None
    assert process.stderr is not None
    last = ""
    try:
        async for raw in process.stderr:
            if line := raw.decode(errors="replace").strip():
                last = line.removeprefix("error: ")
                say(last)
        output = await process.stdout.read()
        status = await process.wait()
    finally:
        groups.signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        run_dir.remove_child("prepare")
    if status != 0:
        raise ModelProblem(f"cannot prepare {source}: {last or f'exit status {status}'}")
    return Path(output.decode().strip().splitlines()[-1])


def prepare_scripted(model: ModelArgument, *, models_dir: Path) -> Path:
    """Return a directory that says what the scripted engine needs to know of ``model``: no weights, only sizes."""
    if Path(model.source).expanduser().is_dir():
        return Path(model.source).expanduser().absolute()
    directory = models_dir / "scripted" / model.name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_SCRIPTED_CONFIG) + "\n")
    return directory
