"""A slice of ``make curves`` on the tiny model: the trainer learns what a plain transformers + PEFT loop learns."""

from pathlib import Path

from transformers import AutoTokenizer

from tests.curves import tasks
from tests.curves.compare import Addition, grpo, sft
from tests.curves.loops import Setup


def silent(line: str) -> None:
    pass


def odd_length(a: int, b: int, answer: str) -> float:
    """Return a reward that an untrained model earns half of the time."""
    return float(len(answer) % 2)


def test_fine_tuning_on_chats_follows_the_plain_loop_step_by_step(tiny_model: Path) -> None:
    setup = Setup(model=tiny_model, dtype="float32", learning_rate=1e-2, seed=1)

    curves = sft(setup, AutoTokenizer.from_pretrained(tiny_model), examples=40, batch=8, note=silent)

    assert curves.farthest < 1e-3
    assert curves.ours[-1] < curves.ours[0] - 0.3


def test_the_policy_task_samples_and_earns_what_the_plain_loop_does(tiny_model: Path) -> None:
    """In float32 with equal random numbers, as long as both have learned the same."""
    setup = Setup(model=tiny_model, dtype="float32", learning_rate=1e-3, seed=1)
    task = Addition(steps=3, problems=2, samples=4, reward=odd_length)

    curves = grpo(setup, AutoTokenizer.from_pretrained(tiny_model), task, silent)

    assert curves.plain == curves.ours
    assert len(set(curves.ours)) > 1


def test_the_chats_are_two_hundred_different_ones() -> None:
    assert len(set(tasks.chats())) == 200


def test_a_reward_is_for_the_last_number() -> None:
    assert [tasks.reward(2, 3, text) for text in ("5", "2 + 3 = 5", "5 or 6", "five", "15")] == [1, 1, 0, 0, 0]
