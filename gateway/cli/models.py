"""`loopline models`: base models on this machine."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from gateway.cli.common import AsJson, DataDir, fail, note, out, print_json, print_table, settings_of
from gateway.core.catalog import BaseModel, CatalogError, parse_catalog
from gateway.settings import Settings
from gateway.supervisor.models import ModelProblem, read_facts, render_catalog
from gateway.supervisor.options import DEFAULT_MAX_MODEL_LEN, DTypeChoice
from gateway.supervisor.preparation import parse_model
from gateway.supervisor.preparation import prepare as prepare_model
from gateway.supervisor.records import RunDir

app = typer.Typer(no_args_is_help=True, help="List and prepare base models.")


@app.command("list")
def list_models(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the base models of the catalogue: those that the gateway serves."""
    models = _catalogued(settings_of(data_dir))
    if as_json:
        print_json([_facts(model) for model in models])
        return
    rows = [
        (model.name, model.dtype, f"{model.context_length:,}", str(model.max_lora_rank), str(model.path))
        for model in models
    ]
    columns = ["name", "dtype", "context", "max rank", "path"]
    print_table(columns, rows, empty="No base models yet; `loopline up` makes the catalogue.", right=columns[2:4])


@app.command()
def prepare(
    model: Annotated[
        str, typer.Argument(help="A catalogue name, a directory or a Hugging Face id; NAME=... names it.")
    ],
    catalog: Annotated[bool, typer.Option("--catalog", help="Write it into the catalogue, as its only model.")] = False,
    engine_url: Annotated[list[str] | None, typer.Option(help="Its engines, for the catalogue.")] = None,
    dtype: Annotated[DTypeChoice, typer.Option(help="Number format of the base weights.")] = DTypeChoice.BFLOAT16,
    max_model_len: Annotated[int, typer.Option(min=8, help="Cap of the context, in tokens.")] = DEFAULT_MAX_MODEL_LEN,
    max_lora_rank: Annotated[int, typer.Option(min=1, max=256)] = 32,
    max_loras: Annotated[int, typer.Option(min=2, help="Adapters that one engine serves at once.")] = 4,
    data_dir: DataDir = None,
) -> None:
    """Convert or download a base model, so that `loopline up` and containers find it; prints its directory."""
    settings = settings_of(data_dir)
    if catalog and not engine_url:
        fail("--catalog needs at least one --engine-url")
    try:
        argument = parse_model(model)
        directory = asyncio.run(_prepare(settings, argument.source))
        facts = read_facts(directory)
    except ModelProblem as error:
        fail(str(error))
    if catalog:
        entry = BaseModel(
            name=argument.name,
            path=_linked(settings.model_dir, argument.name, directory),
            dtype=dtype.value,
            vocab_size=facts.vocab_size,
            context_length=min(max_model_len, facts.context_length),
            max_lora_rank=max_lora_rank,
            max_loras=max_loras,
            engines=tuple(engine_url or ()),
        )
        settings.resolved_catalog.parent.mkdir(parents=True, exist_ok=True)
        settings.resolved_catalog.write_text(render_catalog([entry]))
    out().print(escape(str(directory)), soft_wrap=True, highlight=False)


async def _prepare(settings: Settings, source: str) -> Path:
    console = note()
    return await prepare_model(
        source,
        models_dir=settings.model_dir,
        run_dir=RunDir(settings.data_dir),
        say=lambda line: console.print(escape(line), soft_wrap=True, highlight=False),
    )


def _linked(models_dir: Path, name: str, directory: Path) -> Path:
    """Return ``models_dir/name``, made a link to ``directory`` where it is not that directory itself."""
    place = models_dir.absolute() / name
    if place.resolve() != directory.resolve():
        models_dir.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(directory.resolve(), target_is_directory=True)
    return place


def _catalogued(settings: Settings) -> list[BaseModel]:
    try:
        return list(parse_catalog(settings.resolved_catalog.read_text()).models.values())
    except FileNotFoundError:
        return []
    except CatalogError as error:
        fail(f"{settings.resolved_catalog}: {error}")


def _facts(model: BaseModel) -> dict[str, object]:
    return {
        "name": model.name,
        "path": str(model.path),
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "max_lora_rank": model.max_lora_rank,
        "max_loras": model.max_loras,
        "engines": list(model.engines),
    }
