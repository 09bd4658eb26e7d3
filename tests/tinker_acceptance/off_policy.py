"""``rl.train`` asynchronously: samples are trained on at most one step after the weights that drew them."""

from tests.tinker_acceptance import arithmetic
from tests.tinker_acceptance.outcome import Outcome
from tests.tinker_acceptance.place import Place


def run(place: Place, *, steps: int = 14, groups: int = 12, size: int = 8) -> list[Outcome]:
    options = {
        **arithmetic.options(place, steps=steps, groups=groups, size=size),
        "loss_fn": "ppo",
        "max_steps_off_policy": 1,
    }
    return arithmetic.learned(place.finish("off_policy", arithmetic.MODULE, options))
