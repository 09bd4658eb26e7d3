"""``python -m trainer``: read settings, build the backend, run the loop until SIGTERM or SIGINT."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, cast

import structlog

from gateway import logs
from gateway.core.catalog import BaseModel, CatalogError, parse_catalog
from gateway.core.clock import SystemClock
from gateway.core.errors import NotFound, Unavailable
from gateway.core.tracing import Tracer
from gateway.places import WrongSettings
from gateway.processes import own_name
from gateway.store import SERVER_WAIT_S, UnfitDatabase, open_database
from gateway.store.artifact_stores import open_artifacts
from gateway.traces import TracesUnavailable, open_tracer
from trainer.backend import TrainingBackend
from trainer.kernels import Kernels
from trainer.loop import Limits, Trainer
from trainer.operation_log import OperationLog
from trainer.settings import TrainerSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a clean stop, 2 when settings, a file or the database is wrong or away; a line in
    the log says which.
    """
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Run a base model's training sessions.")
    parser.add_argument("--backend", choices=("peft", "scripted"), default="peft", help="scripted needs no torch")
    backend: str = parser.parse_args(arguments).backend
    logs.configure()
    try:
        settings = TrainerSettings.read()
        base = pick_base(settings)
        tracer = open_tracer(wanted=settings.traces, service="loopline-trainer")
    except (WrongSettings, OSError, CatalogError, NotFound, TracesUnavailable) as error:
        return _not_started(error)
    try:
        return asyncio.run(_serve(settings, base, tracer, scripted=backend == "scripted"))
    finally:
        tracer.close()


def pick_base(settings: TrainerSettings) -> BaseModel:
    """Return the base model to serve.

    Raises:
        OSError, CatalogError, NotFound: no catalogue, a wrong one, no such model, or several and none named.
    """
    catalog = parse_catalog(settings.resolved_catalog.read_text())
    if settings.base_model is not None:
        return catalog.get(settings.base_model)
    if len(catalog.models) != 1:
        raise CatalogError(f"LOOPLINE_BASE_MODEL must name one of: {', '.join(sorted(catalog.models)) or 'none'}")
    return next(iter(catalog.models.values()))


def make_backend(settings: TrainerSettings, base: BaseModel, *, scripted: bool) -> Callable[[], TrainingBackend]:
    """Return a call that builds the backend; it must run in the kernel thread."""

    def build() -> TrainingBackend:
        if scripted:
            from trainer.scripted import ScriptedBackend

            return ScriptedBackend(base)
        # transformers would import them for object detection and for a way to generate: a quarter of a restart
        for unused in ("scipy", "sklearn"):
            sys.modules.setdefault(unused, cast(Any, None))
        from trainer.peft_backend import PeftBackend, configure_torch, pick_device

        configure_torch(settings.resolved_threads)
        return PeftBackend(
            base,
            device=pick_device(settings.device),
            compute_dtype=settings.compute_dtype,
            exact_head=settings.exact_head,
            micro_batch_tokens=settings.micro_batch_tokens,
            operation_bytes=settings.operation_bytes,
            max_on_device=settings.max_on_device,
        )

    return build


async def _serve(settings: TrainerSettings, base: BaseModel, tracer: Tracer, *, scripted: bool) -> int:
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    events = structlog.stdlib.get_logger("trainer")
    owner = own_name()
    clock = SystemClock()
    with Kernels() as kernels:
        events.info("trainer_starting", base_model=base.name, owner=owner, backend="scripted" if scripted else "peft")
        try:
            backend = await kernels.run(make_backend(settings, base, scripted=scripted))
        except ValueError as error:  # an architecture or a size that cannot be served
            return _not_started(error)
        async with AsyncExitStack() as opened:
            try:
                database = await opened.enter_async_context(
                    open_database(
                        settings.resolved_database_url,
                        blob_dir=settings.blob_dir,
                        clock=clock,
                        wait_s=SERVER_WAIT_S,
                        allow_weak_durability=settings.allow_weak_durability,
                        create=True,
                    )
                )
            except (UnfitDatabase, Unavailable) as error:
                return _not_started(error)
            trainer = Trainer(
                backend=backend,
                kernels=kernels,
                log=OperationLog(
                    database,
                    clock,
                    owner=owner,
                    base_model=base.name,
                    lease_s=settings.lease_s,
                    stopping=stopping,
                ),
                wakeups=database.wakeups,
                artifacts=open_artifacts(settings),
                clock=clock,
                limits=Limits(
                    heartbeat_s=settings.heartbeat_s,
                    snapshot_after_s=settings.snapshot_after_s,
                    max_resident=settings.max_resident,
                ),
                stopping=stopping,
                tracer=tracer,
            )
            events.info("trainer_ready", base_model=base.name, owner=owner)
            await trainer.run()
    events.info("trainer_stopped", base_model=base.name)
    return 0


def _not_started(error: Exception) -> int:
    structlog.stdlib.get_logger("trainer").error("trainer_not_started", reason=str(error))
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
