"""``recipes.math_rl.train`` on two-digit sums, on policy: the reward rises."""

from tests.tinker_acceptance.outcome import Outcome, climbs
from tests.tinker_acceptance.place import RENDERER, Options, Place, curve

MODULE = "tinker_cookbook.recipes.math_rl.train"
REWARD = "env/all/reward/total"


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
    log = place.finish("arithmetic", MODULE, options(place, steps=steps, groups=groups, size=size))
    return [climbs(REWARD, curve(log, REWARD), over=3)]
