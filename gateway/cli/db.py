"""`loopline db`: the database's schema."""

import typer
from sqlalchemy.exc import SQLAlchemyError

import migrations
from gateway.cli.common import DataDir, fail, out, settings_of

app = typer.Typer(no_args_is_help=True, help="Look after the database.")


@app.command()
def upgrade(data_dir: DataDir = None) -> None:
    """Bring the schema up to date. Running it again changes nothing."""
    settings = settings_of(data_dir)
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        migrations.upgrade(settings.resolved_database_url)
    except (ValueError, SQLAlchemyError) as error:
        fail(str(error).strip().splitlines()[0])
    out().print("The database is up to date.", highlight=False)
