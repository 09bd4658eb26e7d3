"""``python -m tests.tinker_acceptance``: start vLLM, trainer and gateway, run the recipes, and print what they learned.

Exit status 1 when a program failed or did not learn.
"""

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from gateway.engines.launch import EngineSpec, launch_vllm
from tests.engines.fixtures import all_cores, endpoint_of, running_engine, vocab_size_of
from tests.stack import free_port, running_stack
from tests.tinker_acceptance import (
    arithmetic,
    crowd,
    distillation,
    guess_number,
    minibatches,
    off_policy,
    preference,
    supervised,
)
from tests.tinker_acceptance.outcome import Outcome, table
from tests.tinker_acceptance.place import Place
from tests.tiny_model import smollm_directory

RECIPES: dict[str, ModuleType] = {
    "supervised": supervised,
    "arithmetic": arithmetic,
    "off_policy": off_policy,
    "minibatches": minibatches,
    "preference": preference,
    "guess_number": guess_number,
    "distillation": distillation,
    "crowd": crowd,
}


@contextmanager
def smollm_place(work: Path) -> Iterator[Place]:
    """SmolLM2 with room for rank 32: some programs do not let it be chosen."""
    spec = EngineSpec(
        model_path=smollm_directory(),
        served_name="smollm2-135m-instruct",
        port=free_port(),
        key=secrets.token_hex(16),
        max_lora_rank=32,
        max_loras=3,
        threads=all_cores(),
    )
    with running_engine(launch_vllm(spec), spec.url, work / "engine.log"):
        endpoint = endpoint_of(spec, vocab_size=vocab_size_of(spec.model_path))
        with running_stack(endpoint, work / "stack") as stack:
            yield Place(url=stack.url, key=stack.key, model=spec.model_path, work=work / "runs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RECIPES), help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--work", type=Path, help="keep logs and outputs here (default: a directory that is removed)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tinker-acceptance-") as removed:
        work = arguments.work or Path(removed)
        work.mkdir(parents=True, exist_ok=True)
        with smollm_place(work) as place:
            rows = [row for name in arguments.only.split(",") for row in _rows(name, place)]
    print(table(rows), flush=True)
    return int(any(isinstance(outcome, str) or not outcome.learned for _, outcome, _ in rows))


def _rows(name: str, place: Place) -> list[tuple[str, Outcome | str, float]]:
    started = time.monotonic()
    try:
        outcomes: list[Outcome | str] = [*RECIPES[name].run(place)]
    except AssertionError as error:
        print(f"{name}: {error}", flush=True)
        outcomes = [str(error)]
    seconds = time.monotonic() - started
    rows = [(name, outcome, seconds) for outcome in outcomes]
    print(table(rows), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
