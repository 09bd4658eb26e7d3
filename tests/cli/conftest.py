"""One running `loopline up` (no weights) for the commands that ask a gateway."""

from collections.abc import Iterator

import pytest

from tests.supervisor.live import LiveUp, start_up


@pytest.fixture(scope="package")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveUp]:
    with start_up(tmp_path_factory.mktemp("cli") / "data") as running:
        running.wait_ready()
        yield running
