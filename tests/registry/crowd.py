"""More live versions than slots: every answer is its own version's, while new versions are published meanwhile."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.registry.world import Answer, Publication, World, lesson, words

PROMPT = words(4242, 8)
WORKERS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What came of it. ``wrong`` are answers that differ from their version's quiet one; times are in seconds."""

    asked: int
    wrong: Sequence[str]
    published: Sequence[Publication]
    smallest_margin: float


def teach(world: World, adapters: int) -> list[Answer]:
    """Return the quiet answers of so many adapters, all different and all sure."""
    quiet = [world.taught(seed, PROMPT) for seed in range(adapters)]
    assert len({answer.tokens for answer in quiet}) == adapters
    return quiet


def control(world: World, quiet: Sequence[Answer]) -> list[str]:
    """Ask all at once, with nothing else going on; return what differs."""
    with ThreadPoolExecutor(len(quiet)) as pool:
        return [wrong for wrong in pool.map(lambda answer: _differs(world, answer), quiet) if wrong]


def run(world: World, quiet: Sequence[Answer], *, requests: int, publications: int, seed: int = 1) -> Crowd:
    """Ask ``requests`` times for versions in random order while a session publishes ``publications`` more."""
    order = [random.Random(seed).choice(quiet) for _ in range(requests)]
    published: list[Publication] = []
    session = world.open()
    failures: list[BaseException] = []

    def publish() -> None:
        try:
            with world.stack.client() as client:
                own = World(world.stack, client)
                for number in range(publications):
                    own.step(session, [lesson(words(900 + number, 16), prompt=4)], learning_rate=1e-3)
                    published.append(own.publication(session))
        except BaseException as error:
            failures.append(error)

    publisher = threading.Thread(target=publish)
    publisher.start()
    with ThreadPoolExecutor(WORKERS) as pool:
        wrong = [found for found in pool.map(lambda answer: _differs(world, answer), order) if found]
    publisher.join()
    assert not failures, failures
    return Crowd(
        asked=requests,
        wrong=wrong,
        published=published,
        smallest_margin=min(answer.margin for answer in quiet),
    )


def _differs(world: World, quiet: Answer) -> str | None:
    answer = world.answer(quiet.version, PROMPT)
    return None if answer.tokens == quiet.tokens else f"{quiet.version} answered {answer.tokens}, alone {quiet.tokens}"
