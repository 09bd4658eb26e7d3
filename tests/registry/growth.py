"""Many publications in one session: what grows with them, and how long each takes."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.registry.world import Publication, World, lesson, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of memory (proportional share), bytes of the list of models, series, open files."""

    engine_bytes: int
    gateway_bytes: int
    models_bytes: int
    series: int
    open_files: int

    def growth(self, before: "Footprint") -> dict[str, float]:
        """Return by how much each has grown, as a share."""
        return {
            name: (getattr(self, name) - getattr(before, name)) / getattr(before, name)
            for name in ("engine_bytes", "gateway_bytes", "models_bytes", "series", "open_files")
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    first: Footprint
    last: Footprint
    published: Sequence[Publication]


def run(world: World, *, engine_group: int, publications: int, settled: int) -> Growth:
    """Publish ``publications`` times; compare the footprint at the end with that after ``settled``."""
    session = world.open()
    published: list[Publication] = []
    first = None
    for number in range(publications):
        world.step(session, [lesson(words(number, 16), prompt=4)], learning_rate=1e-4)
        published.append(world.publication(session))
        world.answer(session_version(world, session), words(number, 8))
        if number + 1 == settled:
            first = footprint(world, engine_group)
    assert first is not None
    return Growth(first=first, last=footprint(world, engine_group), published=published)


def session_version(world: World, session: str) -> str:
    return world.client.get(f"/sessions/{session}").json()["latest_version"]


def footprint(world: World, engine_group: int) -> Footprint:
    headers = {"Authorization": f"Bearer {world.stack.key}"}
    metrics = httpx.get(f"{world.stack.url}/metrics", headers=headers).text
    gateway = world.stack.gateway.pid
    group = [pid for pid in _processes() if _group(pid) == engine_group]
    return Footprint(
        engine_bytes=sum(map(_bytes, group)),
        gateway_bytes=_bytes(gateway),
        models_bytes=len(httpx.get(f"{world.stack.url}/v1/models", headers=headers).content),
        series=len(re.findall(r"^[^#\n]", metrics, re.MULTILINE)),
        open_files=sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (gateway, *group)),
    )


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def _bytes(pid: int) -> int:
    found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
