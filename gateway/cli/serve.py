"""`loopline serve`: a version on a vLLM of its own, outside Loopline."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.common import ApiKey, BaseUrl, DataDir, fail, note, out, settings_of
from gateway.cli.http import find_gateway
from gateway.cli.versions import Address, fetch, find
from gateway.core.catalog import BaseModel, CatalogError, parse_catalog
from gateway.core.errors import NotFound
from gateway.engines.launch import Device, Launch, VersionSpec, launch_version
from gateway.settings import Settings
from gateway.supervisor.machine import inspect_machine


def serve(
    address: Address,
    run: Annotated[bool, typer.Option("--run", help="Start it instead of printing the command.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where it listens.")] = 8100,
    host: Annotated[str, typer.Option(help="On which address.")] = "127.0.0.1",
    directory: Annotated[
        Path | None, typer.Option(help="Where the version's files go (default: deploy/ in the data directory).")
    ] = None,
    base_path: Annotated[
        Path | None, typer.Option(help="The base model's directory (default: the catalogue's), for an adapter.")
    ] = None,
    data_dir: DataDir = None,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Print (or run) the vLLM command that serves a merged version, or an adapter on its base model.

    The version's files are downloaded first. The version is the model `group@n` of that server, which has no keys:
    put it behind something that does.
    """
    settings = settings_of(data_dir)
    gateway = find_gateway(settings, base_url, api_key)
    version = find(gateway, address)
    place = (directory or settings.data_dir / "deploy" / version["id"]).absolute()
    if version["kind"] == "state":
        fail(f"{version['address']} is a state: save the weights, merged or not, to serve them")
    launch = launch_version(_spec(settings, version, place, base_path, host=host, port=port))
    fetch(gateway, version, place)
    if run:
        note().print(f"{version['address']} on http://{host}:{port}/v1", highlight=False)
        os.execvpe(launch.command[0], launch.command, {**os.environ, **launch.environment})
    out().print(shell_line(launch), soft_wrap=True, highlight=False, markup=False)


def shell_line(launch: Launch) -> str:
    """Return a launch as one line for a shell."""
    given = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    return " ".join([*given, shlex.join(launch.command)])


def _spec(
    settings: Settings, version: dict[str, Any], place: Path, base_path: Path | None, *, host: str, port: int
) -> VersionSpec:
    machine = inspect_machine()
    base = _catalogued(settings, version["base_model"])
    merged = version["kind"] == "merged"
    model_path = place if merged else base_path or (base.path if base else None)
    if model_path is None:
        fail(f"the catalogue has no {version['base_model']}: say where it is with --base-path")
    return VersionSpec(
        model_path=model_path.absolute(),
        served_name=version["address"],
        host=host,
        port=port,
        dtype=base.dtype if base else "auto",
        device=Device.GPU if machine.has_gpu else Device.CPU,
        adapter=None if merged else place,
        base_name=version["base_model"],
        rank=version["lora"]["rank"],
        context_length=base.context_length if base else None,
        threads=machine.engine_cores,
    )


def _catalogued(settings: Settings, name: str) -> BaseModel | None:
    try:
        return parse_catalog(settings.resolved_catalog.read_text()).get(name)
    except (FileNotFoundError, NotFound):
        return None
    except CatalogError as error:
        fail(f"{settings.resolved_catalog}: {error}")
