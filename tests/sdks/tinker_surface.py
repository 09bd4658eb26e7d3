"""What of the installed ``tinker`` SDK works here: one line for each public method, with the test that asserts it, and
one for each route that its sources name.

``works`` names a test that asserts a value or an effect; ``refused`` says why, and names the test of the refusal;
``not applicable`` never asks this server, or asks for what has no meaning on a server of one's own.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tinker
from tinker.lib.public_interfaces.admin_client import AdminClient

CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, AdminClient)
LOCAL = frozenset({"holder", "get_telemetry"})  # plumbing that sends nothing


@dataclass(frozen=True, slots=True)
class Works:
    """``test`` asserts what comes of it."""

    test: str


@dataclass(frozen=True, slots=True)
class Refused:
    """``test`` asserts the refusal."""

    reason: str
    test: str


@dataclass(frozen=True, slots=True)
class NotApplicable:
    """Nothing to serve."""

    reason: str


Verdict = Works | Refused | NotApplicable


def methods() -> Iterator[str]:
    """Yield every public method of the SDK's clients; twins that only wait differently count once."""
    for client in CLIENTS:
        for name in sorted(vars(client)):
            value = vars(client)[name]
            if name.startswith("_") or name in LOCAL or name.endswith("_async"):
                continue
            if callable(value) or isinstance(value, staticmethod | classmethod):
                yield f"{client.__name__}.{name}"


def routes() -> set[str]:
    """Return the path of every route that the SDK or its command line can ask for, without the names of its ids."""
    package = Path(tinker.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if not path.name.endswith("_test.py")]
    found = {path for source in sources for path in re.findall(r'f?"(/api/v1/[^"]*)"', source)}
    return {re.sub(r"\{\w+\}", "{}", path.partition("?")[0]) for path in found}


def route_table(served: Mapping[str, str], refused: Mapping[str, str], unasked: Mapping[str, str]) -> str:
    """Return the rows of the page: which test shows a route, or why it is refused or never asked for."""
    rows = ["| route | here | why, or what shows it |", "|---|---|---|"]
    for path in sorted(routes()):
        shown = path.removeprefix("/api/v1/").replace("{}", "…")
        if path in refused:
            rows.append(f"| `{shown}` | refused | {refused[path]} |")
        elif path in unasked:
            rows.append(f"| `{shown}` | not applicable | {unasked[path]} |")
        else:
            rows.append(f"| `{shown}` | works | `{served[path]}` |")
    return "\n".join(rows)


def table(verdicts: Mapping[str, Verdict]) -> str:
    """Return the rows of the page, in the SDK's order."""
    rows = ["| method | here | why, or what shows it |", "|---|---|---|"]
    for name in methods():
        match verdicts[name]:
            case Works(test):
                rows.append(f"| `{name}` | works | `{test}` |")
            case Refused(reason, _):
                rows.append(f"| `{name}` | refused | {reason} |")
            case NotApplicable(reason):
                rows.append(f"| `{name}` | not applicable | {reason} |")
    return "\n".join(rows)
