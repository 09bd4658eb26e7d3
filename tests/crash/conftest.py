from collections.abc import Iterator

import pytest

from tests.crash.launchers import Launcher, WarmLauncher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """The warm parent of all stacks of a test run: 10 s once, then processes start in a moment."""
    warm = WarmLauncher(tmp_path_factory.mktemp("crash") / "warm.log")
    yield warm
    warm.close()
