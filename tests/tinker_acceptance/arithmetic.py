"""``recipes.math_rl.train`` on two-digit sums, on policy: the reward rises."""

from pathlib import Path

from tests.tinker_acceptance.outcome import Outcome, rises
from tests.tinker_acceptance.place import RENDERER, Options, Place, curve

MODULE = "tinker_cookbook.recipes.math_rl.train"
REWARD = "env/all/reward/total"  # 1 for a right sum, less 0.1 for an answer that does not end as asked
FORMAT = "env/all/format"  # the share of answers that do: what a model of this size learns first


def options(place: Place, *, steps: int, groups: int, size: int) -> Options:
    """Return the options of every run of this recipe."""
    return {
        "model_name": place.model,
        "renderer_name": RENDERER,
        "lora_rank": place.rank,
        "env": "arithmetic",
        "loss_fn": "importance_sampling",
        "group_size": size,
        "groups_per_batch": groups,
        "learning_rate": 3e-4,
        "max_tokens": 8,
        "max_steps": steps,
        "eval_every": 0,
        "save_every": 0,
    }


def run(place: Place, *, steps: int = 14, groups: int = 12, size: int = 8) -> list[Outcome]:
    return learned(place.finish("arithmetic", MODULE, options(place, steps=steps, groups=groups, size=size)))


def learned(log: Path) -> list[Outcome]:
    """Return what runs on sums have to show. Chance moves the mean reward of three iterations by some 0.007."""
    return [
        rises(REWARD, curve(log, REWARD), by=0.015, over=3),
        rises(FORMAT, curve(log, FORMAT), by=0.15, over=3),
    ]
