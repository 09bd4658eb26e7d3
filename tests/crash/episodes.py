"""One episode: the same plan once in peace and once under fire, and everything that must hold afterwards."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tests.crash.driver import Driver
from tests.crash.faults import Striker
from tests.crash.history import History, Kind, contradictions
from tests.crash.launchers import Launcher
from tests.crash.oracles import counters, equality, sql
from tests.crash.plan import Fault, Plan
from tests.crash.processes import Setting, Stack, running
from tests.crash.proxy import ChaosProxy

if TYPE_CHECKING:
    from tests.crash.oracles.reference import Reference  # imports torch

PROBE_TOLERANCE = 1e-4  # nats, against the float64 reference

Tasks = list["asyncio.Task[None]"]


class Trouble(Protocol):
    """What else happens to a stack while the driver runs, and what must be true of it afterwards."""

    async def run(self, stack: Stack, driver: Driver, plan: Plan) -> None: ...

    def judge(self, stack: Stack) -> list[str]: ...


@dataclass(kw_only=True)
class Run:
    """A finished run: what it came to, and what was wrong with it on its own."""

    outcome: equality.Outcome
    history: History
    violations: list[str]
    distances: dict[str, float]
    sample_distances: dict[str, float] = field(default_factory=dict[str, float])
    struck: Counter[Fault] = field(default_factory=Counter[Fault])
    failed_calls: Counter[Fault] = field(default_factory=Counter[Fault])
    fates: Counter[str] = field(default_factory=Counter[str])
    seconds: float = 0.0


async def run_plan(
    plan: Plan,
    setting: Setting,
    *,
    launcher: Launcher | None = None,
    references: "Mapping[str, Reference] | None" = None,
    chaos: bool = False,
    may_exit: bool = False,
    trouble: Trouble | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Run:
    """Run ``plan`` on a fresh stack, with its strikes and, with ``chaos``, through the proxy; then ask the oracles.

    Args:
        references: what the reference makes of each session; without them that oracle is not asked.
        may_exit: a fault may make a process end itself (a failed fsync).
        trouble: runs beside the driver and is cancelled at its end.
    """
    history = History(path=setting.directory.with_suffix(".history.jsonl"))
    if history.path is not None:
        history.path.parent.mkdir(parents=True, exist_ok=True)
        history.path.unlink(missing_ok=True)
    started = time.monotonic()
    async with running(setting, launcher) as stack:
        proxy = ChaosProxy(stack.url, seed=plan.seed)
        async with proxy.running():
            driver = Driver(
                url=proxy.url if chaos else stack.url,
                key=stack.key,
                base_model=setting.name,
                history=history,
                seed=plan.seed,
                excused=lambda: stack.engine_away_at,
            )
            striker = Striker(stack, driver)
            striking = asyncio.create_task(striker.run(plan.strikes), name="striker")
            beside = [_watch(driver, progress)]
            if trouble is not None:
                beside.append(asyncio.create_task(trouble.run(stack, driver, plan), name="trouble"))
            found = await _drive(driver, plan, striking, beside)
        trainer_status = [stack.terminate(name) for name in stack.names("trainer")]
        gateway_status = stack.terminate("gateway")
        found += [] if set(trainer_status) <= {0} else [f"SIGTERM ended the trainers with {trainer_status}"]
        found += [] if gateway_status == 0 else [f"SIGTERM ended the gateway with {gateway_status}"]
        found += [f"{fault}: ended with {status}" for fault, status in striker.statuses if status != 0]
        found += _ended(stack, may_exit=may_exit)
        found += [f"left behind: {orphan}" for orphan in stack.orphans]
        found += trouble.judge(stack) if trouble is not None else []
        found += contradictions(history)
        artifacts = stack.data_dir / "artifacts"
        found += sql.violations(stack.database_url, plan, history, artifacts)
        if not setting.vllm:
            disturbed = bool(striker.struck) or trouble is not None
            with sql.connected(stack.database_url) as connection:
                found += counters.violations(connection, history, stack.journal, exact=not disturbed and not chaos)
        complete = not found
        outcome = equality.Outcome(results={}, samples={}, states={})
        distances: dict[str, float] = {}
        sample_distances: dict[str, float] = {}
        if complete or len(history.results()) == plan.operations:
            outcome = equality.outcome_of(stack.database_url, plan, history, artifacts)
            if references is not None:
                distances = equality.probe_distance(plan, history, references)
                found += [
                    f"{session}: the probe is {distance:.2e} nats from the reference's"
                    for session, distance in distances.items()
                    if not distance <= PROBE_TOLERANCE
                ]
        if complete and setting.vllm and references is not None:
            sample_distances = equality.sample_distance(plan, history, references)
            found += [
                f"{key}: sampled from other weights, {distance:.2e} nats from the reference's"
                for key, distance in sample_distances.items()
                if not distance <= PROBE_TOLERANCE
            ]
    return Run(
        outcome=outcome,
        history=history,
        violations=found,
        distances=distances,
        sample_distances=sample_distances,
        struck=striker.struck,
        failed_calls=striker.failed_calls,
        fates=Counter({fate.value: count for fate, count in proxy.fates.items()}),
        seconds=time.monotonic() - started,
    )


async def episode(
    plan: Plan,
    setting: Setting,
    references: "Mapping[str, Reference]",
    *,
    launcher: Launcher | None = None,
    chaos: bool = False,
    may_exit: bool = False,
    trouble: Trouble | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Run, list[str]]:
    """Run ``plan`` in peace and then as it is; return the second run and everything that is wrong.

    The directories of a clean episode are removed; those of another stay for whoever looks into it.
    """
    in_peace = replace(
        setting, directory=setting.directory / "quiet", trainers=1, trainer_program="trainer", disk=None, vllm=False
    )
    quiet = await run_plan(replace(plan, strikes=()), in_peace, launcher=launcher, references=references)
    wild = await run_plan(
        plan,
        replace(setting, directory=setting.directory / "wild"),
        launcher=launcher,
        references=references,
        chaos=chaos,
        may_exit=may_exit,
        trouble=trouble,
        progress=progress,
    )
    if setting.vllm:
        quiet.outcome.samples.clear()  # the scripted engine draws other tokens
    found = [f"uninterrupted run: {violation}" for violation in quiet.violations]
    found += wild.violations
    found += equality.differences(wild.outcome, quiet.outcome)
    if found:
        found.append(f"histories, logs and data: {setting.directory}")
    else:
        shutil.rmtree(setting.directory)
    return wild, found


def references_of(plan: Plan, model: Path) -> "Mapping[str, Reference]":
    """Let the reference run every session."""
    import torch

    from tests.crash.oracles.reference import ReferenceModel, ReferenceTrainer

    torch.set_num_threads(1)
    base = ReferenceModel(model)
    return {session.name: ReferenceTrainer(base, session).run() for session in plan.sessions}


async def _drive(driver: Driver, plan: Plan, striking: "asyncio.Task[None]", beside: Tasks) -> list[str]:
    """Run the driver to its end, then let the striker finish its last strike; return what went wrong."""
    wrong: list[Exception] = []
    try:
        await driver.run(plan)
    except ExceptionGroup as errors:
        wrong += _leaves(errors)
        striking.cancel()
    await asyncio.wait([striking])
    for task in beside:
        task.cancel()
    ends = await asyncio.gather(striking, *beside, return_exceptions=True)
    wrong += [end for end in ends if isinstance(end, Exception)]
    return [f"{type(error).__name__}: {error}" for error in wrong]


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


def _watch(driver: Driver, progress: Callable[[int], None]) -> "asyncio.Task[None]":
    async def watch() -> None:
        while True:
            progress(driver.final)
            await asyncio.sleep(0.2)

    return asyncio.create_task(watch(), name="progress")


def _ended(stack: Stack, *, may_exit: bool) -> list[str]:
    if may_exit:
        return []
    return [f"{name} ended by itself with {member.ended}" for name, member in stack.members.items() if member.ended]


def unknowns(run: Run) -> int:
    return run.history.count(Kind.UNKNOWN)
