"""Successive versions that are asked with one long prefix: an engine must not answer one from another's cache."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gateway.engines.launch import Device, Launch, VersionSpec, launch_version
from tests.engines.fixtures import all_cores, running_engine
from tests.registry.world import World, lesson, words
from tests.stack import free_port

PREFIX = words(31, 400)
TOKENS = [*PREFIX, *words(32, 24)]


def versions(world: World, count: int, *, group: str) -> list[tuple[str, list[float], list[float]]]:
    """Publish so many successive versions; return each with the engine's scores of ``TOKENS`` and the trainer's."""
    session = world.open(model_package_group=group)
    found: list[tuple[str, list[float], list[float]]] = []
    for number in range(count):
        world.step(session, [lesson(words(500 + number, 24), prompt=1)], learning_rate=5e-3)
        version = world.save(session)
        engines = world.scores(version, TOKENS)
        forward = world.stack.run(world.client, session, "forward", data=[lesson(TOKENS, prompt=1)])
        found.append((version, engines, forward["result"]["loss_fn_outputs"][0]["logprobs"]["data"]))
    return found


@contextmanager
def cold_engine(adapters: Mapping[str, Path], *, base: Path, rank: int, log: Path) -> Iterator[str]:
    """Serve exported adapters by an engine that has computed nothing and caches no prefix; yields its URL."""
    port = free_port()
    (first, directory), *others = adapters.items()
    spec = VersionSpec(
        model_path=base,
        served_name=first,
        host="127.0.0.1",
        port=port,
        dtype="float32",
        device=Device.CPU,
        adapter=directory,
        base_name="base",
        rank=rank,
        context_length=512,
        threads=all_cores(),
    )
    launch = launch_version(spec)
    more: Sequence[str] = [f"{name}={path}" for name, path in others]
    end = launch.command.index("--lora-modules") + 2
    command = (*launch.command[:end], *more, *launch.command[end:], "--no-enable-prefix-caching")
    with running_engine(Launch(command=command, environment=launch.environment), f"http://127.0.0.1:{port}", log):
        yield f"http://127.0.0.1:{port}"
