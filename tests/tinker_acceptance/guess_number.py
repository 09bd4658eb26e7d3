"""``recipes.multiplayer_rl.guess_number``: up to ten turns an episode; first the model learns to guess at all."""

from tests.tinker_acceptance.arithmetic import REWARD
from tests.tinker_acceptance.outcome import Outcome, rises
from tests.tinker_acceptance.place import RENDERER, Place, curve

MODULE = "tinker_cookbook.recipes.multiplayer_rl.guess_number.train"


def run(place: Place, *, steps: int = 6, groups: int = 2, size: int = 6, by: float = 3.0) -> list[Outcome]:
    options = {
        "model_name": place.model,
        "renderer_name": RENDERER,
        "group_size": size,
        "batch_size": groups,
        "learning_rate": 3e-4,
        "max_tokens": 12,
        "max_steps": steps,
        "eval_every": 0,
        "save_every": 0,
    }
    log = place.finish("guess_number", MODULE, options)
    turns = curve(log, "env/all/turns_per_episode")
    assert max(turns) > 1, f"every episode ended after its first turn: {turns}"
    return [rises(REWARD, curve(log, REWARD), by=by, over=2)]
