"""The command line in this process: the same code as ``python -m gateway.cli``, without its seconds of imports."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from typer.testing import CliRunner

from gateway.cli.app import create_cli


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def loopline(*arguments: str, env: Mapping[str, str] | None = None) -> Done:
    """Run a command with no setting of Loopline in its environment but those of ``env``."""
    wanted: dict[str, str | None] = {name: None for name in os.environ if name.startswith("LOOPLINE_")}
    result = CliRunner().invoke(create_cli(), arguments, env={**wanted, **(env or {})})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)
