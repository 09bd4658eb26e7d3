"""Runs all children together: starts them, waits until all are ready, stops them in order."""

import asyncio
from collections.abc import Callable, Sequence

from gateway.supervisor.children import Child, ChildSpec, Keeper, RestartPolicy
from gateway.supervisor.records import RunDir


class Supervisor:
    """Keeps a set of children running. Specs come in start order; they are stopped in the opposite one.

    ``on_change`` is called with every child that enters a new state.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        run_dir: RunDir,
        policy: RestartPolicy | None = None,
        on_change: Callable[[Child], None] = lambda child: None,
    ) -> None:
        self.children = [Child(spec=spec) for spec in specs]
        self._keepers = [
            Keeper(child, run_dir=run_dir, policy=policy or RestartPolicy(), on_change=on_change)
            for child in self.children
        ]
        self._stop = asyncio.Event()

    async def ready(self) -> None:
        """Return once every child has answered its probe."""
        for child in self.children:
            await child.ready.wait()

    def stop(self) -> None:
        """Ask for a clean stop; asked a second time, children are killed instead of waited for."""
        if self._stop.is_set():
            for keeper in self._keepers:
                keeper.stop(hurry=True)
        self._stop.set()

    async def run(self) -> None:
        """Run the children until ``stop``. However this returns, no process of theirs is left.

        Raises:
            ChildGaveUp: one of them died too often without ever being ready; the others were stopped.
        """
        tasks = [asyncio.create_task(keeper.run(), name=keeper.child.spec.name) for keeper in self._keepers]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            for keeper, task in reversed(list(zip(self._keepers, tasks, strict=True))):
                keeper.stop()
                await asyncio.wait({task})
        for task in tasks:
            task.result()
