"""A slice of the cookbook in the suite, on the tiny model; ``make tinker-acceptance`` runs every recipe on SmolLM2."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import EngineEndpoint, running_stack
from tests.tinker_acceptance import supervised
from tests.tinker_acceptance.outcome import Outcome, falls, rises, same, table
from tests.tinker_acceptance.place import Place
from tests.wire.tinker_clients import SDK_WARNINGS, sdk_is_collected

__all__ = ["sdk_is_collected"]

pytestmark = SDK_WARNINGS


@pytest.fixture(scope="module")
def place(tiny_engine: EngineEndpoint, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("cookbook")
    with running_stack(tiny_engine, directory / "stack") as stack:
        yield Place(url=stack.url, key=stack.key, model=tiny_model, work=directory / "runs")


@pytest.mark.engine
def test_fine_tuning_that_was_killed_ends_where_an_unbroken_run_ends(place: Place) -> None:
    outcomes = supervised.run(place, batches=6, save_every=2, below=0.99)
    assert all(outcome.learned for outcome in outcomes), table([("supervised", each, 0.0) for each in outcomes])


def test_an_outcome_is_held_to_its_bar() -> None:
    assert falls("loss", [4.0, 3.0, 2.0], below=0.6).learned
    assert not falls("loss", [4.0, 1.0, 3.0], below=0.6).learned
    assert rises("reward", [0.0, 0.2, 0.5, 0.7], by=0.4, over=2).learned
    assert not rises("reward", [0.0, 0.2, 0.5, 0.3], by=0.4, over=2).learned
    assert same("nll", 0.25, 0.25).learned
    assert not same("nll", 0.25, 0.25 + 1e-9).learned
    missed = Outcome(what="m", before=1.0, after=1.0, bar="< 1", learned=False)
    assert "MISSED" in table([("name", missed, 1.0)])
    assert "FAILED" in table([("name", "ended with exit status 1\nand more", 1.0)])
